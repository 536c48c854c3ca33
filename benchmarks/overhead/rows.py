"""What is measured: one row for each kind of traffic, with the goals of those that have one."""

from __future__ import annotations

from dataclasses import dataclass, replace

ALLOWED_OF_AIOHTTP = 0.45
"""CPU per request, of the aiohttp proxy's, in every row."""


@dataclass(frozen=True, slots=True)
class Row:
    """Traffic of one kind. ``requests`` is for each proxy in each round."""

    name: str
    prompt_tokens: int = 135
    reply_bytes: int = 2_000
    in_flight: int = 64
    requests: int = 10_000
    delay_s: float = 0.0
    """Mean of the upstream's own time; 0: answered at once, so the proxy is kept busy."""
    chunks: int = 0
    interval_s: float = 0.0
    tls: bool = False
    replicas: int = 2
    rounds: int = 9
    """At most, whatever is asked for."""
    allowed_of_router: float | None = None
    """CPU per request, of vllm-router's."""

    def shortened(self, by: int) -> Row:
        """A ``by``-th of the requests, but each connection gets two."""
        return replace(self, requests=max(2 * self.in_flight, self.requests // by))

    def of(self, requests: int | None, in_flight: int | None) -> Row:
        """With other counts, for a short look."""
        return replace(
            self, requests=requests or self.requests, in_flight=in_flight or self.in_flight
        )


ROWS = (
    Row("135/2k", allowed_of_router=1.0, requests=12_000),
    Row("135/20k", reply_bytes=20_000),
    Row("135/90k", reply_bytes=90_000, requests=8_000, allowed_of_router=1.0),
    Row("135/2M", reply_bytes=2_000_000, in_flight=16, requests=400),
    Row("1024/20k", 1_024, 20_000, requests=6_000, allowed_of_router=1.0),
    Row("4000/20k", 4_000, 20_000, requests=2_000, allowed_of_router=1.0),
    Row("32000/20k", 32_000, 20_000, in_flight=16, requests=240),
    Row(
        "1000-in-flight", 135, 90_000, in_flight=1_000, requests=4_000, delay_s=1.0,
        allowed_of_router=0.9,
    ),
    Row("9000-in-flight", in_flight=9_000, requests=18_000, delay_s=6.0, rounds=1),
    Row("stream", chunks=1_000, interval_s=0.01, requests=64),
    Row("tls", reply_bytes=20_000, tls=True, requests=6_000),
    Row("64-replicas", replicas=64, requests=12_000),
)  # fmt: skip
