"""Counts of the hot path, beside the library's own."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from proxy.tallies import CounterTally, HistogramTally

BOUNDS = (0.001, 0.25, 1, 10)


def lines(registry: CollectorRegistry) -> set[str]:
    """All that a scrape sees but the times of creation, which only the library's have."""
    page = generate_latest(registry).decode().splitlines()
    return {line for line in page if "_created" not in line}


def test_a_scrape_cannot_tell_them_from_the_librarys_own():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count = CounterTally("x_answers", "Text.", ("route", "code"), ours)
    counter = Counter("x_answers_total", "Text.", ("route", "code"), registry=theirs)
    tallies = [
        HistogramTally("x_a_seconds", "Text.", BOUNDS, ("replica",), ours),
        HistogramTally("x_b_seconds", "Text.", BOUNDS, (), ours),
        HistogramTally("x_c_seconds", "Text.", BOUNDS, (), ours),
    ]
    labelled = Histogram("x_a_seconds", "Text.", ("replica",), buckets=BOUNDS, registry=theirs)
    plain = Histogram("x_b_seconds", "Text.", buckets=BOUNDS, registry=theirs)
    Histogram("x_c_seconds", "Text.", buckets=BOUNDS, registry=theirs)
    assert lines(ours) == lines(theirs)
    drawn = random.Random(3)
    for number in range(500):
        code, replica = str(drawn.choice((200, 499, 502))), f"r{number % 3}"
        seconds = drawn.choice((*BOUNDS, drawn.random(), 20 * drawn.random(), 0.0))
        count.inc('/v1/"x"', code)
        counter.labels('/v1/"x"', code).inc()
        tallies[0].observe(seconds, replica)
        labelled.labels(replica).observe(seconds)
        tallies[1].observe(seconds)
        plain.observe(seconds)
    assert lines(ours) == lines(theirs)
