"""HTTP/1.1 to one replica: a small protocol on httptools and a stack of idle connections.

Generations go through here and nothing else does. What it promises: a reply is whole, or comes
chunk by chunk, or is an ``UpstreamBroken``; a caller that goes away closes its connection; a
connection that a server closed while it lay idle costs nobody an error.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from time import monotonic
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

from broadcast.answer import Cause
from proxy.descriptors import USED_UP
from proxy.errors import TooManyAtOnce

IDLE_S = 4.0
"""A connection idle for longer is not used again. vLLM closes them after 5 s
(``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``, vLLM 0.27.1, vllm/envs.py)."""
RACE_S = 1.0
"""A reused connection lost within this time after sending was closed by its server while idle."""
CONNECT_TIMEOUT_S = 10.0
CONNECTING = 128
"""Connects to one replica at a time. A listener drops what its queue cannot hold (uvicorn's: 2048),
and the kernel tries again only after 1, 3 and 7 s: thousands at once would not all get through."""
DESCRIPTOR_LOOKS, DESCRIPTOR_LOOK_S = 20, 0.1
"""A burst may take all descriptors for clients; most of them are refused and give theirs back."""
HEAD_LIMIT_BYTES = 256 * 1024
"""Past it a reply's header block is malformed. Seen from real edges: 40 kB."""
WHOLE_LIMIT_BYTES = 64 * 1024 * 1024
"""Past it a complete reply is passed on as it comes. A 30 MB reply (log-probs) has been seen."""
IN_PLACE_BYTES, IN_PLACE_MOST_BYTES = 16 * 1024, 8 * 1024 * 1024
"""Of a body that is held whole, when more than this is still to come it is read where it stays:
three copies fewer. Not of a longer one: its place is taken, and filled with zeros, at once."""
_SCRATCH = memoryview(bytearray(32 * 1024))
"""What is read goes through here, and is used up before anything else is read: by one thread."""
HIGH_WATER_BYTES = 256 * 1024
"""A stream whose client reads slowly is read no further ahead than this."""

Headers = list[tuple[bytes, bytes]]

Take = Callable[[bytes], bool]
"""Gets a piece of a body, and tells whether it has room for more."""

_NOTHING, _HEAD, _CHUNK, _WHOLE, _END = range(5)
"""What a reply's reader waits for."""


class UpstreamBroken(Exception):
    """The replica gave no whole reply.

    ``early``: its server closed the connection before a byte of the reply came.
    """

    def __init__(self, cause: Cause, detail: str, *, early: bool = False) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
        self.early = early


class Reply:
    """One reply as it comes in. Read by one task, written by its connection."""

    __slots__ = (
        "_body", "_chunks", "_complete", "_connection", "_error", "_size", "_take", "_until",
        "_waiter", "body_bytes", "body_length_known", "headers", "status",
    )  # fmt: skip

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.body_length_known = False
        self.body_bytes = -1
        """As its ``content-length`` says; -1 where there is none."""
        self._connection: _Connection | None = connection
        self._chunks: list[bytes] = []
        self._body: bytes | bytearray | None = None
        self._size = 0
        self._complete = False
        self._error: UpstreamBroken | None = None
        self._take: Take | None = None
        self._until = _NOTHING
        self._waiter: asyncio.Future[None] | None = None

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def pending(self) -> bool:
        """Whether pieces are here that nobody has read."""
        return bool(self._chunks)

    async def head(self) -> None:
        """Until status and headers are here."""
        while not self.status:
            await self._wait(_HEAD)

    async def whole(self) -> bytes | bytearray | None:
        """The complete body, each time it is asked for.

        None when it grew past ``WHOLE_LIMIT_BYTES``: then read it in chunks.
        """
        if self._connection is not None:
            self._connection.resume_reading()
        while not self._complete:
            if self._size > WHOLE_LIMIT_BYTES:
                return None
            await self._wait(_WHOLE)
        body = self._body
        if body is None:
            body = self._body = b"".join(self._chunks)
            self._chunks.clear()
        elif isinstance(body, bytearray):
            del body[self.body_bytes :]
        return body

    async def chunk(self) -> bytes:
        """The next piece of the body; empty at its end."""
        while not self._chunks and not self._complete:
            await self._wait(_CHUNK)
        if not self._chunks:
            return b""
        return self._pieces()

    async def pour(self, take: Take) -> bool:
        """Give each piece to ``take``, all but the last as it is read, without a turn of the loop
        between. False once ``take`` has no room for more, True at the body's end.
        """
        while True:
            if self._chunks and not take(self._pieces()):
                return False
            if self._complete:
                return True
            self._take = take
            try:
                await self._wait(_END)
                if self._take is None:  # it had no room
                    return False
            finally:
                self._take = None

    def _pieces(self) -> bytes:
        """What has come and was not read, as one piece."""
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        if self._connection is not None:
            self._connection.resume_reading()
        return data

    def abort(self, cause: Cause = Cause.RESET, detail: str = "given up") -> None:
        """Close the connection, unless the reply is complete; whoever waits gets the error."""
        if self._connection is not None:
            self._connection.fail(cause, detail)

    async def _wait(self, until: int) -> None:
        if self._error is not None:
            raise self._error
        self._until = until
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._until = _NOTHING
            self._waiter = None
        if self._error is not None:
            raise self._error

    # Written by the connection.

    def on_head(self, status: int) -> None:
        self.status = status
        if self._until in (_HEAD, _CHUNK):
            self._wake()

    def on_data(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._until == _CHUNK:
            self._wake()
        elif self._until == _WHOLE:
            if self._size > WHOLE_LIMIT_BYTES:
                self._wake()
        elif self._size > HIGH_WATER_BYTES and self._connection is not None:
            self._connection.pause_reading()

    def on_read(self) -> None:
        """What one read brought has been given, unless the reply is complete by it."""
        if self._take is not None and self._chunks and not self._take(self._pieces()):
            self._take = None
            self._wake()

    def place(self) -> memoryview | None:
        """Where the rest of the body is to be read, if it is worth that: see IN_PLACE_BYTES."""
        length, size = self.body_bytes, self._size
        most = min(IN_PLACE_MOST_BYTES, WHOLE_LIMIT_BYTES)
        if self._until != _WHOLE or not size + IN_PLACE_BYTES < length <= most:
            return None
        # One byte more: a read that fills its buffer is followed by another that finds nothing.
        body = self._body = bytearray(length + 1)
        body[:size] = b"".join(self._chunks)
        self._chunks.clear()
        return memoryview(body)[size:]

    def on_complete(self) -> None:
        self._complete = True
        self._connection = None
        self._wake()

    def on_error(self, error: UpstreamBroken) -> None:
        self._error = error
        self._connection = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.BufferedProtocol):
    """One connection; carries one exchange at a time."""

    __slots__ = (
        "_head_bytes", "_informational", "_parser", "_pool", "_reading_paused", "_reply", "_rest",
        "_transport", "idle_since_s",
    )  # fmt: skip

    def __init__(self, pool: Upstream) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._rest: memoryview | None = None
        """What is still to come of a body that is read in place, without the parser."""
        self._head_bytes = 0
        self._informational = False
        self._reading_paused = False
        self.idle_since_s = 0.0

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> Reply:
        assert self._transport is not None
        assert self._reply is None
        reply = self._reply = Reply(self)
        self._head_bytes = 0
        self._transport.writelines((head, body) if body else (head,))
        return reply

    def fail(self, cause: Cause, detail: str) -> None:
        """End the exchange with an error and the connection with it."""
        reply, self._reply = self._reply, None
        self._rest = None
        if self._transport is not None:
            self._transport.abort()
        if reply is not None:
            reply.on_error(UpstreamBroken(cause, detail))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def pause_reading(self) -> None:
        if not self._reading_paused and self.alive:
            self._reading_paused = True
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_reading(self) -> None:
        if self._reading_paused and self.alive:
            self._reading_paused = False
            cast(asyncio.Transport, self._transport).resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.opened.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._rest = None
        self._pool.opened.discard(self)
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if exc is None and reply.status and not reply.body_length_known:
            reply.on_complete()  # the body ends where the connection does
        else:
            detail = f"connection lost{f' ({exc})' if exc else ''}"
            early = not reply.status and not self._head_bytes
            reply.on_error(UpstreamBroken(Cause.RESET, detail, early=early))

    def get_buffer(self, sizehint: int, /) -> memoryview:
        if self._rest is not None:
            return self._rest
        pool = self._pool
        if pool.secure and sizehint > len(pool.scratch):
            # uvloop 0.23 drops what of a TLS stream it could not hand over before the stream's end.
            pool.scratch = memoryview(bytearray(sizehint))
        return pool.scratch

    def buffer_updated(self, nbytes: int) -> None:
        reply = self._reply
        if self._rest is not None:
            self._rest = self._rest[nbytes:]
            if len(self._rest) <= 1:
                whole = len(self._rest) == 1  # else the server talks out of turn
                self._rest = None
                keep_alive = self._parser.should_keep_alive()
                self._parser = httptools.HttpResponseParser(self)  # the old one waits for a body
                self._completed(keep_alive and whole)
            return
        if reply is None:  # nothing was asked: a server that talks out of turn
            self.close()
            return
        if not reply.status:
            self._head_bytes += nbytes
        try:
            self._parser.feed_data(self._pool.scratch[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.fail(Cause.RESET, f"not an HTTP/1.1 reply ({exc})")
            return
        if self._reply is not reply:
            return
        if not reply.status and self._head_bytes > HEAD_LIMIT_BYTES:
            self.fail(Cause.RESET, f"header block over {HEAD_LIMIT_BYTES} bytes")
        elif reply.body_bytes > IN_PLACE_BYTES:
            self._rest = reply.place()
        reply.on_read()

    # httptools

    def on_message_begin(self) -> None:
        if self._reply is None:  # a reply behind the reply: the next request must not get it
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        reply = self._reply
        if reply is None:
            return
        name = name.lower()
        if name == b"content-length":
            reply.body_length_known = True
            reply.body_bytes = int(value)
        elif name == b"transfer-encoding" and value.lower().endswith(b"chunked"):
            reply.body_length_known = True
        reply.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        reply = self._reply
        if reply is None:
            return
        if status < 200:
            self._informational = True
            reply.headers.clear()
            reply.body_length_known = False
            reply.body_bytes = -1
            return
        if status in (204, 304):
            reply.body_length_known = True
        reply.on_head(status)

    def on_body(self, data: bytes) -> None:
        if self._reply is not None:
            self._reply.on_data(data)

    def on_message_complete(self) -> None:
        if self._informational:
            self._informational = False
            return
        self._completed(self._parser.should_keep_alive())

    def _completed(self, keep_alive: bool) -> None:
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if keep_alive and self.alive:
            self.resume_reading()
            self._pool.give_back(self)
        else:
            self.close()
        reply.on_complete()


class Upstream:
    """The connections to one replica.

    ``url`` may have a base path, which is kept. ``context`` is used for ``https``.
    """

    def __init__(
        self,
        url: str,
        *,
        context: ssl.SSLContext | None = None,
    ) -> None:
        parts: SplitResult = urlsplit(url)
        secure = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if secure else 80)
        self.base_path = parts.path.rstrip("/").encode()
        netloc = parts.netloc.rpartition("@")[2]
        self.host_header = netloc.encode()
        self.secure = secure
        self.scratch = _SCRATCH
        self.opened: set[_Connection] = set()
        self._context = context if secure else None
        self._idle: list[_Connection] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._breaks = 0
        self._closed = False
        self._connecting = asyncio.Semaphore(CONNECTING)
        self._timeouts = 0

    def __repr__(self) -> str:
        return f"<Upstream {self.host}:{self.port} {len(self.opened)} open, {len(self._idle)} idle>"

    async def ask(self, head: bytes, body: bytes, *, whole: bool) -> Reply:
        """Send one request; return when its reply is here: all of it, or its head.

        A ``whole`` reply past ``WHOLE_LIMIT_BYTES`` comes back incomplete, to be read in chunks.
        Raises ``UpstreamBroken``, or ``TooManyAtOnce`` where this machine is at its limit.
        Cancelling it closes the connection.
        """
        connection = self._take_idle(monotonic())
        while True:
            reused = connection is not None
            if connection is None:
                connection = await self._connect()
            sent_s = monotonic()
            reply = connection.send(head, body)
            try:
                if whole:
                    await reply.whole()
                else:
                    await reply.head()
                return reply
            except UpstreamBroken as exc:
                if not (reused and exc.early and monotonic() - sent_s < RACE_S):
                    raise
                connection = None  # once more, on a fresh one
            except BaseException:
                reply.abort()
                raise

    def give_back(self, connection: _Connection) -> None:
        if self._closed:
            connection.close()
            return
        connection.idle_since_s = monotonic()
        self._idle.append(connection)
        if self._sweep is None:
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(IDLE_S / 2, self._sweep_idle)

    def break_all(self, cause: Cause, detail: str) -> None:
        """End every exchange that is under way; their callers get ``UpstreamBroken``."""
        self._breaks += 1
        for connection in list(self.opened):
            connection.fail(cause, detail)
        self._idle.clear()

    def close(self) -> None:
        """Close idle connections; busy ones close after their exchange."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self, now_s: float) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.alive:
                continue
            if now_s - connection.idle_since_s < IDLE_S:
                return connection
            connection.close()
        return None

    def _sweep_idle(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = monotonic() - IDLE_S
        kept = []
        for connection in self._idle:
            if not connection.alive:
                continue
            if connection.idle_since_s > oldest_s:
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        self._sweep = loop.call_later(IDLE_S / 2, self._sweep_idle) if kept else None

    async def _connect(self) -> _Connection:
        breaks, timeouts = self._breaks, self._timeouts
        try:
            async with self._connecting, asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._timeouts != timeouts:  # it has waited for that already
                    raise _no_connection()
                transport, connection = await self._open(DESCRIPTOR_LOOKS)
        except TimeoutError as exc:
            self._timeouts += 1
            raise _no_connection() from exc
        except ConnectionRefusedError as exc:
            raise UpstreamBroken(Cause.REFUSED, "connection refused") from exc
        except (OSError, ssl.SSLError) as exc:
            if exc.errno in USED_UP:  # says nothing about the replica
                raise TooManyAtOnce(f"no connection can be opened ({exc.strerror or exc})") from exc
            raise UpstreamBroken(Cause.UNREACHABLE, f"cannot connect ({exc})") from exc
        if self._breaks != breaks:
            # The kernel completes handshakes for a process that stands still: no reply would come.
            transport.abort()
            raise UpstreamBroken(Cause.RESET, "given up while connecting")
        _keep_alive(transport.get_extra_info("socket"))
        return connection

    async def _open(self, looks: int) -> tuple[asyncio.Transport, _Connection]:
        """A new connection. Where no descriptor is left it looks again, ``looks`` times in all."""
        loop = asyncio.get_running_loop()
        while True:
            looks -= 1
            try:
                return await loop.create_connection(
                    lambda: _Connection(self),
                    self.host,
                    self.port,
                    ssl=self._context,
                    server_hostname=self.host if self._context else None,
                )
            except OSError as exc:
                if exc.errno not in USED_UP or not looks:
                    raise
            await asyncio.sleep(DESCRIPTOR_LOOK_S)


def _no_connection() -> UpstreamBroken:
    return UpstreamBroken(Cause.UNREACHABLE, f"no connection within {CONNECT_TIMEOUT_S:g} s")


def _keep_alive(sock: socket.socket | None) -> None:
    """Let the kernel notice, within two minutes, a host that vanished while we wait for a reply."""
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
