"""Names, replicas and trainers that come a second time: retired, restarted, taken over, cleaned."""

from __future__ import annotations

import asyncio
import shutil

import httpx

import broadcast.own_copy
import proxy.publishing
from benchmarks.adapter import write_adapter
from benchmarks.replica import SimulatedReplica
from tests.proxy.trainer import LOAD, UNLOAD, load, policy, publish, save


async def test_a_retired_name_loaded_again_with_the_same_bytes_is_live(start, pair, tmp_path):
    """A trainer that resumes publishes such bytes under such a name."""
    running = await start([r.url for r in pair], own_copies="auto", retire_grace_s=0.3)
    path = save(tmp_path, 1)
    assert (await load(running, policy(1), path)).status_code == 200
    await running.client.post(UNLOAD, json={"lora_name": policy(1)})
    assert (await load(running, policy(1), path)).status_code == 200
    assert (await running.status())["policy"]["live"] == [policy(1)]
    await running.daemon.publishing.sweep_once()
    assert (await running.complete(policy(1), [1, 2, 3])).status_code == 200
    assert [len(r.calls(LOAD)) for r in pair] == [1, 1]


async def test_a_live_name_that_a_replica_has_lost_is_no_known_one(start, pair, tmp_path):
    running = await start([r.url for r in pair], own_copies="auto", probe_s=60)
    path = save(tmp_path, 1)
    assert (await load(running, policy(1), path)).status_code == 200
    fleet = running.daemon.replicas.fleet
    fleet.close(policy(1), ["r1"])
    assert (await load(running, policy(1), path)).status_code == 200
    assert len(fleet.candidates(policy(1))) == len(fleet.routable())


async def test_a_copy_that_cannot_be_removed_stops_no_later_sweep(
    start, pair, tmp_path, monkeypatch, caplog
):
    """NFS keeps a file that is open, a mount may be gone."""
    running = await start([r.url for r in pair], own_copies="auto", retire_grace_s=0.0)
    for version in (1, 2):
        await publish(running, tmp_path, version)

    def busy(path):
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(broadcast.own_copy, "remove", busy)
    for left in ([policy(2)], []):
        version = 2 - len(left)
        await running.client.post(UNLOAD, json={"lora_name": policy(version)})
        await running.until(lambda want=left: all(list(r.names) == want for r in pair))
    await running.until(lambda: "a copy is left in" in caplog.text)


async def test_names_of_an_earlier_trainer_whose_files_are_gone_keep_no_fleet_from_ready(
    start, pair, tmp_path
):
    """Its output directory was deleted, and the same vLLM servers are used again."""
    path = save(tmp_path, 1)
    async with httpx.AsyncClient(trust_env=False) as client:
        for replica in pair:
            body = {"lora_name": policy(1), "lora_path": str(path)}
            assert (await client.post(replica.url + LOAD, json=body)).status_code == 200
    shutil.rmtree(path)
    running = await start([r.url for r in pair], load_timeout_s=600)
    assert [list(r.names) for r in pair] == [[], []]
    assert (await running.status())["policy"]["live"] == []


async def test_a_replica_that_dies_while_the_fleet_is_listed_does_not_hold_the_load(
    start, pair, tmp_path
):
    running = await start([r.url for r in pair], load_timeout_s=600)
    pair[0].faults.add("/v1/models", delay_s=2.0)
    listed = [len(r.calls("/v1/models")) for r in pair]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        loading = group.create_task(load(running, policy(1), save(tmp_path, 1)))
        await running.until(lambda: len(pair[1].calls("/v1/models")) > listed[1])
        pair[1].refuse()
        fleet = running.daemon.replicas.fleet
        await running.until(lambda: fleet["r1"].state != "ready")
    assert loading.result().status_code == 200
    assert list(pair[0].names) == [policy(1)]


async def test_a_retired_name_survives_an_outage_of_the_whole_fleet(start, pair, tmp_path):
    """TRL asks again and again with the name it froze."""
    running = await start([r.url for r in pair], hold_s=60, own_copies="auto")
    for version in (1, 2):
        await publish(running, tmp_path, version)
    await running.client.post(UNLOAD, json={"lora_name": policy(1)})
    for replica in pair:
        replica.refuse()
    await running.until_ready(0)
    running.client.timeout = 60
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(running.complete(policy(1), [1, 2, 3]))
        for replica in pair:
            await replica.restart()
    assert asked.result().status_code == 200
    await running.until_ready(2)
    assert [sorted(r.names) for r in pair] == [[policy(1), policy(2)]] * 2


