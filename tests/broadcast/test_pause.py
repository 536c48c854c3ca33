"""Which pauses reach the replicas, with what query, and how each is undone."""

from __future__ import annotations

from itertools import product
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broadcast.pause import PAUSED, RESUMED, Acknowledge, Broadcast, Pause
from routing.ids import ReplicaId

A, B, C = ReplicaId("r0"), ReplicaId("r1"), ReplicaId("r2")
KEEP = b"mode=keep"


def really_paused(mode: Literal["lazy", "eager"] = "eager") -> Pause:
    pause = Pause(mode)
    sent = pause.on_pause(b"mode=wait")
    assert isinstance(sent, Broadcast)
    assert pause.pause_done(sent, paused=[A, B]) == ()
    return pause


@pytest.mark.parametrize(
    ("mode", "query", "target"),
    [
        ("lazy", b"mode=keep", None),
        ("lazy", b"mode=keep&mode=keep", None),
        ("lazy", b"mode=%6beep", None),
        ("lazy", b"", "/pause"),
        ("lazy", b"mode=abort", "/pause?mode=abort"),
        ("lazy", b"mode=wait", "/pause?mode=wait"),
        ("lazy", b"mode=keep&clear_cache=false", "/pause?mode=keep&clear_cache=false"),
        ("lazy", b"mode=keep&clear_cache=", "/pause?mode=keep&clear_cache="),
        ("lazy", b"clear_cache=true", "/pause?clear_cache=true"),
        ("lazy", b"mode=keep&mode=abort", "/pause?mode=keep&mode=abort"),
        (
            "lazy",
            b"mode=keep&wait_for_inflight_requests=true",
            "/pause?mode=keep&wait_for_inflight_requests=true",
        ),
        ("lazy", b"mode=KEEP", "/pause?mode=KEEP"),
        ("lazy", b"mode=k%65\xffp", "/pause?mode=k%65\xffp"),
        ("eager", b"mode=keep", "/pause?mode=keep"),
        ("eager", b"", "/pause"),
    ],
)
def test_what_a_pause_does(mode: Literal["lazy", "eager"], query: bytes, target: str | None):
    """O-16: the query reaches the replicas byte for byte, or nothing reaches them."""
    expected = Acknowledge(PAUSED) if target is None else Broadcast(target)
    assert Pause(mode).on_pause(query) == expected


def test_an_acknowledged_pause_shows_and_stops_nobody():
    pause = Pause()
    pause.on_pause(KEEP)
    assert (pause.paused, pause.real, pause.target) == (True, False, None)
    assert pause.on_resume() == Acknowledge(RESUMED)
    assert (pause.paused, pause.elided) == (False, 1)


def test_only_pauses_that_were_asked_for_are_counted_as_elided():
    pause = Pause()
    pause.on_resume()
    pause.on_pause(KEEP)
    pause.on_pause(KEEP)
    pause.on_resume()
    pause.on_resume()
    assert pause.elided == 1


def test_an_acknowledged_pause_is_made_real_with_the_trainers_own_query():
    pause = Pause()
    pause.on_pause(b"mode=%6beep")
    sent = pause.make_real()
    assert sent == Broadcast("/pause?mode=%6beep")
    assert not pause.real
    assert pause.pause_done(sent, paused=[A, B]) == ()
    assert (pause.real, pause.target) == (True, "/pause?mode=%6beep")
    assert pause.make_real() is None
    assert pause.on_resume() == Broadcast("/resume")
    assert pause.resume_done() == ()
    assert (pause.paused, pause.real, pause.target, pause.elided) == (False, False, None, 0)


def test_nothing_is_made_real_that_nobody_paused():
    assert Pause().make_real() is None


def test_a_lazy_pause_of_a_fleet_that_stands_still_reaches_it():
    assert really_paused("lazy").on_pause(KEEP) == Broadcast("/pause?mode=keep")


def test_an_eager_resume_is_always_sent():
    assert Pause("eager").on_resume(b"x=1") == Broadcast("/resume?x=1")


def test_a_pause_that_fails_somewhere_is_undone_where_it_may_have_landed():
    """O-15: those that did pause would stay paused for the rest of the run."""
    pause = Pause("eager")
    sent = pause.on_pause(KEEP)
    assert isinstance(sent, Broadcast)
    assert pause.pause_done(sent, paused=[A], failed=[B], unknown=[C]) == (A, C)
    assert (pause.paused, pause.real) == (False, False)
    assert pause.on_pause(KEEP) == sent
    assert pause.pause_done(sent, paused=[A, B, C]) == ()
    assert pause.real


def test_a_pause_that_reached_nobody_does_not_hold():
    """Every replica left rotation under the call."""
    pause = Pause("eager")
    assert pause.pause_done(Broadcast("/pause"), paused=[]) == ()
    assert (pause.paused, pause.real, pause.target) == (False, False, None)


