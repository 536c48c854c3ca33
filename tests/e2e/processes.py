"""A child process of the end-to-end tests: starts, is waited for, and is gone at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 20.0  # from SIGTERM to SIGKILL; vLLM takes about 3 s on a busy machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment_with(**changes: str) -> dict[str, str]:
    """This process's environment without settings of rollmux, which would change what is tested."""
    return {k: v for k, v in os.environ.items() if not k.startswith("ROLLMUX_")} | changes


class Process:
    """One child in a session of its own, its output in a file."""

    def __init__(
        self, name: str, command: Sequence[str | Path], env: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._child = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        return self._child.poll()

    def child(self, word: str) -> int:
        """Pid of its one child with `word` on its command line."""
        children = Path(f"/proc/{self._child.pid}/task/{self._child.pid}/children").read_text()
        (found,) = (
            int(pid)
            for pid in children.split()
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )
        return found

    def kill(self) -> None:
        """SIGKILL to it and to all that is in its session's first group; gone on return."""
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def wait(self, timeout_s: float) -> int:
        """The exit code; after `timeout_s` an AssertionError with the end of the output."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} not done in {timeout_s} s:\n{self.tail()}") from None

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM, time to leave, then SIGKILL to whatever is left of its session."""
        if self._child.poll() is None:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str | Path], env: Mapping[str, str], log: Path
) -> Iterator[Process]:
    process = Process(name, command, env, log)
    try:
        yield process
    finally:
        process.stop()


def wait_for_health(process: Process, url: str, timeout_s: float) -> None:
    wait_until(lambda: answers_200(url), process, timeout_s, f"answer 200 at {url}")


def answers_200(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(
    holds: Callable[[], bool], process: Process, timeout_s: float, what: str, every_s: float = 0.25
) -> None:
    """Look until `holds`; an AssertionError if `process` ends first, or after `timeout_s`.

    Another process's progress can only be looked at, so this is the one place that sleeps.
    """
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        gone = process.exit_code is not None
        if gone or time.monotonic() > deadline_s:
            why = f"exited with {process.exit_code}" if gone else f"did not in {timeout_s} s"
            raise AssertionError(f"{process.name} should {what} but {why}:\n{process.tail()}")
        time.sleep(every_s)
