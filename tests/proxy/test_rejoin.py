"""Replicas that restart, stall, come late or do not fit, and a daemon that restarts before them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx

from benchmarks.adapter import write_adapter
from benchmarks.replica import SimulatedReplica

LOAD = "/v1/load_lora_adapter"


async def publish(running, folder, version: int) -> None:
    name = f"trl-policy-v{version}"
    path = write_adapter(folder / name, seed=version)
    answer = await running.client.post(LOAD, json={"lora_name": name, "lora_path": str(path)})
    assert answer.status_code == 200


async def test_a_restarted_replica_gets_nothing_before_it_holds_every_live_adapter(
    start, pair, tmp_path
):
    """The trainer sees only 200s, and only the weights it named."""
    running = await start([r.url for r in pair])
    for version in (1, 2, 3):
        await publish(running, tmp_path, version)
    prompt = list(range(40))
    expected = {v: pair[0].expected_tokens(f"trl-policy-v{v}", prompt, 8) for v in (1, 2, 3)}
    stop = asyncio.Event()
    wrong: list[object] = []
    served = 0

    async def rollouts(version: int) -> None:
        nonlocal served
        while not stop.is_set():
            answer = await running.complete(f"trl-policy-v{version}", prompt)
            served += 1
            if answer.status_code != 200:
                wrong.append((answer.status_code, answer.text))
            elif answer.json()["choices"][0]["token_ids"] != expected[version]:
                wrong.append("other weights")

    async with asyncio.TaskGroup() as group:
        for version in (1, 2, 3) * 4:
            group.create_task(rollouts(version))
        await running.until(lambda: served > 30)
        await pair[1].restart()
        await running.until(lambda: running.daemon.replicas.fleet.missing() != ())
        await running.until_ready(2)
        loaded = len(pair[1].calls(LOAD))
        await running.until(lambda: served > 200)
        stop.set()
    assert wrong == []
    assert loaded == 3 + 3
    order = [c.path for c in pair[1].log]
    reset = len(order) - 1 - order[::-1].index("/reset_prefix_cache")
    since = [c for c in list(pair[1].log)[reset:] if c.path in (LOAD, "/v1/completions")]
    assert [c.path for c in since[:3]] == [LOAD] * 3


async def test_a_silent_restart_is_seen_by_a_probe(start, pair, tmp_path):
    """No traffic at all: the replica is back before anything notices that it was away."""
    running = await start([r.url for r in pair])
    await publish(running, tmp_path, 1)
    await pair[1].restart()
    await running.until(lambda: list(pair[1].names) == ["trl-policy-v1"])
    await running.until_ready(2)


async def test_a_publication_missed_by_a_suspect_replica_is_caught_up(start, pair, tmp_path):
    running = await start([r.url for r in pair])
    pair[1].refuse()
    await running.until_ready(1)
    await publish(running, tmp_path, 1)
    assert list(pair[1].names) == []
    await pair[1].listen()
    await running.until_ready(2)
    assert list(pair[1].names) == ["trl-policy-v1"]


async def test_a_replica_dying_inside_a_publication_does_not_stop_it(start, pair, tmp_path):
    running = await start([r.url for r in pair])
    pair[1].faults.add(LOAD, hang=True)
    path = write_adapter(tmp_path / "a", seed=1)
    call = asyncio.ensure_future(
        running.client.post(LOAD, json={"lora_name": "trl-policy-v1", "lora_path": str(path)})
    )
    await running.until(lambda: len(pair[1].calls(LOAD)) == 1)
    pair[1].refuse()
    assert (await call).status_code == 200
    pair[1].faults.clear()
    await pair[1].listen()
    await running.until_ready(2)
    assert list(pair[1].names) == ["trl-policy-v1"]


async def test_an_engine_that_stands_still_is_left_and_its_rollouts_move(start, pair):
    running = await start([r.url for r in pair], stall_s=1.0)
    first = await running.complete("tiny", list(range(40)))
    stuck = pair[int(first.headers["x-rollmux-replica"][1])]
    stuck.faults.add("/v1/completions", hang=True)
    stuck.faults.add("/is_paused", hang=True)
    moved = await running.complete("tiny", list(range(40)))
    assert moved.status_code == 200
    assert moved.headers["x-rollmux-replica"] != first.headers["x-rollmux-replica"]
    page = (await running.client.get("/metrics")).text
    assert "rollmux_failovers_total{" in page


async def test_slow_probes_alone_take_down_nobody(start, pair):
    running = await start([r.url for r in pair], stall_s=30)
    for replica in pair:
        replica.faults.add("/is_paused", delay_s=1.5)
    for _ in range(10):
        assert (await running.complete("tiny", [1, 2, 3])).status_code == 200
        await asyncio.sleep(0.05)
    assert (await running.client.get("/health")).status_code == 200
    assert [r["state"] for r in (await running.status())["replicas"]] == ["ready", "ready"]


async def test_a_replica_of_another_model_stays_out_with_the_reason(start):
    async with SimulatedReplica() as a, SimulatedReplica(model="other") as b:
        running = await start([a.url, b.url], ready=1)
        await running.until(
            lambda: any(r.error_code == "model_differs" for r in running.daemon.replicas.fleet)
        )
        out = next(r for r in (await running.status())["replicas"] if r["state"] != "ready")
        assert "start them with the same model" in out["last_error"]
        assert (await running.client.get("/health")).status_code == 503


async def test_a_replica_of_another_model_is_back_once_it_was_started_with_the_right_one(start):
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(SimulatedReplica())
        running = await start([a.url])
        other = await stack.enter_async_context(SimulatedReplica(model="other"))
        running.daemon.control.add_replica(b'{"url":"%s"}' % other.url.encode())
        fleet = running.daemon.replicas.fleet
        await running.until(lambda: fleet["r1"].error_code == "model_differs")
        port = other.port
        await other.close()
        await running.until(lambda: fleet["r1"].state == "down")
        await stack.enter_async_context(SimulatedReplica(port=port))
        await running.until_ready(2)


async def test_a_server_without_development_endpoints_still_serves(start):
    async with SimulatedReplica(dev_mode=False) as a:
        running = await start([a.url])
        assert (await running.complete("tiny", [1, 2, 3])).status_code == 200


async def test_a_new_daemon_takes_over_what_all_replicas_hold(start, pair, tmp_path):
    """The daemon restarts in the middle of a run: nothing is swept that the run needs."""
    first = await start([r.url for r in pair])
    for version in (1, 2):
        await publish(first, tmp_path, version)
    await first.daemon.stop()
    second = await start([r.url for r in pair])
    assert [len(r.calls(LOAD)) for r in pair] == [2, 2]
    assert (await second.status())["policy"]["live"] == ["trl-policy-v1", "trl-policy-v2"]
    assert (await second.complete("trl-policy-v2", [1, 2, 3])).status_code == 200


async def test_a_name_on_one_replica_only_is_swept_at_the_start(start, pair, tmp_path):
    path = write_adapter(tmp_path / "a", seed=1)
    async with SimulatedReplica() as spare:
        lone = await start([spare.url])  # a client to load with
        await lone.client.post(
            f"{pair[0].url}{LOAD}", json={"lora_name": "trl-policy-v9", "lora_path": str(path)}
        )
    running = await start([r.url for r in pair])
    assert [list(r.names) for r in pair] == [[], []]
    assert (await running.complete("trl-policy-v9", [1])).status_code == 404


async def test_a_replica_another_run_has_marked_stays_out(start, pair):
    """Two daemons on one replica would undo each other's adapters."""
    running = await start([r.url for r in pair])
    pair[1].weight_version = "rollmux-somebody-else"
    await running.until(
        lambda: any(r.error_code == "foreign_run" for r in running.daemon.replicas.fleet)
    )
    assert len(running.daemon.replicas.fleet.routable()) == 1
    out = next(r for r in (await running.status())["replicas"] if r["state"] != "ready")
    assert "another run" in out["last_error"]


