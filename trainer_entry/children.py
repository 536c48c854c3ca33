"""The processes started here: each leads its own session, and none outlives us.

The supervisor is their reaper (``PR_SET_CHILD_SUBREAPER``, which process 1 of a container is
anyway): what a trainer leaves behind becomes our child, so it can be found, ended and waited for.
Elsewhere than on Linux only a child's own process group is reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Children:
    """Starts children, reaps every zombie, knows who descends from us.

    Made once per process, before any child; call ``reap`` at each SIGCHLD.
    """

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        if _libc is not None:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        program: str | None = None,
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> int:
        """Start ``command`` (the file ``program``, if given) and return its pid; ``OSError``.

        Its output is ours, never a pipe that somebody would have to drain. A session of its own
        keeps a terminal's Ctrl-C from reaching it directly, and lets it still read the terminal: a
        background process group of the same session would be stopped at its first read. If we are
        killed, it gets SIGTERM.
        """
        child = subprocess.Popen(
            list(command),
            executable=program,
            env=dict(env),
            stdin=stdin,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            preexec_fn=_die_with_parent(),  # the only other thread is an idle resolver of names
        )
        self._started[child.pid] = child
        return child.pid

    def reap(self) -> list[tuple[int, int]]:
        """Wait for all that have ended. ``(pid, code)`` of those we started; -n for a signal."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if (child := self._started.pop(pid, None)) is not None:
                child.returncode = os.waitstatus_to_exitcode(status)
                ended.append((pid, child.returncode))

    def send(self, pid: int, number: int, *, group: bool = False) -> None:
        """Send a signal to a child we started, if it is still there."""
        if pid in self._started:  # not reaped, so the pid is nobody else's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(pid, number)

    def descendants(self, but: int | None = None) -> list[int]:
        """Pids of all processes below us, deepest last, without ``but`` and those below it."""
        below: dict[int, list[int]] = {}
        for pid, parent in _parents():
            below.setdefault(parent, []).append(pid)
        found: list[int] = []
        todo = [os.getpid()]
        while todo:
            for pid in below.get(todo.pop(), ()):
                if pid != but:
                    found.append(pid)
                    todo.append(pid)
        return found

    def send_all(self, number: int, but: int | None = None) -> bool:
        """Signal every descendant without ``but``; whether there was one."""
        if sys.platform != "linux":
            pids = [pid for pid in self._started if pid != but]
            for pid in pids:
                self.send(pid, number, group=True)
            return bool(pids)
        pids = self.descendants(but)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return bool(pids)


def _die_with_parent() -> Callable[[], None] | None:
    if _libc is None:
        return None
    prctl = _libc.prctl  # looked up before the fork
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _parents() -> list[tuple[int, int]]:
    """``(pid, parent)`` of every living process; zombies are left out, ``reap`` is theirs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state ppid …; the name may hold blanks and brackets: man 5 proc
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in b"ZX":
                    found.append((int(entry.name), int(fields[1])))
    return found