def test_a_second_pause_that_fails_takes_the_first_with_it():
    pause = really_paused()
    assert pause.pause_done(Broadcast("/pause"), paused=[A], failed=[B]) == (A, B)
    assert (pause.paused, pause.real) == (False, False)


def test_an_acknowledgement_outlives_a_failure_to_make_it_real():
    pause = Pause()
    pause.on_pause(KEEP)
    sent = pause.make_real()
    assert sent is not None
    assert pause.pause_done(sent, paused=[A], failed=[B]) == (A,)
    assert (pause.paused, pause.real) == (True, False)
    assert pause.on_resume() == Acknowledge(RESUMED)


def test_a_resume_that_fails_names_who_may_be_left_paused():
    pause = really_paused()
    assert pause.resume_done(failed=[B], unknown=[C]) == (B, C)
    assert not pause.real


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_abandoning_leaves_nothing_paused(mode: Literal["lazy", "eager"]):
    """O-18: TRL dies between pause and resume when a load fails."""
    pause = really_paused(mode)
    assert pause.abandon() == Broadcast("/resume")
    assert pause.resume_done() == ()
    assert (pause.paused, pause.real, pause.abandon()) == (False, False, None)


def test_abandoning_an_acknowledged_pause_sends_nothing():
    pause = Pause()
    pause.on_pause(KEEP)
    assert pause.abandon() is None
    assert not pause.paused


ALL_OK = ("ok", "ok", "ok")
HOW = st.sampled_from(
    [ALL_OK] * 27 + [*product(("ok", "fails", "lost before", "lost after"), repeat=3)]
)


class PauseMachine(RuleBasedStateMachine):
    """Any order of calls, against three replicas that answer, refuse, or lose the answer.

    A replica that may be left paused leaves the fleet, as the shell makes it rejoin: it counts as
    running again, as its catch-up makes it.
    """

    @initialize(mode=st.sampled_from(["lazy", "eager"]))
    def start(self, mode: Literal["lazy", "eager"]) -> None:
        self.pause = Pause(mode)
        self.standing = dict.fromkeys((A, B, C), False)
        self.queries: set[str] = set()

    def send(self, paused: bool, how: tuple[str, ...]) -> tuple[list[ReplicaId], ...]:
        ok, failed, unknown = [], [], []
        for id, what in zip(self.standing, how, strict=True):
            if what in ("ok", "lost after"):
                self.standing[id] = paused
            {"ok": ok, "fails": failed}.get(what, unknown).append(id)
        return ok, failed, unknown

    def resume(self, ids: tuple[ReplicaId, ...]) -> None:
        for id in ids:
            self.standing[id] = False

    def carry_out(self, sent: Broadcast, how: tuple[str, ...]) -> None:
        assert sent.target in self.queries
        self.resume(self.pause.pause_done(sent, *self.send(True, how)))

    @rule(query=st.sampled_from([b"mode=keep", b"", b"mode=wait"]), how=HOW)
    def pauses(self, query: bytes, how: tuple[str, ...]) -> None:
        self.queries.add(f"/pause?{query.decode()}" if query else "/pause")
        decision = self.pause.on_pause(query)
        if isinstance(decision, Broadcast):
            self.carry_out(decision, how)
        else:
            assert (self.pause.mode, query) == ("lazy", b"mode=keep")

    @rule(how=HOW)
    def changes_weights_in_place(self, how: tuple[str, ...]) -> None:
        asked = self.pause.paused
        sent = self.pause.make_real()
        if sent is not None:
            self.carry_out(sent, how)
        if asked and (sent is None or how == ALL_OK):
            assert all(self.standing.values())

    @rule(how=HOW)
    def resumes(self, how: tuple[str, ...]) -> None:
        decision = self.pause.on_resume()
        if isinstance(decision, Broadcast):
            _, failed, unknown = self.send(False, how)
            self.resume(self.pause.resume_done(failed, unknown))
        assert not self.pause.paused

    @rule(how=HOW)
    def nobody_will_resume(self, how: tuple[str, ...]) -> None:
        sent = self.pause.abandon()
        if sent is not None:
            assert sent == Broadcast("/resume")
            _, failed, unknown = self.send(False, how)
            self.resume(self.pause.resume_done(failed, unknown))
        assert not self.pause.paused

    @invariant()
    def all_stand_still_or_none(self) -> None:
        assert set(self.standing.values()) == {self.pause.real}
        assert (self.pause.target is not None) == self.pause.real
        assert self.pause.paused or not self.pause.real


TestPauseMachine = PauseMachine.TestCase
TestPauseMachine.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
