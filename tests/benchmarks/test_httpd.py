"""The misbehaving server: each fault as a client sees it, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from benchmarks import httpd
from benchmarks.httpd import Arrival, Reply, Server


async def hello(arrival: Arrival) -> Reply:
    return Reply(200, b"hello " + arrival.body, "text/plain")


async def chunks() -> AsyncIterator[bytes]:
    for piece in (b"one", b"two"):
        yield piece


async def fetch(server: Server, path: str = "/", body: bytes = b"", *, seconds: float = 5) -> bytes:
    """All bytes of one answer on a fresh connection, which the server is asked to close."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        async with asyncio.timeout(seconds):
            return await reader.read()
    finally:
        writer.close()


async def plain(server: Server) -> None:
    answer = await fetch(server, body=b"you")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nhello you")
    assert server.log[0].status == 200
    assert server.log[0].body == b"you"


async def reset(server: Server) -> None:
    server.faults.add("/", reset=True)
    with pytest.raises(ConnectionResetError):
        await fetch(server)


async def hang(server: Server) -> None:
    server.faults.add("/", hang=True)
    with pytest.raises(TimeoutError):
        await fetch(server, seconds=0.1)
    assert server.log[0].status is None


async def status(server: Server) -> None:
    server.faults.add("/", status=502, body=b"<html>", content_type="text/html")
    answer = await fetch(server)
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
    assert b"content-type: text/html" in answer
    assert answer.endswith(b"<html>")


async def cut(server: Server) -> None:
    server.faults.add("/", cut=3)
    answer = await fetch(server, body=b"you")
    assert b"content-length: 9\r\n" in answer
    assert answer.endswith(b"\r\n\r\nhel")


async def drop(server: Server) -> None:
    done = []

    async def count(arrival: Arrival) -> Reply:
        done.append(arrival)
        return Reply()

    server.handler = count
    server.faults.add("/", drop=True)
    assert await fetch(server) == b""
    assert len(done) == 1


async def cut_stream(server: Server) -> None:
    async def stream(arrival: Arrival) -> Reply:
        return Reply(200, stream=chunks())

    server.handler = stream
    server.faults.add("/", cut=4, nth=2)
    assert (await fetch(server)).endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert (await fetch(server)).endswith(b"3\r\none\r\n1\r\nt\r\n")


async def refuse(server: Server) -> None:
    server.refuse()
    with pytest.raises(ConnectionRefusedError):
        await fetch(server)
    await server.listen()
    assert (await fetch(server)).startswith(b"HTTP/1.1 200")


async def idle_close(server: Server) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.read()).endswith(b"hello ")  # ends when the server closes
    writer.close()


async def pipelined(server: Server) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    one = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n%d"
    writer.write(one % (1, 1) + one % (2, 2))
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert answer.index(b"hello 1") < answer.index(b"hello 2")
    assert {a.connection for a in server.log} == {1}
    writer.close()


async def nonsense(server: Server) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"nonsense\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


async def large(server: Server) -> None:
    body = b"x" * 8_000_000
    assert (await fetch(server, body=body)).endswith(body)


CASES: list[Callable[[Server], Any]] = [
    plain,
    reset,
    hang,
    status,
    cut,
    drop,
    cut_stream,
    refuse,
    idle_close,
    pipelined,
    nonsense,
    large,
]


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_each_behaviour(
    case: Callable[[Server], Any], loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run() -> None:
        server = Server(hello, keep_alive_s=0.05)
        await server.listen()
        try:
            await case(server)
        finally:
            await server.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


@contextlib.asynccontextmanager
async def connected(turns: int) -> AsyncIterator[tuple[Server, socket.socket]]:
    """A server, and a connection that was made so many turns of the loop ago."""
    server = Server(hello)
    await server.listen()
    with socket.create_connection((server.host, server.port)) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        yield server, client
    await server.close()


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_closed_server_holds_no_connection_whenever_it_came(
    turns: int, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run() -> None:
        async with connected(turns) as (server, client):
            await server.close()
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_server_that_listens_again_resets_what_came_to_it_before(
    turns: int, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run() -> None:
        async with connected(turns) as (server, client):
            server.refuse()
            await server.listen()
            await asyncio.sleep(0.05)
            with pytest.raises(ConnectionResetError):
                client.recv(1)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_server_without_descriptors_waits_for_some(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        server = Server(hello)
        await server.listen()
        monkeypatch.setattr(httpd, "RETRY_S", 0.3)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.create_connection((server.host, server.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            client.setblocking(False)
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            with contextlib.ExitStack() as taken:
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
                taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
                with contextlib.suppress(OSError):
                    while True:
                        taken.enter_context(socket.socket())
                await asyncio.sleep(0.1)
                with pytest.raises(BlockingIOError):
                    client.recv(1)
            await asyncio.sleep(0.5)
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
        await server.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
