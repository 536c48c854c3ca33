"""The trainer's side of one generation: its body, its answer, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import Receive
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from proxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, TooManyAtOnce, error_body

MAX_BODY_BYTES = 32 * 1024 * 1024
"""A million token ids are 7 MB of JSON. Each body is kept whole until it is answered, and parsing
one holds the event loop for about 5 ms a megabyte: hence a bound."""

Headers = Iterable[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Client:
    """One generation's request, and what became of it. Written by its connection as well.

    ``carry`` is run by one task, which ``lost`` cancels: nobody has to watch the connection.
    """

    __slots__ = (
        "_carrying", "_chunked", "_expects_continue", "_flow", "_pieces", "_size", "_transport",
        "_waiter", "_whole", "finished", "gone", "head_bytes", "headers", "keep_alive", "route",
        "started", "target", "task",
    )  # fmt: skip

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        route: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        keep_alive: bool = True,
        expects_continue: bool = False,
        head_bytes: int = 0,
    ) -> None:
        self.route = route
        """The path it is for."""
        self.target = target
        """Path and query as they came."""
        self.headers = headers
        """Names in lower case."""
        self.head_bytes = head_bytes
        """Of its head, at most: some of its body may be among them."""
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        self.started = False
        """A byte of the answer may be with the client."""
        self.finished = False
        """All of the answer has been written."""
        self.gone = False
        """It went away before that."""
        self._transport = transport
        self._flow = flow
        self._expects_continue = expects_continue
        self._pieces: list[bytes] = []
        self._size = 0
        self._whole = False
        self._waiter: asyncio.Future[None] | None = None
        self._carrying = False
        self._chunked = False

    # The body

    async def body(self, timeout_s: float) -> bytes:
        """The whole body. Raises ``BodyTooLarge``, ``BodyTooSlow`` or ``ClientGone``."""
        self._carrying = True
        if self.gone:
            raise ClientGone
        if not self._whole:
            await self._rest(timeout_s)
        if self._size > MAX_BODY_BYTES:
            raise BodyTooLarge(MAX_BODY_BYTES)
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _rest(self, timeout_s: float) -> None:
        if self._expects_continue and not self._size:
            self._expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(timeout_s):
                while not self._whole and self._size <= MAX_BODY_BYTES:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except TimeoutError:
            raise BodyTooSlow(timeout_s, self._size) from None
        finally:
            self._waiter = None

    # The answer

    def reply(self, status: int, headers: Headers, data: bytes | bytearray) -> None:
        """The whole answer. ``headers`` have its length."""
        self.started = True
        first = self._head(status, headers)
        self.finished = True
        self._transport.writelines((first, data))

    def start(self, status: int, headers: Headers, *, length_known: bool) -> None:
        """The head of an answer in pieces, ``headers`` with its length if that is known."""
        self.started = True
        self._chunked = not length_known
        first = self._head(status, headers)
        if self._chunked:
            first = first[:-2] + b"transfer-encoding: chunked\r\n\r\n"
        self._transport.write(first)

    def write(self, data: bytes | bytearray) -> bool:
        """A piece of the answer. False: wait until ``drained`` before the next one."""
        if self._chunked:
            data = b"".join((b"%x\r\n" % len(data), data, b"\r\n"))
        self._transport.write(data)
        return not self._flow.write_paused

    async def drained(self) -> None:
        """Until the client has taken most of what was written."""
        await self._flow.drain()

    def finish(self) -> None:
        """The pieces were all."""
        self.finished = True
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")

    def answer(self, error: ProxyError) -> None:
        """The daemon's own answer, in vLLM's shape, if somebody is there to get it."""
        if self.gone:
            return
        if isinstance(error, TooManyAtOnce):
            self.keep_alive = False  # this connection takes a descriptor as well
        self.reply(*error_body(error))

    def _head(self, status: int, headers: Headers) -> bytes:
        if self._expects_continue and not self._whole:
            self.keep_alive = False  # it may send the body, or not
        return head(status, headers, keep_alive=self.keep_alive)

    # Written by the connection

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_BODY_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()
            self._wake()

    def on_whole(self) -> None:
        """The body is complete."""
        self._whole = True
        self._wake()

    def lost(self) -> None:
        """The connection is."""
        if self.finished or self.gone:
            return
        self.gone = True
        if self._carrying and self.task is not None:
            self.task.cancel()  # before its first step it could record nothing

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def head(status: int, headers: Headers, *, keep_alive: bool) -> bytes:
    """Status line and headers of an answer, as bytes."""
    lines = [STATUS_LINE[status]]
    lines += [b"%b: %b\r\n" % header for header in headers]
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(lines)


async def body_of(receive: Receive, timeout_s: float) -> bytes:
    """The whole body of any other request. Raises what ``Client.body`` does."""
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                data = message.get("body", b"")
                pieces.append(data)
                size += len(data)
                if size > MAX_BODY_BYTES:
                    raise BodyTooLarge(MAX_BODY_BYTES)
                more = message.get("more_body", False)
    except TimeoutError:
        raise BodyTooSlow(timeout_s, size) from None
    return b"".join(pieces)
