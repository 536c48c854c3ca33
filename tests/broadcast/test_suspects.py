"""Bodies that were running when engines died: free, alone, refused."""

from __future__ import annotations

from itertools import islice, repeat

import pytest

from broadcast.suspects import Suspects, Verdict

BODY, OTHER = b"body", b"other"


@pytest.mark.parametrize(
    ("deaths", "verdict"),
    [
        (0, Verdict.FREE),
        (1, Verdict.FREE),
        (2, Verdict.ALONE),
        (3, Verdict.REFUSED),
        (9, Verdict.REFUSED),
    ],
)
def test_the_verdict_follows_the_deaths_seen(deaths: int, verdict: Verdict):
    suspects = Suspects()
    for _ in range(deaths):
        suspects.in_flight_at_death([BODY])
    assert suspects.verdict(BODY) is verdict
    assert suspects.verdict(OTHER) is Verdict.FREE


def test_the_same_body_twice_on_one_engine_saw_one_death():
    suspects = Suspects()
    suspects.in_flight_at_death(islice(repeat(BODY), 8))
    assert suspects.verdict(BODY) is Verdict.FREE
    suspects.in_flight_at_death([BODY])
    assert suspects.verdict(BODY) is Verdict.ALONE


def test_a_body_that_was_answered_is_cleared():
    suspects = Suspects()
    suspects.in_flight_at_death([BODY])
    suspects.in_flight_at_death([BODY])
    suspects.finished(BODY)
    assert (suspects.verdict(BODY), len(suspects)) == (Verdict.FREE, 0)


def test_a_refused_body_stays_refused():
    suspects = Suspects()
    for _ in range(3):
        suspects.in_flight_at_death([BODY])
    suspects.finished(BODY)
    assert suspects.verdict(BODY) is Verdict.REFUSED


def test_the_table_is_bounded_and_lets_refused_bodies_go_last():
    suspects = Suspects(max_tracked=3)
    for _ in range(3):
        suspects.in_flight_at_death([BODY])
    suspects.in_flight_at_death([bytes([n]) for n in range(9)])
    assert len(suspects) == 3
    assert suspects.verdict(BODY) is Verdict.REFUSED
    suspects.in_flight_at_death([bytes([8])])
    assert suspects.verdict(bytes([8])) is Verdict.ALONE
    suspects.in_flight_at_death([bytes([0])])
    assert suspects.verdict(bytes([0])) is Verdict.FREE
