"""Streams: piece by piece as they come, and visibly broken when their source breaks."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.daemon import daemon
from benchmarks.httpd import Arrival, Reply
from proxy.upstream import HIGH_WATER_BYTES
from tests.proxy.scripted import DONE, ScriptedReplica, Tap, error, event, raw

BODY = {"model": "tiny", "prompt": "x", "stream": True}
DEAD = (
    b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for '
    b'the root cause.", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
)


async def test_each_piece_passes_before_the_next_one_is_sent(start):
    tap = Tap()
    async with ScriptedReplica(tap.script) as replica:
        running = await start([replica.url])
        tap.put(event("one"))
        async with running.client.stream("POST", "/v1/completions", json=BODY) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["x-rollmux-replica"] == "r0"
            pieces = answer.aiter_raw()
            for piece in (event("two"), event("three"), DONE):
                before = await anext(pieces)
                assert before.startswith(b"data: ")
                tap.put(piece)
            assert await anext(pieces) == DONE
            tap.end()
            assert [piece async for piece in pieces] == []
        assert running.daemon.replicas.fleet.inflight() == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_has_the_bytes_that_the_replica_gives_directly(start, pair, path):
    running = await start([r.url for r in pair])
    body = {"model": "tiny", "stream": True, "max_tokens": 6, "temperature": 0}
    body |= (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    )
    answer = await running.client.post(path, json=body)
    assert answer.status_code == 200
    assert answer.content.endswith(DONE)
    async with httpx.AsyncClient(trust_env=False) as direct:
        expected = await direct.post(pair[0].url + path, json=body)
    assert _without_ids(answer.content) == _without_ids(expected.content)


def _without_ids(stream: bytes) -> list[bytes]:
    return [line.partition(b'"choices"')[2] for line in stream.split(b"\n\n")]


@pytest.mark.parametrize("kept", [40, len(event("one"))], ids=["in an event", "between two events"])
async def test_a_stream_cut_by_its_source_does_not_end_cleanly(start, kept):
    tap = Tap()
    async with ScriptedReplica(tap.script) as replica:
        running = await start([replica.url])
        replica.faults.add("/v1/completions", cut=kept)
        tap.put(event("one"))
        tap.put(event("two"))
        got = b""
        async with running.client.stream("POST", "/v1/completions", json=BODY) as answer:
            pieces = answer.aiter_raw()
            while len(got) < kept:
                got += await anext(pieces)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)
        assert got == (event("one") + event("two"))[:kept]
        assert len(replica.generations) == 1  # what has begun is never begun again
        await running.until(lambda: running.daemon.replicas.fleet.inflight() == 0)


@pytest.mark.parametrize("ending", [b"", DONE], ids=["cut", "whole"])
async def test_a_stream_that_only_its_connection_ends_needs_its_last_event(start, ending):
    """Without a length or chunks a cut looks like an end; the final event tells them apart."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"

    async def script(arrival: Arrival) -> Reply:
        return await raw(replica, arrival, head + event("one") + b" " * 300_000 + ending)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        request = running.client.post("/v1/completions", json=BODY)
        if ending:
            assert (await request).content.endswith(DONE)
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await request


async def test_a_replica_reset_mid_stream_leaves_rotation(start):
    tap = Tap()
    async with ScriptedReplica(tap.script) as replica:
        running = await start([replica.url])
        moved = []
        running.daemon.replicas.on_transition.append(moved.append)
        tap.put(event("one"))
        async with running.client.stream("POST", "/v1/completions", json=BODY) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            replica.server.refuse()
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)
        assert [(t.old, t.new) for t in moved][:1] == [("ready", "suspect")]


async def test_a_stream_lost_before_its_first_piece_is_begun_elsewhere(start):
    async def resets(arrival: Arrival) -> Reply:
        tap = Tap()
        if len(a.generations) + len(b.generations) == 1:
            lost = next(r for r in (a, b) if r.generations)
            asyncio.get_running_loop().call_later(0.02, lost.server.refuse)  # after the head
        else:
            tap.put(event("one"))
            tap.put(DONE)
            tap.end()
        return await tap.script(arrival)

    async with ScriptedReplica(resets) as a, ScriptedReplica(resets) as b:
        running = await start([a.url, b.url])
        answer = await running.client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        assert answer.content == event("one") + DONE
        assert len(a.generations) + len(b.generations) == 2


