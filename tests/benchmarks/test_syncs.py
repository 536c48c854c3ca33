"""What syncs cost, shortened: a pause that is passed on stops the tokens, a lazy one does not."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import syncs
from benchmarks.engine import Engine, EngineConfig, Job


def test_tokens_during_syncs_are_held_against_those_between(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("LAG_S", 0.5), ("BETWEEN_S", 0.5), ("WARM_UP_S", 0.5), ("LOST", 1.0)):
        monkeypatch.setattr(syncs, name, value)
    monkeypatch.setattr(syncs, "IN_FLIGHT_PER_REPLICA", 8)
    monkeypatch.setattr(sys, "argv", ["syncs", "--syncs", "2", "--replicas", "1", "--json"])
    assert syncs.main() == 0
    lazy, eager = json.loads(capsys.readouterr().out)["pauses"]
    assert (lazy["pause"], eager["pause"]) == ("lazy", "eager")
    assert (lazy["preempted"], eager["preempted"] > 0) == (0, True)
    assert eager["kept"] < 0.5 < lazy["kept"]


def test_tokens_of_unfinished_replies_count() -> None:
    engine = Engine(EngineConfig(step_s=1.0, prefill_token_s=0.0))
    engine.submit(0.0, Job("a", (), prompt_tokens=1, output_tokens=10))
    engine.submit(0.0, Job("b", (), prompt_tokens=1, output_tokens=3))
    engine.advance(4.5)
    assert (engine.counters.generation_tokens, engine.generated()) == (3, 8)
