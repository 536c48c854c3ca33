"""``rollmux run`` with real processes: exit codes, signals, restarts, and nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reaps and kills as Linux allows")

HERE = Path(__file__).parent
DEADLINE_S = 20.0
"""For anything that should happen soon; the machine may be busy."""

TELL = """
import json, os, signal, socket, sys, time
board = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
board.connect(os.environ["BOARD"])
def tell(what, **more):
    board.send(json.dumps({"who": "trainer", "what": what, "pid": os.getpid(), **more}).encode())
def on(name, what=lambda: None):
    def handler(*_):
        tell(name)
        what()
    signal.signal(getattr(signal, name), handler)
"""
STARTED = 'tell("started", env=dict(os.environ))\n'
FOREVER = STARTED + "while True: signal.pause()\n"


class Board:
    """Where the processes of a test say what happens; ``wait`` is how a test waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[dict[str, Any]] = []
        self._unread: list[dict[str, Any]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def wait(self, who: str, what: str) -> dict[str, Any]:
        """The next such note, whatever else came before it; fails after the deadline."""
        by_s = time.monotonic() + DEADLINE_S
        while True:
            for note in self._unread:
                if (note["who"], note["what"]) == (who, what):
                    self._unread.remove(note)
                    return note
            self._socket.settimeout(max(0.001, by_s - time.monotonic()))
            try:
                self._take(self._socket.recv(2**18))
            except TimeoutError:
                pytest.fail(f"{who} never told {what}; seen: {self.story()}")

    def story(self) -> list[str]:
        """All notes so far, in order."""
        self._socket.setblocking(False)
        try:
            while True:
                self._take(self._socket.recv(2**18))
        except BlockingIOError:
            return [f"{note['who']} {note['what']}" for note in self.seen]

    def close(self) -> None:
        self._socket.close()

    def _take(self, raw: bytes) -> None:
        note = json.loads(raw)
        self.seen.append(note)
        self._unread.append(note)


class Entry:
    """One ``rollmux run`` process."""

    def __init__(self, board: Board, process: subprocess.Popen[bytes], output: Path) -> None:
        self.board = board
        self.process = process
        self._output = output

    def ends(self, within_s: float = DEADLINE_S) -> int:
        """Its exit code; afterwards every process that ever told something has to be gone."""
        code = self.process.wait(within_s)
        self.board.story()
        for note in self.board.seen:
            assert not is_there(note["pid"]), f"left behind: {note['who']} {note['pid']}"
        return code

    def said(self) -> str:
        return self._output.read_text()


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    board = Board(tmp_path / "board")
    yield board
    board.close()


Start = Callable[..., Entry]


@pytest.fixture
def start(board: Board, tmp_path: Path) -> Iterator[Start]:
    entries: list[Entry] = []

    def start(
        trainer: str | list[str],
        *,
        plan: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> Entry:
        command = (
            [sys.executable, "-S", "-c", TELL + trainer] if isinstance(trainer, str) else trainer
        )
        daemon = [sys.executable, "-S", str(HERE / "fake_daemon.py"), str(board.path)]
        daemon.append(json.dumps(plan or {}))
        options = {
            "host": "127.0.0.1",
            "port": 0,
            "start_timeout_s": DEADLINE_S,
            "drain_s": DEADLINE_S,
            **options,
        }
        output = tmp_path / f"output-{len(entries)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    str(HERE / "entry.py"),
                    *map(json.dumps, (daemon, options, command)),
                ],
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(HERE.parent.parent),
                    "LC_ALL": "C.UTF-8",
                    "BOARD": str(board.path),
                    **(env or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        entries.append(Entry(board, process, output))
        return entries[-1]

    yield start
    for entry in entries:
        if entry.process.poll() is None:
            entry.process.kill()
            entry.process.wait()
    board.story()
    for note in board.seen:
        if is_there(note["pid"]):
            os.kill(note["pid"], signal.SIGKILL)


# --- the ordinary way ---------------------------------------------------------------------------


def test_trainer_runs_in_a_clean_fleet_and_leaves_it_resumed(start: Start, board: Board) -> None:
    entry = start(STARTED, take_over=True, env={"ROLLMUX_URL": "http://old:1"})
    assert entry.ends() == 0
    assert board.story() == [
        "daemon started",
        "daemon /proxy/clean",
        "trainer started",
        "daemon /proxy/release",
        "daemon SIGTERM",
    ]
    daemon, clean, trainer, *_ = board.seen
    assert daemon["args"][2:5] == ["--replica", "http://a:8000", "--fd"]
    assert clean["sent"]["take_over"] is True
    assert len(clean["sent"]["run_id"]) == 12
    url = trainer["env"].pop("ROLLMUX_URL")
    assert url.startswith("http://127.0.0.1:")
    assert set(trainer["env"]) == {"PATH", "PYTHONPATH", "LC_ALL", "BOARD"}
    assert "ROLLMUX_URL" not in daemon["env"]


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("os.abort()", 134)],
)
def test_exit_code_is_the_trainers(start: Start, end: str, code: int) -> None:
    assert (
        start(f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {end}").ends()
        == code
    )


def test_a_trainer_that_writes_much_is_never_blocked(start: Start) -> None:
    """Nobody has to drain a pipe, and nothing depends on lines or on UTF-8."""
    entry = start(
        "for fd in (1, 2):\n"
        "    left = b'\\xff' * 10_000_000\n"
        "    while left: left = left[os.write(fd, left):]\n"
    )
    assert entry.ends() == 0
    assert entry._output.read_bytes().count(b"\xff") == 20_000_000


def test_the_api_key_is_sent_to_the_daemon(start: Start) -> None:
    assert start(STARTED, plan={"key": "k1"}, api_key="k1").ends() == 0


@pytest.mark.parametrize("own", [True, False])
def test_a_restarted_daemon_finds_the_state_file_of_the_first(
    start: Start, board: Board, own: bool
) -> None:
    """Only where the user gave none; it goes when the run ends."""
    entry = start(FOREVER, own_state_file=own)
    first = board.wait("daemon", "started")
    board.wait("trainer", "started")
    os.kill(first["pid"], signal.SIGKILL)
    second = board.wait("daemon", "started")
    assert first["args"] == second["args"]
    assert ("--state-file" in first["args"]) is own
    if own:
        path = Path(first["args"][first["args"].index("--state-file") + 1])
        assert path.parent.stat().st_mode & 0o077 == 0
    entry.process.terminate()
    assert entry.ends() == 143
    if own:
        assert not path.parent.exists()


def test_the_bucket_is_asked_until_it_has_the_trainers_files(start: Start, board: Board) -> None:
    pending = {"files": 3, "missing": 2, "first_missing": ["out/model"], "problem": ""}
    away = {"files": 3, "missing": 0, "first_missing": [], "problem": "the Hub answered 503"}
    done = {"files": 3, "missing": 0, "first_missing": [], "problem": ""}
    entry = start(
        STARTED + "sys.exit(7)", plan={"flush": [pending, away, done]}, flush_path="/lora/out"
    )
    assert entry.ends() == 7
    assert board.story()[2:] == [
        "trainer started",
        *["daemon /proxy/flush"] * 3,
        "daemon /proxy/release",
        "daemon SIGTERM",
    ]
    assert board.seen[3]["sent"] == {"path": "/lora/out"}
    said = entry.said()
    assert "waiting until the bucket lists 2 of 3 files of /lora/out, as out/model" in said
    assert "the bucket: the Hub answered 503" in said
    assert "the bucket lists all 3 files of /lora/out" in said


# --- refusals before anything starts ------------------------------------------------------------


def test_command_not_found_is_one_line_and_nothing_starts(start: Start, board: Board) -> None:
    entry = start(["pyhton", "train.py"])
    assert entry.ends() == 2
    assert entry.said().startswith("rollmux run: COMMAND not found: 'pyhton'")
    assert entry.said().count("\n") == 1
    assert board.story() == []


def test_a_command_that_cannot_be_executed_is_bad_usage(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    entry = start([str(script)])
    assert entry.ends() == 2
    assert f"COMMAND cannot be run: {script}" in entry.said()


def test_port_in_use_names_the_port_and_the_fix(start: Start, board: Board) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        entry = start(STARTED, port=port)
        assert entry.ends() == 2
    assert f"port {port} on 127.0.0.1 is in use" in entry.said()
    assert "--port" in entry.said()
    assert board.story() == []


def test_a_host_that_is_not_ours_is_named(start: Start) -> None:
    entry = start(STARTED, host="192.0.2.1")
    assert entry.ends() == 2
    assert "--host 192.0.2.1" in entry.said()


def test_a_bad_rank_is_named(start: Start) -> None:
    entry = start(STARTED, env={"MACHINE_RANK": "zero"})
    assert entry.ends() == 2
    assert "MACHINE_RANK='zero'" in entry.said()


# --- the start ----------------------------------------------------------------------------------


def test_a_fleet_that_is_never_ready_ends_with_who_is_missing(start: Start, board: Board) -> None:
    entry = start(STARTED, plan={"ready": False}, start_timeout_s=1.0)
    assert entry.ends() == 1
    assert "waiting for http://b:8000 down (refused)" in entry.said()
    assert "still missing: http://b:8000 down (refused)" in entry.said()
    assert board.story() == ["daemon started", "daemon SIGTERM"]


@pytest.mark.parametrize(("status", "code"), [(409, 2), (500, 1)])
def test_a_fleet_that_cannot_be_cleaned_never_sees_the_trainer(
    start: Start, board: Board, status: int, code: int
) -> None:
    entry = start(STARTED, plan={"clean": [status, "replica b runs 3 requests of somebody else"]})
    assert entry.ends() == code
    assert "replica b runs 3 requests" in entry.said()
    assert board.story() == ["daemon started", "daemon /proxy/clean", "daemon SIGTERM"]


def test_bad_settings_of_the_daemon_are_not_tried_again(start: Start, board: Board) -> None:
    assert start(STARTED, plan={"exit": 2}).ends() == 2
    assert board.story() == ["daemon started"]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_a_start_that_waits(start: Start, board: Board, name: str, code: int) -> None:
    entry = start(STARTED, plan={"ready": False})
    board.wait("daemon", "started")
    entry.process.send_signal(signal.Signals[name])
    assert entry.ends() == code
    assert "trainer started" not in board.story()


def test_a_node_that_does_not_lead_waits_for_the_leaders_daemon(start: Start, board: Board) -> None:
    leader = start(FOREVER)
    url = board.wait("trainer", "started")["env"]["ROLLMUX_URL"]
    follower = start(
        "tell('follows', env=dict(os.environ)); sys.exit(5)",
        env={"SLURM_NODEID": "1", "MASTER_ADDR": "127.0.0.1"},
        port=int(url.rpartition(":")[2]),
    )
    assert board.wait("trainer", "follows")["env"]["ROLLMUX_URL"] == url
    assert follower.process.wait(DEADLINE_S) == 5
    leader.process.terminate()
    assert leader.ends() == 143
    assert board.story().count("daemon started") == board.story().count("daemon /proxy/clean") == 1


def test_a_node_without_a_leader_gives_up_and_names_the_address(start: Start, board: Board) -> None:
    entry = start(STARTED, env={"MACHINE_RANK": "2"}, port=1, start_timeout_s=0.5)
    assert entry.ends() == 1
    assert "http://127.0.0.1:1" in entry.said()
    assert board.story() == []


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_signals_reach_the_trainer_which_may_end_as_it_likes(
    start: Start, board: Board, name: str
) -> None:
    entry = start(f"on('{name}', lambda: sys.exit(3))\n" + FOREVER)
    board.wait("trainer", "started")
    entry.process.send_signal(signal.Signals[name])
    assert entry.ends() == 3
    assert board.story()[-3:] == [f"trainer {name}", "daemon /proxy/release", "daemon SIGTERM"]


def test_whole_tree_is_gone_in_drain_plus_5_however_deaf_it_is(start: Start, board: Board) -> None:
    """Trainer and daemon ignore SIGTERM; a grandchild has left for a session of its own."""
    entry = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    tell('grandchild')\n"
        "    while True: signal.pause()\n" + FOREVER,
        plan={"deaf": True},
        drain_s=0.5,
    )
    board.wait("trainer", "grandchild")
    board.wait("trainer", "started")
    entry.process.terminate()
    began_s = time.monotonic()
    assert entry.ends() == 137
    assert time.monotonic() - began_s < 0.5 + 5 + 10, "10 s for a busy machine"
    assert "daemon /proxy/release" in board.story()


def test_sigint_twice_asks_firmly_and_a_third_time_kills(start: Start, board: Board) -> None:
    entry = start("on('SIGINT'); on('SIGTERM')\n" + FOREVER)
    board.wait("trainer", "started")
    entry.process.send_signal(signal.SIGINT)
    board.wait("trainer", "SIGINT")
    entry.process.send_signal(signal.SIGINT)
    board.wait("trainer", "SIGTERM")
    entry.process.send_signal(signal.SIGINT)
    assert entry.ends() == 137


# --- nothing left behind ------------------------------------------------------------------------


def test_what_a_finished_trainer_left_behind_is_ended(start: Start, board: Board) -> None:
    entry = start(
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    on('SIGTERM', lambda: sys.exit())\n"
        "    os.write(w, b'1')\n"
        "    while True: signal.pause()\n"
        "os.read(r, 1)\n"
    )
    assert entry.ends() == 0
    assert board.story()[2:] == ["trainer SIGTERM", "daemon /proxy/release", "daemon SIGTERM"]


def test_orphans_that_end_are_reaped_while_the_trainer_runs(start: Start, board: Board) -> None:
    """As process 1 of a container: nobody else would."""
    entry = start(
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        "        tell('orphan')\n"
        "        signal.pause()\n"
        "    os._exit(0)\n"
        "os.wait()\n" + FOREVER
    )
    orphan = board.wait("trainer", "orphan")["pid"]
    board.wait("trainer", "started")
    parent = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) == entry.process.pid
    end = os.pidfd_open(orphan)
    os.kill(orphan, signal.SIGKILL)
    assert select.select([end], [], [], DEADLINE_S)[0], "it ends"
    os.close(end)
    by_s = time.monotonic() + DEADLINE_S
    while is_there(orphan):
        assert time.monotonic() < by_s, "it is never reaped"
        os.sched_yield()
    entry.process.terminate()
    assert entry.ends() == 143


