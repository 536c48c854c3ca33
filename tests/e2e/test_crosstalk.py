"""Policies published beside live ones, without a pause, on two real vLLM replicas.

Greedy rollouts of the live policies go on while 200 are published as TRL does it. Each reply must
be that of its adapter alone: the same tokens, with the same log-probabilities but for rounding.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.adapter import write_adapter
from tests.e2e.main_job import COMPLETIONS, LOAD, SAME_WEIGHTS, UNLOAD, adapters_of
from tests.e2e.processes import environment_with, free_port, running, wait_for_health

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
STALENESS = 4  # the replicas have six slots (--max-loras): staleness + 2, as TRL asks for
PUBLICATIONS = 200
CLIENTS = 10  # half of them on a replica at a time: as many as there are live policies
ANSWERS_BETWEEN = 12  # at least, from one publication to the next: two or three of each policy
BLOCK = 16
PROMPT = [random.Random(5).randrange(10, 300) for _ in range(3 * BLOCK)]
CACHED = 2 * BLOCK  # of a known prompt: vLLM computes the last token, so its block, again
REPLY = 16
ANSWERS_S = 120.0  # for that; 0.3 s on two idle cores
COUNTERS = {
    "cached tokens": r"vllm:prefix_cache_hits_total\{.*\}",
    "preemptions": r"vllm:num_preemptions_total\{.*\}",
    "pauses": r'http_requests_total\{.*handler="/pause".*\}',
    # That the replicas count calls at all; vLLM 0.27.1 leaves out those of load_lora_adapter.
    "unloads": r'http_requests_total\{.*handler="/v1/unload_lora_adapter".*\}',
}


async def greedy(client: httpx.AsyncClient, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": REPLY, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    return await client.post(COMPLETIONS, json=body | more)


@dataclass(frozen=True, slots=True)
class Reply:
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]  # of these tokens

    def difference(self, other: Reply) -> float:
        """Largest of a log-probability; infinite where the tokens are others."""
        if self.tokens != other.tokens:
            return math.inf
        pairs = zip(self.log_probs, other.log_probs, strict=True)
        return max(abs(one - another) for one, another in pairs)


def reply_of(answer: httpx.Response) -> Reply:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert len(choice["token_ids"]) == REPLY
    return Reply(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> None:
    answer = await client.post(path, json=body or None)
    assert answer.status_code == 200, f"{path} {body}: {answer.status_code} {answer.text}"


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        yield client


async def replies_alone(url: str, folders: list[Path]) -> list[Reply]:
    """What each adapter says on an idle replica under a name of its own."""
    async with connected(url) as client:
        # Names of an earlier test, of which some may be ours.
        for left in adapters_of(url):
            await post(client, UNLOAD, lora_name=left)
        await post(client, "/reset_prefix_cache")
        replies = []
        for folder in folders:
            alone = f"alone-{folder.name}"
            await post(client, LOAD, lora_name=alone, lora_path=str(folder))
            replies.append(reply_of(await greedy(client, alone)))
            await post(client, UNLOAD, lora_name=alone)
        return replies


def sample(url: str, pattern: str) -> float:
    """Sum of the samples at `url`/metrics whose name and labels fit `pattern`."""
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    return sum(map(float, re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE)))


def counters_of(replicas: tuple[str, str]) -> dict[str, float]:
    """COUNTERS, summed over the replicas."""
    return {
        name: sum(sample(url, pattern) for url in replicas) for name, pattern in COUNTERS.items()
    }


@contextlib.contextmanager
def daemon(replicas: tuple[str, str], log: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        *(sys.executable, "-m", "proxy", "serve", "--port", str(port)),
        *("--replica", replicas[0], "--replica", replicas[1]),
        # Every policy on both replicas, which the default policy would avoid.
        *("--router", "round-robin"),
        # The names go in the rhythm of this test, not of a training run.
        *("--retire-grace-s", "1"),
    ]
    with running("rollmux serve", command, environment_with(), log) as process:
        wait_for_health(process, f"{url}/health", 60)
        yield url


class Run:
    """Rollouts and publications against the daemon, and what came of them."""

    def __init__(self, url: str, made: Path, alone: dict[str, Reply]) -> None:
        self.url = url
        self.made = made
        self.alone = alone
        self.live: list[str] = []
        self.served: dict[str, set[str]] = defaultdict(set)  # by which replicas
        self.answers = 0
        self.largest = 0.0
        self.wrong: list[str] = []
        self._answered = asyncio.Event()
        self._turns = itertools.count()

    async def roll_out(self) -> None:
        """One rollout after another of the live policies in turn, until cancelled."""
        async with connected(self.url) as client:
            while True:
                name = self.live[next(self._turns) % len(self.live)]
                answer = await greedy(client, name)
                where = answer.headers["x-rollmux-replica"]
                self.check(name, where, reply_of(answer))
                self.served[name].add(where)
                self.answers += 1
                self._answered.set()

    def check(self, name: str, where: str, reply: Reply) -> None:
        difference = reply.difference(self.alone[name])
        self.largest = max(self.largest, difference)
        if difference > SAME_WEIGHTS:
            like = min(self.alone, key=lambda other: reply.difference(self.alone[other]))
            self.wrong.append(f"{name} on {where} differs by {difference:.2g}; it is like {like}")

    async def publish(self, client: httpx.AsyncClient, number: int) -> None:
        """One sync, call by call as TRL 1.16 makes it."""
        name = f"trl-policy-v{number}"
        await post(client, "/pause?mode=keep")
        folder = self.made / name
        folder.rename(self.made.with_name("run") / name)
        folder = self.made.with_name("run") / name
        await post(client, LOAD, lora_name=name, lora_path=str(folder))
        await post(client, "/resume")
        self.live.append(name)
        if len(self.live) > STALENESS + 1:
            oldest = self.live.pop(0)
            await post(client, UNLOAD, lora_name=oldest)
            gone = folder.with_name(f"trl-policy-v{number - STALENESS - 2}")
            shutil.rmtree(gone, ignore_errors=True)

    async def answered(self, more: int) -> None:
        """Until there are as many more answers."""
        enough = self.answers + more
        async with asyncio.timeout(ANSWERS_S):
            while self.answers < enough:
                await self._answered.wait()
                self._answered.clear()

    async def go(self) -> None:
        async with connected(self.url) as client, asyncio.TaskGroup() as group:
            await self.publish(client, 1)
            clients = [group.create_task(self.roll_out(), name=str(i)) for i in range(CLIENTS)]
            for number in range(2, PUBLICATIONS + 1):
                await self.answered(ANSWERS_BETWEEN)
                await self.publish(client, number)
            # Those that were under way at the last publication do not name it.
            await self.answered(ANSWERS_BETWEEN + 2 * CLIENTS)
            for task in clients:
                task.cancel()


async def test_no_reply_is_mixed_and_nothing_stops_while_policies_are_published(
    replicas: tuple[str, str], tmp_path: Path
) -> None:
    made = tmp_path / "made"
    (tmp_path / "run").mkdir()
    names = [f"trl-policy-v{number}" for number in range(1, PUBLICATIONS + 1)]
    # Strong enough to change the reply, and so weak that it does not end in one loop or another.
    shape = {"rank": 4, "lora_alpha": 2, "modules": ("q_proj", "o_proj")}
    folders = [write_adapter(made / name, name, **shape) for name in names]
    half = PUBLICATIONS // 2
    first, second = await asyncio.gather(
        replies_alone(replicas[0], folders[:half]), replies_alone(replicas[1], folders[half:])
    )
    alone = dict(zip(names, first + second, strict=True))
    nearest = min(a.difference(b) for a, b in itertools.combinations(alone.values(), 2))
    assert nearest > 10 * SAME_WEIGHTS, f"adapters that differ by {nearest} cannot be told apart"

    before = counters_of(replicas)
    with daemon(replicas, tmp_path / "daemon.log") as url:
        run = Run(url, made, alone)
        await run.go()
        elided = sample(url, "rollmux_pauses_elided_total")
    seen = {name: now - before[name] for name, now in counters_of(replicas).items()}
    print(f"{run.answers} replies, largest difference {run.largest:.2g}; the replicas: {seen}")

    assert not run.wrong, run.wrong[:10]
    assert set(run.served) == set(names)
    both = sum(len(by) == 2 for by in run.served.values())
    assert both > 0.9 * PUBLICATIONS, f"{both} policies were served by both replicas"
    assert seen["unloads"] > PUBLICATIONS
    # No pause has reached a replica, none of its requests was preempted, ...
    assert elided == PUBLICATIONS
    assert (seen["pauses"], seen["preemptions"]) == (0, 0)
    # ... and its cache was never cleared: each policy misses once on each replica, and once more
    # where two of its first requests came together.
    misses = run.answers - seen["cached tokens"] / CACHED
    assert misses <= 2 * 2 * PUBLICATIONS, f"{misses} of {run.answers} prompts were not cached"
