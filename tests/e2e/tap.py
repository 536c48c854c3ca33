"""A recording pass-through: what one side of the wire saw, and on demand something false.

Between trainer and daemon it keeps every exchange. Between daemon and replica it plants a fault:
it rewrites the request, and neither side can tell. What is lost behind it is lost in front of it:
there is never an answer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

# Of one hop only (RFC 9110, 7.6.1), or set anew by whoever sends the body on.
NOT_PASSED_ON = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "date"}
NOT_PASSED_ON |= {"server", "content-encoding"}

Rewrite = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call as the caller saw it; `request` and `reply` are parsed JSON, else None."""

    method: str
    path: str
    request: Any
    status: int
    headers: httpx.Headers
    reply: Any
    text: str
    body: bytes
    """Of the request, as the caller sent it."""


class Tap:
    """Serves at `url` what `upstream` answers.

    `rewrite(path, request)` may change a JSON body on its way up. `before_answer(exchange)` runs in
    a thread once an answer is in and before the caller gets it: the caller is held still meanwhile.
    """

    def __init__(
        self,
        upstream: str,
        rewrite: Rewrite | None = None,
        before_answer: Callable[[Exchange], None] | None = None,
    ) -> None:
        self.exchanges: list[Exchange] = []
        self.unseen: list[Exchange] = []  # answered when their caller was gone
        self.lost: list[tuple[str, str]] = []  # method and path of calls that got no answer
        self.faults: list[BaseException] = []  # of before_answer; to be raised by the test
        self.url = ""
        self._upstream = upstream
        self._rewrite = rewrite
        self._before_answer = before_answer
        # Unlimited: this must never be what holds a generation back. None is kept: a server that
        # closes one as it is used again would look like a server that died.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        request = Request(scope, receive)
        sent = body = await request.body()
        asked = parse(body)
        if self._rewrite and isinstance(asked, dict):
            body = json.dumps(self._rewrite(scope["path"], asked)).encode()
        try:
            answer = await self._client.request(
                request.method,
                self._upstream + scope["path"],
                params=request.query_params,
                headers=[(k, v) for k, v in request.headers.items() if k not in NOT_PASSED_ON],
                content=body,
            )
        except httpx.HTTPError:
            if not await request.is_disconnected():
                self.lost.append((request.method, scope["path"]))
                # ASGI has no word for it: uvicorn's own object, whose method `send` is.
                send.__self__.transport.abort()
                await asyncio.sleep(0)  # uvicorn learns of it in the loop's next turn
            return
        exchange = Exchange(
            request.method,
            scope["path"],
            asked,
            answer.status_code,
            answer.headers,
            parse(answer.content),
            answer.text,
            sent,
        )
        if await request.is_disconnected():
            self.unseen.append(exchange)
            return
        if self._before_answer:
            try:
                await asyncio.to_thread(self._before_answer, exchange)
            except Exception as fault:  # shown by the test; the trainer goes on
                self.faults.append(fault)
        self.exchanges.append(exchange)
        reply = Response(answer.content, answer.status_code)
        reply.raw_headers += [
            (k, v) for k, v in answer.headers.raw if k.decode().lower() not in NOT_PASSED_ON
        ]
        await reply(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})


def parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


@contextlib.contextmanager
def tapped(
    upstream: str,
    rewrite: Rewrite | None = None,
    before_answer: Callable[[Exchange], None] | None = None,
    port: int = 0,
) -> Iterator[Tap]:
    """A Tap on a loopback port (0: a free one), served from a thread of this process.

    Before and after, connections to that port are refused.
    """
    tap = Tap(upstream, rewrite, before_answer)
    config = uvicorn.Config(
        tap,
        host="127.0.0.1",
        port=port,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    tap.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([listener],), name="tap")
    thread.start()
    try:
        yield tap
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
