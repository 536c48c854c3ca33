"""Pause and resume through the daemon: acknowledged where that is enough, real where it must be."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.adapter import write_adapter
from benchmarks.engine import Pause

PAUSED = {"status": "paused"}
RESUMED = {"status": "resumed"}


async def is_paused(running) -> bool:
    return (await running.client.get("/is_paused")).json()["is_paused"]


def standing(pair) -> list[bool]:
    """Which replicas stand still, whatever anybody was told."""
    return [r.engine.paused is not Pause.NONE for r in pair]


def targets(replica, path: str) -> list[str]:
    return [arrival.target for arrival in replica.calls(path)]


async def test_a_lazy_pause_is_acknowledged_and_stops_nobody(start, pair):
    running = await start([r.url for r in pair])
    answer = await running.client.post("/pause?mode=keep")
    assert (answer.status_code, answer.json()) == (200, PAUSED)
    assert await is_paused(running)
    assert (await running.status())["paused"] is True
    assert (await running.complete("tiny", [1, 2, 3])).status_code == 200
    assert (await running.client.post("/resume")).json() == RESUMED
    assert not await is_paused(running)
    assert not any(r.calls("/pause") for r in pair)
    page = (await running.client.get("/metrics")).text
    assert "rollmux_pauses_elided_total 1.0" in page


@pytest.mark.parametrize(
    "query", ["mode=abort", "mode=wait", "mode=keep&clear_cache=false", "", "mode=keep&x=%2F"]
)
async def test_any_other_pause_reaches_every_replica_byte_for_byte(start, pair, query):
    running = await start([r.url for r in pair])
    target = f"/pause?{query}" if query else "/pause"
    assert (await running.client.post(target)).status_code == 200
    assert [targets(r, "/pause") for r in pair] == [[target], [target]]
    await running.client.post("/resume")
    assert [targets(r, "/resume")[-1] for r in pair] == ["/resume", "/resume"]
    assert not await is_paused(running)


async def test_an_eager_pause_is_broadcast(start, pair):
    running = await start([r.url for r in pair], pause="eager")
    await running.client.post("/pause?mode=keep")
    assert [targets(r, "/pause") for r in pair] == [["/pause?mode=keep"]] * 2
    frozen = asyncio.ensure_future(running.complete("tiny", [1, 2, 3]))
    await running.until(lambda: sum(r.in_flight for r in pair) == 1)
    await running.client.post("/resume")
    assert (await frozen).status_code == 200


async def test_a_pause_that_fails_on_one_replica_is_undone_on_the_other(start, pair):
    pair[1].faults.add("/pause", status=500, body=b'{"error":"Failed to pause generation: x"}')
    running = await start([r.url for r in pair], pause="eager")
    answer = await running.client.post("/pause?mode=keep")
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert "r1" in message
    assert "Failed to pause generation: x" in message
    assert not await is_paused(running)
    assert len(pair[0].calls("/resume")) == 1
    assert (await running.complete("tiny", [1, 2, 3])).status_code == 200
    pair[1].faults.clear()
    assert (await running.client.post("/pause?mode=keep")).status_code == 200
    assert (await running.client.post("/resume")).status_code == 200
    await running.until_ready(2)


async def test_a_pause_that_hangs_on_one_replica_is_undone_on_the_other(start, pair):
    pair[1].faults.add("/pause", hang=True)
    running = await start([r.url for r in pair], pause="eager", control_timeout_s=0.5)
    answer = await running.client.post("/pause?mode=keep")
    assert answer.status_code == 502
    assert "r1" in answer.json()["error"]["message"]
    assert len(pair[0].calls("/resume")) == 1


async def test_an_acknowledged_pause_is_made_real_before_weights_change(start, pair):
    running = await start([r.url for r in pair])
    await running.client.post("/pause?mode=keep")
    assert not pair[0].calls("/pause")
    await running.client.post("/collective_rpc", json={"method": "list_loras"})
    assert [targets(r, "/pause") for r in pair] == [["/pause?mode=keep"]] * 2
    await running.client.post("/resume")
    assert all(len(r.calls("/resume")) >= 1 for r in pair)
    assert standing(pair) == [False, False]
    assert not await is_paused(running)


async def test_a_failed_publication_leaves_nothing_paused(start, pair, tmp_path):
    """TRL dies of a failed load without resuming."""
    running = await start([r.url for r in pair], pause="eager")
    pair[1].faults.add("/v1/load_lora_adapter", status=400, body=b'{"error":{"message":"no"}}')
    await running.client.post("/pause?mode=keep")
    path = write_adapter(tmp_path / "a", seed=1)
    body = {"lora_name": "trl-policy-v1", "lora_path": str(path)}
    answer = await running.client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert not await is_paused(running)
    assert standing(pair) == [False, False]


async def test_a_stopping_daemon_resumes_what_it_paused(start, pair):
    running = await start([r.url for r in pair], pause="eager")
    await running.client.post("/pause?mode=keep")
    assert standing(pair) == [True, True]
    await running.daemon.stop()
    assert standing(pair) == [False, False]


async def test_a_replica_that_joins_a_paused_fleet_is_paused_before_it_is_ready(start, pair):
    pair[1].refuse()
    running = await start([r.url for r in pair], pause="eager", ready=1)
    await running.client.post("/pause?mode=keep")
    await pair[1].listen()
    await running.until_ready(2)
    assert standing(pair) == [True, True]
    await running.client.post("/resume")
    assert standing(pair) == [False, False]


async def test_a_new_daemon_leaves_the_pause_of_its_run_alone(start, pair):
    """The daemon died inside a weight update: only the trainer may resume."""
    for replica in pair:
        replica.weight_version = "rollmux-this-run"
        replica.engine.pause(asyncio.get_running_loop().time(), "keep")
    running = await start([r.url for r in pair])
    assert standing(pair) == [True, True]
    assert await is_paused(running)
    assert (await running.client.post("/resume")).status_code == 200
    assert standing(pair) == [False, False]


async def test_a_replica_found_paused_is_resumed_before_it_is_ready(start, pair):
    pair[0].engine.pause(asyncio.get_running_loop().time(), "keep")
    running = await start([r.url for r in pair])
    assert standing(pair) == [False, False]
    assert (await running.complete("tiny", [1, 2, 3])).status_code == 200


async def test_a_replica_that_dies_under_a_pause_does_not_fail_it(start, pair):
    """It is out of rotation, and is paused before it is back; TRL dies of a failed pause."""
    running = await start([r.url for r in pair], pause="eager")
    pair[1].faults.add("/pause", reset=True, times=1)
    assert (await running.client.post("/pause?mode=keep")).status_code == 200
    await running.until_ready(2)
    assert standing(pair) == [True, True]
    assert (await running.client.post("/resume")).status_code == 200
    assert standing(pair) == [False, False]


async def test_a_release_does_not_wait_for_a_load_under_way(start, pair):
    """Who called it is gone, and it may take minutes: the replicas would be left paused."""
    running = await start([r.url for r in pair], pause="eager")
    for replica in pair:
        replica.faults.add("/v1/load_lora_adapter", hang=True)
    await running.client.post("/pause?mode=keep")
    body = {"lora_name": "trl-policy-v1", "lora_path": "/nowhere"}
    load = running.client.post("/v1/load_lora_adapter", json=body)
    late = running.client.post("/pause?mode=keep")
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(load)
        await running.until(lambda: all(r.calls("/v1/load_lora_adapter") for r in pair))
        waiting = group.create_task(late)
        assert (await running.client.post("/proxy/release")).status_code == 200
    assert loading.result().status_code == 503
    assert waiting.result().status_code == 200


async def test_a_fleet_that_sleeps_is_left_asleep_until_it_is_woken(start, pair):
    """vLLM says that it is paused, and a resume would set it going without its weights."""
    running = await start([r.url for r in pair])
    assert (await running.client.post("/sleep?level=1")).status_code == 200
    probed = [len(r.calls("/is_paused")) for r in pair]
    await running.until(
        lambda: all(len(r.calls("/is_paused")) > n + 2 for r, n in zip(pair, probed, strict=True))
    )
    assert [r.state for r in running.daemon.replicas.fleet] == ["ready", "ready"]
    assert [len(r.calls("/resume")) for r in pair] == [0, 0]
    await pair[1].restart()
    await running.until(lambda: pair[1].sleeping)
    await running.until_ready(2)
    assert (await running.client.post("/wake_up")).status_code == 200
    assert standing(pair) == [False, False]
    await running.until_ready(2)
    assert (await running.complete("tiny", [1])).status_code == 200
    codes: list[str] = []
    running.daemon.replicas.on_transition.append(lambda moved: codes.append(moved.code))
    pair[0].engine.pause(asyncio.get_running_loop().time(), "keep")  # by somebody else
    await running.until(lambda: "pause_differs" in codes)


async def test_a_replica_that_becomes_ready_during_a_pause_is_paused_too(start, pair):
    """It must not run on while the others take other weights in."""
    pair[1].refuse()
    running = await start([r.url for r in pair], pause="eager", ready=1, probe_s=60)
    pair[0].faults.add("/pause", late_s=3.0)
    async with asyncio.TaskGroup() as group:
        pausing = group.create_task(running.client.post("/pause?mode=keep"))
        await running.until(lambda: pair[0].calls("/pause"))
        await pair[1].listen()
        await running.until_ready(2)
    assert pausing.result().status_code == 200
    await running.until(lambda: standing(pair) == [True, True])
    await running.until_ready(2)
