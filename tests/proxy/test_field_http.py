"""Field reports K11 and K13: heads, bodies and codings, on the wire itself."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from dataclasses import replace

import httpx
import pytest

from benchmarks.httpd import Arrival, Reply
from tests.proxy.scripted import OK, ScriptedReplica, error, raw

PATH = "/v1/completions"
BODY = json.dumps({"model": "tiny", "prompt": [1]}).encode()


async def sends(running, *pieces: bytes) -> httpx.Response | None:
    """What is answered to exactly these bytes before the connection is closed, if anything."""
    url = httpx.URL(running.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    got = b""
    try:
        async with asyncio.timeout(10):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while data := await reader.read(65536):
                got += data
    except ConnectionError:
        pass  # closed with more of the request on its way
    finally:
        writer.transport.abort()
    head, _, body = got.partition(b"\r\n\r\n")
    if not head:
        return None
    status, *lines = head.split(b"\r\n")
    headers = [tuple(line.split(b": ", 1)) for line in lines]
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)


NOT_HTTP = {
    "request line over 64 kB": b"POST /v1/completions?q=%b HTTP/1.1\r\n\r\n" % (b"z" * 70_000),
    "TLS on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "header without a name": b"POST /v1/completions HTTP/1.1\r\n: x\r\n\r\n",
    "two framings": b"POST /v1/completions HTTP/1.1\r\ncontent-length: 4\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "no number as a length": b"POST /v1/completions HTTP/1.1\r\ncontent-length: 4x\r\n\r\n{}",
}


@pytest.mark.parametrize("name", NOT_HTTP)
async def test_what_is_no_request_is_400_in_vllms_shape_and_named_in_the_log(start, caplog, name):
    """O-47. The parser's bare answer and an empty log left everybody guessing."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        answer = await sends(running, NOT_HTTP[name])
        assert answer is not None
        assert (answer.status_code, answer.headers["x-rollmux-error"]) == (400, "bad_request")
        assert "no HTTP/1.1 request (" in answer.json()["error"]["message"]
        (line,) = [m for m in caplog.messages if "no HTTP/1.1 request" in m]
        assert "127.0.0.1:" in line
        assert not replica.generations
        assert (await running.complete("tiny", [1])).content == OK


async def test_a_head_without_an_end_is_not_read_for_ever(start, caplog):
    """O-47. Nobody knows yet whether its sender has the key."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        for more in (b"y" * 4096, b"y\r\nx: " + b"y" * 4091):  # one header, and many
            answer = await sends(running, b"POST / HTTP/1.1\r\nx: ", *[more] * 5000)  # 20 MB
            if answer is not None:  # else the reset was faster than the answer
                assert answer.status_code == 431
            assert "431 headers_too_large" in caplog.text
            caplog.clear()
            assert (await running.complete("tiny", [1])).content == OK


CODINGS = {"gzip": gzip.compress, "deflate": zlib.compress}
ABORTED = b'{"choices":[{"text":"ha","finish_reason":"abort"}]}'


def coded(reply: Reply, coding: str) -> Reply:
    headers = (("content-encoding", coding), *reply.headers)
    return replace(reply, body=CODINGS[coding](reply.body), headers=headers)


async def test_a_replica_that_compresses_for_who_accepts_it_is_not_led_to(start):
    """O-43. The client's own accept-encoding would be honoured, and the reply be unreadable."""

    async def script(arrival: Arrival) -> Reply:
        accepted = arrival.header("accept-encoding") or ""
        return coded(Reply(200, OK), "gzip") if "gzip" in accepted else Reply(200, OK)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        answer = await running.client.post(
            PATH, content=BODY, headers={"accept-encoding": "gzip, deflate, br"}
        )
        assert answer.content == OK
        assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("coding", CODINGS)
async def test_what_is_compressed_all_the_same_passes_and_is_judged(start, coding):
    """O-43. The same JSON for the client; a refusal is one, and a stump is no success."""
    replies = [Reply(200, OK), error(400, "the prompt is too long"), Reply(200, ABORTED)]

    async def script(arrival: Arrival) -> Reply:
        return coded(reply, coding)

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        moved = []
        running.daemon.replicas.on_transition.append(moved.append)
        codes = []
        for reply in replies:
            answer = await running.client.post(PATH, content=BODY)
            codes.append(answer.status_code)
            if answer.status_code != 503:
                assert answer.json() == json.loads(reply.body)
                assert answer.headers["content-encoding"] == coding
        assert codes == [200, 400, 503]
        assert moved == []


async def test_a_compressed_body_that_only_its_connection_ends_has_to_be_whole(start):
    """O-43 with O-44. Without a length, only what it holds tells a cut from an end."""
    whole = gzip.compress(OK)

    async def script(arrival: Arrival) -> Reply:
        first = len(a.generations) + len(b.generations) == 1
        mine = a if arrival in a.generations else b
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n"
        return await raw(mine, arrival, head + (whole[:40] if first else whole))

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        answer = await running.complete("tiny", [1])
        assert (answer.status_code, answer.content) == (200, OK)
        assert len(a.generations) == len(b.generations) == 1
