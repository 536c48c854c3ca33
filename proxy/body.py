"""What a generation's body says to routing. Parsed once; forwarded as the bytes that came."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from routing.blocks import Path

KEPT_BYTES = 2 * 1024 * 1024
"""Of bodies that are remembered: 80 prompts of 4,000 tokens. Their lists take 6 to 10 times as
much, and what is no list of tokens 30 times at worst."""
_ENTRY_BYTES = 256
"""What an entry counts for beside its body."""
_SEED_NEAR_THE_END = re.compile(rb'"seed": ?(?:0|[1-9]\d{0,18})((?:, ?"\w+": ?-?\d[\d.eE+-]*)*\})')
_NEAR_BYTES = 100


@dataclass(slots=True)  # one a request: frozen, it takes a microsecond more
class Generation:
    """``model`` is empty where the body names none: vLLM then serves its base model.

    Bodies that say the same share one, but for ``path`` nothing of it is to be changed.
    """

    model: str
    prompt: Sequence[int] | bytes
    weight: int
    """Rollouts the call asks for: prompts times ``n``."""
    stream: bool
    single: bool = False
    """It asks for one choice and no more."""
    path: Path | None = None
    """Of the prompt, once a policy has made it."""


class NotJson(ValueError):
    """The body is no JSON object."""


MAX_WEIGHT = 4096
"""Bound of what one call can add to a replica's load, whatever ``n`` it names."""


class Bodies:
    """Reads bodies, and remembers the latest.

    The rollouts of a group differ in nothing but their seed, which TRL 1.16 writes last, or before
    ``min_p`` (async_rollout_worker.py; 1.14 sends none), so that only the first of them is parsed.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, Generation] = {}
        self._kept_bytes = 0

    def __repr__(self) -> str:
        return f"<Bodies {len(self._kept)} kept, {self._kept_bytes} bytes>"

    def read(self, body: bytes) -> Generation:
        """As ``parse``."""
        said = _with_seed_0(body)
        found = self._kept.get(said)
        if found is None:
            found = parse(body)
            size = len(said) + _ENTRY_BYTES
            if size > KEPT_BYTES:
                return found
            self._kept[said] = found
            self._kept_bytes += size
            while self._kept_bytes > KEPT_BYTES:  # the first to come goes first
                gone = next(iter(self._kept))
                del self._kept[gone]
                self._kept_bytes -= len(gone) + _ENTRY_BYTES
        return found


def _with_seed_0(body: bytes) -> bytes:
    """The body, with 0 for a seed behind which there are only numbers: all else is as it was.

    In front of the bracket that ends a body those bytes are members of it and nothing else, for a
    string would end in a quotation mark.
    """
    start = body.rfind(b'"seed":', -_NEAR_BYTES)
    if start >= 0 and (found := _SEED_NEAR_THE_END.fullmatch(body, start)):
        return body[:start] + b'"seed":0' + found[1]
    return body


def parse(body: bytes) -> Generation:
    """Read ``model``, ``prompt`` or ``messages``, ``n`` and ``stream``; raise ``NotJson``.

    Whatever else is wrong with the body is for the replica to say.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = _lenient(body)
    if not isinstance(data, dict):
        raise NotJson(f"the body is a JSON {_kind(data)}, not an object")
    model = data.get("model")
    prompt, prompts = _prompt(data)
    n = data.get("n", 1)
    single = prompts == 1 and n == 1 and "prompt_embeds" not in data
    sampling = data.get("sampling_params")
    if isinstance(sampling, dict):  # of /inference/v1/generate
        n = sampling.get("n", n)
        single = single and n == 1
    return Generation(
        model=model if isinstance(model, str) else "",
        prompt=prompt,
        weight=min(prompts * _count(n), MAX_WEIGHT),
        stream=data.get("stream") is True,
        single=single,
    )


def _count(n: Any) -> int:
    """What vLLM makes of ``n``, at least 1: pydantic takes "2" and 2.0 for 2."""
    if type(n) is int:
        return max(1, n)
    try:
        value = float(n) if isinstance(n, str | float) else 1.0
    except ValueError:
        return 1
    return int(value) if value >= 1 and value.is_integer() else 1


def _lenient(body: bytes) -> Any:
    """Python's parser takes what orjson does not (NaN, integers past 64 bits), as vLLM's does."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as exc:
        where = str(exc) if isinstance(exc, json.JSONDecodeError) else type(exc).__name__
        raise NotJson(f"the body is not JSON: {where}") from exc


def _prompt(data: dict[str, Any]) -> tuple[Sequence[int] | bytes, int]:
    """The first prompt, and how many there are."""
    for key in ("prompt", "token_ids"):
        value = data.get(key)
        if isinstance(value, str):
            return value.encode("utf-8", "surrogatepass"), 1
        if isinstance(value, list) and value:
            first = value[0]
            if isinstance(first, list):
                return first, len(value)
            if isinstance(first, str):
                return first.encode("utf-8", "surrogatepass"), len(value)
            return value, 1
    messages = data.get("messages")
    if messages is None:
        return b"", 1
    # What a chat template puts first comes first. Without the closing bracket a longer
    # conversation begins with the bytes of a shorter one.
    head = [data[key] for key in ("system", "tools") if data.get(key) is not None]
    return (orjson_bytes(head) if head else b"") + orjson_bytes(messages)[:-1], 1


def orjson_bytes(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        return json.dumps(value).encode("utf-8", "surrogatepass")


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
