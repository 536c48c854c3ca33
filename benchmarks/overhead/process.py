"""Child processes on a core of their own, and what they have used."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cores() -> tuple[int, int]:
    """One for the proxy and one for everything else; the same twice where there is only one."""
    found = sorted(os.sched_getaffinity(0))
    return found[0], found[-1]


@contextlib.contextmanager
def started(
    command: Sequence[str],
    core: int,
    *,
    environ: Mapping[str, str],
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    sockets: Sequence[socket.socket] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` on ``core``; ended on the way out: SIGTERM, ten seconds, SIGKILL."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # a child inherits it, with all threads that it will have
    try:
        child = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(environ),
            pass_fds=[sock.fileno() for sock in sockets],
        )  # fmt: skip
    finally:
        os.sched_setaffinity(0, before)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def cpu_s(pid: int) -> float:
    """Processor time of a process and its children, user and system."""
    total = 0
    for one in _tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * _TICK_S


def memory_mb(pid: int, *, peak: bool = False) -> float:
    """Resident memory of a process and its children, in units of 2**20 bytes."""
    name = "VmHWM:" if peak else "VmRSS:"
    total = 0
    for one in _tree(pid):
        for line in Path(f"/proc/{one}/status").read_text().splitlines():
            if line.startswith(name):
                total += int(line.split()[1])
    return total / 1024


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                found += _tree(int(child))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
