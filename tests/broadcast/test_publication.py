"""The publication machine: tables of cases, then random histories against scripted replicas.

The random histories are also run on machines with one planted fault each, which must be found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadcast import publication as machine
from broadcast.answers import LoadOutcome as L
from broadcast.answers import UnloadOutcome as U
from broadcast.publication import (
    At,
    Command,
    Commands,
    Deadline,
    Drop,
    Event,
    FleetBack,
    FleetLow,
    GiveUp,
    ImpossibleEventError,
    Load,
    LoadAnswered,
    Look,
    Looked,
    Phase,
    Publication,
    PublicationResult,
    ReplicaDown,
    Reset,
    ResetAnswered,
    Rules,
    Unload,
    Unloaded,
    Wait,
    Waited,
    begin,
    result,
)
from routing.ids import AdapterName, ReplicaId

NAME = AdapterName("v9")
PATH = "/l/.rollmux/v9-abc"
A, B, C = ReplicaId("r0"), ReplicaId("r1"), ReplicaId("r2")
OURS = {NAME: PATH}
EMPTY: Mapping[ReplicaId, Mapping[str, str]] = {A: {}, B: {}, C: {}}
RULES = Rules()


class Play:
    """A publication played by hand. ``sent`` holds the commands of the last event."""

    def __init__(self, *targets: ReplicaId, rules: Rules = RULES, **extra: Any) -> None:
        extra.setdefault("listed_before", EMPTY)
        self.now_s = 0.0
        self.state, self.sent = begin(NAME, PATH, targets, rules, now_s=0.0, **extra)

    def feed(self, event: Event) -> Commands:
        self.state, self.sent = machine.step(self.state, event)
        return self.sent

    def load(self, replica: ReplicaId, outcome: L, status: int = 200, text: str = "t") -> Commands:
        return self.feed(LoadAnswered(replica, outcome, status, text, self.now_s))

    def look(self, replica: ReplicaId, listed: Mapping[str, str] | None) -> Commands:
        return self.feed(Looked(replica, listed, self.now_s))

    def unload(self, replica: ReplicaId, outcome: U = U.GONE) -> Commands:
        return self.feed(Unloaded(replica, outcome, "t", self.now_s))

    def reset(self, replica: ReplicaId, done: bool) -> Commands:
        return self.feed(ResetAnswered(replica, done, "t", self.now_s))

    def waited(self, replica: ReplicaId) -> Commands:
        return self.feed(Waited(replica, self.now_s))

    def down(self, replica: ReplicaId) -> Commands:
        return self.feed(ReplicaDown(replica, "refused", self.now_s))

    def verify(self, *replicas: ReplicaId) -> None:
        assert self.state.phase is Phase.VERIFYING
        for replica in replicas:
            self.look(replica, OURS)

    @property
    def end(self) -> PublicationResult:
        return result(self.state)


# --- loading ------------------------------------------------------------------------------------


def test_commits_when_every_replica_lists_the_name_with_our_path() -> None:
    play = Play(A, B)
    assert play.sent == (Load(A), Load(B))
    assert play.load(A, L.LOADED) == ()
    assert play.load(B, L.LOADED) == (Look(A), Look(B))
    play.now_s = 2.5
    play.look(A, OURS)
    assert play.state.phase is Phase.VERIFYING
    play.look(B, OURS | {"other": "/x"})
    end = play.end
    assert end.committed
    assert (end.status, end.code, end.seconds) == (200, "", 2.5)
    assert end.message == "Success: LoRA adapter 'v9' added successfully."
    assert end.loaded_on == (A, B)
    assert end.attempts == {A: 1, B: 1}
    assert end.visible_s == {A: 0.0, B: 0.0}
    assert end.dropped == {}


def test_not_visible_is_retried_there_alone() -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    waits = []
    for _ in range(8):
        (wait,) = play.load(B, L.NOT_VISIBLE, 404)
        assert isinstance(wait, Wait)
        assert wait.replica == B
        waits.append(wait.after_s)
        play.now_s += wait.after_s
        assert play.waited(B) == (Load(B),)
    assert waits[0] == 0.25
    assert waits == sorted(waits)
    assert waits[-1] == 2.0
    assert play.load(B, L.LOADED) == (Look(A), Look(B))
    play.verify(A, B)
    assert play.end.attempts == {A: 1, B: 9}
    assert play.end.missed_s == {B: 0.0}
    assert play.end.visible_s == {A: 0.0, B: play.now_s}


def test_first_load_is_put_off_by_the_learned_lag_and_waits_grow_only_past_it() -> None:
    play = Play(A, B, learned_lag_s={B: 3.0})
    assert play.sent == (Load(A), Wait(B, 3.0))
    play.load(A, L.LOADED)
    play.now_s = 2.9  # a timer that fires early
    play.waited(B)
    for _ in range(2):
        assert play.load(B, L.NOT_VISIBLE, 404) == (Wait(B, 0.25),)
        play.now_s += 0.25
        play.waited(B)
    assert play.load(B, L.NOT_VISIBLE, 404) == (Wait(B, 0.375),)


def test_a_minute_of_blindness_is_followed_by_one_wait_longer_than_30_s() -> None:
    """A mount that restarts its memory of a miss at each look must get the time to forget."""
    play = Play(A)
    waits = []
    while play.now_s < 150:
        (wait,) = play.load(A, L.NOT_VISIBLE, 404)
        assert isinstance(wait, Wait)
        waits.append(wait.after_s)
        play.now_s += wait.after_s
        play.waited(A)
    assert [w for w in waits if w > 2.0] == [32.0]
    assert sum(waits[: waits.index(32.0)]) < 63


def test_a_long_wait_never_crosses_the_deadline() -> None:
    play = Play(A, rules=Rules(load_timeout_s=80))
    play.now_s = 70
    assert play.load(A, L.NOT_VISIBLE, 404) == (Wait(A, 0.25),)


def test_an_answer_that_never_came_is_resolved_by_looking() -> None:
    play = Play(A)
    assert play.load(A, L.UNKNOWN, 0, "reset") == (Look(A),)
    assert play.look(A, None) == (Wait(A, 0.25),)
    assert play.waited(A) == (Look(A),)
    assert play.look(A, OURS) == (Look(A),)  # loaded after all: on to verifying
    play.verify(A)
    assert play.end.attempts == {A: 1}


def test_an_answer_that_never_came_and_no_name_there_is_loaded_again() -> None:
    play = Play(A)
    play.load(A, L.UNKNOWN, 0)
    assert play.look(A, {}) == (Wait(A, 0.25),)
    assert play.waited(A) == (Load(A),)
    assert play.load(A, L.ALREADY, 400) == (Look(A),)  # the first one landed late
    assert play.look(A, OURS) == (Look(A),)
    play.verify(A)
    assert play.end.committed


def test_never_received_is_tried_again_without_a_look() -> None:
    play = Play(A)
    assert play.load(A, L.NEVER_RECEIVED, 0) == (Wait(A, 0.25),)
    assert play.waited(A) == (Load(A),)


def test_already_loaded_with_another_path_is_taken_over() -> None:
    play = Play(A)
    assert play.load(A, L.ALREADY, 400) == (Look(A),)
    play.look(A, {NAME: "/else"})
    assert play.waited(A) == (Unload(A),)
    assert play.unload(A) == (Reset(A),)
    assert play.reset(A, True) == (Load(A),)


@pytest.mark.parametrize("path", ["/old/v9", PATH])
def test_a_name_that_was_there_before_is_unloaded_its_cache_cleared_then_loaded(path: str) -> None:
    """Also under our very path: it never counts as loaded."""
    play = Play(A, B, listed_before={A: {NAME: path}, B: {}})
    assert play.sent == (Unload(A), Load(B))
    assert play.unload(A) == (Reset(A),)
    assert play.reset(A, False) == (Wait(A, 0.25),)
    assert play.waited(A) == (Reset(A),)
    assert play.reset(A, True) == (Load(A),)


def test_takeover_unload_without_an_answer_is_tried_again() -> None:
    play = Play(A, listed_before={A: {NAME: "/old"}})
    assert play.unload(A, U.UNKNOWN) == (Wait(A, 0.25),)
    assert play.waited(A) == (Unload(A),)


def test_a_replica_whose_list_is_not_known_is_asked_first() -> None:
    play = Play(A, B, C, listed_before={A: {}}, learned_lag_s={B: 1.0})
    assert play.sent == (Load(A), Look(B), Look(C))
    assert play.look(B, {}) == (Wait(B, 1.0),)
    assert play.look(C, OURS) == (Unload(C),)


def test_a_name_served_before_is_loaded_after_a_cache_clear() -> None:
    """Unloaded since, but vLLM's prefix cache still holds blocks under the name."""
    play = Play(A, B, used_before={A})
    assert play.sent == (Reset(A), Load(B))
    assert play.reset(A, True) == (Load(A),)


