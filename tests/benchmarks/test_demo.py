"""`rollmux demo`, shortened: the real daemon as a child, and what the result says."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import demo


def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LAG_S", 0.3)
    monkeypatch.setattr(demo, "SYNC_EVERY_S", 0.3)
    monkeypatch.setattr(demo, "IN_FLIGHT_PER_REPLICA", 8)


def test_the_result_tells_of_rollouts_syncs_and_routing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quicker(monkeypatch)
    monkeypatch.setenv("ROLLMUX_PORT", "nonsense")  # a real fleet's settings do not reach it
    assert demo.main(argparse.Namespace(seconds=4, replicas=2, push=False, json=True)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rollouts"] > 0
    assert (result["failures"], result["wrong_weights"]) == ([], 0)
    assert result["affinity"] > result["unmatched"]
    assert set(result["routed_per_replica"]) == {"r0", "r1"}
    assert result["publications"] >= 2
    assert result["load_attempts"] >= 2 * result["publications"]
    assert (result["stalled_s"], result["preemptions"], result["pushed_bytes"]) == (0, 0, 0)


def test_a_demo_by_push_does_not_wait_for_the_bucket(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bucket would never show an adapter: without a push there is no first publication."""
    quicker(monkeypatch)
    monkeypatch.setattr(demo, "LAG_S", 3600.0)
    assert demo.main(argparse.Namespace(seconds=4, replicas=2, push=True, json=False)) == 0
    assert "kB pushed; the bucket lags 3600.0 s" in capsys.readouterr().out


def test_replies_by_other_weights_than_the_named_ones_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quicker(monkeypatch)
    monkeypatch.setattr(demo, "read_adapter", lambda *_: "another digest")
    assert demo.main(argparse.Namespace(seconds=3, replicas=1, push=False, json=False)) == 1
    assert "by the right weights         0 of" in capsys.readouterr().out


def test_a_demo_told_to_stop_takes_its_daemon_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "proxy", "demo", "--seconds", "50", "--replicas", "1"]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environ) as child:
        try:
            assert child.stderr is not None
            assert b"rollouts" in child.stderr.readline()  # the view has begun: all is up
            daemons = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            child.terminate()
            _, rest = child.communicate(timeout=30)
        finally:
            child.kill()
    assert (child.returncode, b"told to stop" in rest) == (1, True)
    assert len(daemons) == 1
    assert not Path(f"/proc/{daemons[0]}").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_view_is_drawn_over_on_a_terminal_and_goes_on_in_lines_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    status = {
        "router": {"routed": 4, "affinity": 3},
        "replicas": [{"id": "r0", "state": "ready", "inflight": 3, "adapters": ["trl-policy-v1"]}],
    }
    tally = demo.Tally(rollouts=7, started_s=time.monotonic())
    terminal, file = Terminal(), io.StringIO()
    views = demo.View(terminal), demo.View(file)
    for _ in range(demo.View.LINE_EVERY + 1):
        for view in views:
            view.show(status, tally, 1.0)
    drawn = terminal.getvalue()
    assert drawn.count("\x1b[2A") == demo.View.LINE_EVERY
    assert "▇▇▇" in drawn
    assert file.getvalue().count("rollouts     7") == 2
    assert "\x1b" not in file.getvalue()
