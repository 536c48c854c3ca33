"""Field reports K9: retries that multiply, and clients that give up."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx

from benchmarks.httpd import Arrival, Reply
from benchmarks.replica import SimulatedReplica
from proxy import status
from tests.proxy.scripted import OK, ScriptedReplica, error, until

PATH = "/v1/completions"


async def test_a_replica_that_resets_every_generation_is_not_tried_by_each_of_them(start):
    """O-35. Its probes are fine and all prompts have their blocks there: it waits ever longer."""
    async with ScriptedReplica() as a, ScriptedReplica() as b:
        running = await start([a.url, b.url], spill_threshold=1000)
        prompts = []
        for n in range(200):
            answer = await running.complete("tiny", [n] * 32)
            if answer.headers["x-rollmux-replica"] == "r1":
                prompts.append([n] * 32)
            if len(prompts) == 10:
                break
        b.faults.add(PATH, reset=True)
        seen = len(a.server.log), len(b.server.log)
        now_s = running.daemon.replicas.now_s
        began_s = now_s()
        answers = [await running.complete("tiny", p) for p in prompts * 2]
        assert {x.status_code for x in answers} == {200}
        assert {x.headers["x-rollmux-replica"] for x in answers} == {"r0"}
        at_a = [c for c in list(a.server.log)[seen[0] :] if c.path == PATH]
        at_b = [c for c in list(b.server.log)[seen[1] :] if c.path == PATH]
        assert len(at_a) == 20
        # One try at once, another after each wait of 1, 3 and 7 s; a connection that was used
        # before and breaks at once is replaced within the same try.
        tries = 1 + sum(now_s() - began_s > at_s for at_s in (1, 4, 11))
        assert 1 <= len(at_b) <= 2 * tries
        assert max(Counter(c.body for c in at_b).values()) <= 2


async def test_a_poisoned_request_sent_ninety_times_harms_nobody_else(start, pair):
    """O-36. One prompt too long and one unknown adapter, as TRL repeats them, among good ones."""
    running = await start([r.url for r in pair])
    too_long = {"model": "tiny", "prompt": [1] * 1500, "max_tokens": 8}
    unknown = {"model": "nobody", "prompt": [1], "max_tokens": 8}
    seen = sum(len(r.calls(PATH)) for r in pair)
    left = []
    running.daemon.replicas.on_transition.append(left.append)

    async def again(body: dict) -> list[httpx.Response]:
        return [await running.client.post(PATH, json=body) for _ in range(90)]

    async with asyncio.TaskGroup() as group:
        poisoned = [group.create_task(again(body)) for body in (too_long, unknown)]
        good = [group.create_task(running.complete("tiny", [n, n])) for n in range(128)]
    assert {task.result().status_code for task in good} == {200}
    assert sum(len(r.calls(PATH)) for r in pair) - seen == 128 + 90
    for body, task in zip((too_long, unknown), poisoned, strict=True):
        direct = await running.client.post(f"{pair[0].url}{PATH}", json=body)
        assert {(x.status_code, x.content) for x in task.result()} == {
            (direct.status_code, direct.content)
        }
    assert left == []
    page = (await running.client.get("/metrics")).text
    for code in (400, 404):
        assert f'rollmux_requests_total{{code="{code}",route="/v1/completions"}} 90.0' in page


async def test_no_timeout_of_the_daemons_own_ends_a_generation(start):
    """O-37. However long it takes, in relation to everything that can be set."""
    async with SimulatedReplica(step_s=0.01) as replica:
        short = dict.fromkeys(
            ("hold_s", "outage_s", "control_timeout_s", "attempt_timeout_s", "body_timeout_s"), 0.2
        )
        running = await start([replica.url], **short, stall_s=1.0)
        answer = await running.complete("tiny", [1], max_tokens=250)
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["token_ids"]) == 250
        assert len(replica.calls(PATH)) == 1


async def test_a_client_that_gives_up_again_and_again_frees_the_engine_and_is_counted(
    start, monkeypatch, caplog
):
    """O-37. A generation takes longer than its client waits: cut, sent again, cut again."""
    monkeypatch.setattr(status, "PATIENCE_S", 0.1)
    async with SimulatedReplica(step_s=0.05) as replica:
        running = await start([replica.url])
        for cut in range(3):
            try:
                await running.client.post(
                    PATH, json={"model": "tiny", "prompt": [1], "max_tokens": 900}, timeout=0.2
                )
            except httpx.ReadTimeout:
                await until(lambda n=cut: len(replica.calls(PATH)) == n + 1)
                await until(lambda: replica.in_flight == 0)
        assert running.daemon.replicas.fleet.inflight() == 0
        page = (await running.client.get("/metrics")).text
        assert 'rollmux_client_gave_up_seconds_count{replica="r0"} 3.0' in page
        assert 'rollmux_client_gave_up_seconds_bucket{le="0.1",replica="r0"} 0.0' in page
        hints = [m for m in caplog.messages if "raise the trainer's request_timeout" in m]
        assert len(hints) == 1
        assert f"r0 ({replica.url})" in hints[0]


async def test_a_retry_is_not_taken_for_a_copy_of_what_it_replaces(start):
    """O-38. Servers that know the id of an attempt still being torn down refuse it."""
    seen: set[str | None] = set()

    async def once_each(arrival: Arrival) -> Reply:
        given = arrival.header("x-request-id")
        if given in seen:
            return error(400, f"Request id {given} already running")
        seen.add(given)
        if len(seen) == 1:
            for replica in (a, b):
                if arrival in replica.generations:
                    replica.server.refuse()  # breaks the connection after the id is known
        return Reply(200, OK)

    async with ScriptedReplica(once_each) as a, ScriptedReplica(once_each) as b:
        running = await start([a.url, b.url])
        answer = await running.client.post(
            PATH, json={"model": "tiny", "prompt": [1]}, headers={"x-request-id": "r1"}
        )
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "r1"
        assert len(seen) == 2