# --- drops, the deadline, enough replicas ---------------------------------------------------------


def test_a_replica_that_dies_is_dropped_and_the_rest_commits() -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    assert play.down(B) == (Drop(B, "refused"), Look(A))
    assert play.load(B, L.LOADED) == ()  # its last words
    play.verify(A)
    assert play.end.committed
    assert play.end.dropped == {B: "refused"}
    assert play.end.loaded_on == (A,)


@pytest.mark.parametrize("outcome", [L.ENGINE_DEAD, L.NOT_VLLM])
def test_a_dead_engine_or_a_shut_path_drops_that_replica(outcome: L) -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    drop, look = play.load(B, outcome, 500, "gone")
    assert (drop, look) == (Drop(B, f"{outcome}: 500 gone"), Look(A))


def test_blind_at_the_deadline_is_dropped_and_the_rest_commits() -> None:
    play = Play(A, B, C, rules=Rules(load_timeout_s=5))
    play.load(A, L.LOADED)
    play.load(B, L.NOT_VISIBLE, 404, "No adapter found")
    play.now_s = 5
    sent = play.feed(Deadline(5))
    assert [type(c) for c in sent] == [Drop, Drop, Look]
    assert "404 No adapter found" in play.state.replicas[B].text
    assert "no answer" in play.state.replicas[C].text
    play.verify(A)
    assert play.end.committed
    assert set(play.end.dropped) == {B, C}


