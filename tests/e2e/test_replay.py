"""Simulation against reality: a recorded trace on two real vLLM replicas, and on simulated ones."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.replay import Options, replay
from benchmarks.trace import Trace, read
from benchmarks.workloads import make
from tests.e2e.conftest import START_S, RealParts
from tests.e2e.processes import ROOT, environment_with, free_port, running, wait_for_health

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
RECORDED = ROOT / "benchmarks" / "traces" / "trl-cpu-smoke.jsonl"
MADE = "grpo:steps=3,reply=10,longest=30"
"""Its prompts share less: policies are further apart on it."""
POLICIES = ("prefix", "round-robin", "least-loaded")
INFLIGHT = 16
VOCABULARY = 320  # the tiny model's
NEAR = 0.05
APART = 0.01  # policies nearer to each other than this have no order


def cache_of(url: str) -> tuple[int, int]:
    """Tokens of a block, and of the whole prefix cache, by the replica's own account."""
    page = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    (labels,) = re.findall(r"^vllm:cache_config_info\{(.*)\} ", page, re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    block, blocks = int(found["block_size"]), int(found["num_gpu_blocks"])
    return block, block * blocks


def replayed(
    trace: list[str], replicas: tuple[str, str], policy: str, model: Path, log: Path
) -> dict[str, Any]:
    """What `rollmux replay --url` saw of a daemon with this policy, from empty caches."""
    for url in replicas:
        answer = httpx.post(f"{url}/reset_prefix_cache", timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
    rollmux, url = (sys.executable, "-m", "proxy"), f"http://127.0.0.1:{(port := free_port())}"
    serve = [
        *(*rollmux, "serve", "--port", str(port), "--router", policy),
        *(word for replica in replicas for word in ("--replica", replica)),
    ]
    replay = [
        *(*rollmux, "replay", *trace, "--url", url, "--json", "--model", str(model)),
        *("--vocab-size", str(VOCABULARY), "--inflight", str(INFLIGHT)),
    ]
    with running("rollmux serve", serve, environment_with(), log) as process:
        wait_for_health(process, f"{url}/health", START_S)
        done = subprocess.run(
            replay, cwd=ROOT, env=environment_with(), capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    return dict(result)


@pytest.mark.parametrize(
    ("trace", "words", "apart"),
    [
        pytest.param(lambda: read(RECORDED), [str(RECORDED)], 0.02, id="recorded"),
        pytest.param(lambda: make(MADE), ["--workload", MADE], 0.07, id="made"),
    ],
)
def test_cached_shares_and_the_ranking_of_policies_are_those_of_real_replicas(
    replicas: tuple[str, str],
    real_parts: RealParts,
    tmp_path: Path,
    trace: Callable[[], Trace],
    words: list[str],
    apart: float,
) -> None:
    """``apart``: how much better than the others the prefix policy is on it, at least."""
    caches = {cache_of(url) for url in replicas}
    ((block_tokens, cache_tokens),) = caches
    sent = trace()
    assert sent.block_tokens == block_tokens
    options = Options(replicas=len(replicas), inflight=INFLIGHT, cache_tokens=cache_tokens)
    simulated, real = {}, {}
    for policy in POLICIES:
        simulated[policy] = replay(sent, policy, options).cached_share
        log = tmp_path / f"{policy}.log"
        found = replayed(words, replicas, policy, real_parts.model, log)
        assert found["requests"] == sum(request.ok for request in sent.requests)
        assert found["queried_tokens"] == found["prompt_tokens"]
        real[policy] = found["cached_share"]
        print(f"{policy}: real {real[policy]:.1%}, simulated {simulated[policy]:.1%}; {found}")
    for policy in POLICIES:
        assert real[policy] == pytest.approx(simulated[policy], abs=NEAR), policy
    by_simulation = sorted(POLICIES, key=lambda policy: -simulated[policy])
    assert by_simulation[0] == "prefix"
    for better, worse in itertools.combinations(by_simulation, 2):
        if simulated[better] - simulated[worse] > APART:
            assert real[better] > real[worse], f"{better} and {worse}"
    assert simulated["prefix"] - max(simulated[p] for p in POLICIES[1:]) > apart
