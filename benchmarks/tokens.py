"""Pseudo tokens: a byte tokenizer like the tiny Qwen2's, and replies that show who answered.

A reply's tokens are a function of the weights, the prompt and the position (and of the seed,
where one is drawn), so that equal weights answer equally and other weights do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
"""The special tokens; id 2 also ends a reply."""


def _alphabet() -> list[int]:
    """Bytes in the order in which a byte-level BPE numbers them (GPT-2's printable alphabet)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    shown = {b: b for b in printable} | {b: 256 + i for i, b in enumerate(others)}
    return sorted(range(256), key=shown.__getitem__)


_BYTE_OF = dict(enumerate(_alphabet(), start=3))
_ID_OF = {byte: number for number, byte in _BYTE_OF.items()}
_FIRST, _COUNT = 3, 94  # '!' to '~': one token is one printable character


def encode(text: str) -> list[int]:
    """One id per byte of the text."""
    return [_ID_OF[byte] for byte in text.encode()]


def piece(token: int) -> bytes:
    """What one token decodes to; special tokens to nothing, merges to a stand-in letter."""
    if token <= IM_END:
        return b""
    byte = _BYTE_OF.get(token)
    return b"?" if byte is None else bytes((byte,))


def decode(tokens: Sequence[int]) -> str:
    return b"".join(map(piece, tokens)).decode("utf-8", "replace")


def chat_tokens(messages: Sequence[tuple[str, str]]) -> list[int]:
    """A conversation of (role, text) in the tiny Qwen2's chat template, with the reply's start."""
    out: list[int] = []
    for role, text in messages:
        out += [IM_START, *encode(f"{role}\n{text}"), IM_END, *encode("\n")]
    return [*out, IM_START, *encode("assistant\n")]


def reply_tokens(weights: str, prompt: Sequence[int], draw: str, count: int) -> list[int]:
    """``count`` tokens. ``draw`` is empty for greedy decoding."""
    return [_FIRST + byte % _COUNT for byte in _bytes("tokens", weights, prompt, draw, count)]


def reply_length(prompt: Sequence[int], draw: str, mean: int) -> int:
    """How long a reply would be if nothing cut it: 1 to ``2 * mean - 1`` tokens."""
    low, high = _bytes("length", "", prompt, draw, 2)
    return 1 + (256 * high + low) % (2 * mean - 1)


def logprobs(weights: str, prompt: Sequence[int], draw: str, count: int) -> list[float]:
    """One for each of ``reply_tokens``: -0.1 to -4.1."""
    return [-0.1 - byte / 64 for byte in _bytes("logprobs", weights, prompt, draw, count)]


def _bytes(use: str, weights: str, prompt: Sequence[int], draw: str, count: int) -> bytes:
    key = repr((use, weights, list(prompt), draw)).encode()
    return blake3(key).digest(length=max(count, 1))[:count]
