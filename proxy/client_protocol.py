"""HTTP/1.1 on the trainer's side: uvicorn's protocol, with bounds and words where it has none.

A generation goes from here straight to the data plane, as a ``Client``; ASGI's messages, events and
tasks about each of them would cost more than carrying it. All else is left to uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.client import Client, head
from proxy.errors import BadRequest, HeadersTooLarge, ProxyError, error_body
from proxy.turns import Turns

log = logging.getLogger("rollmux")

HEAD_LIMIT_BYTES = 1024 * 1024
"""Past it a head that has no end yet is not read on. A whole one is held against a lower bound
(``app.HEAD_LIMIT_BYTES``), so that whoever is a little over it gets to read why."""

Carry = Callable[[Client], Coroutine[Any, Any, None] | None]
"""Carries one generation to its end, or has answered it. What it raises is the daemon's end."""


class _Ahead(Exception):
    """A request came before the one in hand was answered."""


class ClientProtocol(HttpToolsProtocol):
    """One client's connection.

    Requests are not taken ahead (RFC 9112, 9.3.2, lets a server close instead): uvicorn 0.54 tells
    only the last of them that the client is gone, and an engine would go on for nobody. The one in
    hand is answered with ``connection: close``, and the client sends the others again.
    """

    _ahead = False
    _in_head = True
    _head_bytes = 0
    """Of the head in hand, at most: what came in one piece with it may be among them."""
    _piece_bytes = 0
    _generation: Client | None = None
    _begun = False
    """The generation is, or waits for its turn."""
    _idle_since_s = 0.0

    def __init__(self, routed: dict[bytes, str], carry: Carry, turns: Turns, **given: Any) -> None:
        """``routed``: the targets of generations, with the name of each as a route."""
        super().__init__(**given)
        self._routed = routed
        self._carry = carry
        self._turns = turns

    def data_received(self, data: bytes) -> None:
        if self._ahead:
            return  # read all the same: the end of the connection comes behind it
        self._piece_bytes = len(data)
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        generation = self._generation
        if (
            generation is not None
            and not self._begun
            and not generation.finished
            and not self.transport.is_closing()  # refused: what came was no request after all
        ):
            self._begin(generation)  # its body is still to come
        # A body that came along may be most of it; then the head is whole.
        if self._in_head and self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse(HeadersTooLarge(HEAD_LIMIT_BYTES))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._generation is not None:
            self._generation.lost()

    def shutdown(self) -> None:
        if self._generation is not None and not self._generation.finished:
            self._generation.keep_alive = False
        else:
            super().shutdown()

    # One request

    def on_message_begin(self) -> None:
        busy: Any = None
        if self._generation is not None and not self._generation.finished:
            busy = self._generation
        elif self.cycle is not None and not self.cycle.response_complete:
            busy = self.cycle
        if busy is not None:
            self._ahead = True
            busy.keep_alive = False
            raise _Ahead
        self._generation = None
        self._begun = False
        self._in_head = True
        self._head_bytes = self._piece_bytes
        self._idle_since_s = self.loop.time()
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which nobody reads (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.get_method() == b"POST":
            route, target = self._routed.get(self.url), self.url
            if route is None:
                route, target = self._route_of(self.url)
            if route is not None:
                self._generation = Client(
                    self.transport,
                    self.flow,
                    route,
                    target,
                    self.headers,
                    keep_alive=self.parser.get_http_version() != "1.0"
                    and self.parser.should_keep_alive(),
                    expects_continue=self.expect_100_continue,
                    head_bytes=self._head_bytes,
                )
                return
        url, headers, expects_continue = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # makes the scope, which a generation does without
        self.url, self.expect_100_continue = url, expects_continue
        self.headers += headers
        super().on_headers_complete()

    def _route_of(self, url: bytes) -> tuple[str | None, bytes]:
        """The route of a target with a query, or written in another way; and path with query."""
        parsed = httptools.parse_url(url)
        path = parsed.path or b""
        route = self._routed.get(unquote(path, "latin-1").encode("latin-1"))
        return route, path + b"?" + parsed.query if parsed.query else path

    def on_body(self, body: bytes) -> None:
        if self._generation is None:
            super().on_body(body)
        elif not self._generation.finished:
            self._generation.on_body(body)

    def on_message_complete(self) -> None:
        generation = self._generation
        if generation is None:
            super().on_message_complete()
        elif not generation.finished:
            generation.on_whole()
            if not self._begun:
                self._begin(generation)

    def _begin(self, generation: Client) -> None:
        self._begun = True
        self._turns.begin(self._start, generation)

    def _start(self, generation: Client) -> None:
        carried = self._carry(generation)
        if carried is None:
            self._ended(generation)
            return
        task = self.loop.create_task(self._run(generation, carried))
        generation.task = task
        self.tasks.add(task)

    async def _run(self, generation: Client, carried: Coroutine[Any, Any, None]) -> None:
        try:
            await carried
        finally:
            self.tasks.discard(cast("asyncio.Task[None]", generation.task))
            self._ended(generation)

    def _ended(self, generation: Client) -> None:
        if generation.finished and generation.keep_alive:
            self.on_response_complete()
        else:
            self.transport.close()  # what has begun has no end then, which the client sees

    # Between requests

    def on_response_complete(self) -> None:
        """As uvicorn's, but the timer looks by itself whether its time has come."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_again_in(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        """Nothing: see ``timeout_keep_alive_handler``."""

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._generation is not None and not self._generation.finished:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            return
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_again_in(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _look_again_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    # What is no request

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is handled."""
        if self._ahead:
            return
        error = sys.exception()
        why = error and (error.__context__ or error)
        self._refuse(BadRequest(f"this is no HTTP/1.1 request ({why or msg})"))

    def _refuse(self, error: ProxyError) -> None:
        if self.transport.is_closing():
            return
        status, headers, body = error_body(error)
        peer = ":".join(map(str, self.client)) if self.client else "a client"
        log.warning("%s answered %d %s: %s", peer, status, error.code, error)
        self.transport.write(head(status, headers, keep_alive=False) + body)
        self.transport.close()
