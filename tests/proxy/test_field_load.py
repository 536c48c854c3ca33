"""Field reports K8: what is counted as load, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest

from benchmarks.httpd import Arrival, Reply
from proxy.settings import Secrets
from tests.proxy.scripted import DONE, OK, ScriptedReplica, Tap, event, hang, until

PATH = "/v1/completions"
KEY = "the trainer's key"
PROMPTLY_S = 5.0
"""The contract says 1 s, of a machine that is not busy."""


def request(**fields: object) -> bytes:
    """One generation as it is on the wire."""
    body = json.dumps({"model": "tiny", "prompt": [1]} | fields).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
        b"content-length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )


async def connect(running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(running.url)
    return await asyncio.open_connection(url.host, url.port)


def nothing_is_left(running) -> bool:
    replicas = running.daemon.replicas
    return not (
        any(r.inflight for r in replicas.fleet)
        or replicas.fleet.inflight_names()
        or any(replicas._bodies.values())
        or replicas._reserved
    )


@pytest.mark.parametrize("at", ["in its own piece", "in one piece with the first", "with a body"])
async def test_who_leaves_after_a_pipelined_request_is_noticed_too(start, tmp_path, at):
    """O-34. With everything switched on, and the next request sent before the answer."""
    async with ScriptedReplica(hang) as replica:
        running = await start(
            [replica.url],
            secrets=Secrets(api_key=KEY),
            record=str(tmp_path / "trace.jsonl"),
        )
        _, writer = await connect(running)
        first, second = request(), request(prompt=[2] * (100_000 if "body" in at else 1))
        if "one piece" in at:
            writer.write(first + second)
        else:
            writer.write(first)
            await until(lambda: replica.generations)
            writer.write(second)
        await until(lambda: replica.generations)
        await asyncio.sleep(0.05)  # so that the second one is here; nothing shows it
        writer.transport.abort()
        arrival = replica.generations[0]
        await until(lambda: arrival.disconnected_s is not None, within_s=PROMPTLY_S)
        await until(lambda: nothing_is_left(running), within_s=PROMPTLY_S)
        assert len(replica.generations) == 1


async def test_what_is_sent_ahead_is_sent_again_by_its_client(start):
    """O-34. The first one's answer says so, and nothing of the second has run."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        reader, writer = await connect(running)
        writer.write(request() + request(prompt=[2]))
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head
        assert body == OK
        assert len(replica.generations) == 1


async def test_hundreds_that_leave_at_any_point_leave_no_count_behind(start):
    """O-32. Then 150 more are spread as if nobody had ever been there."""
    rng = random.Random(32)
    points = ("in its head", "in its body", "once sent", "while it waits", "in the reply", "never")

    async def script(arrival: Arrival) -> Reply:
        await asyncio.sleep(rng.random() * 0.01)
        if b'"stream": true' not in arrival.body:
            return Reply(200, OK)
        tap = Tap()
        tap.put(event("x" * rng.choice((10, 100_000))))
        if b"in the reply" not in arrival.body:  # else it is left before its end
            tap.put(DONE)
            tap.end()
        return await tap.script(arrival)

    async def leaves(number: int) -> None:
        reader, writer = await connect(running)
        point = rng.choice(points)
        whole = request(
            prompt=[[number] * 20] * rng.choice((1, 3)),
            n=rng.choice((1, 8)),
            stream=point == "in the reply" or rng.random() < 0.5,
            user=point,
        )
        cut = {"in its head": 40, "in its body": -10}.get(point)
        writer.write(whole[:cut])
        if point in ("in its head", "in its body", "while it waits"):
            await asyncio.sleep(rng.random() * 0.01)
        elif point == "in the reply":
            await reader.read(100)
        elif point == "never":
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(100)
        writer.transport.abort()

    async with (
        ScriptedReplica(script) as a,
        ScriptedReplica(script) as b,
        ScriptedReplica(script) as c,
    ):
        running = await start([r.url for r in (a, b, c)])
        for first in range(0, 240, 60):
            async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                for number in range(first, first + 60):
                    group.create_task(leaves(number))
        await until(lambda: nothing_is_left(running), within_s=PROMPTLY_S)
        sample = running.daemon.metrics.registry.get_sample_value
        left = {
            phase: sample("rollmux_client_disconnects_total", {"phase": phase}) or 0
            for phase in ("read", "upstream", "reply")
        }
        assert all(left.values()), left  # it did leave at each of these
        await running.until_ready(3)
        page = (await running.client.get("/metrics")).text
        for replica in ("r0", "r1", "r2"):
            assert f'rollmux_replica_inflight{{replica="{replica}"}} 0.0' in page
        running.daemon.replicas.router.forget_all()  # else it makes up for what it sent till now
        spread: Counter[str] = Counter()
        for first in range(1000, 1150, 30):
            async with asyncio.TaskGroup() as group:
                work = [
                    group.create_task(running.complete("tiny", [n] * 20))
                    for n in range(first, first + 30)
                ]
            spread.update(w.result().headers["x-rollmux-replica"] for w in work)
        assert all(40 <= spread[r] <= 60 for r in ("r0", "r1", "r2")), spread


async def test_all_that_leave_at_once_free_their_engines(start, tmp_path):
    """O-33, O-34. A trainer that stops, with everything switched on."""
    async with ScriptedReplica(hang) as a, ScriptedReplica(hang) as b:
        running = await start(
            [a.url, b.url],
            secrets=Secrets(api_key=KEY),
            record=str(tmp_path / "trace.jsonl"),
            ready=0,
        )
        await running.until_ready(2)
        writers = []
        for number in range(128):
            _, writer = await connect(running)
            writer.write(request(prompt=[number] * 20, stream=bool(number % 2)))
            writers.append(writer)
        await until(lambda: len(a.generations) + len(b.generations) == 128)
        assert sorted(r.inflight for r in running.daemon.replicas.fleet) == [64, 64]
        for writer in writers:
            writer.transport.abort()
        arrivals = [*a.generations, *b.generations]
        await until(
            lambda: all(arrival.disconnected_s is not None for arrival in arrivals),
            within_s=PROMPTLY_S,
        )
        await until(lambda: nothing_is_left(running), within_s=PROMPTLY_S)
        assert not any(c for r in ("r0", "r1") for c in running.daemon.replicas.upstream(r)._idle)
