"""Field reports K10: connections to replicas, kept and given up."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from benchmarks.httpd import Arrival, Reply
from broadcast.answer import Cause
from proxy import upstream
from proxy.daemon import CLIENT_IDLE_S
from proxy.upstream import Upstream
from tests.proxy.scripted import OK, ScriptedReplica, hang, ok, until

PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"


@pytest.mark.parametrize("seed", [1, 2])
async def test_cancels_while_connecting_leave_no_connection_that_is_nobodys(seed):
    """O-39. Then whoever comes next is served at once."""
    rng = random.Random(seed)

    async def script(arrival: Arrival) -> Reply:
        return Reply(200, OK) if rng.random() < 0.5 else await hang(arrival)

    async with ScriptedReplica(script) as replica:
        there = Upstream(replica.url)
        for _ in range(20):
            work = [
                asyncio.ensure_future(there.ask(HEAD, b"{}", whole=rng.random() < 0.5))
                for _ in range(20)
            ]
            for _ in range(rng.randrange(12)):  # turns of the loop: in connect, sent, answered
                await asyncio.sleep(0)
            for ask in work:
                ask.cancel()
            for done in await asyncio.gather(*work, return_exceptions=True):
                if not isinstance(done, BaseException):
                    done.abort()
        await until(lambda: len(there.opened) == len([c for c in there._idle if c.alive]))
        await until(lambda: len(replica.server.connections) == len(there.opened))
        replica.script = ok
        reply = await asyncio.wait_for(there.ask(HEAD, b"{}", whole=True), 5)
        assert await reply.whole() == OK
        there.break_all(Cause.RESET, "the test is over")
        there.close()
        await until(lambda: not there.opened)


async def test_calls_to_replicas_do_not_wait_behind_384_rollouts(start):
    """O-40. No pool, so no wait for a place in it; and nothing gives up after some default time."""
    async with ScriptedReplica(hang) as a, ScriptedReplica(hang) as b:
        running = await start([a.url, b.url])
        url = httpx.URL(running.url)
        writers = []
        for number in range(384):
            _, writer = await asyncio.open_connection(url.host, url.port)
            body = b'{"model":"tiny","prompt":[%d]}' % number
            writer.write(HEAD.replace(b"length: 2", b"length: %d" % len(body)) + body)
            writers.append(writer)
        await until(lambda: len(a.generations) + len(b.generations) == 384, within_s=30)
        looks = len(a.probes), len(b.probes)
        for path in ("/health", "/v1/models", "/is_paused", "/proxy/status", "/metrics"):
            assert (await running.client.get(path)).status_code == 200
        await until(lambda: len(a.probes) > looks[0] + 5 and len(b.probes) > looks[1] + 5)
        assert [r.inflight for r in running.daemon.replicas.fleet] == [192, 192]
        assert len(running.daemon.replicas.fleet.routable()) == 2
        for writer in writers:
            writer.transport.abort()
        await until(lambda: running.daemon.replicas.fleet.inflight() == 0, within_s=30)


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_bursts_on_connections_that_are_just_being_closed_lose_nothing(start, how):
    """O-41. Eight at once lie idle, and each ends as it is used for the second time."""
    used: set[int] = set()

    async def script(arrival: Arrival) -> Reply:
        if arrival.connection not in used:
            used.add(arrival.connection)
            return Reply(200, OK)
        (connection,) = [c for c in replica.server.connections if c.number == arrival.connection]
        if how == "RST":
            connection.reset()
        else:
            connection.transport.close()
        return await hang(arrival)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        moved = []
        running.daemon.replicas.on_transition.append(moved.append)
        for burst in range(6):
            async with asyncio.TaskGroup() as group:
                work = [group.create_task(running.complete("tiny", [burst, n])) for n in range(8)]
            assert {w.result().status_code for w in work} == {200}
        assert len(replica.generations) > 60  # most were lost once
        assert moved == []


async def test_a_connection_is_closed_before_its_server_would(monkeypatch):
    """O-41. Without anybody asking: a server's FIN would else find a request on its way."""
    monkeypatch.setattr(upstream, "IDLE_S", 0.1)
    async with ScriptedReplica() as replica:
        there = Upstream(replica.url)
        await there.ask(HEAD, b"{}", whole=True)
        assert len(there.opened) == 1
        await until(lambda: not there.opened)
        await until(lambda: not replica.server.connections)
        there.close()


def test_clients_drop_idle_connections_before_the_daemon_does():
    """O-41, the other way round. aiohttp, TRL's client, keeps them 15 s; vLLM's own clients 5 s."""
    assert CLIENT_IDLE_S > 2 * 15
    assert upstream.IDLE_S < 5


async def test_a_replica_that_reads_slowly_gets_all_of_a_long_body(start):
    """It takes what it can, and the daemon waits; others are not held up by it."""
    body = b'{"model":"tiny","prompt":[' + b"123456," * 400_000 + b"1]}"
    got = bytearray()
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go_on.wait()
        while len(got) < len(body):
            got.extend(await reader.read(50_000))
            await asyncio.sleep(0)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(OK), OK))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0, limit=2**16)
    there = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    head = HEAD.replace(b"length: 2", b"length: %d" % len(body))
    asking = asyncio.ensure_future(there.ask(head, body, whole=True))
    async with asyncio.timeout(30):
        await until(lambda: there.opened)
        async with ScriptedReplica() as other:
            running = await start([other.url])
            assert (await running.complete("tiny", [1])).status_code == 200
        assert not asking.done()
        go_on.set()
        assert await (await asking).whole() == OK
    assert (len(got), got == body) == (len(body), True)
    there.close()
    server.close()


async def test_a_client_that_reads_slowly_holds_up_nobody_and_gets_everything(start):
    """A whole reply of 8 MB, taken in small pieces, while others come and go."""
    big = b'{"choices":[{"text":"' + b"x" * 8_000_000 + b'"}]}'

    async def script(arrival: Arrival) -> Reply:
        return Reply(200, big if b"[9]" in arrival.body.replace(b" ", b"") else OK)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        url = running.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=2**16)
        body = b'{"model":"tiny","prompt":[9]}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        async with asyncio.timeout(30):
            await reader.readuntil(b"\r\n\r\n")
            assert (await running.complete("tiny", [1])).content == OK
            # The replica is free: what is left to do is between the daemon and its client.
            await until(lambda: running.daemon.replicas.fleet.inflight() == 0)
            got = 0
            while got < len(big):
                piece = await reader.read(20_000)
                assert piece, got
                got += len(piece)
        assert got == len(big)
        writer.close()
