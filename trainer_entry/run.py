"""``rollmux run``: the shell that carries out what the supervisor decides.

It owns the listening socket, so connects queue in the kernel while the daemon restarts, and hands
it to the daemon as ``--fd N``. It knows the daemon as a command line and over HTTP, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainer_entry import rank, supervisor
from trainer_entry.children import Children
from trainer_entry.daemon_api import DaemonApi, Unanswered

BACKLOG: Final = 4096
"""Connects that queue while the daemon restarts: thousands of rollouts at most. The kernel cuts it
to ``net.core.somaxconn``, 4096 since Linux 5.4."""
FLUSH_LOOK_S: Final = 1.0
"""Between two looks at a bucket that does not have all files yet."""
FLUSH_ANSWER_S: Final = 30.0
"""One look at it: the Hub is asked once per thousand files."""
LOOK_S: Final = 0.5
"""Between two looks at a fleet that is not ready."""
SWEEP_S: Final = 0.05
"""Between two looks at what a finished trainer left behind."""
LAST_KILL_S: Final = 2.0
"""To see the last SIGKILLs take effect before we go."""
PASSED_ON: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

DAEMON: Final = (sys.executable, "-P", "-m", "proxy", "serve")
"""``-P``: a folder called ``proxy`` where the trainer runs is not our package."""


def run(
    serve_args: Sequence[str],
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    host: str,
    port: int,
    start_timeout_s: float,
    drain_s: float,
    take_over: bool = False,
    flush_path: str = "",
    api_key: str = "",
    own_state_file: bool = False,
    daemon_command: Sequence[str] = DAEMON,
) -> int:
    """Run ``command`` with a daemon beside it, and return the exit code for this process.

    ``serve_args`` go to the daemon as they are, then ``--fd N``. ``env`` is the environment of
    both; the trainer's has ``ROLLMUX_URL`` besides. ``port`` 0 takes a free one.
    ``own_state_file``: the daemon gets a ``--state-file`` that lives as long as this call, so that
    one that is started again knows what no replica can tell it. ``flush_path``: a folder in the
    daemon's bucket; this ends when the bucket lists its files, or a minute after the trainer.
    Blocks; has to be called from the main thread of a process without other children. No child is
    left behind.
    """
    if not command:
        return _refuse("no COMMAND; write it behind --: rollmux run [options] -- python train.py")
    program = shutil.which(command[0], path=env.get("PATH", os.defpath))
    if program is None:
        return _refuse(
            f"COMMAND not found: {command[0]!r} is no executable file on PATH; "
            "check its spelling, or give its whole path"
        )
    try:
        leads = rank.node_rank(env) == 0
    except rank.RankError as error:
        return _refuse(str(error))
    with contextlib.ExitStack() as stack:
        listener = None
        if leads:
            try:
                listener = stack.enter_context(_listen(host, port))
            except OSError as error:
                return _refuse(_why_no_socket(error, host, port))
            url = rank.base_url(host, listener.getsockname()[1])
            if own_state_file:
                serve_args = [*serve_args, *_own_state_file(stack)]
        else:
            url = rank.leader_url(env, host, port)
        shell = _Shell(
            supervisor.Limits(start_timeout_s, drain_s, leads, flush=bool(flush_path)),
            DaemonApi(url, api_key),
            listener,
            daemon=[*daemon_command, *serve_args],
            trainer=list(command),
            program=program,
            env=env,
            take_over=take_over,
            flush_path=flush_path,
        )
        return asyncio.run(shell.live())


class _Shell:
    """Feeds events to the supervisor and does what it commands, until it says exit."""

    def __init__(
        self,
        limits: supervisor.Limits,
        api: DaemonApi,
        listener: socket.socket | None,
        *,
        daemon: list[str],
        trainer: list[str],
        program: str,
        env: Mapping[str, str],
        take_over: bool,
        flush_path: str,
    ) -> None:
        self._limits = limits
        self._api = api
        self._listener = listener
        self._daemon_command = daemon
        self._trainer_command = trainer
        self._program = program
        self._env = env
        self._take_over = take_over
        self._flush_path = flush_path
        self._run_id = uuid.uuid4().hex[:12]
        self._children = Children()
        self._daemon: int | None = None
        self._trainer: int | None = None
        self._sweep_with = signal.SIGTERM
        self._exit_code: int | None = None
        self._events: asyncio.Queue[supervisor.Event] = asyncio.Queue()
        """Few: signals, deaths, one answer at a time."""

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        self._catch_signals(loop)
        try:
            async with asyncio.TaskGroup() as tasks:
                work = _Work(tasks)
                state, commands = supervisor.begin(self._limits, loop.time())
                self._do(commands, work)
                while self._exit_code is None:
                    event = await self._next_event(state.deadline_s)
                    state, commands = supervisor.step(state, event, loop.time())
                    self._do(commands, work)
                work.stop()
        finally:
            await self._kill_rest()
        return self._exit_code

    def _catch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handlers only record. One that was ignored when we started (nohup) stays ignored."""
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for name in PASSED_ON:
            number = signal.Signals[name]
            if signal.getsignal(number) is not signal.SIG_IGN:
                seen = supervisor.Signalled(number)
                loop.add_signal_handler(number, self._events.put_nowait, seen)

    def _reap(self) -> None:
        for pid, code in self._children.reap():
            if pid == self._daemon:
                self._daemon = None
                self._events.put_nowait(supervisor.DaemonDied(code))
            elif pid == self._trainer:
                self._trainer = None
                self._events.put_nowait(supervisor.TrainerExited(code))

    async def _next_event(self, deadline_s: float | None) -> supervisor.Event:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._events.get()
        except TimeoutError:
            return supervisor.Tick()

    def _do(self, commands: Sequence[supervisor.Command], work: _Work) -> None:
        for command in commands:
            match command:
                case supervisor.Say():
                    _say(command.text)
                case supervisor.StartDaemon():
                    self._start_daemon()
                case supervisor.WatchFleet():
                    work.start(self._watch(), "watch the fleet")
                case supervisor.CleanFleet():
                    work.start(self._clean(), "clean the fleet")
                case supervisor.StartTrainer():
                    self._start_trainer()
                case supervisor.SignalTrainer():
                    if self._trainer is not None:
                        self._children.send(self._trainer, command.signal, group=command.group)
                case supervisor.SweepTrainer():
                    work.start(self._sweep(), "sweep")
                case supervisor.KillTrainer():
                    self._sweep_with = signal.SIGKILL
                    self._children.send_all(signal.SIGKILL, but=self._daemon)
                case supervisor.WatchFlush():
                    work.start(self._watch_flush(), "watch the bucket")
                case supervisor.ReleaseFleet():
                    work.start(self._release(), "release the fleet")
                case supervisor.StopDaemon():
                    work.stop()
                    if self._daemon is not None:
                        self._children.send(self._daemon, signal.SIGTERM)
                case supervisor.KillDaemon():
                    if self._daemon is not None:
                        self._children.send(self._daemon, signal.SIGKILL, group=True)
                case supervisor.Exit():
                    self._exit_code = command.code

    def _start_daemon(self) -> None:
        assert self._listener is not None
        fd = self._listener.fileno()
        self._daemon = self._children.start(
            [*self._daemon_command, "--fd", str(fd)],
            _daemon_env(self._env),
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
        )

    def _start_trainer(self) -> None:
        env = {**self._env, "ROLLMUX_URL": self._api.url}
        try:
            self._trainer = self._children.start(self._trainer_command, env, program=self._program)
        except OSError as error:
            why = f"COMMAND cannot be run: {self._program}: {error.strerror}"
            self._events.put_nowait(supervisor.TrainerNotStarted(why))

    async def _watch(self) -> None:
        while True:
            look = await self._api.look()
            self._events.put_nowait(supervisor.FleetSeen(look.ready, look.missing))
            if look.ready:
                return
            await asyncio.sleep(LOOK_S)

    async def _clean(self) -> None:
        event: supervisor.Event
        try:
            answer = await self._api.clean(self._run_id, self._take_over, supervisor.CLEAN_S)
        except Unanswered as error:
            event = supervisor.CleanUnanswered(str(error))
        else:
            if answer.status == 200:
                event = supervisor.Cleaned()
            elif answer.status == 409:
                event = supervisor.CleanRefused(answer.message)
            else:
                event = supervisor.CleanFailed(answer.message)
        self._events.put_nowait(event)

    async def _sweep(self) -> None:
        sent = None
        while True:
            # SIGTERM once; SIGKILL until nothing new appears
            again = self._sweep_with == signal.SIGKILL or sent is None
            sent = self._sweep_with if again else 0
            if not self._children.send_all(sent, but=self._daemon):
                break
            await asyncio.sleep(SWEEP_S)
        self._events.put_nowait(supervisor.NoneLeft())

    async def _watch_flush(self) -> None:
        while True:
            seen = await self._look_at_bucket()
            self._events.put_nowait(seen)
            if seen.done:
                return
            await asyncio.sleep(FLUSH_LOOK_S)

    async def _look_at_bucket(self) -> supervisor.FlushSeen:
        path = self._flush_path
        try:
            answer = await self._api.flush(path, FLUSH_ANSWER_S)
        except Unanswered as error:
            return supervisor.FlushSeen(False, str(error))
        if answer.status != 200:
            return supervisor.FlushSeen(True, f"--flush-path {path}: {answer.message}")
        found = json.loads(answer.body)
        if found["problem"]:
            return supervisor.FlushSeen(False, f"the bucket: {found['problem']}")
        if found["missing"]:
            left = f"{found['missing']} of {found['files']} files"
            text = f"waiting until the bucket lists {left} of {path}"
            return supervisor.FlushSeen(False, f"{text}, as {found['first_missing'][0]}")
        return supervisor.FlushSeen(True, f"the bucket lists all {found['files']} files of {path}")

    async def _release(self) -> None:
        try:
            answer = await self._api.release(supervisor.RELEASE_S)
            problem = "" if answer.status == 200 else answer.message
        except Unanswered as error:
            problem = str(error)
        self._events.put_nowait(supervisor.Released(problem))

    async def _kill_rest(self) -> None:
        """Nothing is left of a normal end; this is for what could not be seen or foreseen."""
        for _ in range(round(LAST_KILL_S / SWEEP_S)):
            if not self._children.send_all(signal.SIGKILL):
                return
            await asyncio.sleep(SWEEP_S)


