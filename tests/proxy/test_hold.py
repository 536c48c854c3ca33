"""Generations that find no replica: held, then 503; or 404 when no replica will ever do."""

from __future__ import annotations

import asyncio

from benchmarks.adapter import write_adapter
from benchmarks.replica import SimulatedReplica
from tests.proxy.scripted import ScriptedReplica, hang, until


async def test_without_a_ready_replica_it_waits_and_then_says_who_is_missing(start):
    async with ScriptedReplica() as a, ScriptedReplica() as b:
        running = await start([a.url, b.url], hold_s=0.4)
        for replica in (a, b):
            replica.server.refuse()
        await running.until_ready(0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 503
        assert loop.time() - began >= 0.4
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-rollmux-error"] == "no_ready_replica"
        message = answer.json()["error"]["message"]
        assert a.url in message
        assert b.url in message
        assert "refused" in message


async def test_what_waits_is_served_as_soon_as_a_replica_is_ready(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], hold_s=30.0)
        replica.server.refuse()
        await running.until_ready(0)
        work = running.daemon.tasks.start(running.complete("tiny", [1]), "client")
        await asyncio.sleep(0)
        await replica.server.listen()
        assert (await work).status_code == 200


async def test_before_anything_joined_every_name_waits(start):
    """Whether a name is unknown can be said only once the replicas have been looked at."""
    async with SimulatedReplica() as replica:
        url = replica.url
        replica.refuse()
        running = await start([url], ready=0, hold_s=30.0)
        tasks = [
            running.daemon.tasks.start(running.complete(name, [1]), "client")
            for name in ("tiny", "trl-policy-v3")
        ]
        tried, _ = await asyncio.wait(tasks, timeout=0.3)
        assert not tried
        await replica.listen()
        known, unknown = [await task for task in tasks]
        assert known.status_code == 200
        assert unknown.status_code == 404


async def test_an_unknown_model_is_404_in_vllms_own_words(start, pair):
    running = await start([r.url for r in pair], hold_s=30.0)
    async with asyncio.timeout(10):
        answer = await running.complete("no-such-model", [1])
    assert answer.status_code == 404
    assert answer.json() == {
        "error": {
            "message": "The model `no-such-model` does not exist.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }
    assert answer.headers["x-rollmux-error"] == "unknown_model"
    assert not any(r.calls("/v1/completions") for r in pair)


async def test_a_body_without_a_model_gets_the_base_model(start, pair):
    running = await start([r.url for r in pair])
    answer = await running.client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
    assert answer.status_code == 200
    assert answer.json()["model"] == "tiny"


async def test_a_live_adapter_that_no_ready_replica_holds_waits(start, pair, tmp_path):
    write_adapter(tmp_path / "v1")
    running = await start([r.url for r in pair], hold_s=0.3)
    load = {"lora_name": "v1", "lora_path": str(tmp_path / "v1")}
    assert (await running.client.post("/v1/load_lora_adapter", json=load)).status_code == 200
    for replica in pair:
        replica.refuse()
    await running.until_ready(0)
    answer = await running.complete("v1", [1])
    assert answer.status_code == 503
    assert "v1" in answer.json()["error"]["message"]


async def test_the_hold_begins_anew_after_a_long_attempt(start):
    """A replica that dies late in a generation leaves it the whole hold to find another."""
    async with ScriptedReplica(hang) as dies, ScriptedReplica() as comes:
        running = await start([dies.url], hold_s=2.0)
        work = running.daemon.tasks.start(running.complete("tiny", [1]), "client")
        await until(lambda: dies.generations)
        await asyncio.sleep(2.1)  # longer than the hold
        dies.server.refuse()
        await running.until_ready(0)
        running.daemon.probes.watch(running.daemon.replicas.add(comes.url))
        assert (await work).status_code == 200


async def test_an_empty_fleet_has_not_forgotten_its_base_model(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], hold_s=0.1)
        running.daemon.replicas.remove("r0")
        assert (await running.complete("tiny", [1])).status_code == 503
        assert (await running.complete("other", [1])).status_code == 404


async def test_a_retired_name_that_is_waited_for_is_not_given_up(start, pair, tmp_path):
    """The trainer sends a frozen name again and again: 404 for ninety times ends its run."""
    write_adapter(tmp_path / "v1")
    running = await start([r.url for r in pair], hold_s=0.1, retire_grace_s=60)
    load = {"lora_name": "v1", "lora_path": str(tmp_path / "v1")}
    assert (await running.client.post("/v1/load_lora_adapter", json=load)).status_code == 200
    await running.client.post("/v1/unload_lora_adapter", json={"lora_name": "v1"})
    for replica in pair:
        replica.refuse()
    await running.until_ready(0)
    ledger, since_s = running.daemon.replicas.ledger, running.daemon.replicas.now_s()
    assert ledger.retirable(since_s + 60, ()) == ("v1",)
    assert (await running.complete("v1", [1])).status_code == 503
    assert ledger.retirable(since_s + 60, ()) == ()
