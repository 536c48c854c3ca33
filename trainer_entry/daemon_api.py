"""The few calls that the trainer entry makes to the daemon, over HTTP, on asyncio streams."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

LOOK_TIMEOUT_S: Final = 5.0
"""One look at ``/health`` or the status; the daemon answers both from its own memory."""
MAX_ANSWER_BYTES: Final = 16 * 2**20
"""A status of a thousand replicas is about 1 MB."""
MAX_TEXT: Final = 500
"""Characters shown of an answer that is not ours, in one line."""


class Unanswered(Exception):
    """No complete answer: refused, reset, cut off or too late. The daemon may be restarting."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    @property
    def message(self) -> str:
        """The message of an error in vLLM's shape, else the start of the text."""
        try:
            return str(json.loads(self.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = " ".join(self.body.decode("utf-8", "replace").split())
            return f"status {self.status}: {text[:MAX_TEXT] or 'empty'}"


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the fleet; ``missing`` has a text per replica that is not ready."""

    ready: bool
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DaemonApi:
    """``url`` is the daemon's, ``api_key`` what its clients have to send (empty: nothing)."""

    url: str
    api_key: str = ""

    async def look(self) -> Look:
        """Whether ``/health`` is 200, and who is not ready by ``/proxy/status``. Never raises."""
        try:
            health = await self._call("GET", "/health", None, LOOK_TIMEOUT_S)
            status = await self._call("GET", "/proxy/status", None, LOOK_TIMEOUT_S)
        except Unanswered as error:
            return Look(False, (f"the daemon at {self.url} ({error})",))
        missing = _missing(status)
        if health.status != 200 and not missing:
            missing = (f"/health of {self.url} ({health.message})",)
        return Look(health.status == 200, missing)

    async def clean(self, run_id: str, take_over: bool, timeout_s: float) -> Answer:
        """Resume, unload left adapters, reset caches and mark, on every replica (contract 3.4).

        200: done. 409: a replica is busy for somebody else, and ``take_over`` is false.
        """
        body = {"run_id": run_id, "take_over": take_over}
        return await self._call("POST", "/proxy/clean", body, timeout_s)

    async def release(self, timeout_s: float) -> Answer:
        """Resume every replica that is really paused."""
        return await self._call("POST", "/proxy/release", {}, timeout_s)

    async def flush(self, path: str, timeout_s: float) -> Answer:
        """One look at which files below ``path`` the Hub does not list yet.

        200: ``files`` and ``missing`` are counts, ``first_missing`` has one of them, ``problem``
        says why the Hub could not be asked. 400: the folder is not in the bucket.
        """
        return await self._call("POST", "/proxy/flush", {"path": path}, timeout_s)

    async def _call(self, method: str, path: str, body: Any, timeout_s: float) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(method, path, body)
        except TimeoutError as error:
            raise Unanswered(f"{method} {path}: no answer in {timeout_s:g} s") from error
        except (OSError, EOFError, http.client.HTTPException) as error:
            raise Unanswered(f"{method} {path}: {str(error) or type(error).__name__}") from error

    async def _exchange(self, method: str, path: str, body: Any) -> Answer:
        at = urlsplit(self.url)
        tls = ssl.create_default_context() if at.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            at.hostname, at.port or (443 if tls else 80), ssl=tls
        )
        content = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {at.path}{path} HTTP/1.1",
            f"Host: {at.netloc}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
        ]
        if self.api_key:
            head.append(f"Authorization: Bearer {self.api_key}")
        try:
            writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + content)
            await writer.drain()
            raw = bytearray()
            while chunk := await reader.read(2**16):
                raw += chunk
                if len(raw) > MAX_ANSWER_BYTES:
                    raise Unanswered(f"{method} {path}: more than {MAX_ANSWER_BYTES} bytes")
        finally:
            writer.close()
        return _parse(bytes(raw))


class _Whole:
    """A finished answer as the ``socket`` that ``http.client`` reads from."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _parse(raw: bytes) -> Answer:
    """Bytes until the end of the connection; ``HTTPException`` if they are not a whole answer."""
    response = http.client.HTTPResponse(_Whole(raw))  # type: ignore[arg-type]
    response.begin()
    return Answer(response.status, response.read())


def _missing(status: Answer) -> tuple[str, ...]:
    try:
        replicas = json.loads(status.body)["replicas"]
        return tuple(
            f"{each['url']} {each['state']}"
            + (f" ({each['last_error']})" if each.get("last_error") else "")
            for each in replicas
            if each["state"] != "ready"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()
