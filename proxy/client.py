"""The trainer's side of one exchange: its body, its answer, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import Message, Receive, Send

from proxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, error_body

MAX_BODY_BYTES = 32 * 1024 * 1024
"""A million token ids are 7 MB of JSON. Each body is kept whole until it is answered, and parsing
one holds the event loop for about 5 ms a megabyte: hence a bound."""


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Client:
    """One request's ``receive`` and ``send``, and what became of them."""

    __slots__ = ("_receive", "_send", "finished", "gone", "started")

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.started = False
        self.finished = False
        self.gone = False

    async def body(self, timeout_s: float) -> bytes:
        """The whole body. Raises ``BodyTooLarge``, ``BodyTooSlow`` or ``ClientGone``."""
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                more = True
                while more:
                    message = await self._message()
                    data = message.get("body", b"")
                    pieces.append(data)
                    size += len(data)
                    if size > MAX_BODY_BYTES:
                        raise BodyTooLarge(MAX_BODY_BYTES)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise BodyTooSlow(timeout_s, size) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _message(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            raise ClientGone
        return message

    async def until_gone(self, task: asyncio.Task[None]) -> None:
        """Cancel ``task`` when the client goes away before its answer is complete."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                break
        if not self.finished:
            self.gone = True
            task.cancel()

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, error: ProxyError) -> None:
        """The daemon's own answer, in vLLM's shape."""
        status, headers, body = error_body(error)
        await self.start(status, headers)
        await self.finish(body)
