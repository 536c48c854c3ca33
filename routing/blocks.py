"""Hashes of the whole blocks of a prompt, each standing for all that comes before it.

The hash of block k is taken over the hash of block k-1 and the block, so two chains agree up to
block k exactly when model and first k blocks do. The root is the model's name with its length in
front and the kind of prompt, and nothing of this process: a restart gives the same chain.

XXH3 is no cryptographic hash: who sends prompts could make two of them collide, and would misplace
prompts of the same adapter, no more. Measured in one run on 2 busy cores, Python 3.11: 0.27 µs a
block with xxhash 4.1, 0.62 with one running blake3. 4-byte tokens pack and hash faster than 8-byte
ones, and every vocabulary fits. ``python -m benchmarks.decisions`` prints what it is here.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from xxhash import xxh3_128_digest

from routing.ids import BlockHash

DIGEST_BYTES = 16
"""128 bits: no collision is to be expected at any number of blocks. Half of it would save 8 bytes
a block in the table, and no time."""
_ODD, _END = 1, 2
"""Seeds of the hash: of a block that is not all tokens, and of what stands for a whole prompt. So
neither can equal a block of tokens with the same bytes."""
_digest = cast("Callable[..., BlockHash]", xxh3_128_digest)

TEXT_BYTES_PER_TOKEN = 4
"""Of a prompt that comes as text: about 4 bytes a token in English."""


@dataclass(slots=True)  # one a request: frozen, it takes a microsecond more
class Path:
    """What identifies a prompt, from general to special."""

    blocks: list[BlockHash]
    """One per whole block, at most as many as were asked for."""
    end: BlockHash | None
    """Stands for the whole prompt, the part of a block after the last whole one included. None for
    an empty prompt and for one longer than asked for. Never equal to a block's hash."""


def chain(model: str, prompt: Sequence[int] | bytes, block_tokens: int) -> list[BlockHash]:
    """One hash per whole block: ``len(prompt) // block_tokens`` of them, for text per 4 times as
    many bytes. Takes whatever JSON can carry in a list, and anything else as an empty prompt."""
    hashes, _, _ = _walk(model, _items(prompt), block_tokens, None)
    return hashes


def path(model: str, prompt: Sequence[int] | bytes, block_tokens: int, max_blocks: int) -> Path:
    """The chain of the first ``max_blocks`` blocks and, where that is all of it, its end."""
    items = _items(prompt)
    hashes, last, done = _walk(model, items, block_tokens, max_blocks)
    rest = items[done:]
    if not items or len(rest) >= _width(items, block_tokens):
        return Path(hashes, None)
    packed = rest if isinstance(rest, bytes) else _pack(rest)
    if packed is None:
        last, packed = _odd(last, rest), b""
    return Path(hashes, _digest(last + packed, _END))


def _items(prompt: object) -> bytes | list[object] | tuple[object, ...]:
    if isinstance(prompt, bytes | list | tuple):
        return prompt
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, bytearray | memoryview):
        return bytes(prompt)
    return list(prompt) if isinstance(prompt, Sequence) else b""


def _root(model: str, items: bytes | list[object] | tuple[object, ...]) -> BlockHash:
    name = model.encode("utf-8", "surrogatepass")
    kind = b"text" if isinstance(items, bytes) else b"ints"
    return _digest(len(name).to_bytes(8, "little") + name + kind)


def _width(items: bytes | list[object] | tuple[object, ...], block_tokens: int) -> int:
    return block_tokens * TEXT_BYTES_PER_TOKEN if isinstance(items, bytes) else block_tokens


def _walk(
    model: str,
    items: bytes | list[object] | tuple[object, ...],
    block_tokens: int,
    max_blocks: int | None,
) -> tuple[list[BlockHash], BlockHash, int]:
    """Hashes, the last of them or else the root, and how many items they stand for."""
    last = _root(model, items)
    width = _width(items, block_tokens)
    count = len(items) // width
    if max_blocks is not None and count > max_blocks:
        count = max_blocks
    done = count * width
    covered = items if done == len(items) else items[:done]
    packed = covered if isinstance(covered, bytes) else _pack(covered)
    if packed is None:
        return *_walk_any(last, covered, width), done
    digest, hashes = _digest, []
    if packed:
        cut = struct.iter_unpack(f"{len(packed) // count}s", packed)
        hashes = [last := digest(last + block) for (block,) in cut]
    return hashes, last, done


def _walk_any(
    last: BlockHash, items: Sequence[object], width: int
) -> tuple[list[BlockHash], BlockHash]:
    """As the fast way, where some blocks hold other things than tokens."""
    hashes = []
    for start in range(0, len(items), width):
        block = items[start : start + width]
        data = _pack(block)
        last = _odd(last, block) if data is None else _digest(last + data)
        hashes.append(last)
    return hashes, last


def _pack(items: Sequence[object]) -> bytes | None:
    """4 bytes a token; None if one of them is not an integer of 32 bits."""
    try:
        return struct.pack(f"<{len(items)}i", *items)
    except struct.error:
        return None


def _odd(last: BlockHash, items: Any) -> BlockHash:
    """The hash of items that are not all tokens. ``marshal`` knows all that JSON can carry,
    integers of any length and lone surrogates too; its version 2 writes the same bytes for the
    same value."""
    try:
        written = marshal.dumps(items, 2)
    except ValueError:  # nested deeper than its limit (2,000), or no JSON value at all
        written = b""
    return _digest(last + written, _ODD)


def prompt_digest(model: str, prompt: Sequence[int] | bytes) -> bytes:
    """16 bytes that stand for model and whole prompt."""
    items = _items(prompt)
    root = _root(model, items)
    packed = items if isinstance(items, bytes) else _pack(items)
    return _odd(root, items) if packed is None else _digest(root + packed)