@pytest.mark.parametrize("at_least", [None, 2])
def test_too_few_at_the_deadline_roll_back_with_504(at_least: int | None) -> None:
    play = Play(A, B, rules=Rules(load_timeout_s=5, min_replicas=at_least))
    play.load(A, L.LOADED)
    play.load(B, L.NOT_VISIBLE, 404, "No adapter found")
    play.now_s = 5
    assert play.feed(Deadline(5))[-1] == Unload(A)
    play.unload(A)
    end = play.end
    assert end.outcome is Phase.ROLLED_BACK
    assert (end.status, end.code, end.culprit) == (504, "adapter_not_visible", B)
    for words in ("1 of 2 replicas", "r1 after 1 attempts in 5.0 s", "No adapter found"):
        assert words in end.message
    assert end.loaded_on == ()


def test_the_only_replica_dies() -> None:
    play = Play(A)
    play.down(A)
    assert (play.end.status, play.end.code) == (504, "replicas_lost")


def test_too_few_targets_end_at_once() -> None:
    for play in (Play(), Play(A, rules=Rules(min_replicas=2))):
        assert play.sent == ()
        assert (play.end.status, play.end.code) == (504, "replicas_lost")


def test_the_clock_stands_while_the_fleet_is_low() -> None:
    play = Play(A, rules=Rules(load_timeout_s=10))
    play.now_s = 4
    play.feed(FleetLow(4))
    play.feed(FleetLow(4))
    assert play.state.deadline_s is None
    play.now_s = 500
    assert play.feed(Deadline(500)) == ()  # an alarm that was on its way
    play.feed(FleetBack(500))
    play.feed(FleetBack(503))
    assert play.state.deadline_s == 506
    assert play.feed(Deadline(505.9)) == ()
    play.feed(Deadline(506))
    assert (play.end.status, play.end.code) == (504, "adapter_timeout")


def test_the_clock_does_not_start_again_past_the_deadline() -> None:
    play = Play(A)
    play.load(A, L.LOADED)
    play.feed(Deadline(300))
    play.feed(FleetLow(301))
    play.feed(FleetBack(302))
    assert play.state.deadline_s is None


