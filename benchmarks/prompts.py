"""Prompts made of a trace's ids, for a server that computes them: a trace has no tokens.

Equal ids give equal tokens and unlike ids unlike ones, so that prompts share exactly the blocks
that those of the run shared. A function of ids, vocabulary and seed: each time the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import orjson
from blake3 import blake3

from benchmarks.trace import Request

FIRST_TOKEN = 3
"""Below it many vocabularies have the tokens that begin, end and pad."""
CACHED_BLOCKS = 20_000
"""60 MB with Mooncake's blocks of 512 tokens, six bytes each."""


class Prompts:
    """JSON lists of token ids."""

    def __init__(self, block_tokens: int, vocab_size: int, seed: int) -> None:
        """``vocab_size``: ids are at least ``FIRST_TOKEN`` and below it."""
        self._block_tokens = block_tokens
        self._span = vocab_size - FIRST_TOKEN
        self._seed = seed
        self._block = lru_cache(CACHED_BLOCKS)(lambda number: self._made(number, block_tokens))

    def of(self, position: int, request: Request) -> bytes:
        """Of the request at that place of the trace: ``request.prompt_tokens`` token ids.

        Where the trace does not say what the end of a prompt is, it is like no other's.
        """
        size = self._block_tokens
        whole = request.whole_blocks(size)
        pieces = [self._block(number) for number in request.ids[:whole]]
        left = request.prompt_tokens - whole * size
        if left:
            known = len(request.ids) > whole
            pieces.append(self._made(request.ids[whole] if known else f"end {position}", left))
        return b"[%b]" % b",".join(pieces)

    def _made(self, key: int | str, count: int) -> bytes:
        draw = blake3(f"{self._seed} {key}".encode()).digest(length=4 * count)
        return orjson.dumps(_tokens(draw, self._span))[1:-1]


def _tokens(draw: bytes, span: int) -> Sequence[int]:
    return [FIRST_TOKEN + each % span for each in array("I", draw)]
