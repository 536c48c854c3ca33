"""Field reports K5: pauses that fail, that cut generations short, and that nobody ends."""

from __future__ import annotations

import asyncio

from benchmarks.engine import Pause
from benchmarks.httpd import Arrival, Reply
from benchmarks.replica import SimulatedReplica
from broadcast import fleet
from proxy import control, probes
from tests.proxy.scripted import ScriptedReplica, until
from tests.proxy.trainer import LOAD, Trainer, load, save

PATH = "/v1/completions"
KEEP = "/pause?mode=keep"


def standing(*replicas: SimulatedReplica) -> list[bool]:
    return [r.engine.paused is not Pause.NONE for r in replicas]


async def test_a_pause_that_one_of_three_refuses_leaves_none_paused(start, pair):
    """O-15. The two that did pause are resumed before the error goes out."""
    async with SimulatedReplica() as c:
        running = await start([r.url for r in (*pair, c)], pause="eager")
        pair[1].faults.add("/pause", status=500, body=b'{"error":"cannot"}', times=1)
        answer = await running.client.post(KEEP)
        assert answer.status_code == 500
        assert standing(*pair, c) == [False] * 3
        assert [len(r.calls("/resume")) for r in (*pair, c)] == [1, 0, 1]
        assert (await running.client.post(KEEP)).status_code == 200
        assert standing(*pair, c) == [True] * 3
        assert (await running.client.post("/resume")).status_code == 200
        assert standing(*pair, c) == [False] * 3


async def test_a_pause_carried_out_by_a_replica_that_hangs_is_undone_there_too(start, pair):
    """O-15. It has not answered, so it may be paused: as here, where only its answer is late."""
    running = await start([r.url for r in pair], pause="eager", control_timeout_s=0.3)
    pair[1].faults.add("/pause", late_s=1.0, times=1)
    answer = await running.client.post(KEEP)
    assert answer.status_code == 502
    assert standing(*pair) == [False, False]
    await running.until_ready(2)
    assert (await running.client.post(KEEP)).status_code == 200
    assert (await running.client.post("/resume")).status_code == 200
    assert standing(*pair) == [False, False]


async def test_a_replica_left_paused_is_named_and_resumed_before_it_serves(start, pair):
    """O-15. The resume that should make good a failed pause fails as well."""
    running = await start([r.url for r in pair], pause="eager")
    pair[1].faults.add("/pause", status=500, body=b'{"error":"cannot"}', times=1)
    pair[0].faults.add("/resume", status=500, body=b'{"error":"no"}', times=1)
    answer = await running.client.post(KEEP)
    assert answer.status_code == 500
    assert "may still be paused: r0" in answer.json()["error"]["message"]
    state = running.daemon.replicas.fleet["r0"]
    assert (state.state, state.error_code) == ("joining", "left_paused")
    await running.until_ready(2)
    assert standing(*pair) == [False, False]


async def test_a_pause_that_cuts_running_generations_short_is_told(start, caplog):
    """O-16. A bare ``/pause`` means abort; it passes, as everything does, but not silently."""
    async with SimulatedReplica(step_s=0.01) as a:
        running = await start([a.url])
        rollout = running.daemon.tasks.start(
            running.complete("tiny", [1], max_tokens=900), "rollout"
        )
        await until(lambda: a.in_flight == 1)
        assert (await running.client.post("/pause")).status_code == 200
        assert [c.target for c in a.calls("/pause")] == ["/pause"]
        assert "a pause without mode=keep while 1 rollouts run" in caplog.text
        await running.client.post("/resume")
        await until(lambda: len(a.calls(PATH)) == 2 and a.in_flight)
        rollout.cancel()


async def test_a_generation_cut_short_is_sent_again_and_counted(start):
    """O-16. TRL ignores ``finish_reason``: the stump would be trained on."""

    async def cut(arrival: Arrival) -> Reply:
        return Reply(200, b'{"choices":[{"text":"ha","finish_reason":"abort"}]}')

    async with ScriptedReplica(cut) as a, ScriptedReplica() as b:
        running = await start([a.url, b.url], router="round-robin")
        answers = [await running.complete("tiny", [n]) for n in range(4)]
        assert {x.status_code for x in answers} == {200}
        assert {x.headers["x-rollmux-replica"] for x in answers} == {"r1"}
        assert not any(b"abort" in x.content for x in answers)
        cuts = len(a.generations)
        assert cuts > 0
        page = (await running.client.get("/metrics")).text
        assert f'rollmux_failovers_total{{cause="aborted",replica="r0"}} {cuts}.0' in page