def test_giving_up_ends_it_even_while_the_clock_stands() -> None:
    play = Play(A)
    play.feed(FleetLow(1))
    play.feed(GiveUp(2))
    assert play.end.status == 504


# --- verifying ----------------------------------------------------------------------------------


def test_a_replica_that_lost_the_name_meanwhile_loads_again_and_all_are_verified_anew() -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    play.load(B, L.LOADED)
    play.look(A, OURS)
    assert play.look(B, {}) == (Wait(B, 0.25),)
    assert play.state.phase is Phase.LOADING
    assert play.waited(B) == (Load(B),)
    assert play.load(B, L.LOADED) == (Look(A), Look(B))
    play.verify(A, B)
    assert play.end.attempts == {A: 1, B: 2}


def test_a_replica_that_keeps_losing_the_name_is_dropped() -> None:
    """Several registries behind one address: loads land in one, lists come from another."""
    play = Play(A, B)
    play.load(A, L.LOADED)
    for _ in range(2):
        play.load(B, L.LOADED)
        play.look(A, OURS)
        play.look(B, {})
        play.waited(B)
    play.load(B, L.LOADED)
    play.look(A, OURS)
    assert play.look(B, {}) == (Drop(B, "it does not list the adapter that it had loaded"),)
    assert play.end.committed


def test_silent_look_past_the_deadline_is_tried_three_times_then_dropped() -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    play.load(B, L.LOADED)
    play.look(A, OURS)
    play.now_s = 300
    play.feed(Deadline(300))
    for _ in range(2):
        (wait,) = play.look(B, None)
        assert isinstance(wait, Wait)
        play.waited(B)
    play.look(B, None)
    assert play.end.committed
    assert play.end.loaded_on == (A,)


def test_name_lost_past_the_deadline_drops_the_replica() -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    play.load(B, L.LOADED)
    play.now_s = 300
    play.feed(Deadline(300))
    play.look(A, OURS)
    play.look(B, {NAME: "/else"})
    assert play.end.loaded_on == (A,)


# --- rolling back -------------------------------------------------------------------------------


def test_refusal_waits_for_stragglers_and_unloads_them_too() -> None:
    play = Play(A, B, C)
    play.load(A, L.LOADED)
    text = "LoRA rank 16 is greater than max_lora_rank 8."
    assert play.load(B, L.REFUSED, 500, text) == (Unload(A),)
    play.unload(A)
    assert play.state.phase is Phase.ROLLING_BACK
    assert play.load(C, L.LOADED) == (Unload(C),)
    play.unload(C)
    end = play.end
    assert end.outcome is Phase.ROLLED_BACK
    assert (end.status, end.code, end.culprit) == (500, "adapter_refused", B)
    assert f"replica r1 refused it: 500 {text}" in end.message
    assert end.dropped == {}


@pytest.mark.parametrize("outcome", [L.UNKNOWN, L.ALREADY])
def test_a_straggler_that_may_have_landed_is_unloaded(outcome: L) -> None:
    play = Play(A, B)
    play.load(A, L.REFUSED, 400)
    assert play.load(B, outcome, 0) == (Unload(B),)


@pytest.mark.parametrize("outcome", [L.NOT_VISIBLE, L.REFUSED, L.NEVER_RECEIVED])
def test_a_straggler_that_did_not_land_needs_no_unload(outcome: L) -> None:
    play = Play(A, B)
    play.load(A, L.REFUSED, 400)
    assert play.load(B, outcome, 500) == ()
    assert play.end.outcome is Phase.ROLLED_BACK


def test_a_load_that_timed_out_is_unloaded_though_a_look_did_not_see_it() -> None:
    """It may still land; vLLM's lock of the name makes the unload come after it."""
    play = Play(A, B)
    play.load(A, L.UNKNOWN, 0, "timeout")
    play.look(A, {})
    assert play.load(B, L.REFUSED, 500) == (Unload(A),)


