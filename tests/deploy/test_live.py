"""The container's health check, against a real daemon and against none."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

from deploy.live import is_live
from proxy.daemon import Daemon
from proxy.settings import Secrets, Settings


async def test_a_daemon_lives_without_any_replica_ready():
    listener = socket.create_server(("127.0.0.1", 0))
    port = str(listener.getsockname()[1])
    daemon = Daemon(Settings(replicas=("http://127.0.0.1:1",), drain_s=0.1), Secrets())
    daemon.start(listener)
    try:
        for host in ("", "127.0.0.1", "0.0.0.0"):
            environ = {"ROLLMUX_HOST": host, "ROLLMUX_PORT": port}
            assert await asyncio.to_thread(is_live, environ)
    finally:
        await daemon.stop()
        listener.close()


def test_nobody_listening_is_not_live():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    assert not is_live({"ROLLMUX_PORT": str(port)})


async def test_an_answer_that_is_not_the_daemons_is_not_live():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert not await asyncio.to_thread(is_live, {"ROLLMUX_PORT": str(port)})
