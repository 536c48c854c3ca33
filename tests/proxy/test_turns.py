"""Generations that arrive together begin in turns, and let other work pass."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import httpx

from proxy import turns
from proxy.settings import Secrets
from proxy.turns import Turns
from tests.proxy.scripted import OK, ScriptedReplica, until

BODY = json.dumps({"model": "tiny", "prompt": "x"}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)


async def test_what_comes_behind_a_burst_passes_most_of_it_and_the_order_stays():
    began: list[int] = []
    passed: list[int] = []
    gate = Turns()
    for number in range(5 * turns.MOST):
        gate.begin(began.append, number)  # type: ignore[arg-type]
    asyncio.get_running_loop().call_soon(lambda: passed.append(len(began)))
    assert began == list(range(turns.MOST))
    for _ in range(10):
        await asyncio.sleep(0)
    assert passed[0] <= 2 * turns.MOST
    assert began == list(range(5 * turns.MOST))


async def test_a_later_turn_has_room_again():
    began: list[int] = []
    gate = Turns()
    for first in range(0, 4 * turns.MOST, turns.MOST):
        for number in range(first, first + turns.MOST):
            gate.begin(began.append, number)  # type: ignore[arg-type]
        assert len(began) == first + turns.MOST
        await asyncio.sleep(0)


async def test_each_of_a_burst_is_answered_once(start, monkeypatch):
    monkeypatch.setattr(turns, "MOST", 1)
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        async with httpx.AsyncClient(base_url=running.url, trust_env=False) as client:
            asked = [client.post("/v1/completions", content=BODY) for _ in range(50)]
            answers = await asyncio.gather(*asked)
        assert [answer.content for answer in answers] == [OK] * 50
        assert len(replica.generations) == 50


async def test_who_is_refused_and_gone_by_then_gets_no_answer(start, monkeypatch):
    """An answer written to a connection that is closed would be an error of the loop's."""
    waiting = []
    async with ScriptedReplica() as replica:
        running = await start([replica.url], secrets=Secrets(api_key="k"))
        monkeypatch.setattr(Turns, "begin", lambda self, *both: waiting.append(both))
        url = httpx.URL(running.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(REQUEST + BODY)
        await until(lambda: waiting)
        start_it, generation = waiting[0]
        writer.close()
        await until(lambda: generation.gone)
        await asyncio.sleep(0.02)
        start_it(generation)
        assert not generation.started


async def test_who_leaves_while_it_waits_for_its_turn_is_not_sent_and_is_counted(
    start, monkeypatch
):
    waiting = []
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        monkeypatch.setattr(Turns, "begin", lambda self, *both: waiting.append(both))
        url = httpx.URL(running.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(REQUEST + BODY)
        await until(lambda: waiting)
        writer.close()
        start_it, generation = waiting[0]
        await until(lambda: generation.gone)
        start_it(generation)

        sample = running.daemon.metrics.registry.get_sample_value
        left = partial(sample, "rollmux_client_disconnects_total", {"phase": "read"})
        await until(lambda: left() == 1)
        assert len(waiting) == 1
        assert not replica.generations
