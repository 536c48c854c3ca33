"""What a generation's body says to routing. Parsed once; forwarded as the bytes that came."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(slots=True)  # one a request: frozen, it takes a microsecond more
class Generation:
    """``model`` is empty where the body names none: vLLM then serves its base model."""

    model: str
    prompt: Sequence[int] | bytes
    weight: int
    """Rollouts the call asks for: prompts times ``n``."""
    stream: bool
    single: bool = False
    """It asks for one choice and no more."""


class NotJson(ValueError):
    """The body is no JSON object."""


MAX_WEIGHT = 4096
"""Bound of what one call can add to a replica's load, whatever ``n`` it names."""


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
