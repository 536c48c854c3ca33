"""The scale benchmark, in small: it replays what it says, and times the policy and not itself."""

from __future__ import annotations

import json
import sys
import time

import pytest

from benchmarks import scale
from benchmarks.replay import Options, replay
from benchmarks.workloads import make

ARGS = ["--requests", "800", "--replicas", "20", "--inflight", "400"]


def test_it_is_the_replay_of_a_workload_and_its_parts_add_up():
    begun_s = time.process_time()
    spent, found = scale.measure(Options(replicas=20, inflight=400), 800, "prefix", 3)
    took_s = time.process_time() - begun_s
    trace = make("grpo:prompts=50,steps=2,inflight=400,seed=3")
    assert found == replay(trace, "prefix", Options(replicas=20, inflight=400))
    assert 0 < spent.loads < spent.decisions
    assert min(spent.trace, spent.engines) > 0
    assert spent.all_of_it <= took_s  # nothing counts twice


def test_it_prints_each_part_and_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale", *ARGS])
    scale.main()
    out = capsys.readouterr().out
    assert "800 requests" in out
    for part in ("trace", "decisions", "of it loads", "engines", "all of it", "peak memory"):
        assert part in out
    monkeypatch.setattr(sys, "argv", ["scale", *ARGS, "--json"])
    scale.main()
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 800
    assert found["decisions"]["unmatched"] == 100


def test_no_requests_are_bad_usage(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale", "--requests", "0"])
    with pytest.raises(SystemExit) as left:
        scale.main()
    assert left.value.code == 2
    assert "at least 1" in capsys.readouterr().err
