"""Field reports K7 through the whole daemon; the policies themselves are tried in tests/routing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from contextlib import AsyncExitStack

import httpx
import pytest

from benchmarks.httpd import Arrival, Reply
from proxy import daemon
from tests.proxy.scripted import OK, ScriptedReplica, error, until

TEMPLATE = list(range(100_000, 100_023))


def tokens(number: int) -> dict:
    return {"prompt": [*TEMPLATE, *(number * 1000 + n for n in range(112))]}


def chat(number: int) -> dict:
    told = [{"role": "system", "content": "s" * 200}]
    return {"messages": [*told, {"role": "user", "content": f"{number:04} " * 60}]}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", tokens), ("/v1/chat/completions", chat)]
)
async def test_groups_that_come_at_once_fill_all_replicas_alike(start, path, body):
    """O-26. 20 prompts of 8 rollouts each on 4 replicas, all in flight together."""
    gate = asyncio.Event()

    async def script(arrival: Arrival) -> Reply:
        await gate.wait()
        return Reply(200, OK)

    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(ScriptedReplica(script)) for _ in range(4)]
        running = await start([r.url for r in replicas])
        fleet = running.daemon.replicas.fleet
        url = httpx.URL(running.url)
        clients = []
        for number in range(160):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            data = json.dumps({"model": "tiny"} | body(number // 8)).encode()
            writer.write(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                % (path.encode(), len(data), data)
            )
            clients.append((reader, writer))
            loads = [r.inflight for r in fleet]
            assert max(loads) - min(loads) <= 8 + 1
        await until(lambda: sum(len(r.generations) for r in replicas) == 160, within_s=30)
        loads = [r.inflight for r in fleet]
        assert sum(loads) == 160
        assert max(loads) - min(loads) <= 8 + 1
        assert loads == [len(r.generations) for r in replicas]
        gate.set()
        routes: Counter[bytes] = Counter()
        for reader, writer in clients:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 15)
            routes[head.partition(b"x-rollmux-route: ")[2].partition(b"\r")[0]] += 1
            writer.close()
        where = defaultdict(set)
        for replica in replicas:
            for arrival in replica.generations:
                where[arrival.body].add(replica.url)
        moved = sum(len(urls) - 1 for urls in where.values())
        assert len(where) == 20
        assert moved <= routes[b"spilled"] <= 10
        assert routes[b"unmatched"] == 20
        assert fleet.inflight() == 0


async def test_a_daemon_that_starts_does_not_always_begin_with_the_first_replica(
    start, monkeypatch
):
    """O-30. Where the turns begin is drawn at its start."""
    first = []
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(ScriptedReplica()) for _ in range(3)]
        for seed in range(3):
            monkeypatch.setattr(daemon.random_secrets, "randbits", lambda bits, n=seed: n)
            running = await start([r.url for r in replicas])
            answer = await running.complete("tiny", [1])
            first.append(answer.headers["x-rollmux-replica"])
    assert sorted(first) == ["r0", "r1", "r2"]


async def test_a_request_that_fails_everywhere_is_told_apart_in_the_metrics(start):
    """O-51. Twice each time, no more; the causes and the code are counted, nobody is taken out."""

    async def script(arrival: Arrival) -> Reply:
        if b"666" in arrival.body:
            return error(500, "Out of range float values", "InternalServerError")
        return Reply(200, OK)

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        moved = []
        running.daemon.replicas.on_transition.append(moved.append)
        for n in range(5):
            assert (await running.complete("tiny", [666])).status_code == 500
            assert (await running.complete("tiny", [n])).status_code == 200
        page = (await running.client.get("/metrics")).text
        assert 'rollmux_requests_total{code="500",route="/v1/completions"} 5.0' in page
        failovers = [
            line
            for line in page.splitlines()
            if line.startswith("rollmux_failovers_total{") and "server_error" in line
        ]
        assert sum(float(line.rpartition(" ")[2]) for line in failovers) == 10
        assert len(a.generations) + len(b.generations) == 15
        assert moved == []
