"""One control call: what comes of each thing that a network can do, and what is sent."""

from __future__ import annotations

import asyncio
import socket
import sys

import httpx
import pytest
import respx

from broadcast.answer import Answer, Cause, NoAnswer
from proxy import calls
from proxy.calls import Calls
from proxy.tokens import Bearer
from routing.ids import ReplicaId

A = ReplicaId("a")
URL = "http://127.0.0.1:8000"


@pytest.fixture
async def call():
    made = Calls({A: URL}.get, Bearer(token="s3cret", hosts=["127.0.0.1"]))
    yield made
    await made.close()


@respx.mock
async def test_the_answer_comes_as_it_was_sent(call):
    route = respx.post(f"{URL}/pause?mode=keep")
    route.respond(200, content=b'{"a": 1}', content_type="application/json")
    answer = await call(A, "POST", "/pause?mode=keep", b"{}", timeout_s=5)
    assert answer == Answer(200, b'{"a": 1}', "application/json")
    (sent,) = (exchange.request for exchange in route.calls)
    assert sent.headers["authorization"] == "Bearer s3cret"
    assert sent.headers["content-type"] == "application/json"
    assert sent.content == b"{}"


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (httpx.ReadTimeout("slow"), Cause.TIMEOUT),
        (httpx.WriteTimeout("slow"), Cause.TIMEOUT),
        (httpx.ConnectTimeout("far"), Cause.UNREACHABLE),
        (httpx.ConnectError("no such host"), Cause.UNREACHABLE),
        (httpx.ReadError("gone"), Cause.RESET),
        (httpx.RemoteProtocolError("what?"), Cause.RESET),
    ],
    ids=lambda value: getattr(value, "value", None) or type(value).__name__,  # of a cause
)
@respx.mock
async def test_what_a_network_does_is_no_exception(call, raised, cause):
    respx.get(f"{URL}/health").mock(side_effect=raised)
    answer = await call(A, "GET", "/health", timeout_s=5)
    assert isinstance(answer, NoAnswer)
    assert answer.cause is cause
    assert answer.never_received is (cause in (Cause.REFUSED, Cause.UNREACHABLE))


async def test_where_nobody_listens_nothing_was_received():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    made = Calls({A: url}.get, Bearer())
    assert (await made(A, "GET", "/", timeout_s=5)).cause is Cause.REFUSED
    await made.close()


@respx.mock
async def test_a_refusal_that_echoes_the_token_is_shown_without_it(call):
    respx.get(f"{URL}/health").respond(401, text="no such key: s3cret")
    answer = await call(A, "GET", "/health", timeout_s=5)
    assert answer.body == b"no such key: ***"


@respx.mock
async def test_an_endless_answer_is_not_read_on(call, monkeypatch):
    monkeypatch.setattr(calls, "MAX_ANSWER_BYTES", 10)
    respx.get(f"{URL}/health").respond(200, content=b"x" * 11)
    answer = await call(A, "GET", "/health", timeout_s=5)
    assert answer == NoAnswer(Cause.RESET, "answer over 10 bytes")


async def test_a_replica_that_left_is_not_asked(call):
    answer = await call(ReplicaId("b"), "GET", "/health", timeout_s=5)
    assert answer == NoAnswer(Cause.UNREACHABLE, "left the fleet")


async def test_no_call_looks_for_modules_on_disk(monkeypatch):
    """That would block the loop, for each probe of each replica."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    made = Calls({A: url}.get, Bearer())
    assert isinstance(await made(A, "GET", "/", timeout_s=5), Answer)  # imports what it needs

    looked_for = []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            looked_for.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert isinstance(await made(A, "GET", "/", timeout_s=5), Answer)
    assert looked_for == []
    await made.close()
    server.close()