async def test_an_engine_dead_before_the_first_token_of_a_stream_is_hidden(start):
    """vLLM has sent 200 by then; the error is the stream's first event."""

    async def script(arrival: Arrival) -> Reply:
        tap = Tap()
        first = len(a.generations) + len(b.generations) == 1
        for piece in (DEAD if first else event("one"), DONE):
            tap.put(piece)
        tap.end()
        return await tap.script(arrival)

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        moved = []
        running.daemon.replicas.on_transition.append(moved.append)
        answer = await running.client.post("/v1/completions", json=BODY)
        assert answer.content == event("one") + DONE
        assert moved[0].new == "down"
        assert moved[0].code == "engine_dead"


async def test_an_engine_that_dies_under_a_stream_is_seen_in_it(start):
    tap = Tap()
    async with ScriptedReplica(tap.script) as replica:
        running = await start([replica.url])
        moved = []
        running.daemon.replicas.on_transition.append(moved.append)
        got = b""
        tap.put(event("one"))
        async with running.client.stream("POST", "/v1/completions", json=BODY) as answer:
            async for piece in answer.aiter_raw():
                got += piece
                if piece == event("one"):
                    tap.put(DEAD)
                elif piece == DEAD:
                    tap.put(DONE)
                    tap.end()
        assert got == event("one") + DEAD + DONE
        assert moved[0].code == "engine_dead"


async def test_a_model_that_writes_of_dead_engines_kills_none(start):
    tap = Tap()
    async with ScriptedReplica(tap.script) as replica:
        running = await start([replica.url])
        tap.put(event('data: {"error": EngineCore encountered an issue'))
        tap.put(DONE)
        tap.end()
        answer = await running.client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        assert running.daemon.replicas.fleet.routable()


async def test_an_error_instead_of_a_stream_is_judged_like_any_other(start):
    async def script(arrival: Arrival) -> Reply:
        return error(400, "max_tokens is too large")

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        answer = await running.client.post("/v1/completions", json=BODY)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "max_tokens is too large"


async def test_a_client_that_reads_slowly_slows_its_replica_down(start):
    """The daemon reads a stream no further ahead than its bounds, whatever its length."""
    piece = event("x" * 60_000)
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += len(piece)
            yield piece

    async def script(arrival: Arrival) -> Reply:
        return Reply(200, b"", "text/event-stream", (), endless())

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        async with running.client.stream("POST", "/v1/completions", json=BODY):
            seen, quiet = 0, 0
            async with asyncio.timeout(10):
                while quiet < 5:  # until nothing moves any more
                    await asyncio.sleep(0.02)
                    quiet = quiet + 1 if sent == seen else 0
                    seen = sent
            # Ours, and what four kernel buffers of loopback hold.
            assert sent < HIGH_WATER_BYTES + 16_000_000


async def test_clients_that_leave_under_a_fast_stream_are_no_error_of_the_loops(tmp_path):
    """What is read for one that is gone is not written to its closed connection.

    A daemon of its own: only uvloop raises then.
    """
    piece = event("x" * 200)

    async def endless():
        while True:
            await asyncio.sleep(0)  # no more than its client takes
            yield piece

    async def script(arrival: Arrival) -> Reply:
        return Reply(200, b"", "text/event-stream", (), endless())

    log = tmp_path / "log"
    body = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with ScriptedReplica(script) as replica, daemon([replica.url], log) as served:
        url = httpx.URL(served)
        for _ in range(60):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head + body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            for _ in range(20):
                await reader.read(1000)
            writer.transport.abort()
        async with httpx.AsyncClient(base_url=served, trust_env=False) as client:
            for _ in range(500):
                status = (await client.get("/proxy/status")).json()
                if not status["replicas"][0]["inflight"]:
                    break
                await asyncio.sleep(0.02)
            assert not status["replicas"][0]["inflight"]
    assert "Traceback" not in log.read_text()
    assert "Fatal" not in log.read_text()


async def test_a_reply_whose_length_is_meant_for_one_connection_still_has_an_end(start):
    """``connection: content-length`` takes the header away: the client needs another one."""
    whole = b'{"choices": []}'

    async def script(arrival: Arrival) -> Reply:
        head = b"HTTP/1.1 200 OK\r\nconnection: content-length\r\n"
        return await raw(
            replica, arrival, head + b"content-length: %d\r\n\r\n%b" % (len(whole), whole)
        )

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        answer = await running.client.post("/v1/completions", json=BODY | {"stream": False})
        assert answer.content == whole
