"""The hint in a running daemon: what it is fed with, where it shows, when it is logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from benchmarks.httpd import Arrival, Reply
from benchmarks.replica import SimulatedReplica
from proxy.bottleneck import CONFIRM_S, MIN_S, Bottleneck, Hint, Remark
from proxy.engine_load import EngineLoad
from proxy.hints import READ_AT_ONCE
from tests.proxy.conftest import DEADLINE_S, Running
from tests.proxy.scripted import ScriptedReplica, hang, until


async def test_queues_of_the_engines_are_in_the_status(start):
    async with SimulatedReplica() as told, ScriptedReplica() as silent:
        running = await start([told.url, silent.url])
        await running.daemon.hints.read_once()
        first, second = (await running.status())["replicas"]
        assert (first["running"], first["waiting"]) == (0.0, 0.0)
        assert (second["running"], second["waiting"]) == (None, None)
        assert running.daemon.status.engine_loads == {"r0": EngineLoad(0.0, 0.0)}
        running.daemon.replicas.remove("r0")
        await running.daemon.hints.read_once()
        assert running.daemon.status.engine_loads == {}


async def test_a_large_fleet_is_read_in_turns(start):
    """Every replica in its turn, no more than a bound at once."""
    async with ScriptedReplica() as replica:
        urls = [f"{replica.url}/{i}" for i in range(READ_AT_ONCE + 8)]
        running = await start([replica.url])
        hints, fleet = running.daemon.hints, running.daemon.replicas.fleet
        asked = []
        await hints.close(DEADLINE_S)  # the daemon's own rounds

        async def calls(id, *args, **kwargs):
            asked.append(id)

        hints._calls = calls
        ready = fleet["r0"].state
        for url in urls[1:]:
            fleet.add(url, 0.0).state = ready
        for _ in range(3):
            await hints.read_once()
        assert asked[: READ_AT_ONCE + 8] == [r.id for r in fleet]
        assert asked[READ_AT_ONCE + 8 :] == [r.id for r in fleet][:READ_AT_ONCE]


async def test_held_rollouts_are_counted_while_they_wait(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], hold_s=30.0)
        running.daemon.replicas.drain("r0")
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(running.complete("tiny", [1]))
            await running.until(lambda: running.daemon.status.held() == 1)
            assert (await running.status())["held"] == 1
            assert "rollmux_requests_held 1.0" in (await running.client.get("/metrics")).text
            sent.cancel()
        await running.until(lambda: running.daemon.status.held() == 0)


def minutes(running: Running, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a daemon that stays as it is, one a second, with no time passing."""
    hints, replicas = running.daemon.hints, running.daemon.replicas
    look = hints.look
    monkeypatch.setattr(hints, "look", lambda: None)  # the daemon's own, by the real clock
    monkeypatch.setattr(hints, "_bottleneck", Bottleneck())
    for at_s in range(int(seconds)):
        with monkeypatch.context() as patch:
            patch.setattr(replicas, "now_s", lambda at_s=at_s: float(at_s))
            look()


async def test_a_new_hint_is_logged_once_and_shown(start, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "rollmux")

    async def never(arrival: Arrival) -> Reply:
        return await hang(arrival)

    async with ScriptedReplica(never) as replica:
        running = await start([replica.url])
        assert (await running.status())["hint"]["code"] == "unknown"
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(running.complete("tiny", [i])) for i in range(8)]
            await until(lambda: len(replica.generations) == 8, within_s=DEADLINE_S)
            minutes(running, MIN_S + CONFIRM_S + 60, monkeypatch)
            status = await running.status()
            page = (await running.client.get("/metrics")).text
            for task in sent:
                task.cancel()
    assert status["hint"]["code"] == "generation"
    assert "8 rollouts in flight" in status["hint"]["text"]
    lines = [line for line in caplog.messages if line.startswith("what holds the run back")]
    assert lines == [f"what holds the run back: {status['hint']['text']}"]
    assert 'rollmux_bottleneck{cause="generation"} 1.0' in page
    assert 'rollmux_bottleneck{cause="unknown"} 0.0' in page


async def test_remarks_are_in_the_status_and_in_its_text(start, monkeypatch):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        monkeypatch.setattr(running.daemon.hints, "look", lambda: None)
        running.daemon.status.hint = Hint("trainer", "Slow.", (Remark("uneven", "Uneven."),))
        assert (await running.status())["hint"] == {
            "code": "trainer",
            "text": "Slow.",
            "remarks": [{"code": "uneven", "text": "Uneven."}],
        }
        text = await running.client.get("/proxy/status.txt")
        assert text.headers["content-type"] == "text/plain; charset=utf-8"
        assert text.text.splitlines()[3:5] == ["Slow.", "Uneven."]
