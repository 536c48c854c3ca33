"""The comparison with the peer, as far as it goes without one."""

from __future__ import annotations

import json

import pytest

from benchmarks import peers


@pytest.mark.timeout(180)  # eight processes are started one after another
def test_each_policy_gets_the_same_rollouts_on_fresh_replicas(capsys, monkeypatch):
    monkeypatch.setattr(peers, "find_router", lambda given: given)
    words = ["grpo:steps=1,reply=30", "--faster", "50", "--json"]
    assert peers.main([*words, "--router", "prefix", "--router", "round-robin"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]["grpo:steps=1,reply=30"]
    assert set(found) == {"prefix", "round-robin"}
    for router, (result,) in found.items():
        assert result["requests"] == 128
        assert result["router"] == router
        assert result["queried_tokens"] == 128 * 135
    # Fresh ones: of each prompt at least the first rollout finds only the template.
    prefix, rotated = (found[router][0]["cached_share"] for router in ("prefix", "round-robin"))
    assert 0.7 < prefix < 0.9
    assert rotated < prefix - 0.05
    shown = peers.table(found)
    assert next(line for line in shown.splitlines() if line.startswith("group, p90"))


def test_a_trace_that_is_not_there_is_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(peers, "find_router", lambda given: given)
    assert peers.main(["no-such-trace"]) == 2
    assert "'no-such-trace' is no workload" in capsys.readouterr().err