def test_a_wait_that_ends_while_rolling_back_loads_nothing() -> None:
    play = Play(A, B)
    play.load(A, L.NOT_VISIBLE, 404)
    play.load(B, L.LOADED)
    play.down(B)
    play = Play(A, B, C)
    play.load(A, L.NOT_VISIBLE, 404)
    play.load(B, L.REFUSED, 500)
    assert play.waited(A) == ()
    assert play.state.replicas[A].at is At.CLEAN


def test_missing_endpoint_is_501_with_the_fix_in_words() -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    assert play.load(B, L.ENDPOINT_MISSING, 404) == (Unload(A),)
    play.unload(A)
    assert (play.end.status, play.end.code) == (501, "runtime_lora_disabled")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in play.end.message


@pytest.mark.parametrize(
    ("status", "told"), [(400, 400), (500, 500), (422, 422), (404, 502), (204, 502)]
)
def test_trainer_gets_the_replicas_status_but_never_404(status: int, told: int) -> None:
    play = Play(A)
    play.load(A, L.REFUSED, status)
    assert play.end.status == told


def test_a_long_refusal_is_told_bounded() -> None:
    play = Play(A)
    play.load(A, L.REFUSED, 500, "x" * 20_000)
    assert len(play.end.message) < 2200


@pytest.mark.parametrize("outcome", [U.UNKNOWN, U.NEVER_RECEIVED])
def test_unload_without_an_answer_is_tried_three_times_then_stranded(outcome: U) -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    play.load(B, L.REFUSED, 500, "no")
    for _ in range(2):
        (wait,) = play.unload(A, outcome)
        assert isinstance(wait, Wait)
        assert play.waited(A) == (Unload(A),)
    assert play.unload(A, outcome) == (Drop(A, f"unload {outcome}: t"),)
    end = play.end
    assert end.outcome is Phase.STRANDED
    assert (end.status, end.code) == (500, "adapter_stranded")
    assert end.stranded == (A,)
    assert set(end.dropped) == {A}
    assert "replica r1 refused it" in end.message
    assert "r0: unload" in end.message


def test_stranded_only_once_nothing_is_pending() -> None:
    play = Play(A, B, C)
    play.load(A, L.LOADED)
    play.load(B, L.REFUSED, 500)
    play.unload(A, U.REFUSED)
    assert play.state.phase is Phase.ROLLING_BACK
    assert play.down(A) == ()
    play.load(C, L.NOT_VISIBLE, 404)
    assert play.end.outcome is Phase.STRANDED


def test_a_replica_that_dies_while_rolling_back_is_dropped_not_stranded() -> None:
    play = Play(A, B)
    play.load(A, L.LOADED)
    play.load(B, L.REFUSED, 500)
    play.down(A)
    assert play.end.outcome is Phase.ROLLED_BACK
    assert set(play.end.dropped) == {A}


@pytest.mark.parametrize("listed", [{}, {NAME: "/old"}, None])
def test_a_first_look_out_when_rolling_back_leaves_the_name_nowhere(
    listed: Mapping[str, str] | None,
) -> None:
    play = Play(A, B, listed_before={A: {}})
    play.load(A, L.REFUSED, 500)
    assert play.look(B, listed) == (() if listed == {} else (Unload(B),))


def test_a_takeover_that_cannot_unload_is_dropped() -> None:
    play = Play(A, B, listed_before={A: {NAME: "/old"}, B: {}})
    (drop,) = play.unload(A, U.REFUSED)
    assert isinstance(drop, Drop)
    assert "cannot take the name over" in drop.reason


def test_a_takeover_without_the_endpoint_is_501() -> None:
    play = Play(A, listed_before={A: {NAME: "/old"}})
    play.unload(A, U.ENDPOINT_MISSING)
    play.unload(A, U.ENDPOINT_MISSING)
    assert play.state.failure is not None
    assert play.state.failure.status == 501


# --- what cannot be -----------------------------------------------------------------------------


def test_what_is_not_in_the_table_raises() -> None:
    play = Play(A)
    with pytest.raises(ImpossibleEventError, match="no result while loading"):
        play.end  # noqa: B018
    with pytest.raises(ImpossibleEventError, match="answered as if"):
        play.unload(A)
    play.load(A, L.LOADED)
    with pytest.raises(ImpossibleEventError, match="LoadAnswered in verifying"):
        play.load(A, L.LOADED)
    play.verify(A)
    for event in (Looked(A, OURS, 1), Deadline(1), ReplicaDown(A, "x", 1)):
        with pytest.raises(ImpossibleEventError, match="in committed"):
            play.feed(event)


