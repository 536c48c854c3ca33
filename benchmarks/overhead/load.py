"""A load generator that costs little and believes nothing: every answer is checked.

Told what to do on its standard input and telling what it found on its standard output, a JSON line
each; run by the benchmark, not by hand.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from benchmarks.overhead import wire

IDLE_S = 2.0
"""A connection idle for longer is opened anew: its server may be about to close it."""
CONNECTING = 256  # at once: what a backlog of any peer holds
KEPT_BODIES_BYTES = 64_000_000
"""Prebuilt bodies; past it prompts are used again, which the report tells."""


@dataclass(slots=True)
class Count:
    """What became of the requests of one phase."""

    sent: int = 0
    good: int = 0
    bad_status: int = 0
    wrong_body: int = 0
    """Another request's answer, or one of another length."""
    lost: int = 0
    """The connection ended without a whole answer."""
    doubled: int = 0
    """An answer that nobody had asked for."""
    unanswered: int = 0
    """At the deadline."""
    first_bad: str = ""
    ends: Counter[str] = field(default_factory=Counter)
    """How requests of the mixed soak ended that are not to be answered as usual."""
    round_trips_s: list[float] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)
    """Round trip without the time at the upstream; of a stream, to its first byte."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, in turn, and what answers look like."""

    addresses: Sequence[tuple[str, int]]
    body_bytes: int
    context: ssl.SSLContext | None


class Client(asyncio.Protocol):
    """One connection, one request at a time.

    Times are of ``time.monotonic``: uvloop's own clock has whole milliseconds only.
    """

    def __init__(self, load: Load, host: bytes) -> None:
        self.load = load
        self._host = host
        self._parser: Any = None
        self.transport: asyncio.Transport | None = None
        self.number = 0  # 0: nothing is under way
        self.idle_since_s = 0.0
        self._sent_s = 0.0
        self._first_s = 0.0
        self.status = 0
        self.start = b""
        self._head = b""
        self._body_bytes = 0
        self._missing = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.idle_since_s = time.monotonic()

    def send(self, number: int, body: bytes) -> None:
        assert self.transport is not None
        self.number = number
        self.status = self._body_bytes = 0
        self._head = self.start = b""
        self._missing = -1
        self._parser = None
        self._first_s = 0.0
        self._sent_s = time.monotonic()
        self.transport.write(wire.request(self._host, body, number))

    def data_received(self, data: bytes) -> None:
        if not self.number:
            self.load.count.doubled += 1
            self.load.note(f"nobody asked: {data[:100]!r}")
            return
        if not self._first_s:
            self._first_s = time.monotonic()
        if self._parser is not None:
            self._feed(data)
            return
        if self._missing < 0:
            self._head += data
            head, found, body = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            length = _content_length(head)
            if length is None:
                self._parser = httptools.HttpResponseParser(self)
                self._feed(self._head)
                return
            self.status = int(head[9:12])
            self._missing = length
            data = body
        if len(data) > self._missing:
            self.load.count.doubled += 1
            self.load.note(f"more than one answer: {data[self._missing :][:100]!r}")
            data = data[: self._missing]
        if len(self.start) < wire.ID_BYTES:
            self.start += data[: wire.ID_BYTES]
        self._body_bytes += len(data)
        self._missing -= len(data)
        if not self._missing:
            self._end()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self.load.note(f"not HTTP: {exc}")
            if self.transport is not None:
                self.transport.abort()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if len(self.start) < wire.ID_BYTES:
            self.start += data[: wire.ID_BYTES]
        self._body_bytes += len(data)

    def on_message_complete(self) -> None:
        self._end()

    def _end(self) -> None:
        now_s = time.monotonic()
        number, self.number = self.number, 0
        self.idle_since_s = now_s
        self.judge(number, now_s)
        self.load.next(self)

    def judge(self, number: int, now_s: float) -> None:
        """Count the whole answer that has come to the request ``number``."""
        count = self.load.count
        held_s = self.whole(number, self.load.target.body_bytes)
        if held_s is not None:
            count.good += 1
            count.round_trips_s.append(now_s - self._sent_s)
            first_s = self._first_s if self.load.streams else now_s
            count.added_s.append(first_s - self._sent_s - held_s)

    def whole(self, number: int, body_bytes: int) -> float | None:
        """Seconds at the upstream if the answer is what it has to be; counted as bad if not."""
        answered, held_s = wire.id_of(self.start)
        count = self.load.count
        if self.status != 200:
            count.bad_status += 1
            self.load.note(f"status {self.status}: {self.start!r}")
        elif answered != number or self._body_bytes != body_bytes:
            count.wrong_body += 1
            self.load.note(f"{self._body_bytes} bytes for {number}: {self.start!r}")
        else:
            return held_s
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.number:
            self.number = 0
            self.load.count.lost += 1
            self.load.note(f"connection lost: {exc}")
            self.load.reopen(self)


