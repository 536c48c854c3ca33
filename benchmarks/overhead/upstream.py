"""Fixed-answer upstreams: as much of vLLM as a proxy needs to become ready, and one reply to all.

One process serves all of them in one event loop, on the socket itself: what it costs is taken from
the core that the load generator needs too. Run by the benchmark, not by hand.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self, cast

import uvloop

from benchmarks.overhead import wire
from benchmarks.overhead.wire import Kind


@dataclass(frozen=True, slots=True)
class Answers:
    """What each generation gets."""

    reply_bytes: int = 2_000
    delay_s: float = 0.0
    """Mean; see ``wire.delay_s``."""
    chunks: int = 0
    """Events of a stream; 0: one whole reply."""
    interval_s: float = 0.0
    """Between two events of a stream."""
    certificate: str = ""
    """A PEM file with certificate and key: TLS."""
    mixed: bool = False
    """Each request's number says what it gets; see ``wire.Kind``."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return replace(cls(), **json.loads(text))


def _whole(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status.encode(),
        len(body),
        body,
    )


def _json(value: Any, status: str = "200 OK") -> bytes:
    return _whole(json.dumps(value).encode(), status)


CARD = {"id": "m", "object": "model", "parent": None, "root": "m", "max_model_len": 65_536}
SETTINGS = {
    "vllm_config": {
        "model_config": {"model": "m", "dtype": "torch.bfloat16", "max_model_len": 65_536},
        "cache_config": {"block_size": 16, "enable_prefix_caching": True},
        "parallel_config": {"data_parallel_size": 1},
        "lora_config": {"max_loras": 6, "max_lora_rank": 64, "max_cpu_loras": 6},
    }
}
CONTROL = {
    b"GET /health": _whole(b""),
    b"GET /ping": _whole(b""),
    b"GET /v1/models": _json({"object": "list", "data": [CARD]}),
    b"GET /is_paused": _json({"is_paused": False}),
    b"GET /server_info": _json(SETTINGS),
}
"""What proxies ask before they send a generation."""
UNKNOWN = _json({"detail": "Not Found"}, "404 Not Found")
# In vLLM's shape: the daemon takes anything else for the words of something in between.
FAILED = _json({"error": {"message": "made to fail", "code": 500}}, "500 Internal Server Error")
# vLLM 0.27.1 answers so where the endpoint is and no name was given.
NAMELESS = _json({"error": {"message": "no lora_name", "code": 400}}, "400 Bad Request")


class Upstreams:
    """The answers, made once, and the streams that are under way."""

    def __init__(self, answers: Answers) -> None:
        self.loop = asyncio.get_running_loop()
        self.answers = answers
        self.rest = wire.reply_rest(answers.reply_bytes)
        self.head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % answers.reply_bytes
        )
        self.stream_head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.event = wire.event()
        self.seen = bytearray()
        """How often each number has come, counted from ``wire.NUMBERS``."""

    def generation(self, connection: Connection, number: int) -> None:
        place = max(0, number - wire.NUMBERS)
        if place >= len(self.seen):
            self.seen.extend(bytes(place + 100_000 - len(self.seen)))
        self.seen[place] = min(255, self.seen[place] + 1)
        if self.answers.mixed:
            kind, first = wire.kind_of(number), self.seen[place] == 1
            if kind is Kind.FAILED or (kind is Kind.FAILED_ONCE and first):
                connection.transport.write(FAILED)
                return
            if kind is Kind.RESET and first and connection.breaks(number):
                connection.reset()
                return
        delay_s = wire.delay_s(number, self.answers.delay_s) if number > wire.NUMBERS else 0.0
        came_s = time.monotonic()
        if delay_s:
            self.loop.call_later(delay_s, self._answer, connection, number, came_s)
        else:
            self._answer(connection, number, came_s)

    def _answer(self, connection: Connection, number: int, came_s: float) -> None:
        if connection.transport.is_closing():
            return
        start = wire.REPLY_START % (number, round(1e6 * (time.monotonic() - came_s)))
        streams = not self.answers.mixed or wire.kind_of(number).streams
        if self.answers.chunks and streams and number > wire.NUMBERS:
            connection.transport.write(self.stream_head + wire.event(start))
            cut = self.answers.mixed and wire.kind_of(number) is Kind.CUT
            if cut and connection.breaks(number):
                self.loop.call_later(self.answers.interval_s, connection.reset)
                return
            self.loop.call_later(self.answers.interval_s, self._next, connection, 1)
        else:
            connection.transport.writelines((self.head, start, self.rest))

    def _next(self, connection: Connection, sent: int) -> None:
        if connection.transport.is_closing():
            return
        if sent == self.answers.chunks:
            connection.transport.write(wire.STREAM_END)
            return
        connection.transport.write(self.event)
        self.loop.call_later(self.answers.interval_s, self._next, connection, sent + 1)


class Connection(asyncio.Protocol):
    """One request at a time, as proxies send them."""

    def __init__(self, upstreams: Upstreams, *, unsteady: bool = False) -> None:
        self._upstreams = upstreams
        self._unsteady = unsteady
        self.transport: asyncio.Transport
        self._head = b""
        self._body: list[bytes] = []
        self._missing = -1
        """Bytes of the body that have not come; -1 before its head is whole."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def breaks(self, number: int) -> bool:
        """Whether this request's connection may be broken here."""
        return self._unsteady or number <= wire.NUMBERS + 50

    def reset(self) -> None:
        """As a process that dies: not even the end of what was sent is sure to arrive."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            self._head += data
            head, found, body = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = head
            self._missing = _content_length(head)
            data = body
        self._body.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        head, body_pieces = self._head, self._body
        self._head, self._body, self._missing = b"", [], -1
        method, target = head.split(b" ", 2)[:2]
        path = target.partition(b"?")[0]
        if method == b"POST" and path.endswith(b"/completions"):
            self._upstreams.generation(self, wire.number_of(body_pieces))
        elif path == b"/v1/unload_lora_adapter":
            self.transport.write(NAMELESS)
        elif path == b"/seen":
            seen = self._upstreams.seen
            self.transport.write(
                _json({"once": seen.count(1), "again": len(seen) - seen.count(0) - seen.count(1)})
            )
        else:
            self.transport.write(CONTROL.get(method + b" " + path, UNKNOWN))


def _content_length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    if at < 0:
        if b"\r\ntransfer-encoding:" in lower:
            raise NotImplementedError("a proxy that sends chunked requests")
        return 0
    return int(lower[at + 17 :].split(b"\r\n", 1)[0])


async def serve(answers: Answers, sockets: list[socket.socket]) -> None:
    """Until SIGTERM."""
    upstreams = Upstreams(answers)
    context = None
    if answers.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(answers.certificate)
    loop = asyncio.get_running_loop()
    for index, sock in enumerate(sockets):
        make = partial(Connection, upstreams, unsteady=index % 2 == 1)
        await loop.create_server(make, sock=sock, ssl=context)
    print("ready", flush=True)
    await asyncio.get_running_loop().create_future()


def main() -> None:
    answers, *descriptors = sys.argv[1:]
    sockets = [socket.socket(fileno=int(fd)) for fd in descriptors]
    for sock in sockets:
        sock.setblocking(False)
        sock.listen(16_384)
    uvloop.run(serve(Answers.from_json(answers), sockets))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(130)
