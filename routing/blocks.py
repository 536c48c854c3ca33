"""Hashes of the whole blocks of a prompt, each standing for all that comes before it.

The hash of block k is the digest of one running blake3 over the seed and blocks 1..k, so two chains
agree up to block k exactly when model and first k blocks do. The seed is the model's name with its
length in front and the kind of prompt, and nothing of this process: a restart gives the same chain.

Measured on 2 shared cores, Python 3.11, blake3 1.0: a running hasher asked for its digest takes
0.55 µs a block, a fresh hasher over the last hash and the block 0.7 µs; the length of the digest
makes no difference. Packing takes 9 ns a token; 4-byte tokens pack and hash a quarter faster than
8-byte ones, and every vocabulary fits. ``python -m benchmarks.decisions`` prints what it is here.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from routing.ids import BlockHash

DIGEST_BYTES = 16
"""128 bits: no collision is to be expected at any number of blocks. Half of it would save 8 bytes
a block in the table, and no time."""

TEXT_BYTES_PER_TOKEN = 4
"""Of a prompt that comes as text: about 4 bytes a token in English."""


KEPT_BLOCKS = 100_000
"""In the paths kept for prompts that come again: about 6 MB, or 400 prompts of 4,000 tokens."""


@dataclass(slots=True)  # one a request: frozen, it takes a microsecond more
class Path:
    """What identifies a prompt, from general to special."""

    blocks: list[BlockHash]
    """One per whole block, at most as many as were asked for."""
    end: BlockHash | None
    """Stands for the whole prompt, the part of a block after the last whole one included. None for
    an empty prompt and for one longer than asked for. Never equal to a block's hash."""
    block_tokens: int = 0
    """Of each block."""


def chain(model: str, prompt: Sequence[int] | bytes, block_tokens: int) -> list[BlockHash]:
    """One hash per whole block: ``len(prompt) // block_tokens`` of them, for text per 4 times as
    many bytes. Takes whatever JSON can carry in a list, and anything else as an empty prompt."""
    hashes, _, _ = _walk(model, _items(prompt), block_tokens, None)
    return hashes


def path(model: str, prompt: Sequence[int] | bytes, block_tokens: int, max_blocks: int) -> Path:
    """The chain of the first ``max_blocks`` blocks and, where that is all of it, its end."""
    items = _items(prompt)
    hashes, hasher, done = _walk(model, items, block_tokens, max_blocks)
    rest = items[done:]
    if not items or len(rest) >= _width(items, block_tokens):
        return Path(hashes, None, block_tokens)
    packed = rest if isinstance(rest, bytes) else _pack(rest)
    if packed is None:
        hasher, packed = _turn(hasher, rest), b""
    # Further on in the same stream of digests, so that no block of the same content equals it.
    end = hasher.update(packed).digest(DIGEST_BYTES, seek=DIGEST_BYTES)
    return Path(hashes, BlockHash(end), block_tokens)


class Paths:
    """Paths of the latest prompts, each hashed block by block once.

    The rollouts of a group have one prompt, and its digest as a whole takes a quarter of the time
    of its path at 4,000 tokens; packing the tokens is most of it (measured as above).
    """

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._kept: dict[bytes, Path] = {}
        self._kept_blocks = 0

    def __repr__(self) -> str:
        return f"Paths({len(self._kept)} prompts, {self._kept_blocks} blocks)"

    def of(self, model: str, prompt: Sequence[int] | bytes) -> Path:
        """As ``path``. Not to be changed: the next one may get the same."""
        key = prompt_digest(model, prompt)
        found = self._kept.get(key)
        if found is None:
            found = path(model, prompt, self._block_tokens, self._max_blocks)
            self._kept[key] = found
            self._kept_blocks += len(found.blocks) + 1
            while self._kept_blocks > KEPT_BLOCKS:  # the first to come goes first
                gone = self._kept.pop(next(iter(self._kept)))
                self._kept_blocks -= len(gone.blocks) + 1
        return found


def _items(prompt: object) -> bytes | list[object] | tuple[object, ...]:
    if isinstance(prompt, bytes | list | tuple):
        return prompt
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, bytearray | memoryview):
        return bytes(prompt)
    return list(prompt) if isinstance(prompt, Sequence) else b""


def _seed(model: str, items: bytes | list[object] | tuple[object, ...]) -> blake3:
    name = model.encode("utf-8", "surrogatepass")
    kind = b"text" if isinstance(items, bytes) else b"ints"
    return blake3(len(name).to_bytes(8, "little") + name + kind)


def _width(items: bytes | list[object] | tuple[object, ...], block_tokens: int) -> int:
    return block_tokens * TEXT_BYTES_PER_TOKEN if isinstance(items, bytes) else block_tokens


def _walk(
    model: str,
    items: bytes | list[object] | tuple[object, ...],
    block_tokens: int,
    max_blocks: int | None,
) -> tuple[list[BlockHash], blake3, int]:
    """Hashes, the hasher behind the last of them, and how many items they stand for."""
    hasher = _seed(model, items)
    width = _width(items, block_tokens)
    count = len(items) // width
    if max_blocks is not None and count > max_blocks:
        count = max_blocks
    done = count * width
    covered = items if done == len(items) else items[:done]
    packed = covered if isinstance(covered, bytes) else _pack(covered)
    if packed is None:
        hashes, hasher = _walk_any(hasher, covered, width)
    elif packed:
        update = hasher.update  # returns the hasher itself
        cut = struct.iter_unpack(f"{len(packed) // count}s", packed)
        hashes = [BlockHash(update(block).digest(DIGEST_BYTES)) for (block,) in cut]
    else:
        hashes = []
    return hashes, hasher, done


def _walk_any(
    hasher: blake3, items: Sequence[object], width: int
) -> tuple[list[BlockHash], blake3]:
    """As the fast way, where some blocks hold other things than tokens."""
    hashes = []
    for start in range(0, len(items), width):
        block = items[start : start + width]
        data = _pack(block)
        if data is None:
            hasher = _turn(hasher, block)
        else:
            hasher.update(data)
        hashes.append(BlockHash(hasher.digest(DIGEST_BYTES)))
    return hashes, hasher


def _pack(items: Sequence[object]) -> bytes | None:
    """4 bytes a token; None if one of them is not an integer of 32 bits."""
    try:
        return struct.pack(f"<{len(items)}i", *items)
    except struct.error:
        return None


def _turn(hasher: blake3, items: Any) -> blake3:
    """What follows items that are not all tokens: a new hasher, keyed with all that was before, so
    that no row of tokens can be mistaken for them. ``marshal`` knows all that JSON can carry,
    integers of any length and lone surrogates too; its version 2 writes the same bytes for the
    same value."""
    try:
        written = marshal.dumps(items, 2)
    except ValueError:  # nested deeper than its limit (2,000), or no JSON value at all
        written = b""
    return blake3(blake3(written).digest(), key=hasher.digest())


def prompt_digest(model: str, prompt: Sequence[int] | bytes) -> bytes:
    """32 bytes that stand for model and whole prompt."""
    items = _items(prompt)
    hasher = _seed(model, items)
    packed = items if isinstance(items, bytes) else _pack(items)
    if packed is None:
        return _turn(hasher, items).digest()
    return hasher.update(packed).digest()