class _Work:
    """The one thing that is being waited for besides the children; a new one ends the old."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._now: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.stop()
        self._now = self._tasks.create_task(work, name=name)

    def stop(self) -> None:
        if self._now is not None:
            self._now.cancel()


def _own_state_file(stack: contextlib.ExitStack) -> list[str]:
    try:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollmux-run-"))
    except OSError as error:
        _say(f"no folder for a state file ({error.strerror}); a restarted daemon asks the replicas")
        return []
    return ["--state-file", str(Path(folder) / "state.json")]


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A port whose last connections are still in TIME_WAIT is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _why_no_socket(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--port {port}: port {port} on {host} is in use; "
            "stop the program that listens there, or set another --port (ROLLMUX_PORT)"
        )
    if error.errno == errno.EACCES:
        return f"--port {port}: not allowed to listen on {host}:{port}; set a --port above 1023"
    return f"--host {host}: cannot listen on {host}:{port} ({error.strerror or error})"


def _daemon_env(env: Mapping[str, str]) -> dict[str, str]:
    """Lets the daemon find the code we run, installed or not. ``ROLLMUX_URL`` is not a setting."""
    ours = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (ours, env.get("PYTHONPATH"))))
    return {**{k: v for k, v in env.items() if k != "ROLLMUX_URL"}, "PYTHONPATH": path}


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads our output any more; the run goes on
        print(f"rollmux run: {text}", file=sys.stderr, flush=True)


def _refuse(why: str) -> int:
    _say(why)
    return supervisor.BAD_USAGE
