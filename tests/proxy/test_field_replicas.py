"""Field reports K6: replicas that are dead, late, slow, silent, or all away at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from benchmarks.replica import SimulatedReplica
from broadcast import fleet
from proxy import calls, control, probes, upstream
from tests.proxy.scripted import ScriptedReplica, until
from tests.proxy.trainer import UNLOAD, Trainer, load, policy, publish, save

PATH = "/v1/completions"


@pytest.fixture
def no_flap(monkeypatch):
    """Going down soon after coming up costs no wait, as it would not in an hour-long run."""
    monkeypatch.setattr(fleet, "FLAP_S", 0.0)


def used_by(replica: str, answers) -> int:
    return sum(x.headers["x-rollmux-replica"] == replica for x in answers)


async def test_a_dying_engine_is_seen_from_the_traffic_and_skipped_at_once(start, pair, tmp_path):
    """O-20. Probes are too rare to see its 0.3 s of 503; affinity pulls nobody back there."""
    running = await start([r.url for r in pair], probe_s=60.0)
    await publish(running, tmp_path, 1)
    prompts = [list(range(n, n + 40)) for n in range(8)]
    first = [await running.complete(policy(1), p) for p in prompts]
    dead = pair[1]
    mine = [p for p, x in zip(prompts, first, strict=True)
            if x.headers["x-rollmux-replica"] == "r1"]  # fmt: skip
    assert mine, "no affinity to the one that dies"
    dead.faults.add(PATH, delay_s=0.2)
    flying = [
        running.daemon.tasks.start(running.complete(policy(1), p), "rollout") for p in mine[:3]
    ]
    seen = len(dead.calls(PATH))
    await until(lambda: len(dead.calls(PATH)) > seen)
    dead.die()
    await until(lambda: dead.engine.dead)
    answers = [await task for task in flying]
    assert {x.status_code for x in answers} == {200}
    after = [await running.complete(policy(1), p) for p in mine * 3]
    assert {x.status_code for x in after} == {200}
    assert used_by("r0", after) == len(after)
    assert len(dead.calls(PATH)) <= seen + len(flying)


async def test_slow_answers_to_probes_alone_take_no_busy_replica_out(start, pair, monkeypatch):
    """O-21. Both answer probes too late for long; their completions come as ever."""
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.25)
    running = await start([r.url for r in pair], probe_s=0.02, router="round-robin")
    left = []
    running.daemon.replicas.on_transition.append(left.append)
    for replica in pair:
        replica.faults.add("/is_paused", delay_s=1.0)
    before = [len(r.calls("/is_paused")) for r in pair]
    loop = asyncio.get_running_loop()
    while any(len(r.calls("/is_paused")) < n + 5 for r, n in zip(pair, before, strict=True)):
        assert (await running.complete("tiny", [1])).status_code == 200
        began_s = loop.time()
        assert (await running.client.get("/health")).status_code == 200
        assert loop.time() - began_s < 5.0  # TRL gives it no more
    assert [moved.code for moved in left] == []


async def test_idle_replicas_with_slow_probes_are_never_all_taken_out(start, pair, monkeypatch):
    """O-21. Without a completion as a sign of life the last one stays, and both come back."""
    running = await start([r.url for r in pair], probe_s=0.02)
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.05)
    fewest = 2

    def count(_: object) -> None:
        nonlocal fewest
        fewest = min(fewest, len(running.daemon.replicas.fleet.routable()))

    running.daemon.replicas.on_transition.append(count)
    for replica in pair:
        replica.faults.add("/is_paused", delay_s=0.5)
    before = [len(r.calls("/is_paused")) for r in pair]
    await until(
        lambda: all(len(r.calls("/is_paused")) >= n + 8 for r, n in zip(pair, before, strict=True))
    )
    assert fewest == 1
    assert (await running.client.get("/health")).status_code == 200
    monkeypatch.undo()
    for replica in pair:
        replica.faults.clear()
    await running.until_ready(2)


async def test_a_silent_replica_holds_up_nothing_but_its_own(start, monkeypatch):
    """O-22. 200 completions, half of them with affinity to the one that hangs on everything."""
    monkeypatch.setattr(control, "READ_TIMEOUT_S", 0.3)
    async with ScriptedReplica() as a, ScriptedReplica() as b:
        running = await start([a.url, b.url], spill_threshold=1000)
        where: dict[str, list[list[int]]] = {"r0": [], "r1": []}
        for n in range(40):
            prompt = [n] * 32
            answer = await running.complete("tiny", prompt)
            where[answer.headers["x-rollmux-replica"]].append(prompt)
        b.faults.add("*", hang=True)

        def hundred(replica: str) -> list[asyncio.Task]:
            of = where[replica]
            return [
                running.daemon.tasks.start(running.complete("tiny", of[n % len(of)]), "rollout")
                for n in range(100)
            ]

        stuck, flowing = hundred("r1"), hundred("r0")
        answers = await asyncio.gather(*flowing)
        assert used_by("r0", answers) == 100
        for path in ("/metrics", "/health", "/v1/models", "/proxy/status"):
            async with asyncio.timeout(5.0):
                assert (await running.client.get(path)).status_code == 200
        assert not any(task.done() for task in stuck)
        running.daemon.replicas.fleet.stall_s = 0.5
        moved = await asyncio.gather(*stuck)
        assert {x.status_code for x in moved} == {200}
        assert used_by("r0", moved) == 100


async def test_the_base_model_comes_first_with_its_length_when_the_first_replica_is_dead(
    start, pair, tmp_path
):
    """O-23."""
    running = await start([r.url for r in pair])
    await publish(running, tmp_path, 1)
    pair[0].refuse()
    for path in ("/server_info?config_format=json", "/get_world_size", "/version"):
        assert (await running.client.get(path)).status_code == 200
    cards = (await running.client.get("/v1/models")).json()["data"]
    assert [(c["id"], c["max_model_len"]) for c in cards] == [("tiny", 1024), (policy(1), None)]


async def test_the_daemon_is_up_before_any_replica_and_healthy_with_the_last_one(start):
    """O-24. Nothing listens when it starts; the three come one after another."""
    replicas = [SimulatedReplica() for _ in range(3)]
    for replica in replicas:
        await replica.start()
        replica.refuse()
    running = await start([r.url for r in replicas], ready=0)
    assert (await running.client.get("/proxy/live")).status_code == 200
    waiting = running.daemon.tasks.start(running.complete("tiny", [1]), "rollout")
    for number, replica in enumerate(replicas):
        health = await running.client.get("/health")
        assert health.status_code == 503
        message = health.json()["error"]["message"]
        assert [r.url in message for r in replicas] == [n >= number for n in range(3)]
        await replica.listen()
        await running.until_ready(number + 1)
    assert (await running.client.get("/health")).status_code == 200
    assert (await waiting).status_code == 200
    for replica in replicas:
        await replica.close()


async def test_a_replica_that_never_comes_is_named_until_the_start_has_timed_out(start, pair):
    """O-24. Then the others are enough, and the log has said who is missing."""
    pair[1].refuse()
    running = await start([r.url for r in pair], ready=1, start_timeout_s=60.0)
    health = await running.client.get("/health")
    assert health.status_code == 503
    assert f"r1 ({pair[1].url}) is down: refused" in health.json()["error"]["message"]
    replicas = running.daemon.replicas
    assert replicas.fleet.healthy(replicas.now_s() + 60)
    assert (await running.client.get("/health")).status_code == 200


class FullQueue:
    """A listening port whose queue is full: the kernel drops what would connect to it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", port))
        self.socket.listen(0)
        self.waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", port))
            self.waiting.append(one)

    def close(self) -> None:
        for one in (*self.waiting, self.socket):
            one.close()


