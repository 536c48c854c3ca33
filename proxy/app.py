"""Which path goes where: generations to the data plane, everything else to a Starlette app."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Coroutine
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from broadcast.answer import Answer
from broadcast.joins import Joined
from proxy import page
from proxy.bucket_gate import BucketGate
from proxy.client import Client, ClientGone, body_of
from proxy.control import Control
from proxy.errors import (
    BadRequest,
    HeadersTooLarge,
    NotSupported,
    ProxyError,
    Unauthorized,
    UnknownRoute,
    bug_body,
    error_body,
)
from proxy.generation import Generations
from proxy.metrics import CONTENT_TYPE
from proxy.status import Status

log = logging.getLogger("rollmux")

ROUTED = frozenset(
    ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate")
)
NOT_POST = ["GET", "PUT", "PATCH", "DELETE"]
FORWARDED = {
    "/version": ["GET"],
    "/tokenize": ["POST"],
    "/detokenize": ["POST"],
    "/v1/completions/render": ["POST"],
    "/v1/chat/completions/render": ["POST"],
    "/docs": ["GET"],
    "/openapi.json": ["GET"],
}
"""Any ready replica can answer these."""
OPEN = frozenset(("/proxy/live", "/proxy", page.PATH))
"""Served without the key: they tell nothing. The page asks for it and reads the status with it."""
POLLED = frozenset(("/health", "/ping", "/proxy/ready"))
"""Asked again and again while the fleet starts: the log tells of each replica once instead."""
HEAD_LIMIT_BYTES = 256 * 1024
"""Bound of a request's headers, the same as of a reply's (``upstream.HEAD_LIMIT_BYTES``). A request
line over 64 kB the parser refuses: 400, with a line in the log (``client_protocol``)."""
NO_STATE_HERE = (
    "{path} keeps state on one replica, and the next request may go to another. "
    "Use /v1/chat/completions."
)
ONE_REPLICA_ONLY = (
    "merged weights cannot be broadcast to {n} replicas through one transfer engine. The trainer "
    "fell back to merged weights: the warning just above this in its log says why (usually "
    "replicas without --enable-lora, or with data parallelism). Fix that, or run one replica."
)


class App:
    """A key check, then the data plane or the Starlette app.

    An ASGI application for all but generations, which come by another way (``client_protocol``).
    """

    def __init__(self, generations: Generations, rest: ASGIApp, api_key: str | None) -> None:
        self._generations = generations
        self._rest = rest
        self._key = f"Bearer {api_key}".encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        refusal = self._refusal(scope["method"], path, scope["headers"], open=path in OPEN)
        if refusal is not None:
            await _error(refusal)(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    def generation(self, client: Client) -> Coroutine[Any, Any, None] | None:
        """Carries one generation to its end; None if it was refused, which is answered already."""
        refusal = self._refusal(
            "POST", client.route, client.headers, few=client.head_bytes <= HEAD_LIMIT_BYTES
        )
        if refusal is None:
            return self._generations(client)
        client.answer(refusal)
        return None

    def _refusal(
        self,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        *,
        open: bool = False,
        few: bool = False,
    ) -> ProxyError | None:
        """``few``: the headers are known to be within their bound."""
        if not few:
            head_bytes = sum(map(len, chain.from_iterable(headers)))
            if head_bytes > HEAD_LIMIT_BYTES:
                log.warning("%s %.200s: %d bytes of headers", method, path, head_bytes)
                return HeadersTooLarge(HEAD_LIMIT_BYTES)
        if self._key and not open:
            sent = next((v for k, v in headers if k == b"authorization"), b"")
            if not hmac.compare_digest(sent, self._key):
                return Unauthorized()
        return None


def rest(
    control: Control, status: Status, gate: BucketGate | None, *, body_timeout_s: float
) -> Starlette:
    """Everything but generations."""

    def target_of(request: Request) -> str:
        query = request.scope["query_string"].decode("latin-1")
        path: str = request.scope["raw_path"].decode("latin-1")
        return f"{path}?{query}" if query else path

    async def load(request: Request) -> Response:
        return _response(await control.load(await body_of(request.receive, body_timeout_s)))

    async def unload(request: Request) -> Response:
        return _response(await control.unload(await body_of(request.receive, body_timeout_s)))

    async def pause(request: Request) -> Response:
        await body_of(request.receive, body_timeout_s)
        return _response(await control.pause(request.scope["query_string"]))

    async def resume(request: Request) -> Response:
        await body_of(request.receive, body_timeout_s)
        return _response(await control.resume())

    async def broadcast(request: Request) -> Response:
        body = await body_of(request.receive, body_timeout_s)
        return _response(await control.broadcast(request.url.path, target_of(request), body))

    async def forward(request: Request) -> Response:
        body = await body_of(request.receive, body_timeout_s) if request.method == "POST" else None
        kind = request.headers.get("content-type", "")
        return _response(await control.forward(request.method, target_of(request), body, kind))

    async def joined(request: Request) -> Response:
        return _response(await control.joined(request.url.path, target_of(request)))

    async def health(request: Request) -> Response:
        return _response(control.health())

    async def init_transfer(request: Request) -> Response:
        replicas = len(control.replicas.fleet)
        if replicas > 1:
            raise NotSupported(ONE_REPLICA_ONLY.format(n=replicas))
        body = await body_of(request.receive, body_timeout_s)
        return _response(await control.broadcast(request.url.path, target_of(request), body))

    async def responses_api(request: Request) -> Response:
        raise NotSupported(NO_STATE_HERE.format(path="/v1/responses"))

    async def metrics(request: Request) -> Response:
        return Response(status.metrics_page(), media_type=CONTENT_TYPE)

    async def proxy_status(request: Request) -> Response:
        return _json(status.as_dict())

    async def live(request: Request) -> Response:
        return _json({"live": True})

    async def ready(request: Request) -> Response:
        return _response(control.health())

    async def status_text(request: Request) -> Response:
        return Response(status.as_text(), media_type="text/plain; charset=utf-8")

    async def live_page(request: Request) -> Response:
        return Response(page.HTML, headers=page.HEADERS)

    async def clean(request: Request) -> Response:
        return _response(await control.clean(await body_of(request.receive, body_timeout_s)))

    async def release(request: Request) -> Response:
        return _response(await control.release())

    async def flush(request: Request) -> Response:
        return _json(await _flush(gate, await body_of(request.receive, body_timeout_s)))

    async def add_replica(request: Request) -> Response:
        control.check_admin(request.headers)
        return _response(control.add_replica(await body_of(request.receive, body_timeout_s)))

    async def remove_replica(request: Request) -> Response:
        control.check_admin(request.headers)
        drain = request.query_params.get("drain", "").lower() in ("1", "true", "yes")
        return _response(control.remove_replica(request.path_params["id"], drain=drain))

    async def wrong_method(request: Request) -> Response:
        raise HTTPException(405, headers={"allow": "POST"})

    routes: list[BaseRoute] = [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/init_weight_transfer_engine", init_transfer, methods=["POST"]),
        Route("/v1/responses", responses_api, methods=["POST"]),
        Route("/v1/responses/{rest:path}", responses_api, methods=["GET", "POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/proxy/status", proxy_status, methods=["GET"]),
        Route("/proxy/status.txt", status_text, methods=["GET"]),
        Route("/proxy/live", live, methods=["GET"]),
        Route("/proxy/ready", ready, methods=["GET"]),
        Route(page.PATH, live_page, methods=["GET"]),
        Route("/proxy", lambda _: RedirectResponse("/proxy/"), methods=["GET"]),
        Route("/proxy/clean", clean, methods=["POST"]),
        Route("/proxy/release", release, methods=["POST"]),
        Route("/proxy/flush", flush, methods=["POST"]),
        Route("/proxy/replicas", add_replica, methods=["POST"]),
        Route("/proxy/replicas/{id}", remove_replica, methods=["DELETE"]),
        *(Route(path, wrong_method, methods=NOT_POST) for path in sorted(ROUTED)),
        *(Route(path, broadcast, methods=["POST"]) for path in control.BROADCAST),
        *(Route(path, joined, methods=["GET"]) for path in control.JOINED),
        *(Route(path, forward, methods=methods) for path, methods in FORWARDED.items()),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={
            ProxyError: _proxy_error,
            ClientGone: _client_gone,
            404: _not_found,
            405: _method_not_allowed,
            Exception: _bug,
        },
    )


async def _flush(gate: BucketGate | None, body: bytes) -> dict[str, object]:
    """Which files of a folder are not in the bucket yet; `rollmux run --flush-path` asks."""
    if gate is None:
        raise BadRequest("there is no bucket to look into; start with --bucket-gate")
    try:
        path = orjson.loads(body)["path"]
        flush = await gate.flushed(Path(path))
    except (KeyError, TypeError, orjson.JSONDecodeError) as exc:
        raise BadRequest('the body must be {"path": "/…"}') from exc
    except (ValueError, OSError) as exc:
        raise BadRequest(f"path: {exc}", param="path") from exc
    return {
        "files": flush.files,
        "missing": len(flush.missing),
        "first_missing": flush.missing[:1],
        "problem": flush.problem,
    }


def _response(answer: Answer | Joined) -> Response:
    """An answer as it is: vLLM gives some of its own no content type."""
    response = Response(answer.body, status_code=answer.status)
    if answer.content_type:
        response.headers["content-type"] = answer.content_type
    if isinstance(answer, Joined) and answer.error:
        response.headers["x-rollmux-error"] = answer.error
        log.warning("answered %d %s: %s", answer.status, answer.error, answer.body.decode()[:2000])
    return response


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _error(error: ProxyError) -> Response:
    return _raw(*error_body(error))


def _raw(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Response:
    response = Response(body, status_code=status)
    for name, value in headers:
        response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response


async def _proxy_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ProxyError)
    path = request.url.path
    level = logging.DEBUG if path in POLLED else logging.WARNING
    log.log(level, "%s %s answered %d %s: %s", request.method, path, exc.status, exc.code, exc)
    return _error(exc)


async def _client_gone(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)


async def _not_found(request: Request, exc: Exception) -> Response:
    return _error(UnknownRoute(request.method, request.url.path))


async def _method_not_allowed(request: Request, exc: Exception) -> Response:
    headers = exc.headers if isinstance(exc, HTTPException) else None
    return Response(
        b'{"detail":"Method Not Allowed"}', 405, headers=headers, media_type="application/json"
    )


async def _bug(request: Request, exc: Exception) -> Response:
    log.error("%s %s failed inside the daemon", request.method, request.url.path, exc_info=exc)
    return _raw(*bug_body())