async def test_generations_that_race_with_a_pause_are_all_answered_after_it(start, monkeypatch):
    """O-17. No token for 45 s is normal while paused: nobody is timed out, moved or taken down."""
    async with SimulatedReplica(step_s=0.005) as a, SimulatedReplica(step_s=0.005) as b:
        running = await start([a.url, b.url], pause="eager", stall_s=5.0, hold_s=0.5)
        replicas = running.daemon.replicas

        def rollouts(numbers: range) -> list[asyncio.Task]:
            return [
                running.daemon.tasks.start(running.complete("tiny", [n], max_tokens=50), "rollout")
                for n in numbers
            ]

        before = rollouts(range(32))
        await until(lambda: replicas.fleet.inflight() == 32)
        assert (await running.client.post(KEEP)).status_code == 200
        during = rollouts(range(32, 64))
        await until(lambda: len(a.calls(PATH)) + len(b.calls(PATH)) == 64)
        for replica in (a, b):  # one that is paused to take weights in answers no probe either
            replica.faults.add("/is_paused", hang=True)
        with monkeypatch.context() as short:
            short.setattr(probes, "PROBE_TIMEOUT_S", 0.2)
            probed = [len(r.calls("/is_paused")) for r in (a, b)]
            often = 2 * fleet.SLOW_PROBES
            # The first one may have been sent with the usual time limit.
            await until(lambda: all(len(r.calls("/is_paused")) > n + often
                                    for r, n in zip((a, b), probed, strict=True)),
                        within_s=30)  # fmt: skip
        for later_s in (10, 20, 45):
            replicas.apply(replicas.fleet.tick(replicas.now_s() + later_s))
        done = sum(task.done() for task in before)
        assert (
            replicas.fleet.inflight()
            == 64 - done
            == sum(r["inflight"] for r in (await running.status())["replicas"])
        )
        assert not any(task.done() for task in during)
        for replica in (a, b):
            replica.faults.clear()
        assert (await running.client.post("/resume")).status_code == 200
        answers = await asyncio.gather(*before, *during)
        assert {x.status_code for x in answers} == {200}
        assert {len(x.json()["choices"][0]["token_ids"]) for x in answers} == {50}
        assert replicas.fleet.inflight() == 0
        assert len(a.calls(PATH)) + len(b.calls(PATH)) == 64
        assert all(r.state == "ready" for r in replicas.fleet)


async def test_a_pause_that_nobody_ends_is_seen_and_the_next_trainer_ends_it(
    start, pair, tmp_path, caplog, monkeypatch
):
    """O-18. The trainer died between pause and resume; another one comes."""
    monkeypatch.setattr(control, "STILL_PAUSED_S", 0.2)
    running = await start([r.url for r in pair], pause="eager")
    await running.client.post(KEEP)
    stands = "the trainer's pause has stood for"
    await running.until(lambda: caplog.text.count(stands) >= 2)
    assert "the replicas stand still" in caplog.text
    assert "rollmux_paused 1.0" in (await running.client.get("/metrics")).text
    await Trainer(running, tmp_path).sync()
    assert standing(*pair) == [False, False]
    assert "rollmux_paused 0.0" in (await running.client.get("/metrics")).text
    assert running.daemon.control._pause_watch is None


async def test_a_load_that_fails_between_pause_and_resume_stops_nobody(start, pair, tmp_path):
    """O-18. TRL raises before its resume; the next trainer's sync finds nothing in its way."""
    running = await start([r.url for r in pair], pause="eager")
    pair[1].faults.add(LOAD, status=400, body=b'{"error":{"message":"no"}}', times=1)
    await running.client.post(KEEP)
    assert (await load(running, "trl-policy-v1", save(tmp_path, 1))).status_code == 400
    assert standing(*pair) == [False, False]
    assert (await running.complete("tiny", [1])).status_code == 200
    await Trainer(running, tmp_path).sync()
    assert standing(*pair) == [False, False]
