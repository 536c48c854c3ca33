"""Curves hold what happened, in few numbers, however much it was and however long it took."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import BINS, FINEST_S, Timeline, quantiles
from benchmarks.replay import percentiles

TIMES_S = st.floats(0.0, 5000.0, allow_nan=False)
REPLIES = st.lists(st.tuples(TIMES_S, TIMES_S, st.integers(1, 9)), min_size=1, max_size=20)


def test_quantiles_are_by_nearest_rank_and_end_with_the_greatest():
    found = quantiles([float(n) for n in range(1000, 0, -1)])
    assert found == [float(n) for n in range(10, 1001, 10)]
    assert quantiles([2.0, 1.0]) == [1.0] * 50 + [2.0] * 50
    assert quantiles([]) == []


@given(st.lists(TIMES_S, min_size=1, max_size=200))
def test_quantiles_agree_with_the_percentiles_of_the_table(values):
    found, told = quantiles(values), percentiles(values)
    assert [found[k - 1] for k in (50, 90, 99)] == pytest.approx(
        [told.p50, told.p90, told.p99], abs=1e-4
    )


@hypothesis.settings(deadline=None)
@given(REPLIES)
def test_bins_are_the_means_of_what_was_in_flight_and_generated(spans):
    """Against a sum over all replies of their overlap with each bin; in the order they end."""
    replies = sorted((min(a, b), max(a, b) + 0.01, n) for a, b, n in spans)
    origin_s, until_s = replies[0][0], max(end for _, end, _ in replies)
    timeline = Timeline()
    for begin, _, n in replies:
        timeline.inflight(begin, n)
    for begin, end, n in sorted(replies, key=lambda reply: reply[1]):
        timeline.tokens(begin, end, 100 * n)
        timeline.inflight(end, -n)
    found = timeline.curves(until_s, [], [])
    length_s = until_s - origin_s
    assert len(found.inflight) == len(found.tokens_per_second) <= BINS
    assert (len(found.inflight) - 1) * found.bin_s <= length_s <= BINS * found.bin_s
    assert found.bin_s == FINEST_S or length_s > found.bin_s * BINS / 2
    for number, (inflight, tokens) in enumerate(
        zip(found.inflight, found.tokens_per_second, strict=True)
    ):
        low = origin_s + number * found.bin_s
        high = min(low + found.bin_s, until_s)
        overlaps = [
            (max(0.0, min(high, end) - max(low, begin)), n, 100 * n / (end - begin))
            for begin, end, n in replies
        ]
        width = high - low
        if width < 1e-6:
            continue
        assert inflight == pytest.approx(sum(s * n for s, n, _ in overlaps) / width, abs=0.01)
        assert tokens == pytest.approx(
            sum(s * rate for s, _, rate in overlaps) / width, rel=1e-6, abs=0.01
        )


def test_a_request_that_failed_after_all_replies_stretches_nothing():
    timeline = Timeline()
    timeline.inflight(0.0, 2)
    timeline.tokens(0.0, 7.0, 700)
    timeline.inflight(7.0, -1)
    timeline.inflight(8.0, -1)
    found = timeline.curves(7.0, [], [])
    assert len(found.tokens_per_second) == len(found.inflight)
    assert sum(found.tokens_per_second) * found.bin_s == pytest.approx(700)


def test_a_reply_that_took_no_time_counts_too():
    timeline = Timeline()
    timeline.inflight(7.0, 1)
    timeline.tokens(7.0, 7.0, 5)
    timeline.inflight(7.0, -1)
    found = timeline.curves(7.0, [0.0], [])
    assert sum(found.tokens_per_second) > 0
    assert found.inflight == [0.0]
