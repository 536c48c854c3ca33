"""How many tokens a reply says it has: found by looking at its bytes, without parsing them.

A whole reply with log-probabilities is hundreds of kilobytes of JSON; looking for one key in it is
a hundredth of the cost of reading it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

USAGE_BYTES = 600
"""Looked at from the key ``usage`` on: vLLM's takes 120 bytes, 200 with its details."""
TAIL_BYTES = 2048
"""Kept of a stream's end: its last events, of which one may carry the usage."""

EVENT = b"data: {"
"""Begins an event that is not the closing ``[DONE]``."""

# The second name of each is that of /v1/messages. Shapes as the simulated replica answers them,
# which tests/e2e/test_conformance.py holds against vLLM.
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})')
_TOKEN_IDS = re.compile(rb'"token_ids":\s*\[([^\]]*)\]')


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """0 for what the reply does not tell."""

    prompt: int = 0
    output: int = 0


def of_whole(data: bytes | bytearray) -> ReplyTokens:
    """Of a whole reply: its last usage, else its lists of token ids, or its events.

    ``/inference/v1/generate`` has token ids and no usage.
    """
    start = data.rfind(b'"usage"')
    if start >= 0:
        usage = data[start : start + USAGE_BYTES]
        prompt, output = _PROMPT.search(usage), _OUTPUT.search(usage)
        if output is not None:
            return ReplyTokens(int(prompt[1]) if prompt else 0, int(output[1]))
    if data.startswith((b"data: ", b"event: ")):  # a stream that came in one piece
        return ReplyTokens(0, data.count(EVENT))
    lists = (found[1] for found in _TOKEN_IDS.finditer(data))
    return ReplyTokens(0, sum(ids.count(b",") + 1 for ids in lists if ids.strip()))


class StreamTokens:
    """Fed with a stream's pieces as they pass."""

    def __init__(self) -> None:
        self._tail = b""
        self._events = 0

    def feed(self, piece: bytes | bytearray) -> None:
        self._events += piece.count(EVENT)
        self._tail = (self._tail + piece)[-TAIL_BYTES:]

    def result(self) -> ReplyTokens:
        """The usage, if the stream has one; else an event counts as a token, which is near."""
        told = of_whole(self._tail) if b'"usage"' in self._tail else ReplyTokens()
        return told if told.output else ReplyTokens(0, self._events)