# --- histories ----------------------------------------------------------------------------------


@dataclass
class Engine:
    """A scripted vLLM: what it lists, and what is on its way to it."""

    listed: dict[str, str] = field(default_factory=dict)
    served_old: bool = False
    """Its prefix cache holds blocks of other weights under the name."""
    loads: list[str] = field(default_factory=list)
    """Loads whose client hung up, and which are still to be carried out, in order."""
    dead: bool = False

    def finish_loads(self) -> None:
        """vLLM's lock of the name: an unload or another load comes after them."""
        for path in self.loads:
            self.listed.setdefault(NAME, path)
        self.loads.clear()


class History:
    """One history: ``chance`` decides what each replica does and in which order answers come."""

    def __init__(self, chance: random.Random, faulty: Callable[..., Any] | None = None) -> None:
        self.chance = chance
        count = chance.randint(1, 4)
        self.engines = {ReplicaId(f"r{n}"): Engine() for n in range(count)}
        for engine in self.engines.values():
            if chance.random() < 0.25:
                engine.listed[NAME] = chance.choice([PATH, "/old"])
                engine.served_old = True
            if chance.random() < 0.2:
                engine.served_old = True
        self.now_s = 0.0
        self.refusing = {r for r in self.engines if chance.random() < 0.08}
        self.sick = chance.random() * 0.5
        at_least = chance.choice([None, 1, 1, min(2, count)])
        self.needed = at_least or count
        rules = Rules(load_timeout_s=20, min_replicas=at_least)
        asked = {r for r in self.engines if chance.random() < 0.5}
        self.events: list[Event] = []
        self.out: dict[ReplicaId, Command] = {}
        self.dropped: set[ReplicaId] = set()
        self.rolling = False
        self.step = faulty or machine.step
        self.state, commands = begin(
            NAME,
            PATH,
            list(self.engines),
            rules,
            now_s=0.0,
            listed_before={r: dict(self.engines[r].listed) for r in asked},
            learned_lag_s={r: 1.0 for r in self.engines if chance.random() < 0.3},
            used_before=[r for r, e in self.engines.items() if e.served_old],
        )
        self.take(commands)

    def run(self) -> PublicationResult:
        for n in range(600):
            if self.state.phase.final:
                return self.check(result(self.state))
            if n < 200:
                self.advance()
            else:  # the storm is over: from here on it has to come to an end
                self.sick = 0.0
                if n == 200:
                    self.feed(FleetBack(self.now_s))
                else:
                    self.proceed()
        raise AssertionError("it never ends")

    def advance(self) -> None:
        """One thing happens."""
        chance = self.chance
        roll = chance.random()
        living = [r for r, e in self.engines.items() if not e.dead]
        if roll < 0.02 and living:
            victim = chance.choice(living)
            self.engines[victim] = Engine(dead=True)
            if chance.random() < 0.7:
                self.feed(ReplicaDown(victim, "died", self.now_s))
        elif roll < 0.04:
            self.feed(chance.choice([FleetLow, FleetBack, Deadline])(self.now_s))
        elif roll < 0.05:
            for engine in self.engines.values():
                engine.finish_loads()
        else:
            self.proceed()

    def proceed(self) -> None:
        """An answer comes, or the alarm rings."""
        if self.state.deadline_s is not None and self.now_s >= self.state.deadline_s:
            self.feed(Deadline(self.now_s))
        elif self.out:
            self.answer(self.chance.choice(sorted(self.out)))
        else:
            self.feed(FleetBack(self.now_s))

    def answer(self, replica: ReplicaId) -> None:
        command, engine, chance = self.out.pop(replica), self.engines[replica], self.chance
        self.now_s += chance.random() * 0.3
        lost = chance.random() < self.sick * 0.5
        event: Event
        match command:
            case Wait():
                self.now_s += command.after_s
                event = Waited(replica, self.now_s)
            case Look():
                listed = None if engine.dead or lost else dict(engine.listed)
                event = Looked(replica, listed, self.now_s)
            case Load():
                outcome = self.loaded(replica, engine, lost)
                event = LoadAnswered(replica, outcome, 500, "text", self.now_s)
            case Unload():
                event = Unloaded(replica, self.unloaded(engine, lost), "text", self.now_s)
            case Reset():
                done = not engine.dead and not lost
                if done:
                    engine.served_old = False
                event = ResetAnswered(replica, done, "text", self.now_s)
            case Drop():
                raise AssertionError("not a call")
        self.feed(event)

    def loaded(self, replica: ReplicaId, engine: Engine, lost: bool) -> L:
        if engine.dead:
            return self.chance.choice([L.NEVER_RECEIVED, L.ENGINE_DEAD])
        if replica in self.refusing:
            return L.REFUSED
        if lost:
            fate = self.chance.choice(["never", "pending", "done"])
            if fate == "pending":
                engine.loads.append(PATH)
            elif fate == "done":
                engine.finish_loads()
                engine.listed.setdefault(NAME, PATH)
            return L.UNKNOWN
        engine.finish_loads()
        if NAME in engine.listed:
            return L.ALREADY
        if self.chance.random() < self.sick:
            return L.NOT_VISIBLE
        assert not engine.served_old, "loaded over a stale prefix cache"
        engine.listed[NAME] = PATH
        return L.LOADED

    def unloaded(self, engine: Engine, lost: bool) -> U:
        if engine.dead:
            return U.NEVER_RECEIVED
        engine.finish_loads()
        if not lost or self.chance.random() < 0.5:
            engine.listed.pop(NAME, None)
        if lost:
            return self.chance.choice([U.UNKNOWN, U.UNKNOWN, U.REFUSED])
        return U.GONE

    def feed(self, event: Event) -> None:
        self.state, commands = self.step(self.state, event)
        self.rolling = self.rolling or self.state.phase is Phase.ROLLING_BACK
        self.take(commands)

    def take(self, commands: Commands) -> None:
        for command in commands:
            replica = command.replica
            assert replica not in self.dropped, f"{command} after it was dropped"
            pending = self.out.pop(replica, None)
            if isinstance(command, Drop):
                self.dropped.add(replica)
                if isinstance(pending, Load):  # nobody waits for it, and it may land
                    self.engines[replica].loads.append(PATH)
                continue
            assert pending is None or isinstance(pending, Wait), f"{command} while {pending} is out"
            assert not (self.rolling and isinstance(command, Load)), "a load while rolling back"
            self.out[replica] = command

    def check(self, end: PublicationResult) -> PublicationResult:
        for engine in self.engines.values():
            engine.finish_loads()  # whatever was still to land has landed
        assert all(isinstance(c, Wait) for c in self.out.values()), "ended with calls out"
        assert set(end.dropped) == self.dropped
        kept = set(self.engines) - self.dropped
        if end.committed:
            assert set(end.loaded_on) == kept
            assert len(kept) >= self.needed
            for replica in kept - {r for r, e in self.engines.items() if e.dead}:
                assert self.engines[replica].listed.get(NAME) == PATH
                assert not self.engines[replica].served_old
            assert end.status == 200
        else:
            assert not [r for r in kept if NAME in self.engines[r].listed], "left behind"
            assert end.status >= 400
            assert end.status != 404
            assert end.code
            assert end.loaded_on == ()
            assert (end.outcome is Phase.STRANDED) == bool(end.stranded)
        return end


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_in_any_history_it_ends_everywhere_or_nowhere(chance: random.Random) -> None:
    """Committed: every replica not dropped lists our path. Else: none but the named holds it."""
    History(chance).run()


