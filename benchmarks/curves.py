"""What a replay's report draws: how long replies took, and what went on over time, in few numbers.

Bounded whatever is replayed: 100 quantiles, and at most ``BINS`` bins of equal width, which double
when the time outgrows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BINS = 120
"""A plot on a phone is some 300 dots wide; between 60 and 120 bins are used."""
FINEST_S = 1 / 16
QUANTILES = 100
SHORTEST_S = 1e-6
"""What took no time took this."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Lists as JSON has them, rounded to what can be seen."""

    request_s: list[float]
    """Seconds from sending to the whole reply; element k - 1 is the quantile k of 100."""
    group_s: list[float]
    """The same of groups; empty without groups."""
    bin_s: float
    """Seconds of a bin of the two below; the last one may end earlier."""
    inflight: list[float]
    """Rollouts in flight, mean of the bin."""
    tokens_per_second: list[float]
    """Generated, mean of the bin; each reply's tokens count evenly over its time."""


def quantiles(values: Sequence[float]) -> list[float]:
    """By nearest rank, ``QUANTILES`` of them, the last one the greatest; of nothing, none."""
    ordered = sorted(values)
    if not ordered:
        return []
    return [
        round(ordered[-(-len(ordered) * k // QUANTILES) - 1], 4) for k in range(1, QUANTILES + 1)
    ]


class _Steps:
    """The mean of a step function in each bin, from its jumps in any order. Times begin at 0."""

    def __init__(self) -> None:
        self.width_s = FINEST_S
        self._jumps = [0.0] * BINS
        self._areas = [0.0] * BINS
        """What the bin's own jumps put under the curve inside the bin."""

    def add(self, at_s: float, by: float) -> None:
        """From ``at_s`` on it is higher by this."""
        self._reach(at_s)
        number = int(at_s / self.width_s)
        self._jumps[number] += by
        self._areas[number] += by * ((number + 1) * self.width_s - at_s)

    def means(self, until_s: float) -> list[float]:
        """One for each bin that began before ``until_s``, which is more than 0."""
        self._reach(until_s)
        level, found = 0.0, []
        for number in range(math.ceil(until_s / self.width_s)):
            area = self._areas[number] + level * self.width_s
            level += self._jumps[number]
            width_s = min(self.width_s, until_s - number * self.width_s)
            found.append(round(max(0.0, area / width_s), 2))
        return found

    def widen(self, width_s: float) -> None:
        """To bins of that width, which another one has."""
        self._reach(BINS * width_s / 2)

    def _reach(self, at_s: float) -> None:
        while at_s >= BINS * self.width_s:
            pairs = [(number, number + 1) for number in range(0, BINS, 2)]
            areas, jumps = self._areas, self._jumps
            self._areas = [areas[a] + areas[b] + jumps[a] * self.width_s for a, b in pairs]
            self._jumps = [jumps[a] + jumps[b] for a, b in pairs]
            self._areas += [0.0] * (BINS // 2)
            self._jumps += [0.0] * (BINS // 2)
            self.width_s *= 2


class Timeline:
    """In flight and generated tokens over time, from the first call on; a few additions a reply."""

    def __init__(self) -> None:
        self._origin_s: float | None = None
        self._inflight = _Steps()
        self._tokens = _Steps()

    def inflight(self, at_s: float, by: int) -> None:
        """So many more, or fewer, from then on."""
        if self._origin_s is None:
            self._origin_s = at_s
        self._inflight.add(at_s - self._origin_s, by)

    def tokens(self, began_s: float, ended_s: float, count: int) -> None:
        """A whole reply to a request that was counted in flight."""
        assert self._origin_s is not None
        began_s, ended_s = began_s - self._origin_s, ended_s - self._origin_s
        rate = count / max(ended_s - began_s, SHORTEST_S)
        self._tokens.add(began_s, rate)
        self._tokens.add(max(ended_s, began_s + SHORTEST_S), -rate)

    def curves(
        self, until_s: float, request_s: Sequence[float], group_s: Sequence[float]
    ) -> Curves:
        """All of it, with the seconds that requests and groups took, in any order."""
        assert self._origin_s is not None
        length_s = max(until_s - self._origin_s, SHORTEST_S)
        # What ended later than all replies, a request that failed, has widened only one of them.
        width_s = max(self._inflight.width_s, self._tokens.width_s)
        for steps in (self._inflight, self._tokens):
            steps.widen(width_s)
        inflight, tokens = self._inflight.means(length_s), self._tokens.means(length_s)
        return Curves(
            quantiles(request_s), quantiles(group_s), self._inflight.width_s, inflight, tokens
        )
