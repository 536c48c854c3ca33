"""The publication benchmark, shortened: what it counts, and when it says the goal is missed."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import pytest

from benchmarks import publication
from benchmarks.adapter import read_adapter, write_adapter
from benchmarks.publication import LEARNING, Case, HalfPublished, LaggingFolder, Times

SHORT = Case("short", 0.3, lambda folder: LaggingFolder(folder, 0.3, 0.1))


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    monkeypatch.setattr(publication, "CASES", (SHORT,))
    monkeypatch.setattr(publication, "BETWEEN_S", 0.0)
    monkeypatch.setattr(publication, "LEARNING", 1)
    monkeypatch.setattr(sys, "argv", ["publication", "--count", "2", "--json"])
    code = publication.main()
    return code, json.loads(capsys.readouterr().out)


def test_load_calls_through_a_late_mount_are_measured_from_the_call_to_its_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publication, "ALLOWED_S", 30.0)  # whatever else the machine does
    code, result = run(monkeypatch, capsys)
    (times,) = result["mounts"]
    assert code == 0
    assert times["met"]
    assert len(times["loads_s"]) == 1 + 2
    # Times of files come from a coarser clock.
    assert all(load_s >= 0.3 - 0.05 for load_s in times["loads_s"])
    assert all(attempts >= 2 for attempts in times["attempts"])
    assert {"commit", "machine", "seed", "settings"} <= set(result["origin"])


def test_a_missed_goal_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publication, "ALLOWED_S", -0.3)
    code, result = run(monkeypatch, capsys)
    assert (code, result["mounts"][0]["met"]) == (1, False)


def test_pushed_publications_do_not_wait_for_the_mount(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that would never show the files, so that only a push can bring them."""
    never = Case("never", 3600.0, lambda folder: LaggingFolder(folder, 3600.0), True)
    monkeypatch.setattr(publication, "CASES", (never,))
    monkeypatch.setattr(publication, "PUSHED_S", 30.0)  # whatever else the machine does
    monkeypatch.setattr(publication, "BETWEEN_S", 0.0)
    monkeypatch.setattr(publication, "LEARNING", 1)
    monkeypatch.setattr(sys, "argv", ["publication", "--count", "6", "--json"])
    assert publication.main() == 0
    (times,) = json.loads(capsys.readouterr().out)["mounts"]
    assert (times["pushed"], times["met"]) == (True, True)
    assert statistics.median(times["attempts"]) == 2


def test_a_push_is_held_to_its_own_bound() -> None:
    assert not Times("late", 2.5, (*[9.0] * LEARNING, 0.31), (), pushed=True).met
    assert Times("late", 2.5, (*[9.0] * LEARNING, 0.3), (), pushed=True).met


@pytest.mark.parametrize(("p50_s", "met"), [(3.0, True), (3.01, False)])
def test_the_learning_is_not_counted_and_the_bound_is_the_lag_and_half_a_second(
    p50_s: float, met: bool
) -> None:
    times = Times("late", 2.5, (*[9.0] * LEARNING, 0.1, p50_s, 9.0), ())
    assert (times.p50_s, times.met) == (p50_s, met)


def test_half_published_shows_the_configuration_first(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "v1", layers=1)
    mount = HalfPublished(tmp_path)

    def read_after(seconds: float) -> str:
        now_s = time.time()
        for folder in (mount, mount._early):
            folder.clock = lambda: now_s + seconds
        return read_adapter(str(adapter), 8, mount.read)

    with pytest.raises(FileNotFoundError):
        read_after(1.0)
    with pytest.raises(ValueError, match="doesn't contain tensors"):
        read_after(2.2)
    assert read_after(3.4)


@pytest.mark.parametrize("option", [(), ("--push",)])
def test_real_replicas_need_the_folder_that_they_see_late_or_the_key(
    monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    monkeypatch.delenv("ROLLMUX_PUSH_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", ["publication", "--url", "http://127.0.0.1:1", *option])
    with pytest.raises(SystemExit) as refused:
        publication.main()
    assert refused.value.code == 2
