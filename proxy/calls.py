"""Control calls to replicas, over httpx: one client a replica, every timeout written at the call.

Never on the connections that carry generations, so that a call does not queue behind them.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncIterator, Callable, Mapping

import httpx

from broadcast.answer import Answer, Cause, NoAnswer
from proxy.tokens import Bearer
from routing.ids import ReplicaId

CONNECT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Bound of an answer to a control call. ``/openapi.json`` of vLLM 0.27.1 is 0.2 MB, the largest."""
KEEP_ALIVE_S = 4.0
"""Below vLLM's 5 s, for the same reason as in ``upstream.IDLE_S``."""


class Calls:
    """Sends control calls; an instance is a ``broadcast.answer.Call``.

    ``urls`` gives the base URL of a replica. Nothing here raises for what a network can do.
    """

    def __init__(
        self,
        urls: Callable[[ReplicaId], str | None],
        bearer: Bearer,
        *,
        context: ssl.SSLContext | None = None,
        trust_env: bool = False,
    ) -> None:
        self._urls = urls
        self._bearer = bearer
        self._context = context
        self._trust_env = trust_env
        self._clients: dict[ReplicaId, httpx.AsyncClient] = {}

    async def __call__(
        self,
        replica: ReplicaId,
        method: str,
        target: str,
        body: bytes | AsyncIterator[bytes] | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Answer | NoAnswer:
        """A body in pieces needs its ``content-length`` among the headers."""
        url = self._urls(replica)
        if url is None:
            return NoAnswer(Cause.UNREACHABLE, "left the fleet")
        sent = dict(headers or {})
        if body is not None:
            sent.setdefault("content-type", "application/json")
        if self._bearer.allowed(url):
            sent["authorization"] = self._bearer.value().decode()
        if not sent.get("authorization"):
            sent.pop("authorization", None)
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(replica, method, url + target, body, sent, timeout)
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
            return NoAnswer(Cause.TIMEOUT, f"no answer within {timeout_s:g} s")
        except (httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
            return NoAnswer(Cause.UNREACHABLE, self._words(exc))
        except httpx.ConnectError as exc:
            if _refused(exc):
                return NoAnswer(Cause.REFUSED, "connection refused")
            return NoAnswer(Cause.UNREACHABLE, self._words(exc))
        except httpx.HTTPError as exc:
            return NoAnswer(Cause.RESET, self._words(exc))

    async def _ask(
        self,
        replica: ReplicaId,
        method: str,
        url: str,
        body: bytes | AsyncIterator[bytes] | None,
        headers: dict[str, str],
        timeout: httpx.Timeout,
    ) -> Answer | NoAnswer:
        client = self._client(replica)
        async with client.stream(
            method, url, content=body, headers=headers, timeout=timeout
        ) as response:
            pieces: list[bytes] = []
            size = 0
            async for piece in response.aiter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    return NoAnswer(Cause.RESET, f"answer over {MAX_ANSWER_BYTES} bytes")
            found = b"".join(pieces)
            if response.status_code != 200:  # refusals are shown and logged
                found = self._bearer.redact_bytes(found)
            return Answer(response.status_code, found, response.headers.get("content-type", ""))

    def _client(self, replica: ReplicaId) -> httpx.AsyncClient:
        client = self._clients.get(replica)
        if client is None:
            client = self._clients[replica] = httpx.AsyncClient(
                verify=self._context if self._context is not None else True,
                trust_env=self._trust_env,
                follow_redirects=False,
                limits=httpx.Limits(
                    max_connections=None,
                    max_keepalive_connections=4,
                    keepalive_expiry=KEEP_ALIVE_S,
                ),
                headers={"user-agent": "rollmux", "accept": "*/*"},
            )
        return client

    async def forget(self, replica: ReplicaId) -> None:
        client = self._clients.pop(replica, None)
        if client is not None:
            await client.aclose()

    async def close(self) -> None:
        for replica in tuple(self._clients):
            await self.forget(replica)

    def _words(self, exc: Exception) -> str:
        text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        return self._bearer.redact(text)


def _refused(exc: BaseException) -> bool:
    """Whether a refused connection is at the bottom of what httpx wrapped."""
    seen: BaseException | None = exc
    while seen is not None:
        if isinstance(seen, ConnectionRefusedError):
            return True
        if isinstance(seen, BaseExceptionGroup):
            return all(_refused(each) for each in seen.exceptions)
        if isinstance(seen, OSError) and seen.errno == errno.ECONNREFUSED:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