async def test_release_right_after_a_restart_resumes_what_the_last_daemon_paused(start, pair):
    """The trainer dies with the daemon: the next daemon is told to let go before it has looked."""
    async with httpx.AsyncClient(trust_env=False) as client:
        for replica in pair:
            replica.weight_version = "rollmux-this-run"
            assert (await client.post(f"{replica.url}/pause?mode=keep")).status_code == 200
        running = await start([r.url for r in pair], pause="eager", ready=0)
        assert (await running.client.post("/proxy/release")).status_code == 200
        for replica in pair:
            answer = await client.get(f"{replica.url}/is_paused")
            assert answer.json() == {"is_paused": False}


async def test_a_prompt_is_new_to_a_replica_that_was_restarted(start, pair):
    """Its cache is empty: nothing draws the prompt there any more."""
    running = await start([r.url for r in pair])
    prompt = list(range(64))
    first = await running.complete("tiny", prompt)
    again = await running.complete("tiny", prompt)
    assert again.headers["x-rollmux-route"] == "affinity"
    served = running.daemon.replicas.fleet[first.headers["x-rollmux-replica"]]
    epoch = served.epoch
    await pair[int(served.id[1:])].restart()
    await running.until(lambda: served.epoch > epoch)
    await running.until_ready(2)
    after = await running.complete("tiny", prompt)
    assert after.headers["x-rollmux-route"] == "unmatched"
