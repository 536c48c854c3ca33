"""The bytes that the load generator and the upstreams agree on.

A request carries its number as TRL's ``seed``; the reply's id repeats it, with the microseconds
that the upstream held the request: what is left of the round trip is the way there and back.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from random import Random

NUMBERS = 10**18
"""Numbers start past it: always 19 digits, within the 63 bits of a seed. A request with this one
itself asks whether a proxy is ready, and is answered whole and at once."""
_GOLDEN = 0.6180339887498949  # multiples of it, without their whole part, spread evenly over 0..1
_SEED = re.compile(rb'"seed": ?(\d{19})')
_TEMPLATE_TOKENS = 23
"""Tokens that all prompts begin with, as a chat template does."""
_VOCABULARY = 150_000  # Qwen's
GROUP = 8
"""Rollouts of one prompt, as in GRPO."""
REPLY_START = b'{"id":"cmpl-%d-%09d",'
EVENT_BYTES = 250
"""Of one token's event in a stream with log-probabilities."""


def delay_s(number: int, mean_s: float) -> float:
    """How long the upstream takes for this request: half of ``mean_s`` to one and a half.

    Spread evenly, so that answers do not come in bursts.
    """
    # Of the number as it is a float would have no digits behind the point.
    return mean_s * (0.5 + ((number - NUMBERS) * _GOLDEN) % 1.0)


class Kind(Enum):
    """What becomes of a request of the mixed soak."""

    OK = "ok"
    STREAM = "a stream"
    FAILED = "500 from every upstream"
    FAILED_ONCE = "500 from the first upstream"
    RESET = "a reset from the first upstream, instead of an answer"
    CUT = "a stream that its upstream breaks off"
    ABORTED = "the client goes away before the answer"
    ABORTED_STREAM = "the client goes away within the stream"

    @property
    def streams(self) -> bool:
        return self in (Kind.STREAM, Kind.CUT, Kind.ABORTED_STREAM)


_OFTEN = {
    1: Kind.STREAM, 2: Kind.FAILED, 3: Kind.FAILED_ONCE, 4: Kind.ABORTED, 5: Kind.ABORTED_STREAM,
}  # fmt: skip


def kind_of(number: int) -> Kind:
    """One in 50 of each; resets one in 500 and broken streams one in 10,000.

    Each of these two may cost a replica up to 30 s out of rotation (``broadcast.fleet``): past the
    first 50 numbers, which have all kinds, only every other upstream breaks connections. Else a
    fast daemon soon has one replica left, and nobody to ask for a second opinion.
    """
    round_, place = divmod(number, 50)
    if place == 6 and not round_ % 10:
        return Kind.RESET
    if place == 7 and not round_ % 200:
        return Kind.CUT
    return _OFTEN.get(place, Kind.OK)


# --- requests ------------------------------------------------------------------------------------


def bodies(count: int, prompt_tokens: int, seed: int, *, stream: bool) -> list[bytes]:
    """``count`` distinct prompts as TRL sends them, each without its seed and closing bracket."""
    random = Random(seed)
    template = Random(0).choices(range(_VOCABULARY), k=min(_TEMPLATE_TOKENS, prompt_tokens))
    fields = {
        "max_tokens": 3000, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0,
        "n": 1, "return_token_ids": True, "logprobs": 0,
    }  # fmt: skip
    if stream:
        fields["stream"] = True
    found = []
    for _ in range(count):
        own = random.choices(range(_VOCABULARY), k=prompt_tokens - len(template))
        text = json.dumps({"model": "m", "prompt": template + own, **fields})
        found.append(f'{text[:-1]}, "seed": '.encode())
    return found


def request(host: bytes, body: bytes, number: int, path: bytes = b"/v1/completions") -> bytes:
    """Headers as aiohttp sends them for TRL, and the whole body."""
    return b"".join(
        (
            b"POST %s HTTP/1.1\r\nHost: %s\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
            b"User-Agent: Python/3.11 aiohttp/3.14.5\r\nContent-Length: %d\r\n"
            b"Content-Type: application/json\r\n\r\n" % (path, host, len(body) + 20),
            body,
            b"%d}" % number,
        )
    )


def number_of(pieces: list[bytes]) -> int:
    """The number in a request's body; its last piece is enough unless a proxy wrote it anew."""
    end = pieces[-1][-20:]
    if len(end) == 20 and end.endswith(b"}") and end[:19].isdigit():
        return int(end[:19])
    found = _SEED.search(b"".join(pieces))
    return int(found[1]) if found else 0


# --- replies -------------------------------------------------------------------------------------


def reply_rest(size: int) -> bytes:
    """What follows ``REPLY_START``, so that the whole body has ``size`` bytes."""
    room = size - len(REPLY_START % (NUMBERS, 0))
    tokens = max(1, (room - 300) // 40)  # of an id and a log-probability each, and some text

    def text(pad: int) -> bytes:
        choice = {
            "index": 0,
            "text": "x" * pad,
            "logprobs": {"token_logprobs": [-0.12345678] * tokens},
            "token_ids": [100_000] * tokens,
            "finish_reason": "length",
        }
        usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
        whole = {"object": "text_completion", "model": "m", "choices": [choice], "usage": usage}
        return json.dumps(whole)[1:].encode()

    pad = room - len(text(0))
    if pad < 0:
        raise ValueError(f"a reply has at least {size - pad} bytes")
    return text(pad)


def event(start: bytes = b"{") -> bytes:
    """One chunk of a stream in HTTP's chunked coding; ``start`` opens its JSON."""
    data = b'data: %s"object":"text_completion","choices":[{"index":0,"text":"' % start
    end = b'","token_ids":[100000],"finish_reason":null}]}\n\n'
    data += b"x" * (EVENT_BYTES - len(data) - len(end)) + end
    return b"%x\r\n%s\r\n" % (len(data), data)


DONE_EVENT = b"data: [DONE]\n\n"
STREAM_END = b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE_EVENT), DONE_EVENT)


def stream_bytes(chunks: int) -> int:
    """Of a stream's body, without the chunked coding."""
    return chunks * EVENT_BYTES + len(DONE_EVENT)


_ID = re.compile(rb'(?:data: )?\{"id":"cmpl-(\d{19})-(\d{9})"')
ID_BYTES = len(b"data: " + REPLY_START % (NUMBERS, 0))


def id_of(start: bytes) -> tuple[int, float]:
    """Number and seconds at the upstream, from the first ``ID_BYTES`` of a body; zeros if none."""
    found = _ID.match(start)
    return (int(found[1]), int(found[2]) / 1e6) if found else (0, 0.0)
