"""The learned lag comes close to the real one, and follows it, on a mount that remembers misses."""

from __future__ import annotations

import random
import statistics

import pytest

from broadcast.answers import LoadOutcome
from broadcast.lag import Lag
from broadcast.publication import LoadAnswered, Rules, Wait, Waited, begin, step
from routing.ids import AdapterName, ReplicaId

R = ReplicaId("r0")


class Mount:
    """Files show ``lag_s`` after the start; a miss is remembered for ``negative_s``."""

    def __init__(self, negative_s: float) -> None:
        self.negative_s = negative_s
        self.lag = Lag()

    def publish(self, lag_s: float) -> float:
        """One publication by the real machine; how long after the files were there it loaded."""
        now_s, blind_until_s = 0.0, 0.0
        first = {R: self.lag.first_look_s}
        name = AdapterName("v1")
        listed = {R: dict[str, str]()}
        state, (command,) = begin(
            name, "/p", [R], Rules(), now_s=0.0, listed_before=listed, learned_lag_s=first
        )
        while True:
            if isinstance(command, Wait):
                now_s += command.after_s
                state, (command,) = step(state, Waited(R, now_s))
            if now_s >= blind_until_s:
                if now_s >= lag_s:
                    break
                blind_until_s = now_s + self.negative_s
            missed = LoadAnswered(R, LoadOutcome.NOT_VISIBLE, 404, "", now_s)
            state, (command,) = step(state, missed)
        missed_at_s = state.replicas[R].missed_at_s
        self.lag = self.lag.seen(missed_at_s, now_s)
        return now_s - lag_s


@pytest.mark.parametrize("negative_s", [0.0, 1.0])
@pytest.mark.parametrize(("jitter_s", "late_s"), [(0.0, 0.1), (0.1, 0.3), (0.3, 0.5)])
def test_after_five_publications_the_median_load_is_less_than_half_a_second_late(
    negative_s: float, jitter_s: float, late_s: float
) -> None:
    chance, mount = random.Random(1), Mount(negative_s)
    late = [mount.publish(2.5 + chance.uniform(-jitter_s, jitter_s)) for _ in range(60)]
    assert statistics.median(late[5:]) < late_s


@pytest.mark.parametrize(("before_s", "after_s"), [(2.5, 8.0), (30.0, 3.0), (2.5, 0.0)])
def test_a_lag_that_changed_is_followed(before_s: float, after_s: float) -> None:
    mount = Mount(1.0)
    for _ in range(20):
        mount.publish(before_s)
    late = [mount.publish(after_s) for _ in range(200)]
    assert statistics.median(late[-20:]) < 1.0


def test_without_a_lag_every_first_look_is_at_once() -> None:
    mount = Mount(1.0)
    assert [mount.publish(0.0) for _ in range(5)] == [0.0] * 5
    assert mount.lag.first_look_s == 0.0