def test_histories_reach_every_end() -> None:
    ends = {History(random.Random(seed)).run().outcome for seed in range(400)}
    assert ends == {Phase.COMMITTED, Phase.ROLLED_BACK, Phase.STRANDED}


# --- planted faults -----------------------------------------------------------------------------

Stepper = Callable[[Publication, Event], tuple[Publication, Commands]]


def forgets_stragglers(state: Publication, event: Event) -> tuple[Publication, Commands]:
    """Rolls back without waiting for loads that are out."""
    after, commands = machine.step(state, event)
    if after.phase is Phase.ROLLING_BACK and not any(
        p.at is At.UNLOADING for p in after.replicas.values()
    ):
        return replace(after, phase=Phase.ROLLED_BACK), commands
    return after, commands


def counts_a_name_from_before_as_loaded(
    state: Publication, event: Event
) -> tuple[Publication, Commands]:
    if isinstance(event, Looked) and (event.listed or {}).get(NAME) == PATH:
        before = state.replicas[event.replica]
        known = {event.replica: replace(before, old=False)}
        state = replace(state, replicas={**state.replicas, **known})
    return machine.step(state, event)


def guesses_that_a_lost_load_failed(
    state: Publication, event: Event
) -> tuple[Publication, Commands]:
    if isinstance(event, LoadAnswered) and event.outcome is L.UNKNOWN:
        event = replace(event, outcome=L.REFUSED)
    return machine.step(state, event)


