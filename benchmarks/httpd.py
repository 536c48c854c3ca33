"""A small HTTP/1.1 server that can also misbehave, on the socket itself, when told to.

It is uvicorn's place taken for simulations: dozens of servers in one event loop are cheap, and
it can do what uvicorn cannot: never answer, reset, cut a body short, stop listening.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl, unquote

import httptools

_LOG = logging.getLogger(__name__)
_PHRASES = {int(status): status.phrase for status in HTTPStatus}

CONTROL = "/sim/"
"""Calls below this are remote control: not logged, and no fault touches them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How one call goes wrong. The fields act in the order they are listed."""

    delay_s: float = 0.0
    """Wait before anything else."""
    hang: bool = False
    """Never answer; the connection stays open and the call is not carried out."""
    reset: bool = False
    """Break the connection with a TCP reset; the call is not carried out."""
    die: bool = False
    """Whoever serves dies of this call (the server's ``die`` is called)."""
    status: int | None = None
    """Answer this, with the three fields below; the call is not carried out."""
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    late_s: float = 0.0
    """Carry the call out, then wait before the answer."""
    drop: bool = False
    """Carry the call out, then close without an answer."""
    cut: int | None = None
    """Carry the call out, declare the whole answer, send this many bytes of the body, close."""


@dataclass(slots=True)
class _Rule:
    method: str | None
    path: str
    fault: Fault
    nth: int | None
    times: int | None
    seen: int = 0


class Faults:
    """Which calls go wrong. The first rule that fits decides."""

    def __init__(self) -> None:
        self._rules: list[_Rule] = []

    def add(
        self,
        path: str,
        fault: Fault | None = None,
        *,
        nth: int | None = None,
        times: int | None = None,
        method: str | None = None,
        **fields: Any,
    ) -> None:
        """Let calls of ``path`` (``*``: all) go wrong, as ``fault`` or its fields say.

        ``nth`` counts from 1 over calls of that path made from now on; without it the first
        ``times`` calls are meant; without either, all of them.
        """
        self._rules.append(_Rule(method, path, fault or Fault(**fields), nth, times))

    def clear(self, path: str | None = None) -> None:
        """Drop the rules for one path, or all."""
        self._rules = [r for r in self._rules if path is not None and r.path != path]

    def take(self, method: str, path: str) -> Fault | None:
        """The fault for a call that has just come in; every fitting rule counts it."""
        found: Fault | None = None
        for rule in self._rules:
            if rule.path not in ("*", path) or rule.method not in (None, method):
                continue
            rule.seen += 1
            due = rule.seen == rule.nth if rule.nth is not None else True
            if rule.nth is None and rule.times is not None:
                due = rule.seen <= rule.times
            if due and found is None:
                found = rule.fault
        return found


@dataclass(slots=True)
class Arrival:
    """One request as it came in. Times are of the event loop's clock, in seconds."""

    number: int
    connection: int
    at_s: float
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    """Names in lower case, in the order they came."""
    body: bytes
    answered_s: float | None = None
    """When the last byte of the answer was handed to the socket."""
    status: int | None = None
    disconnected_s: float | None = None
    """When the client went away before it had its answer."""

    @property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: a whole body, or an iterator of pieces that is sent as chunks."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    """Empty: the header is left out."""
    headers: tuple[tuple[str, str], ...] = ()
    stream: AsyncIterator[bytes] | None = field(default=None)
    close: bool = False
    """Close the connection afterwards, unannounced."""


Handler = Callable[[Arrival], Awaitable[Reply]]
T = TypeVar("T")

BACKLOG = 2048
RETRY_S = 1.0
"""Until connections are taken again, after there was no descriptor for one."""


class Server:
    """Listens on one loopback port and keeps it over ``refuse`` and ``listen``.

    ``handler`` is cancelled when the client goes away, except on ``uncancelled`` paths, where
    the work goes on and the answer is lost.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        keep_alive_s: float = 5.0,
        uncancelled: frozenset[str] = frozenset(),
        log_limit: int = 100_000,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.handler = handler
        self.host = host
        self.port = port
        self.keep_alive_s = keep_alive_s
        self.context = context
        self.uncancelled = uncancelled
        self.die: Callable[[], None] = self.refuse
        self.faults = Faults()
        self.log: deque[Arrival] = deque(maxlen=log_limit)
        self.connections: set[_Connection] = set()
        self.connections_made = 0
        self.arrivals = 0
        self._listener: socket.socket | None = None
        self._accepting: dict[asyncio.Task[Any], socket.socket] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http{'s' if self.context else ''}://{self.host}:{self.port}"

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def accepts(self, listener: socket.socket) -> bool:
        """Whether this is where connections are taken now."""
        return listener is self._listener

    async def listen(self) -> None:
        """Take connections; the port is chosen at the first time and kept."""
        await asyncio.sleep(0)  # what ``refuse`` has reset is closed before anybody connects
        if self._listener is not None:
            return
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # With its protocol named: else asyncio leaves Nagle's delay on.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._take(listener)

    def _take(self, listener: socket.socket) -> None:
        if self.accepts(listener):
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        # Not asyncio's server, which forgets to close what it accepted in the turn of its own end.
        loop = asyncio.get_running_loop()
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            for _ in range(BACKLOG):
                try:
                    accepted, _ = listener.accept()
                except OSError as exc:
                    if exc.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    _LOG.warning("no connection is taken for %g s: %s", RETRY_S, exc.strerror)
                    loop.remove_reader(listener)
                    loop.call_later(RETRY_S, self._take, listener)
                    return
                task = loop.create_task(
                    loop.connect_accepted_socket(
                        lambda: _Connection(self, listener), accepted, ssl=self.context
                    )
                )
                self._accepting[task] = accepted
                task.add_done_callback(self._accepted)

    def _accepted(self, task: asyncio.Task[Any]) -> None:
        accepted = self._accepting.pop(task)
        if task.cancelled():
            accepted.close()  # a task that had not begun has not
        else:
            task.exception()  # a handshake that failed is the client's to tell

    def refuse(self, *, reset: bool = True) -> None:
        """Take no more connections; those open are reset, or left alone."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if reset:
            for connection in list(self.connections):
                connection.reset()

    async def close(self) -> None:
        """Everything ends: socket, connections, handlers."""
        self.refuse()
        tasks = [*self._tasks, *self._accepting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the next turn of the loop

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that ends with this server at the latest."""
        task: asyncio.Task[T] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Connection(asyncio.Protocol):
    """One client's connection: requests are answered one after another."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        self.server = server
        self.listener = listener
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.number = 0
        self.queue: deque[tuple[Arrival, bool]] = deque()
        self.task: asyncio.Task[None] | None = None
        self.current: Arrival | None = None
        self.idle: asyncio.TimerHandle | None = None
        self.lost = False
        self.writable = asyncio.Event()
        self.writable.set()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports have the methods but not the base class.
        self.transport = cast(asyncio.Transport, transport)
        if not self.server.accepts(self.listener):  # accepted in the very turn of its end
            self.reset()
            return
        self.server.connections.add(self)
        self.server.connections_made += 1
        self.number = self.server.connections_made

    def data_received(self, data: bytes) -> None:
        if self.idle is not None:
            self.idle.cancel()
            self.idle = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an Upgrade header is ignored, as uvicorn does without websockets
        except httptools.HttpParserError:
            self._write(Reply(400, b"Invalid HTTP request received.", "text/plain; charset=utf-8"))
            self._close()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.writable.set()
        self.server.connections.discard(self)
        if self.idle is not None:
            self.idle.cancel()
        if self.current is not None:
            self.current.disconnected_s = self.loop.time()
            if self.task is not None and self.current.path not in self.server.uncancelled:
                self.task.cancel()

    # httptools

    def on_message_begin(self) -> None:
        self.target = b""
        self.headers: list[tuple[str, str]] = []
        self.body = bytearray()

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if any(k == "expect" and v.lower() == "100-continue" for k, v in self.headers):
            assert self.transport is not None
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        server = self.server
        server.arrivals += 1
        arrival = Arrival(
            server.arrivals,
            self.number,
            self.loop.time(),
            self.parser.get_method().decode(),
            self.target.decode("latin-1"),
            tuple(self.headers),
            bytes(self.body),
        )
        if not arrival.target.startswith(CONTROL):
            server.log.append(arrival)
        self.queue.append((arrival, self.parser.should_keep_alive()))
        if self.task is None:
            self.task = server.own(self._serve())

    # Answers

    async def _serve(self) -> None:
        try:
            while self.queue and not self.lost:
                self.current, keep_alive = self.queue.popleft()
                await self._answer(self.current)
                self.current = None
                if not keep_alive:
                    self._close()
            if not self.lost:
                self.idle = self.loop.call_later(self.server.keep_alive_s, self._close)
        finally:
            self.task = None

    async def _answer(self, arrival: Arrival) -> None:
        fault = None
        if not arrival.target.startswith(CONTROL):
            fault = self.server.faults.take(arrival.method, arrival.path)
        fault = fault or Fault()
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.hang:
            await self.loop.create_future()
        if fault.reset:
            self.reset()
            return
        if fault.die:
            self.server.die()
        if fault.status is not None:
            reply = Reply(fault.status, fault.body, fault.content_type, fault.headers)
        else:
            try:
                reply = await self.server.handler(arrival)
            except Exception as error:
                _LOG.exception("%s %s: the handler broke", arrival.method, arrival.target)
                reply = Reply(500, repr(error).encode(), "text/plain; charset=utf-8")
        if fault.late_s:
            await asyncio.sleep(fault.late_s)
        if fault.drop:
            self._close()
            return
        if self.lost:
            return
        arrival.status = reply.status
        if reply.stream is None:
            self._write(reply, head_only=arrival.method == "HEAD", cut=fault.cut)
        else:
            await self._stream(reply, fault.cut)
        arrival.answered_s = self.loop.time()
        if fault.cut is not None or reply.close:
            self._close()

    def _write(self, reply: Reply, *, head_only: bool = False, cut: int | None = None) -> None:
        if self.transport is None or self.lost:
            return
        body = reply.body[:cut] if cut is not None else reply.body
        length = (("content-length", str(len(reply.body))),)
        self.transport.write(_head(reply, length) + (b"" if head_only else body))

    async def _stream(self, reply: Reply, cut: int | None) -> None:
        assert reply.stream is not None
        assert self.transport is not None
        self.transport.write(_head(reply, (("transfer-encoding", "chunked"),)))
        sent = 0
        async for piece in reply.stream:
            part = piece if cut is None else piece[: cut - sent]
            if part and not self.lost:
                self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
                await self.writable.wait()
            sent += len(part)
            if cut is not None and sent >= cut:
                return
        self.transport.write(b"0\r\n\r\n")

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        """Close so that the other side sees a TCP reset, not an end."""
        if self.transport is None or self.transport.is_closing():
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def _head(reply: Reply, framing: tuple[tuple[str, str], ...]) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} {_PHRASES.get(reply.status, '')}"]
    headers = [("date", formatdate(usegmt=True)), ("server", "uvicorn"), *reply.headers]
    if reply.content_type:
        headers.append(("content-type", reply.content_type))
    for name, value in (*headers, *framing):
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def with_headers(reply: Reply, *headers: tuple[str, str]) -> Reply:
    """The same answer with more headers."""
    return replace(reply, headers=reply.headers + headers)
