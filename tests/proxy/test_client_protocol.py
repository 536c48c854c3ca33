"""The trainer's side on the wire: how a generation comes in, and how its answer ends."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.httpd import Arrival, Reply
from proxy.settings import Secrets
from tests.proxy.conftest import DEADLINE_S
from tests.proxy.scripted import OK, ScriptedReplica, Tap, event, until

BODY = json.dumps({"model": "tiny", "prompt": "x"}).encode()
STREAM = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()


def request(body: bytes, *lines: bytes, target: bytes = b"/v1/completions") -> bytes:
    head = (b"POST %b HTTP/1.1" % target, b"host: x", b"content-length: %d" % len(body))
    return b"\r\n".join((*head, *lines, b"", body))


async def opened(running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(running.url)
    return await asyncio.open_connection(url.host, url.port)


async def answer_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of an answer with a length."""
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        return head, await reader.readexactly(length)


@pytest.mark.parametrize(
    "target", [b"/v1/completions?a=b%20c", b"/v1/comple%74ions", b"http://x/v1/completions"]
)
async def test_a_target_written_another_way_is_a_generation_and_goes_on_as_it_is(start, target):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        reader, writer = await opened(running)
        writer.write(request(BODY, target=target))
        head, body = await answer_of(reader)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"x-rollmux-replica: r0\r\n" in head
        assert body == OK
        assert replica.generations[0].target.endswith(target.decode().removeprefix("http://x"))
        writer.close()


async def test_generations_and_other_calls_take_turns_on_one_connection(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        reader, writer = await opened(running)
        for _ in range(3):
            writer.write(request(BODY))
            assert (await answer_of(reader))[1] == OK
            writer.write(b"GET /proxy/live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await answer_of(reader))[1] == b'{"live":true}'
        writer.close()


async def test_an_idle_client_is_let_go_and_a_busy_one_is_not(start):
    """The timer's own time, set back by hand."""
    tap = Tap()

    async def script(arrival: Arrival) -> Reply:
        return await tap.script(arrival) if b"stream" in arrival.body else Reply(200, OK)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        reader, writer = await opened(running)
        writer.write(request(BODY))
        assert (await answer_of(reader))[1] == OK
        protocol = next(
            c for c in running.daemon._server.server_state.connections if c._generation is not None
        )
        assert protocol.timeout_keep_alive_task is not None
        protocol.timeout_keep_alive_handler()  # too early: it will look again
        assert protocol.timeout_keep_alive_task is not None
        writer.write(request(STREAM))
        await until(lambda: len(replica.generations) == 2)
        protocol._idle_since_s -= 2 * protocol.timeout_keep_alive
        protocol.timeout_keep_alive_handler()  # busy, however late it is
        assert protocol.timeout_keep_alive_task is None
        async with asyncio.timeout(DEADLINE_S):
            tap.put(event("late"))
            await reader.readuntil(b"late")
            tap.end()
            await reader.readuntil(b"0\r\n\r\n")
            await until(lambda: protocol.timeout_keep_alive_task is not None)
            protocol._idle_since_s -= 2 * protocol.timeout_keep_alive
            protocol.timeout_keep_alive_handler()
            assert await reader.read() == b""
        writer.close()


async def test_a_client_that_asks_first_is_told_to_go_on(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        reader, writer = await opened(running)
        head = request(BODY, b"expect: 100-continue")[: -len(BODY)]
        writer.write(head)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await answer_of(reader))[1] == OK
        writer.close()


@pytest.mark.parametrize("key", ["", "a-key"])
async def test_a_body_that_is_no_http_is_answered_once_and_is_no_generation(start, key):
    """Its head is whole and its body broken, in one piece; with a key it is refused twice over."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url], secrets=Secrets(api_key=key or None))
        reader, writer = await opened(running)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"ZZ\r\n")
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 4") == 1
        assert not replica.generations
        headers = {"authorization": f"Bearer {key}"} if key else {}
        page = (await running.client.get("/metrics", headers=headers)).text
        assert "rollmux_requests_total{" not in page
        writer.close()


async def test_what_comes_behind_a_body_is_no_header(start):
    """RFC 9110, 6.5: trailers. One with a header's name must not take its place."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        reader, writer = await opened(running)
        lines = (b"host: x", b"transfer-encoding: chunked", b"x-request-id: real")
        head = b"\r\n".join((b"POST /v1/completions HTTP/1.1", *lines, b"", b""))
        chunk = b"%x\r\n%b\r\n" % (len(BODY), BODY)
        writer.write(head + chunk + b"0\r\nx-request-id: late\r\nx-other: late\r\n\r\n")
        assert (await answer_of(reader))[1] == OK
        (sent,) = replica.generations
        assert [v for k, v in sent.headers if k == "x-request-id"] == ["real"]
        assert "x-other" not in dict(sent.headers)
        writer.close()


async def test_a_bug_is_500_in_vllms_shape_and_costs_neither_count_nor_connection(
    start, caplog, monkeypatch
):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        monkeypatch.setattr(running.daemon.replicas, "choose", lambda *_: 1 / 0)
        reader, writer = await opened(running)
        for _ in range(2):
            writer.write(request(BODY))
            head, body = await answer_of(reader)
            assert head.startswith(b"HTTP/1.1 500 ")
            assert b"x-rollmux-error: bug" in head
            assert json.loads(body)["error"]["code"] == 500
        assert "ZeroDivisionError" in caplog.text
        assert not running.daemon._server.server_state.tasks
        assert running.daemon.replicas.fleet.inflight() == 0
        writer.close()


async def test_a_client_gone_before_its_generation_begins_is_counted(start):
    """In one turn of the loop: its request comes, and its connection is lost."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        _, writer = await opened(running)
        server = running.daemon._server.server_state
        await until(lambda: any(c.transport for c in server.connections))
        (protocol,) = [c for c in server.connections if c._generation is None and c.cycle is None]
        protocol.data_received(request(BODY))
        assert len(server.tasks) == 1
        protocol.transport.abort()
        protocol.connection_lost(ConnectionResetError())
        await until(lambda: not server.tasks)
        sample = running.daemon.metrics.registry.get_sample_value
        assert sample("rollmux_client_disconnects_total", {"phase": "read"}) == 1
        assert not replica.generations
        writer.close()