class Load:
    """Keeps ``connections`` busy until each request of a phase is answered."""

    client: type[Client] = Client

    def __init__(self, target: Target, connections: int, *, streams: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.target = target
        self.streams = streams
        self.count = Count()
        self._connections = connections
        self._clients: list[Client] = []
        self._work: Iterator[tuple[int, bytes]] = iter(())
        self._busy = 0
        self._done: asyncio.Future[None] = self.loop.create_future()
        self._opening: set[asyncio.Task[None]] = set()

    def note(self, what: str) -> None:
        self.count.first_bad = self.count.first_bad or what

    async def run(
        self,
        work: Iterable[tuple[int, bytes]],
        deadline_s: float,
        connections: int | None = None,
        spread_s: float = 0.0,
    ) -> tuple[Count, float]:
        """One phase on the connections that are there; the count, and the seconds it took.

        Connections begin within ``spread_s``, one after the other, not all at once.
        """
        clients = await self._connected(connections or self._connections)
        self.count = Count()
        self._work = iter(work)
        self._done = self.loop.create_future()
        begun_s = time.monotonic()
        self._busy = len(clients)
        for index, client in enumerate(clients):
            if spread_s:
                self.loop.call_later(spread_s * index / len(clients), self.next, client)
            else:
                self.next(client)
        try:
            async with asyncio.timeout(deadline_s):
                await self._done
        except TimeoutError:
            self.count.unanswered = self._busy + sum(1 for _ in self._work)
            self._busy = 0
            self.close()
        return self.count, time.monotonic() - begun_s

    def next(self, client: Client) -> None:
        """The client is free."""
        if client.transport is None or client.transport.is_closing():
            self.reopen(client)
            return
        number, body = next(self._work, (0, b""))
        if number:
            self.count.sent += 1
            client.send(number, body)
            return
        self._busy -= 1
        if not self._busy and not self._done.done():
            self._done.set_result(None)

    def reopen(self, client: Client) -> None:
        """A client whose connection is gone gets another one and goes on."""

        async def again() -> None:
            fresh = await self._open(self._clients.index(client))
            self._clients[self._clients.index(client)] = fresh
            self.next(fresh)

        task = asyncio.ensure_future(again())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def close(self) -> None:
        """Break all connections; what is under way on them counts no further."""
        for task in self._opening:
            task.cancel()
        for client in self._clients:
            client.number = 0
            if client.transport is not None:
                client.transport.abort()

    async def _connected(self, wanted: int) -> list[Client]:
        old_s = time.monotonic() - IDLE_S
        gate = asyncio.Semaphore(CONNECTING)

        async def fresh(index: int) -> Client:
            if index < len(self._clients):
                client = self._clients[index]
                if client.transport is not None and client.idle_since_s > old_s:
                    return client
                if client.transport is not None:
                    client.transport.close()
            async with gate:
                return await self._open(index)

        found = await asyncio.gather(*(fresh(index) for index in range(wanted)))
        self._clients[:wanted] = found
        return list(found)

    async def _open(self, index: int) -> Client:
        host, port = self.target.addresses[index % len(self.target.addresses)]
        _, client = await self.loop.create_connection(
            lambda: self.client(self, f"{host}:{port}".encode()),
            host,
            port,
            ssl=self.target.context,
        )
        return client


def _content_length(head: bytes) -> int | None:
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    return None if at < 0 else int(lower[at + 17 :].split(b"\r\n", 1)[0])


# --- a session with the benchmark -----------------------------------------------------------------


class Session:
    """The bodies of one row, and the numbers already used."""

    def __init__(self, prompt_tokens: int, *, stream: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        self._number = wire.NUMBERS
        self._built: tuple[int, list[bytes]] = (-1, [])
        self._warm = wire.bodies(1, prompt_tokens, 1_000_003, stream=stream)[0]

    def warming(self, count: int) -> list[tuple[int, bytes]]:
        """One prompt for all: nothing of the work is in a prefix table yet."""
        return [(self._take(), self._warm) for _ in range(count)]

    def work(self, count: int, seed: int) -> list[tuple[int, bytes]]:
        """Groups of ``wire.GROUP`` requests with one prompt, in their order."""
        if self._built[0] != seed:
            most = max(1, KEPT_BODIES_BYTES // (8 * self._prompt_tokens + 200))
            groups = min(most, -(-count // wire.GROUP))
            self._built = (
                seed,
                wire.bodies(groups, self._prompt_tokens, seed, stream=self._stream),
            )
        prompts = self._built[1]
        return [
            (self._take(), prompts[index // wire.GROUP % len(prompts)]) for index in range(count)
        ]

    def _take(self) -> int:
        self._number += 1
        return self._number


async def session(first: dict[str, Any]) -> None:
    """Warm up, wait for the word, measure, and again for the next target."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    chunks = first["chunks"]
    made = Session(first["prompt_tokens"], stream=bool(chunks))
    body_bytes = wire.stream_bytes(chunks) if chunks else first["reply_bytes"]
    while line := await lines.readline():
        asked = json.loads(line)
        context = None
        if asked["ca"]:
            context = ssl.create_default_context(cafile=asked["ca"])
        addresses = [
            (parts.hostname or "", parts.port or 0) for parts in map(urlsplit, asked["urls"])
        ]
        target = Target(addresses, body_bytes, context)
        load = Load(target, asked["in_flight"], streams=bool(chunks))
        work = made.work(asked["requests"], asked["seed"])
        warm, _ = await load.run(made.warming(asked["in_flight"]), asked["deadline_s"])
        tell({"warm": warm.good, "first_bad": warm.first_bad})
        await lines.readline()  # the word to begin: the proxy's CPU time has been read
        count, took_s = await load.run(work, asked["deadline_s"], spread_s=asked["spread_s"])
        tell(result(count, took_s))
        if asked["calm_requests"]:
            await lines.readline()
            calm = made.work(asked["calm_requests"], asked["seed"])
            count, took_s = await load.run(calm, asked["deadline_s"], asked["calm_in_flight"])
            tell(result(count, took_s))
        load.close()


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def result(count: Count, took_s: float) -> dict[str, Any]:
    names = ("sent", "good", "bad_status", "wrong_body", "lost", "doubled", "unanswered")
    return {
        **{name: getattr(count, name) for name in names},
        "first_bad": count.first_bad,
        "ends": dict(count.ends),
        "seconds": took_s,
        "added_p50_s": quantile(count.added_s, 0.5),
        "added_p99_s": quantile(count.added_s, 0.99),
        "round_trip_p50_s": quantile(count.round_trips_s, 0.5),
    }


def quantile(values: Sequence[float], part: float) -> float:
    """By rank, of no values 0."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))]


if __name__ == "__main__":
    uvloop.run(session(json.loads(sys.argv[1])))
