"""The lag learned for one replica: how long after a publication's start its mount shows the files.

A look too early costs up to the time for which the mount remembers the miss (hf-mount: 1 s), a look
too late costs what it is late. The first miss and the first success of each publication bound the
lag from both sides, and the next first look goes between the bounds. In a model of such a mount
(2.5 s, misses remembered 1 s, 55 publications) the median load came 0.04 s after the files were
there, 0.45 s with 0.3 s of jitter either way.
"""

from __future__ import annotations

from dataclasses import dataclass

FINE_S = 0.4
"""Bounds as close as this are not halved again: another miss would cost more than it gains."""
SINK_S = 0.01
SINK_GROWTH = 1.5
"""With each success in a row the lower bound sinks, faster and faster, so that a lag that became
shorter is found. While the lag is steady that costs one early look in about eight publications."""
MAX_CALM = 40
"""Bound of the count of successes in a row; by then the lower bound is 0 for any lag."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Bounds in seconds. ``high_s`` is None before the first success."""

    low_s: float = 0.0
    high_s: float | None = None
    calm: int = 0
    """First looks in a row that were not too early."""

    @property
    def first_look_s(self) -> float:
        """When to look first, in seconds after the start: 0 while nothing is known."""
        if self.high_s is None:
            return 0.0
        if self.high_s - self.low_s <= FINE_S:
            return self.high_s
        return (self.low_s + self.high_s) / 2

    def seen(self, missed_s: float | None, visible_s: float) -> Lag:
        """After a publication: its first miss, None if there was none, and its first success."""
        if missed_s is None:
            high_s = visible_s if self.high_s is None else min(self.high_s, visible_s)
            low_s = max(0.0, min(self.low_s, high_s) - SINK_S * SINK_GROWTH**self.calm)
            return Lag(low_s, high_s, min(self.calm + 1, MAX_CALM))
        if self.high_s is None or missed_s >= self.high_s:  # nothing known, or it has grown
            return Lag(missed_s, visible_s)
        return Lag(max(self.low_s, missed_s), min(self.high_s, visible_s))