async def test_a_retired_name_without_files_holds_up_no_replica_that_joins(start, pair, tmp_path):
    running = await start([r.url for r in pair], load_timeout_s=600)
    for version in (1, 2):
        await publish(running, tmp_path, version)
    await running.client.post(UNLOAD, json={"lora_name": policy(1)})
    pair[1].faults.add(LOAD, status=404, body=b'{"error":{"message":"No adapter found"}}', times=1)
    await pair[1].restart()
    fleet = running.daemon.replicas.fleet
    await running.until(lambda: fleet["r1"].state != "ready")
    await running.until_ready(2)
    assert list(pair[1].names) == [policy(2)]


async def test_a_name_that_was_named_while_another_was_unloaded_is_kept(start, pair, tmp_path):
    running = await start([r.url for r in pair], probe_s=60)
    for version in (1, 2):
        await publish(running, tmp_path, version)
    for version in (1, 2):
        await running.client.post(UNLOAD, json={"lora_name": policy(version)})
    ledger = running.daemon.replicas.ledger
    ledger.retire_grace_s = 0.0  # both are due
    pair[1].faults.add(UNLOAD, late_s=1.0)
    told = len(pair[1].calls(UNLOAD))
    async with asyncio.TaskGroup() as group:
        group.create_task(running.daemon.publishing.sweep_once())
        await running.until(lambda: len(pair[1].calls(UNLOAD)) > told)
        ledger.retire_grace_s = 600.0  # and the second is not any more
    assert ledger.retired_names() == (policy(2),)
    assert (await running.complete(policy(2), [1, 2, 3])).status_code == 200


async def test_a_replica_that_was_away_during_the_cleaning_comes_back(start, pair):
    running = await start([r.url for r in pair])
    replicas = running.daemon.replicas
    pair[1].refuse()
    await running.until(lambda: len(replicas.fleet.routable()) == 1)
    assert (await running.client.post("/proxy/clean", json={"run_id": "abc"})).status_code == 200
    await pair[1].listen()
    await running.until_ready(2)
    assert pair[1].weight_version == "rollmux-abc"


async def test_a_trainer_with_another_rank_can_begin_under_the_first_ones_name(
    start, pair, tmp_path
):
    running = await start([r.url for r in pair])
    await publish(running, tmp_path / "first", 1)
    other = write_adapter(tmp_path / "second" / policy(1), "x", hidden=32, layers=1)
    assert (await load(running, policy(1), other)).status_code == 200
    strange = save(tmp_path / "third", 2)
    refused = await load(running, policy(2), strange)
    assert refused.status_code == 400
    assert "shape" in refused.text


async def test_an_adapter_that_was_refused_sets_no_shapes(start, pair, tmp_path):
    pair[0].faults.add(LOAD, status=400, body=b'{"error":{"message":"no"}}', times=1)
    running = await start([r.url for r in pair])
    assert (await load(running, policy(1), save(tmp_path, 1))).status_code == 400
    other = write_adapter(tmp_path / policy(2), "x", hidden=32, layers=1)
    assert (await load(running, policy(2), other)).status_code == 200


async def test_a_name_is_taken_over_only_once_its_last_request_has_ended(start, pair, tmp_path):
    """A running one would leave cached blocks of the old weights under the name."""
    running = await start([r.url for r in pair])
    await publish(running, tmp_path, 1)
    for replica in pair:
        replica.faults.add("/v1/completions", delay_s=1.0)
    told = [len(r.calls(UNLOAD)) for r in pair]
    fleet = running.daemon.replicas.fleet
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(running.complete(policy(1), [1, 2, 3]))
        await running.until(lambda: policy(1) in fleet.inflight_names())
        group.create_task(publish(running, tmp_path / "other", 1, seed="other"))
        await running.until(lambda: [len(r.calls(UNLOAD)) for r in pair] != told)
        assert policy(1) not in fleet.inflight_names()
    assert asked.result().status_code == 200