def test_children_do_not_outlive_an_entry_that_is_killed(start: Start, board: Board) -> None:
    entry = start("on('SIGTERM', lambda: sys.exit())\n" + FOREVER)
    board.wait("trainer", "started")
    entry.process.kill()
    board.wait("trainer", "SIGTERM")
    board.wait("daemon", "SIGTERM")


# --- a daemon that dies -------------------------------------------------------------------------


def test_a_client_that_connects_while_the_daemon_restarts_is_answered(
    start: Start, board: Board, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    entry = start("on('SIGTERM', lambda: sys.exit(0))\n" + FOREVER, plan={"gate": str(gate)})
    url = board.wait("trainer", "started")["env"]["ROLLMUX_URL"]
    first = board.wait("daemon", "started")["pid"]
    os.mkfifo(gate)  # the next daemon stops at it, before it accepts
    os.kill(first, signal.SIGKILL)
    second = board.wait("daemon", "started")["pid"]
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as client:
        client.sendall(b"GET /who HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        gate.open("w").close()
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.rpartition(b"\r\n")[2]) == {"pid": second}
    entry.process.terminate()
    assert entry.ends() == 0
    assert board.story().count("daemon /proxy/clean") == 1, "a fleet in use is not cleaned"


def test_fourth_death_of_the_daemon_stops_the_trainer(start: Start, board: Board) -> None:
    entry = start("on('SIGTERM', lambda: sys.exit(0))\n" + FOREVER)
    board.wait("trainer", "started")
    for _ in range(4):
        os.kill(board.wait("daemon", "started")["pid"], signal.SIGKILL)
    assert entry.ends() == 1
    assert "the 4th time in 10 minutes; stopping the trainer" in entry.said()
    assert board.story()[-1] == "trainer SIGTERM"


def test_the_real_daemon_command_is_found_wherever_the_trainer_runs(tmp_path: Path) -> None:
    """A folder called like our package, where the trainer runs, does not shadow it."""
    (tmp_path / "proxy").mkdir()
    (tmp_path / "proxy" / "__init__.py").write_text("raise SystemExit('shadowed')")
    code = (
        "import subprocess, sys; from trainer_entry.run import DAEMON, _daemon_env\n"
        "command = [*DAEMON[:2], '-c', 'import proxy']\n"
        "sys.exit(subprocess.run(command, env=_daemon_env({})).returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(HERE.parent.parent)},
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
