"""A replica whose answers to generations the test writes; probes get vLLM's usual ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

import orjson

from benchmarks.httpd import Arrival, Faults, Reply, Server

Script = Callable[[Arrival], Awaitable[Reply]]

CARD = {"id": "tiny", "object": "model", "parent": None, "root": "tiny", "max_model_len": 1024}
OK = b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"hi"}]}'


async def ok(arrival: Arrival) -> Reply:
    return Reply(200, OK)


class ScriptedReplica:
    """An async context manager. ``base`` is a path that every call has to begin with."""

    def __init__(self, script: Script = ok, *, base: str = "", keep_alive_s: float = 5.0) -> None:
        self.script = script
        self.base = base
        self.server = Server(self._answer, keep_alive_s=keep_alive_s)
        self.probes: list[Arrival] = []
        self.generations: list[Arrival] = []

    @property
    def url(self) -> str:
        return self.server.url + self.base

    @property
    def faults(self) -> Faults:
        return self.server.faults

    async def _answer(self, arrival: Arrival) -> Reply:
        path = arrival.path.removeprefix(self.base)
        if not arrival.path.startswith(self.base):
            return _json({"detail": "Not Found"}, 404)
        if arrival.method == "POST" and path.startswith(("/v1/c", "/v1/m", "/inference")):
            self.generations.append(arrival)
            return await self.script(arrival)
        self.probes.append(arrival)
        if path == "/v1/models":
            return _json({"object": "list", "data": [CARD]})
        if path == "/is_paused":
            return _json({"is_paused": False})
        return _json({"detail": "Not Found"}, 404)

    async def __aenter__(self) -> Self:
        await self.server.listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.server.close()


def _json(value: object, status: int = 200) -> Reply:
    return Reply(status, orjson.dumps(value))


def error(status: int, message: str, kind: str = "BadRequestError") -> Reply:
    """vLLM's error shape."""
    inside = {"message": message, "type": kind, "param": None, "code": status}
    return _json({"error": inside}, status)


def event(text: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "text": text}]}) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def raw(replica: ScriptedReplica, arrival: Arrival, data: bytes) -> Reply:
    """Send exactly these bytes and close; never comes back."""
    (connection,) = [c for c in replica.server.connections if c.number == arrival.connection]
    assert connection.transport is not None
    connection.transport.write(data)
    connection.transport.close()
    return await hang(arrival)


class Tap:
    """A stream that gives what the test puts in, when it does. ``cut`` breaks it off."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, piece: bytes) -> None:
        self._pieces.put_nowait(piece)

    def end(self) -> None:
        self._pieces.put_nowait(None)

    async def _read(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def script(self, arrival: Arrival) -> Reply:
        return Reply(200, b"", "text/event-stream; charset=utf-8", (), self._read())


async def hang(arrival: Arrival) -> Reply:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def until(holds: Callable[[], object], *, within_s: float = 5.0) -> None:
    """Wait for what has no event to wait for: the other side of a socket, a count in the daemon."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
