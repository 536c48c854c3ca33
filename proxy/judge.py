"""What a replica's answer to a generation means: pass it on, or ask another replica.

Pure: status and body in, a verdict out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from enum import StrEnum

import orjson

from broadcast.answers import ENGINE_DEAD_TEXT


class Verdict(StrEnum):
    """What to do with the answer."""

    PASS = "pass"
    """It is the replica's answer to this request: the client gets it unchanged."""
    ABORTED = "aborted"
    """200, but cut short by a pause or an abort: never handed on as a success."""
    ENGINE_DEAD = "engine_dead"
    """The engine behind the API server died."""
    ADAPTER_LOST = "adapter_lost"
    """404 for the model named: this replica does not hold it (any more)."""
    SERVER_ERROR = "server_error"
    """A 5xx in vLLM's shape: may be this request's own fault, so it is tried once elsewhere."""
    TOKEN_REJECTED = "token_rejected"
    """401 or 403: the path to the replica is shut."""
    EDGE = "edge"
    """Not vLLM's words: something in between answered."""


_ENGINE_DEAD = ENGINE_DEAD_TEXT.encode()
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
"""For zlib: tell the two by their first bytes (zlib.h, inflateInit2)."""
READABLE_BYTES = 64 * 1024 * 1024
"""Decoded of a compressed body; what lies behind is not judged. ``upstream.WHOLE_LIMIT_BYTES``."""


def readable(headers: Iterable[tuple[bytes, bytes]], body: bytes | bytearray) -> bytes | bytearray:
    """``body`` without its compression, for judging; as it is where that is not known here.

    Replies are asked for uncompressed. Something in between may not care.
    """
    if body.startswith(b"{"):  # nearly all
        return body
    for name, value in headers:
        if name == b"content-encoding" and value.lower() in (b"gzip", b"x-gzip", b"deflate"):
            try:
                return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, READABLE_BYTES)
            except zlib.error:
                return body
    return body


def judge(status: int, body: bytes | bytearray, *, single: bool = False) -> Verdict:
    """``body`` is the whole reply, ``single`` if it has one choice at most. For a stream that began
    well see ``judge_piece``."""
    if status == 200:
        if _is_page(body):
            return Verdict.EDGE
        return Verdict.ABORTED if _aborted(body, single) else Verdict.PASS
    if status in (401, 403):
        return Verdict.TOKEN_REJECTED
    if not _vllm_shaped(body):
        return Verdict.EDGE
    if status == 404 and b"does not exist" in body:
        return Verdict.ADAPTER_LOST
    if status >= 500:
        return Verdict.ENGINE_DEAD if _ENGINE_DEAD in body else Verdict.SERVER_ERROR
    return Verdict.PASS


def judge_piece(piece: bytes | bytearray) -> Verdict:
    """What the first piece of a 200 stream says; of the others see ``engine_died``."""
    if engine_died(piece):
        return Verdict.ENGINE_DEAD
    return Verdict.EDGE if _is_page(piece) else Verdict.PASS


def engine_died(piece: bytes | bytearray) -> bool:
    """Whether a piece of a 200 stream says so: an engine that dies under one sends an error event.

    vLLM 0.27.1 then ends the stream as any other (entrypoints/generate/base/serving.py,
    create_streaming_error_response). Several events may have come as one piece; text that a model
    wrote is inside of an event's JSON, where a line break is an escape.
    """
    # Not ``in``: with bytes it makes an exception, and drops it (CPython 3.11, bytes_methods.c).
    return piece.find(_ENGINE_DEAD) >= 0 and any(
        piece.startswith(begin) or b"\n" + begin in piece for begin in _ERROR_EVENTS
    )


_ERROR_EVENTS = (b'data: {"error"', b"event: error")


def _is_page(body: bytes | bytearray) -> bool:
    """HTML where JSON or events were due: a login page of something in between, say."""
    return body[:64].lstrip()[:1] == b"<"


_FINISH_REASON = b'"finish_reason"'
_REASON = re.compile(rb'"finish_reason"\s*:\s*(?:"(\w+)|null)')


def _aborted(body: bytes | bytearray, single: bool) -> bool:
    """vLLM 0.27.1 gives running requests ``finish_reason: "abort"`` at ``/pause?mode=abort``.

    Looked for from the end: of a single choice of 90 kB most lies before it, and looking through
    that was an eighth of what such a generation cost.
    """
    at = len(body)
    while (at := body.rfind(_FINISH_REASON, 0, at)) >= 0:
        if (reason := _REASON.match(body, at)) is None:
            continue  # the words as something else, say the text of a token
        if reason[1] == b"abort":
            break
        if single:
            return False
    else:
        return False
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list):
        return False
    return any(isinstance(c, dict) and c.get("finish_reason") == "abort" for c in choices)


def _vllm_shaped(body: bytes | bytearray) -> bool:
    """``{"error": {…}}``, ``{"error": "…"}`` (dev endpoints) or Starlette's ``{"detail": …}``."""
    if body.lstrip()[:1] != b"{":
        return False
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(data, dict) and ("error" in data or "detail" in data or "object" in data)
