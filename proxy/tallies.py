"""Counts that every generation moves, kept as plain numbers and given to the library at a scrape.

prometheus_client's own counters take a lock and check their arguments at each step: with six of
them a generation, 6 % of what a short one costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry


class CounterTally(Collector):
    """A counter by the values of its labels. One thread writes."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labelnames = name, text, labels
        self.counts: dict[tuple[str, ...], int] = {}
        registry.register(self)

    def inc(self, *values: str) -> None:
        """One more for these label values."""
        self.counts[values] = self.counts.get(values, 0) + 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labelnames)
        for values, count in list(self.counts.items()):
            family.add_metric(values, count)
        yield family


class HistogramTally(Collector):
    """A histogram by the value of its label, or of none. One thread writes."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Sequence[str],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labelnames = name, text, labels
        self._bounds = bounds
        self._words = [str(float(bound)) for bound in bounds] + ["+Inf"]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self._begin(())
        registry.register(self)

    def _begin(self, values: tuple[str, ...]) -> list[int]:
        counts = self._counts[values] = [0] * len(self._words)
        self._sums[values] = 0.0
        return counts

    def observe(self, seconds: float, *values: str) -> None:
        """One more of this size for these label values."""
        counts = self._counts.get(values) or self._begin(values)
        counts[bisect_left(self._bounds, seconds)] += 1  # a bound is within its bucket
        self._sums[values] += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        for values, counts in list(self._counts.items()):
            total = 0
            buckets = []
            for word, count in zip(self._words, counts, strict=True):
                total += count
                buckets.append((word, float(total)))
            family.add_metric(values, buckets, self._sums[values])
        yield family