async def test_after_connects_that_timed_out_everything_is_as_before(
    start, pair, monkeypatch, no_flap
):
    """O-25. Both drop every connect for a while, and many clients try again and again."""
    monkeypatch.setattr(upstream, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(calls, "CONNECT_TIMEOUT_S", 0.2)
    running = await start([r.url for r in pair], hold_s=0.3)
    replicas = running.daemon.replicas.fleet
    for replica in pair:
        replica.refuse()
    full = [FullQueue(r.port) for r in pair]
    recovered = asyncio.Event()
    seen: list[int] = []

    async def rollout(n: int) -> None:
        while True:
            answer = await running.complete("tiny", [n])
            seen.append(answer.status_code)
            if answer.status_code == 200:
                return
            assert answer.status_code in (502, 503)
            await asyncio.wait_for(recovered.wait(), 15) if n % 2 else await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for n in range(60):
            group.create_task(rollout(n))
        try:
            await until(lambda: len(seen) > 60, within_s=15)
            assert not replicas.routable()
            assert all("no connection within 0.2 s" in r.last_error for r in replicas)
        finally:
            for queue in full:
                queue.close()
        for replica in pair:
            await replica.listen()
        recovered.set()
        await running.until_ready(2)
    assert seen.count(200) == 60
    assert replicas.inflight() == 0
    assert all(r.error_code == "" for r in replicas)
    await until(lambda: all(r.in_flight == 0 for r in pair))
    page = (await running.client.get("/metrics")).text
    assert 'rollmux_replica_inflight{replica="r0"} 0.0' in page
    answers = [await running.complete("tiny", [100 + n]) for n in range(20)]
    assert {x.status_code for x in answers} == {200}
    assert 5 <= used_by("r0", answers) <= 15


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_outage_of_all_replicas_with_a_sync_inside_is_survived(
    start, pair, tmp_path, restarted, no_flap
):
    """The contract: control calls wait; generations get 503 at worst, which the trainer tries
    again; afterwards every replica holds every live policy."""
    running = await start([r.url for r in pair], hold_s=0.2, own_copies="auto")
    trainer = Trainer(running, tmp_path)
    for _ in range(2):
        await trainer.sync()
    for replica in pair:
        replica.refuse()
    await running.until_ready(0)
    codes: list[int] = []

    async def rollout(n: int) -> None:
        """TRL tries a request ninety times, the waits apart."""
        for _ in range(90):
            answer = await running.complete(policy(2), [n])
            codes.append(answer.status_code)
            if answer.status_code == 200:
                return
        raise AssertionError

    async with asyncio.TaskGroup() as group:
        for n in range(8):
            group.create_task(rollout(n))
        sync = group.create_task(trainer.sync())
        await until(lambda: codes.count(503) >= 16)
        assert not sync.done()
        for replica in pair:
            await (replica.restart() if restarted else replica.listen())
    assert set(codes) == {200, 503}
    await running.until_ready(2)
    live = {policy(1), policy(2), policy(3)}
    assert [set(r.names) for r in pair] == [live] * 2
    assert (await running.client.get("/is_paused")).json() == {"is_paused": False}
    for version in (1, 2, 3):
        answer = await running.complete(policy(version), [1, 2])
        expected = pair[0].expected_tokens(policy(version), [1, 2], 8)
        assert answer.json()["choices"][0]["token_ids"] == expected


async def test_an_outage_in_the_middle_of_a_sync_is_survived(start, pair, tmp_path, no_flap):
    """Between pause and load, and again between load and resume."""
    running = await start([r.url for r in pair], pause="eager", hold_s=0.2)
    await running.client.post("/pause?mode=keep")
    path = save(tmp_path, 1)
    for replica in pair:
        replica.refuse()
    await running.until_ready(0)
    loading = running.daemon.tasks.start(load(running, policy(1), path), "load")
    for replica in pair:
        await replica.restart()
    assert (await loading).status_code == 200
    for replica in pair:
        replica.refuse()
    await running.until_ready(0)
    resuming = running.daemon.tasks.start(running.client.post("/resume"), "resume")
    for replica in pair:
        await replica.listen()
    assert (await resuming).status_code == 200
    await running.until_ready(2)
    assert (await running.complete(policy(1), [1])).status_code == 200
    assert [r.engine.paused.value for r in pair] == ["none", "none"]


async def test_a_name_retired_while_a_replica_was_away_is_not_there_when_it_is_back(
    start, pair, tmp_path
):
    """Contract 3.2: those that are away are told when they come back."""
    running = await start([r.url for r in pair], retire_grace_s=0.05)
    await publish(running, tmp_path, 1)
    await publish(running, tmp_path, 2)
    pair[1].refuse()
    await running.until_ready(1)
    await running.client.post(UNLOAD, json={"lora_name": policy(1)})
    await until(lambda: policy(1) not in pair[0].names)
    await pair[1].listen()
    await running.until_ready(2)
    assert [list(r.names) for r in pair] == [[policy(2)]] * 2
