"""Suspects: bodies of generations that were running when an engine died.

One body can kill every engine it is sent to, and the trainer sends it ninety times. A body that saw
two engine deaths goes out again only alone on a replica, so that a third death is proof; after the
third it is refused, and so are repeats of it. A connection lost to a living engine is no death.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum

DEATHS_ALONE = 2
DEATHS_REFUSED = 3
MAX_TRACKED = 65_536
"""Bodies followed, 100 bytes each: two deaths of a full fleet of 16 replicas with 2048 running on
each. The one seen longest ago is let go first, but refused ones only after all others."""


class Verdict(StrEnum):
    FREE = "free"
    ALONE = "alone"
    """Only to a replica with nothing else in flight, and nothing else there until it ends."""
    REFUSED = "refused"


class Suspects:
    """Deaths seen per digest of a body."""

    def __init__(self, max_tracked: int = MAX_TRACKED) -> None:
        self._max_tracked = max_tracked
        self._deaths: OrderedDict[bytes, int] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Suspects {len(self._deaths)} followed, {len(self._refused)} refused>"

    def __len__(self) -> int:
        return len(self._deaths) + len(self._refused)

    def in_flight_at_death(self, digests: Iterable[bytes]) -> None:
        """One engine died; these bodies were running on it. A body twice there counts once."""
        for digest in dict.fromkeys(digests):
            if digest in self._refused:
                continue
            deaths = self._deaths.pop(digest, 0) + 1
            if deaths >= DEATHS_REFUSED:
                self._refused[digest] = None
            else:
                self._deaths[digest] = deaths
        while len(self) > self._max_tracked:
            (self._deaths or self._refused).popitem(last=False)

    def verdict(self, digest: bytes) -> Verdict:
        if not self._deaths and not self._refused:
            return Verdict.FREE
        if digest in self._refused:
            return Verdict.REFUSED
        return Verdict.ALONE if self._deaths.get(digest, 0) >= DEATHS_ALONE else Verdict.FREE

    def finished(self, digest: bytes) -> None:
        """It got a whole answer from a living engine: it was not the cause."""
        self._deaths.pop(digest, None)
