"""A recorded trace, read whole: requests and events in the order of their times.

Both kinds are read: what ``--record`` writes (the contract's section 5) and plain Mooncake traces
(``timestamp``, ``input_length``, ``output_length``, ``hash_ids`` of 512 tokens each). Keys that are
not known are ignored; a line that cannot be used is left out, and told with its number.
"""

from __future__ import annotations

import io
import math
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from blake3 import blake3

FORMAT = 1
MOONCAKE_BLOCK_TOKENS = 512
"""Mooncake's traces do not say it; their README does."""
MAX_TOKENS = 100_000_000
"""Of one request: more is a damaged line, not a context."""
MAX_N = 4096
"""As ``proxy.body.MAX_WEIGHT``."""


class TraceError(ValueError):
    """The file cannot be replayed at all. One line, which names it and says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. ``ids`` has one id per whole block of the prompt and, where it is known, one
    for the block that is not whole. It may end before the prompt does."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: array[int]
    model: str = ""
    n: int = 1
    """Replies asked for; ``output_tokens`` are those of all."""
    replica: str = ""
    ok: bool = True
    """False for one that ended in an error, or without an answer."""

    def reply_tokens(self, number: int) -> int:
        """Of reply ``number``, from 0: those of all shared out, what is left over to the first."""
        return max(1, (self.output_tokens + self.n - 1 - number) // self.n)

    def whole_blocks(self, block_tokens: int) -> int:
        """How many of ``ids`` stand for whole blocks."""
        return min(len(self.ids), self.prompt_tokens // block_tokens)


@dataclass(frozen=True, slots=True)
class Event:
    """``kind``: publish, unload, pause or resume; other kinds are left out."""

    at_s: float
    kind: str
    model: str = ""
    real: bool = False
    """Of a pause or resume: whether it reached the replicas."""
    clear_cache: bool = False
    """Of a pause: whether their prefix caches were cleared."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that is left out."""

    line: int
    why: str


@dataclass(slots=True)
class Trace:
    name: str
    digest: str = ""
    """blake3 of the file, 16 hexadecimal digits."""
    block_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    inflight: int | None = None
    """The limit that its trainer keeps, of a trace that is made and not recorded."""

    def replicas(self) -> int:
        """How many different ones the trace names; 0 for a plain one."""
        return len({request.replica for request in self.requests} - {""})


def read(path: Path) -> Trace:
    """Read a file; ``.zst`` is unpacked. Raises ``TraceError``, also where there is no request."""
    trace = Trace(path.name)
    hasher = blake3()
    try:
        with ExitStack() as stack:
            lines = _lines(stack, path)
            for number, line in enumerate(lines, 1):
                hasher.update(line)
                _take(trace, number, line)
    except OSError as exc:
        raise TraceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    if not trace.requests:
        first = f"; line {trace.faults[0].line}: {trace.faults[0].why}" if trace.faults else ""
        raise TraceError(f"{path}: holds no request{first}")
    trace.digest = hasher.hexdigest(8)
    # A line is written when its request ends; the order of a trace is that of beginnings.
    trace.requests.sort(key=lambda request: request.at_s)
    trace.events.sort(key=lambda event: event.at_s)
    return trace


def _lines(stack: ExitStack, path: Path) -> Iterable[bytes]:
    file = stack.enter_context(path.open("rb"))
    if not path.name.endswith(".zst"):
        return file
    try:
        import zstandard
    except ImportError:
        raise TraceError(
            f"{path}: needs the package zstandard; install rollmux[zstd], or unpack it first"
        ) from None
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    stack.callback(reader.close)
    return _until_damage(io.BufferedReader(reader), zstandard.ZstdError)


def _until_damage(file: BinaryIO, damage: type[Exception]) -> Iterator[bytes]:
    """What can be unpacked, and then one line that is no JSON, which is told as a fault."""
    try:
        yield from file
    except damage:
        yield b"(damaged from here on)"


def _take(trace: Trace, number: int, line: bytes) -> None:
    if not line.strip():
        return
    try:
        data = orjson.loads(line)
        if not isinstance(data, dict):
            raise ValueError("is no JSON object")
        if "rollmux_trace" in data:
            if data["rollmux_trace"] != FORMAT:
                raise TraceError(
                    f"{trace.name}: is a trace of format {data['rollmux_trace']}, and this version "
                    f"reads {FORMAT}; replay it with the version that recorded it"
                )
        elif "event" in data:
            _take_event(trace, data)
        else:
            _take_request(trace, data)
    except orjson.JSONDecodeError:
        trace.faults.append(Fault(number, "is no JSON"))
    except TraceError:
        raise
    except ValueError as exc:
        trace.faults.append(Fault(number, str(exc)))


def _take_event(trace: Trace, data: dict[str, Any]) -> None:
    kind, model = data["event"], data.get("model", "")
    if kind not in ("publish", "unload", "pause", "resume"):
        return
    if kind == "publish" and data.get("outcome", "committed") != "committed":
        return
    if not isinstance(model, str):
        raise ValueError("model is no text")
    at_s = _time_s(data)
    real, clears = data.get("real") is True, data.get("clear_cache") is True
    trace.events.append(Event(at_s, kind, model, real, clears))


def _take_request(trace: Trace, data: dict[str, Any]) -> None:
    block_tokens = _integer(data, "block_size", 1, MAX_TOKENS, MOONCAKE_BLOCK_TOKENS)
    prompt_tokens = _integer(data, "input_length", 0, MAX_TOKENS)
    output_tokens = _integer(data, "output_length", 0, MAX_TOKENS)
    model, replica = data.get("model", ""), data.get("replica", "")
    if not isinstance(model, str) or not isinstance(replica, str):
        raise ValueError("model or replica is no text")
    if not isinstance(data.get("hash_ids"), list):
        raise ValueError("hash_ids is no list")
    try:
        ids = array("q", data["hash_ids"])
    except (TypeError, OverflowError):
        raise ValueError("hash_ids holds what is no id") from None
    if trace.block_tokens not in (0, block_tokens):
        raise ValueError(f"block_size is {block_tokens}, and {trace.block_tokens} before it")
    # Prompts that came as text are cut at bytes: there may be more ids than the tokens fill. The
    # ids tell prompts apart, so they count.
    prompt_tokens = max(prompt_tokens, (len(ids) - 1) * block_tokens + 1, 1)
    request = Request(
        _time_s(data),
        prompt_tokens,
        output_tokens,
        ids,
        model,
        _integer(data, "n", 1, MAX_N, 1),
        replica,
        data.get("status", 200) == 200,
    )
    trace.block_tokens = block_tokens
    trace.requests.append(request)


def _time_s(data: dict[str, Any]) -> float:
    value = data.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("timestamp is no number")
    if not 0 <= value < 1e12:
        raise ValueError(f"timestamp is {value}, out of range")
    return value / 1e3


def _integer(data: dict[str, Any], key: str, low: int, high: int, default: int = -1) -> int:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} is no whole number")
    if key not in data and default < 0:
        raise ValueError(f"{key} is missing")
    if not low <= value <= high:
        raise ValueError(f"{key} is {value}, out of range")
    return value