def does_not_verify(state: Publication, event: Event) -> tuple[Publication, Commands]:
    after, commands = machine.step(state, event)
    if after.phase is Phase.VERIFYING and state.phase is Phase.LOADING:
        done = {r: replace(p, at=At.VERIFIED) for r, p in after.replicas.items()}
        return replace(after, phase=Phase.COMMITTED, replicas=done), ()
    return after, commands


def believes_one_look_without_the_name(
    state: Publication, event: Event
) -> tuple[Publication, Commands]:
    """Takes a load that timed out for gone once a look does not show it."""
    after, commands = machine.step(state, event)
    absent = isinstance(event, Looked) and event.listed is not None and NAME not in event.listed
    if absent and after.replicas[event.replica].at is At.WAITING:
        known = replace(after.replicas[event.replica], holds=False)
        after = replace(after, replicas={**after.replicas, event.replica: known})
    return after, commands


def skips_the_cache_clear(state: Publication, event: Event) -> tuple[Publication, Commands]:
    after, commands = machine.step(state, event)
    if isinstance(event, Unloaded) and any(isinstance(c, Reset) for c in commands):
        loading = replace(after.replicas[event.replica], at=At.LOADING, stale=False, attempts=1)
        after = replace(after, replicas={**after.replicas, event.replica: loading})
        return after, (Load(event.replica),)
    return after, commands


def takes_a_failed_clear_for_done(state: Publication, event: Event) -> tuple[Publication, Commands]:
    if isinstance(event, ResetAnswered):
        event = replace(event, done=True)
    return machine.step(state, event)


def takes_a_lost_unload_for_done(state: Publication, event: Event) -> tuple[Publication, Commands]:
    if isinstance(event, Unloaded):
        event = replace(event, outcome=U.GONE)
    return machine.step(state, event)


def does_not_name_the_stranded(state: Publication, event: Event) -> tuple[Publication, Commands]:
    after, commands = machine.step(state, event)
    ends = {
        r: replace(p, at=At.CLEAN) if p.at is At.STRANDED else p for r, p in after.replicas.items()
    }
    phase = Phase.ROLLED_BACK if after.phase is Phase.STRANDED else after.phase
    return replace(after, phase=phase, replicas=ends), commands


def commits_with_too_few(state: Publication, event: Event) -> tuple[Publication, Commands]:
    return machine.step(replace(state, needed=0), event)


@pytest.mark.parametrize(
    "fault",
    [
        forgets_stragglers,
        counts_a_name_from_before_as_loaded,
        guesses_that_a_lost_load_failed,
        does_not_verify,
        believes_one_look_without_the_name,
        skips_the_cache_clear,
        takes_a_failed_clear_for_done,
        takes_a_lost_unload_for_done,
        does_not_name_the_stranded,
        commits_with_too_few,
    ],
)
def test_planted_fault_is_found(fault: Stepper) -> None:
    """The invariants of the random histories are strong enough to see each of these."""
    for seed in range(3000):
        try:
            History(random.Random(seed), fault).run()
        except (AssertionError, ImpossibleEventError):
            return
    pytest.fail(f"3000 histories did not see that it {fault.__name__}")