async def test_a_load_waits_while_it_would_push_out_what_runs_and_cannot_be_read_again(
    start, tmp_path
):
    """An engine that looks for the files of an adapter it let go dies when they are gone."""
    async with SimulatedReplica(max_loras=2, max_cpu_loras=2) as replica:
        running = await start([replica.url])
        for version in (1, 2):
            await publish(running, tmp_path, version)
        shutil.rmtree(tmp_path / policy(1))
        replica.faults.add("/v1/completions", delay_s=1.0)
        loads = len(replica.calls(LOAD))
        fleet = running.daemon.replicas.fleet
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(running.complete(policy(1), [1, 2, 3]))
            await running.until(lambda: policy(1) in fleet.inflight_names())
            running.daemon.replicas.ledger.loaded(policy(2))  # used after it
            group.create_task(publish(running, tmp_path, 3))
            await running.until(lambda: len(replica.calls(LOAD)) > loads)
            assert policy(1) not in fleet.inflight_names()
        assert asked.result().status_code == 200


async def test_a_takeover_that_breaks_leaves_no_name_that_nobody_holds(
    start, pair, tmp_path, monkeypatch
):
    running = await start([r.url for r in pair], hold_s=600)
    await publish(running, tmp_path, 1)

    async def broken(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(proxy.publishing, "publish", broken)
    other = save(tmp_path / "other", 1, "other")
    assert (await load(running, policy(1), other)).status_code == 500
    assert (await running.complete(policy(1), [1, 2, 3])).status_code == 404


async def test_a_name_taken_over_leaves_no_copy_of_what_it_was(start, pair, tmp_path):
    running = await start([r.url for r in pair], own_copies="auto")
    await publish(running, tmp_path, 1)
    (first,) = (tmp_path / ".rollmux").iterdir()
    shutil.rmtree(tmp_path / policy(1))
    await publish(running, tmp_path, 1, seed="other")
    (second,) = (tmp_path / ".rollmux").iterdir()
    assert first != second


async def test_the_first_replica_to_be_seen_does_not_decide_the_model_for_ever(start):
    """The wrong one came first, is started anew with the right model, and all are ready."""
    async with SimulatedReplica(model="other") as wrong:
        running = await start([wrong.url])
        fleet = running.daemon.replicas.fleet
        async with SimulatedReplica() as right:
            running.daemon.control.add_replica(b'{"url":"%s"}' % right.url.encode())
            await running.until(lambda: fleet["r1"].error_code == "model_differs")
            port = wrong.port
            await wrong.close()
            await running.until(lambda: fleet["r0"].state == "down")
            async with SimulatedReplica(port=port):
                await running.until_ready(2)


async def test_a_replica_deleted_while_it_is_probed_leaves_without_an_error(start, pair, caplog):
    running = await start([r.url for r in pair])
    pair[0].faults.add("/is_paused", delay_s=0.5)
    before = len(pair[0].calls("/is_paused"))
    await running.until(lambda: len(pair[0].calls("/is_paused")) > before)
    running.daemon.control.remove_replica("r0", drain=False)
    calls = running.daemon.calls
    await running.until(lambda: "r0" not in calls._clients)
    assert "KeyError" not in caplog.text


async def test_the_journal_counts_though_every_replica_was_started_anew(start, pair, tmp_path):
    """The node rebooted: nobody carries the run's marker any more."""
    state = str(tmp_path / "state")
    first = await start([r.url for r in pair], own_copies="auto", state_file=state)
    for version in (1, 2):
        await publish(first, tmp_path, version)
    for gone in (tmp_path / policy(1), *(tmp_path / ".rollmux").glob(f"{policy(1)}-*")):
        shutil.rmtree(gone)
    await first.daemon.stop()
    for replica in pair:
        await replica.restart()
    second = await start([r.url for r in pair], own_copies="auto", state_file=state)
    assert (await second.status())["policy"]["live"] == [policy(2)]
    assert (await second.complete(policy(2), [1, 2, 3])).status_code == 200


async def test_a_journal_without_a_run_is_left_out(start, pair, tmp_path, caplog):
    state = tmp_path / "state"
    state.write_bytes(b'{"rollmux_journal":1}')
    running = await start([r.url for r in pair], state_file=str(state))
    assert (await running.complete("unknown", [1])).status_code == 404
    assert "is of another kind and is left out" in caplog.text
