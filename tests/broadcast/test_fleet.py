"""Who may get a request: states, leases, stalls, restarts, and what each name may be sent to."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broadcast.fleet import (
    EDGES,
    FLAP_S,
    MAX_BACK_OFF_S,
    SLOW_PROBES,
    Fleet,
    Lease,
    Probe,
    Replica,
    ReplicaState,
    Transition,
)
from routing.ids import AdapterName, ReplicaId
from routing.router import ReplicaLoad

V1, V2 = AdapterName("trl-policy-v1"), AdapterName("trl-policy-v2")
BASE = "Qwen/Qwen2.5-Math-1.5B"
MARK = "run-1"
LONG_S = 2 * FLAP_S


def probe(
    sent_at_s: float,
    listed: dict[AdapterName, str] | None = None,
    *,
    paused: bool = False,
    identity: str | None = MARK,
) -> Probe:
    return Probe(sent_at_s, listed or {}, (BASE,), paused, identity)


def join(
    fleet: Fleet, r: Replica, now_s: float, adapters: dict[AdapterName, str] | None = None
) -> tuple[Transition, ...]:
    fleet.probe_ok(r.id, probe(now_s, adapters), now_s)
    epoch = fleet.catch_up_started(r.id)
    return fleet.joined(r.id, epoch, adapters or {}, now_s, identity=MARK)


def ready(
    count: int = 2, adapters: dict[AdapterName, str] | None = None, **options: object
) -> tuple[Fleet, list[Replica]]:
    """A fleet that became ready at 0 s."""
    fleet = Fleet(**options)  # type: ignore[arg-type]
    replicas = [fleet.add(f"http://r{n}:8000", 0.0) for n in range(count)]
    for r in replicas:
        join(fleet, r, 0.0, adapters)
    return fleet, replicas


def moves(transitions: tuple[Transition, ...]) -> list[tuple[str, str]]:
    return [(t.old.value, t.new.value) for t in transitions]


# Membership, candidates, leases


def test_ids_count_up_and_are_never_used_again():
    fleet, _ = ready(2)
    fleet.remove(ReplicaId("r1"))
    assert fleet.add("http://r1:8000", 1.0).id == "r2"


def test_a_url_is_not_added_twice_unless_the_first_is_leaving():
    fleet, (a, _) = ready(2)
    with pytest.raises(ValueError, match="already"):
        fleet.add(a.url, 1.0)
    fleet.drain(a.id, 1.0)
    assert fleet.add(a.url, 1.0).state is ReplicaState.JOINING


def test_a_replica_is_what_a_routing_policy_wants():
    load: ReplicaLoad = Replica(ReplicaId("r0"), "http://a")
    assert (load.id, load.inflight) == ("r0", 0)


def test_candidates_are_the_ready_replicas_that_hold_the_name():
    fleet, (a, b) = ready(2)
    fleet.hold([b.id], V1, "/p", 1.0)
    assert fleet.candidates(V1) == (b,)
    assert fleet.candidates(BASE) == (a, b)
    assert fleet.candidates("nobody-knows") == ()


def test_candidates_are_the_same_object_while_nothing_changes():
    fleet, (a, _) = ready(2, {V1: "/p"})
    first = fleet.candidates(V1)
    fleet.start(a.id, 1, V1).release()
    fleet.probe_ok(a.id, probe(1.0, {V1: "/p"}), 1.0)
    assert fleet.candidates(V1) is first


def test_names_from_clients_do_not_make_the_table_grow():
    fleet, _ = ready(2, {V1: "/p"})
    for n in range(1000):
        fleet.candidates(f"made-up-{n}")
    assert set(fleet._by_model) == {V1, BASE}


def test_a_closed_name_gets_nothing_more_there():
    fleet, (a, b) = ready(2, {V1: "/p"})
    fleet.close(V1, [a.id])
    assert fleet.candidates(V1) == (b,)
    fleet.close(V1)
    assert fleet.candidates(V1) == ()


def test_a_lease_counts_its_weight_once():
    fleet, (a, _) = ready(2)
    lease = fleet.start(a.id, 8, V1)
    other = fleet.start(a.id, 1, V2)
    assert (a.inflight, a.routed, fleet.inflight_names()) == (9, 9, {V1, V2})
    lease.release()
    lease.release()
    assert (a.inflight, a.routed, fleet.inflight_names()) == (1, 9, {V2})
    other.release()
    assert (fleet.inflight(), fleet.inflight_names()) == (0, frozenset())


def test_a_lease_on_a_removed_replica_can_still_be_released():
    fleet, (a, _) = ready(2)
    lease = fleet.start(a.id, 1, V1)
    fleet.remove(a.id)
    lease.release()
    assert (a.inflight, fleet.inflight_names()) == (0, frozenset())


def test_a_draining_replica_gets_nothing_new_and_keeps_what_it_has():
    fleet, (a, b) = ready(2)
    fleet.start(a.id, 1)
    assert moves(fleet.drain(a.id, 1.0)) == [("ready", "draining")]
    assert fleet.routable() == (b,)
    assert a.inflight == 1
    fleet.connection_refused(a.id, "gone", 2.0)
    fleet.engine_dead(a.id, "dead", 2.0)
    fleet.probe_ok(a.id, probe(3.0), 3.0)
    assert a.state is ReplicaState.DRAINING


# What traffic sees


def test_a_refused_connection_takes_it_out_at_once_and_a_probe_decides():
    fleet, (a, b) = ready(2)
    assert moves(fleet.connection_refused(a.id, "connect", LONG_S)) == [("ready", "suspect")]
    assert fleet.routable() == (b,)
    # The other thousand requests that were on it say the same: no news.
    assert fleet.connection_refused(a.id, "connect", LONG_S) == ()
    assert moves(fleet.probe_failed(a.id, "refused", "x", LONG_S, LONG_S)) == [("suspect", "down")]
    assert a.last_error == "refused: x"


def test_a_probe_lets_a_suspect_back_with_what_it_held():
    fleet, (a, b) = ready(2, {V1: "/p"})
    fleet.connection_lost(a.id, "reset", LONG_S)
    back = fleet.probe_ok(a.id, probe(LONG_S + 1, {V1: "/p"}), LONG_S + 1)
    assert moves(back) == [("suspect", "ready")]
    assert fleet.candidates(V1) == (a, b)
    assert a.last_error == ""


def test_a_probe_sent_before_the_connection_broke_proves_nothing():
    fleet, (a, _) = ready(2)
    fleet.connection_refused(a.id, "connect", LONG_S)
    assert fleet.probe_ok(a.id, probe(LONG_S - 1), LONG_S + 1) == ()
    assert fleet.probe_failed(a.id, "refused", "", LONG_S - 1, LONG_S + 1) == ()
    assert a.state is ReplicaState.SUSPECT


def test_a_dead_engine_is_down_at_once_and_holds_nothing():
    fleet, (a, b) = ready(2, {V1: "/p"})
    assert moves(fleet.engine_dead(a.id, "EngineCore", 1.0)) == [("ready", "down")]
    assert a.adapters == {}
    assert fleet.candidates(V1) == (b,)


def test_an_edge_answering_for_it_takes_it_out_with_the_reason():
    fleet, (a, _) = ready(2)
    fleet.not_vllm(a.id, "token_rejected", "401", LONG_S)
    assert (a.state, a.error_code) == (ReplicaState.SUSPECT, "token_rejected")
    fleet.probe_failed(a.id, "token_rejected", "401", LONG_S, LONG_S)
    assert a.state is ReplicaState.DOWN
    assert "token_rejected" in fleet.missing()[0]


def test_a_404_for_a_name_it_should_hold_makes_it_rejoin():
    fleet, (a, _) = ready(2, {V1: "/p"})
    assert moves(fleet.adapter_lost(a.id, V1, LONG_S)) == [("ready", "joining")]
    assert (a.error_code, a.adapters) == ("lost_adapter", {})


def test_a_404_for_a_name_that_was_closed_meanwhile_is_no_news():
    fleet, (a, _) = ready(2, {V1: "/p"})
    fleet.close(V1)
    assert fleet.adapter_lost(a.id, V1, 1.0) == ()


def test_an_answer_about_an_earlier_life_changes_nothing():
    fleet, (a, _) = ready(2, {V1: "/p"})
    lease = fleet.start(a.id, 1, V1)
    fleet.engine_dead(a.id, "dead", 1.0)
    fleet.probe_ok(a.id, probe(2.0), 2.0)
    join(fleet, a, 3.0, {V1: "/p"})
    assert a.state is ReplicaState.READY
    assert fleet.engine_dead(a.id, "dead", 4.0, lease.epoch) == ()
    assert fleet.connection_lost(a.id, "reset", 4.0, lease.epoch) == ()
    assert fleet.adapter_lost(a.id, V1, 4.0, lease.epoch) == ()
    assert a.state is ReplicaState.READY


def test_events_about_a_removed_replica_change_nothing():
    fleet, (a, b) = ready(2)
    fleet.remove(a.id)
    fleet.answered(a.id, 1.0)
    fleet.probe_sent(a.id, 1.0)
    fleet.set_paused([a.id], True, 1.0)
    assert fleet.connection_refused(a.id, "", 1.0) == ()
    assert fleet.probe_ok(a.id, probe(1.0), 1.0) == ()
    assert fleet.probe_failed(a.id, "refused", "", 1.0, 1.0) == ()
    assert fleet.must_rejoin(a.id, "x", "", 1.0) == ()
    assert fleet.joined(a.id, 0, {}, 1.0) == ()
    assert list(fleet) == [b]


# What probes see


def test_what_comes_back_from_down_has_to_catch_up_first():
    fleet, (a, b) = ready(2, {V1: "/p"})
    fleet.engine_dead(a.id, "dead", LONG_S)
    at_s = LONG_S + 5
    assert moves(fleet.probe_ok(a.id, probe(at_s, {V1: "/p"}), at_s)) == [("down", "joining")]
    assert fleet.candidates(V1) == (b,)
    assert fleet.to_catch_up(at_s) == (a,)
    assert moves(join(fleet, a, at_s, {V1: "/p"})) == [("joining", "ready")]
    assert fleet.candidates(V1) == (a, b)


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        (probe(LONG_S, {V1: "/p"}, identity="default"), "restarted"),
        (probe(LONG_S, {V1: "/p"}, identity=None), "restarted"),
        (probe(LONG_S, {}), "lost_adapter"),
        (probe(LONG_S, {V1: "/other"}), "lost_adapter"),
        (probe(LONG_S, {V1: "/p"}, paused=True), "pause_differs"),
    ],
)
@pytest.mark.parametrize("suspect", [False, True])
def test_a_replica_that_is_not_as_we_left_it_rejoins(seen: Probe, code: str, suspect: bool):
    fleet, (a, _) = ready(2, {V1: "/p"})
    if suspect:
        fleet.connection_lost(a.id, "reset", LONG_S)
    fleet.probe_ok(a.id, seen, LONG_S)
    assert (a.state, a.error_code) == (ReplicaState.JOINING, code)


def test_a_listing_read_before_a_commit_does_not_look_like_a_restart():
    fleet, (a, _) = ready(2)
    fleet.hold([a.id], V1, "/p", 10.0)
    assert fleet.probe_ok(a.id, probe(9.9, {}), 10.1) == ()
    assert moves(fleet.probe_ok(a.id, probe(10.1, {}), 10.2)) == [("ready", "joining")]


def test_a_pause_state_read_before_the_pause_does_not_count():
    fleet, (a, b) = ready(2)
    fleet.expect_paused(None, 10.0)
    assert fleet.probe_ok(b.id, probe(10.1, paused=True), 10.2) == ()
    fleet.set_paused([a.id, b.id], True, 11.0)
    fleet.expect_paused(True, 11.0)
    assert fleet.probe_ok(a.id, probe(10.9, paused=False), 11.1) == ()
    assert a.paused
    assert moves(fleet.probe_ok(a.id, probe(12.0, paused=False), 12.1)) == [("ready", "joining")]


def test_a_marker_read_before_it_was_set_does_not_count():
    fleet, (a, _) = ready(2)
    fleet.marked(a.id, "run-2", 10.0)
    assert fleet.probe_ok(a.id, probe(9.9, identity=MARK), 10.1) == ()
    assert moves(fleet.probe_ok(a.id, probe(10.1, identity=MARK), 10.2)) == [("ready", "joining")]


def test_slow_probes_need_several_in_a_row():
    fleet, (a, _) = ready(2)
    for n in range(SLOW_PROBES - 1):
        assert fleet.probe_failed(a.id, "timeout", "", float(n), float(n)) == ()
    assert moves(fleet.probe_failed(a.id, "timeout", "", 9.0, 9.0)) == [("ready", "suspect")]


def test_slow_probes_do_not_hurt_a_replica_that_answers_requests():
    """O-21: a busy worker answers its health check late."""
    fleet, (a, _) = ready(2)
    for n in range(20 * SLOW_PROBES):
        assert fleet.probe_failed(a.id, "timeout", "", float(n), float(n)) == ()
        if n % 2:
            fleet.answered(a.id, float(n))
    assert a.state is ReplicaState.READY


def test_slow_probes_alone_never_take_the_last_ready_replica():
    fleet, replicas = ready(2)
    for n, r in product(range(1, 3 * SLOW_PROBES), replicas):
        fleet.probe_failed(r.id, "timeout", "", float(n), float(n))
    assert len(fleet.routable()) == 1


def test_slow_probes_do_not_count_while_the_fleet_is_really_paused():
    fleet, (a, _) = ready(2)
    fleet.set_paused([a.id], True, 1.0)
    fleet.expect_paused(True, 1.0)
    for n in range(2, 10 * SLOW_PROBES):
        assert fleet.probe_failed(a.id, "timeout", "", float(n), float(n)) == ()


# Stalls


def test_a_deep_probe_unanswered_for_too_long_makes_it_down():
    fleet, (a, b) = ready(2, stall_s=60.0)
    fleet.probe_sent(a.id, 10.0)
    fleet.probe_sent(a.id, 40.0)
    assert fleet.tick(69.0) == ()
    assert moves(fleet.tick(70.0)) == [("ready", "down")]
    assert (a.error_code, fleet.routable()) == ("stalled", (b,))


@pytest.mark.parametrize("sign", ["answered", "probe_ok"])
def test_a_sign_of_life_restarts_the_stall_clock(sign: str):
    fleet, (a, _) = ready(2, stall_s=60.0)
    fleet.probe_sent(a.id, 10.0)
    if sign == "answered":
        fleet.answered(a.id, 50.0)
    else:
        fleet.probe_ok(a.id, probe(10.0), 50.0)
        fleet.probe_sent(a.id, 50.0)
    assert fleet.tick(109.0) == ()
    assert moves(fleet.tick(110.0)) == [("ready", "down")]


def test_a_replica_nobody_asked_is_not_stalled():
    fleet, _ = ready(2, stall_s=60.0)
    assert fleet.tick(1e6) == ()


def test_a_probe_from_before_a_catch_up_does_not_stall_what_joined():
    fleet, (a, _) = ready(2, stall_s=60.0)
    fleet.probe_sent(a.id, 10.0)
    fleet.must_rejoin(a.id, "dropped", "blind", 20.0)
    assert fleet.tick(200.0) == ()
    join_s = 201.0
    fleet.joined(a.id, fleet.catch_up_started(a.id), {}, join_s, identity=MARK)
    assert fleet.tick(join_s + 1) == ()
    assert a.state is ReplicaState.READY


def test_a_replica_resumed_on_its_own_gets_a_fresh_stall_clock():
    fleet, (a, _) = ready(2, stall_s=60.0)
    fleet.set_paused([a.id], True, 5.0)
    fleet.probe_sent(a.id, 10.0)
    assert fleet.tick(200.0) == ()
    fleet.set_paused([a.id], False, 200.0)
    assert fleet.tick(259.0) == ()
    assert moves(fleet.tick(260.0)) == [("ready", "down")]


def test_a_paused_fleet_does_not_stall_and_the_clock_starts_with_the_resume():
    fleet, (a, _) = ready(2, stall_s=60.0)
    fleet.probe_sent(a.id, 10.0)
    fleet.set_paused([a.id], True, 20.0)
    fleet.expect_paused(True, 20.0)
    assert fleet.tick(1000.0) == ()
    fleet.set_paused([a.id], False, 1000.0)
    fleet.expect_paused(False, 1000.0)
    assert fleet.tick(1059.0) == ()
    assert moves(fleet.tick(1060.0)) == [("ready", "down")]


# Changes it must not miss


def test_what_missed_a_change_while_suspect_rejoins():
    fleet, (a, b) = ready(2)
    fleet.connection_lost(a.id, "reset", LONG_S)
    fleet.hold([b.id], V1, "/p", LONG_S + 1)
    assert fleet.change_committed([b.id], LONG_S + 1) == ()
    seen = probe(LONG_S + 2, {V1: "/p"})
    assert moves(fleet.probe_ok(a.id, seen, LONG_S + 2)) == [("suspect", "joining")]
    assert a.error_code == "missed_change"


def test_a_ready_replica_without_the_change_rejoins_at_once():
    fleet, (a, b) = ready(2)
    assert moves(fleet.change_committed([b.id], LONG_S)) == [("ready", "joining")]
    assert fleet.to_catch_up(LONG_S) == (a,)


def test_a_catch_up_overtaken_by_a_change_is_due_again():
    fleet, (a, b) = ready(2)
    fleet.must_rejoin(a.id, "dropped", "blind", LONG_S)
    epoch = fleet.catch_up_started(a.id)
    assert fleet.to_catch_up(LONG_S) == ()
    fleet.change_committed([b.id], LONG_S)
    assert fleet.joined(a.id, epoch, {}, LONG_S) == ()
    assert fleet.to_catch_up(LONG_S) == (a,)
    assert moves(fleet.joined(a.id, fleet.catch_up_started(a.id), {}, LONG_S)) == [
        ("joining", "ready")
    ]


def test_a_catch_up_of_an_earlier_life_does_not_join():
    fleet, (a, _) = ready(2)
    fleet.must_rejoin(a.id, "dropped", "blind", LONG_S)
    epoch = fleet.catch_up_started(a.id)
    fleet.connection_refused(a.id, "died under it", LONG_S)
    fleet.probe_ok(a.id, probe(LONG_S), LONG_S)
    assert fleet.joined(a.id, epoch, {}, LONG_S) == ()
    assert a.state is ReplicaState.JOINING


def test_a_catch_up_told_to_begin_again_does_not_join():
    fleet, (a, _) = ready(2)
    fleet.must_rejoin(a.id, "dropped", "blind", LONG_S)
    epoch = fleet.catch_up_started(a.id)
    assert fleet.must_rejoin(a.id, "stranded", "v2 is left over", LONG_S) == ()
    assert fleet.joined(a.id, epoch, {}, LONG_S) == ()
    assert fleet.to_catch_up(LONG_S) == (a,)


def test_failed_catch_ups_wait_longer_each_time_up_to_a_bound():
    fleet, (a, _) = ready(2)
    now_s = LONG_S
    fleet.must_rejoin(a.id, "dropped", "blind", now_s)
    waits = []
    for _ in range(8):
        epoch = fleet.catch_up_started(a.id)
        fleet.catch_up_failed(a.id, epoch, "load_failed", "no", now_s)
        assert fleet.to_catch_up(now_s) == ()
        waits.append(a.retry_at_s - now_s)
        now_s = a.retry_at_s
        assert fleet.to_catch_up(now_s) == (a,)
    assert all(early < late or late == MAX_BACK_OFF_S for early, late in pairwise(waits))
    assert waits[-1] == MAX_BACK_OFF_S


def test_one_that_keeps_breaking_connections_comes_back_later_each_time():
    """O-35: its failures are remembered across requests, though its probes are fine."""
    fleet, (a, _) = ready(2)
    now_s, waits = LONG_S, []
    for _ in range(4):
        fleet.connection_lost(a.id, "reset", now_s)
        left_s = now_s
        while a.state is not ReplicaState.READY:
            fleet.probe_ok(a.id, probe(now_s), now_s)
            now_s += 0.5
        waits.append(now_s - left_s)
    assert waits == sorted(waits)
    assert waits[0] <= 1.0 < waits[-1] <= MAX_BACK_OFF_S


def test_no_more_than_half_wait_out_their_broken_connections():
    """A network that breaks connections of all replicas must not leave the work to one of them."""
    fleet, replicas = ready(8)
    fewest, now_s = 8, LONG_S
    for n in range(200):
        fleet.connection_lost(replicas[n % 8].id, "reset", now_s)
        for r in replicas:
            if r.state is ReplicaState.SUSPECT:
                fleet.probe_ok(r.id, probe(now_s), now_s)
        fewest = min(fewest, len(fleet.routable()))
        now_s += 0.1
    assert fewest == 4


# In-place changes


def test_after_an_in_place_change_a_restarted_process_stays_out():
    fleet, (a, b) = ready(2)
    fleet.weights_changed_in_place([a.id, b.id], LONG_S)
    fleet.engine_dead(a.id, "dead", LONG_S + 1)
    fleet.probe_ok(a.id, probe(LONG_S + 9, identity="default"), LONG_S + 9)
    assert a.identity is None
    assert (a.state, fleet.to_catch_up(1e6)) == (ReplicaState.JOINING, ())
    assert "other weights" in fleet.missing()[0]
    assert fleet.joined(a.id, fleet.catch_up_started(a.id), {}, 1e6) == ()


def test_after_an_in_place_change_the_same_process_may_come_back():
    fleet, (a, b) = ready(2)
    fleet.weights_changed_in_place([a.id, b.id], LONG_S)
    fleet.connection_refused(a.id, "", LONG_S + 1)
    fleet.probe_failed(a.id, "refused", "", LONG_S + 2, LONG_S + 2)
    assert a.state is ReplicaState.DOWN
    assert moves(join(fleet, a, LONG_S + 60)) == [("joining", "ready")]


def test_who_missed_an_in_place_change_or_joins_after_it_stays_out():
    fleet, (a, b) = ready(2)
    fleet.connection_lost(a.id, "", LONG_S)
    fleet.weights_changed_in_place([b.id], LONG_S)
    c = fleet.add("http://late:8000", LONG_S)
    assert "other weights" in fleet.missing()[-1]
    fleet.probe_ok(a.id, probe(LONG_S + 1), LONG_S + 1)
    fleet.probe_ok(c.id, probe(LONG_S + 1, identity="default"), LONG_S + 1)
    assert [r.state for r in (a, c)] == [ReplicaState.JOINING] * 2
    assert fleet.to_catch_up(1e6) == ()


def test_an_excluded_replica_stays_out_and_says_why():
    fleet, (a, b) = ready(2)
    fleet.exclude(a.id, "replicas_disagree", "dtype is float16, not bfloat16", 1.0)
    assert (fleet.routable(), fleet.to_catch_up(1e6)) == ((b,), ())
    assert "float16" in fleet.missing()[0]


def test_an_excluded_replica_is_looked_at_anew_once_it_was_down():
    """It may have been started with other options; nothing else would ever let it back."""
    fleet, (a, b) = ready(2)
    fleet.exclude(a.id, "model_differs", "serves another model", 1.0)
    fleet.exclude(b.id, "wrong_weights", "serves the base model", 1.0, for_good=True)
    for r in (a, b):
        fleet.connection_refused(r.id, "", 2.0)
        assert r.state is ReplicaState.DOWN
        fleet.probe_ok(r.id, probe(3.0, identity="default"), 3.0)
    assert fleet.to_catch_up(1e6) == (a,)
    assert fleet.missing()[1].endswith("serves the base model")


def test_who_missed_an_in_place_change_stays_out_after_it_was_down_too():
    fleet, (a, b) = ready(2)
    fleet.connection_lost(a.id, "", LONG_S)
    fleet.weights_changed_in_place([b.id], LONG_S)
    fleet.engine_dead(a.id, "", LONG_S)
    fleet.probe_ok(a.id, probe(LONG_S + 1), LONG_S + 1)
    assert fleet.to_catch_up(1e6) == ()


# Health


def test_healthy_once_every_replica_has_been_ready_then_while_enough_are():
    fleet = Fleet(min_replicas=1)
    a, b = fleet.add("http://a", 0.0), fleet.add("http://b", 0.0)
    join(fleet, a, 1.0)
    assert not fleet.healthy(1.0)
    assert fleet.missing() == ("r1 (http://b) is joining: has not been looked at yet",)
    join(fleet, b, 2.0)
    assert fleet.healthy(2.0)
    fleet.engine_dead(a.id, "dead", 3.0)
    assert fleet.healthy(3.0)
    fleet.engine_dead(b.id, "dead", 4.0)
    assert not fleet.healthy(4.0)


def test_healthy_after_the_start_timeout_with_enough_replicas():
    fleet = Fleet(min_replicas=1, start_timeout_s=100.0)
    a, _ = fleet.add("http://a", 0.0), fleet.add("http://b", 0.0)
    assert not fleet.healthy(100.0)
    join(fleet, a, 101.0)
    assert fleet.healthy(101.0)


def test_all_means_every_replica_that_stays():
    fleet, (a, _) = ready(2, min_replicas="all")
    assert fleet.healthy(1.0)
    fleet.connection_lost(a.id, "", 2.0)
    assert not fleet.healthy(2.0)
    fleet.drain(a.id, 3.0)
    assert fleet.healthy(3.0)


def test_an_empty_fleet_is_not_healthy():
    assert not Fleet(min_replicas="all").healthy(1e6)
    assert not Fleet(min_replicas=1).healthy(1e6)


def test_a_change_of_state_that_is_no_edge_raises():
    fleet, (a, _) = ready(2)
    fleet.engine_dead(a.id, "dead", 1.0)
    with pytest.raises(AssertionError, match="no edge from down to ready"):
        fleet._move(a, ReplicaState.READY, "", "", 2.0)


# Any order of events, against a naive model

NAMES = (V1, V2)


class Life:
    """What a real server would hold: adapters, marker, pause. The naive side of the model."""

    def __init__(self) -> None:
        self.listed: dict[AdapterName, str] = {}
        self.identity: str | None = "default"
        self.epochs: set[int] = set()


class FleetMachine(RuleBasedStateMachine):
    """The fleet against lists that are computed anew for each look."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(stall_s=60.0)
        self.now_s = 0.0
        self.seen: list[Transition] = []
        self.lives: dict[ReplicaId, Life] = {}
        self.leases: list[Lease] = []
        self.released: list[Lease] = []
        self.running: Counter[ReplicaId] = Counter()
        self.committed: dict[AdapterName, str] = {}
        self.loads = 0

    def note(self, transitions: tuple[Transition, ...]) -> None:
        for t in transitions:
            assert t.new in EDGES[t.old]
            assert (t.old, t.new) != (ReplicaState.DOWN, ReplicaState.READY)
        self.seen += transitions

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        for _ in range(count):
            self.add()
        for r in self.fleet:
            self.lives[r.id].identity = MARK
            self.note(join(self.fleet, r, 0.0))
        # Long enough ago for a first trouble not to look like flapping.
        self.now_s = LONG_S

    def pick(self, n: int) -> Replica:
        return list(self.fleet)[n % len(self.fleet)]

    def look(self, r: Replica, sent_at_s: float) -> Probe:
        life = self.lives[r.id]
        return Probe(sent_at_s, dict(life.listed), (BASE,), False, life.identity)

    @precondition(lambda self: len(self.fleet) < 5)
    @rule()
    def add(self) -> None:
        r = self.fleet.add(f"http://{len(self.lives)}", self.now_s)
        self.lives[r.id] = Life()

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 40.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.note(self.fleet.tick(self.now_s))

    @precondition(lambda self: len(self.fleet) > 1)
    @rule(n=st.integers(0, 9), at_once=st.booleans())
    def leave(self, n: int, at_once: bool) -> None:
        r = self.pick(n)
        if at_once or r.state is ReplicaState.DRAINING:
            self.fleet.remove(r.id)
        else:
            self.note(self.fleet.drain(r.id, self.now_s))

    @precondition(lambda self: len(self.fleet) > 0)
    @rule(n=st.integers(0, 9), asked_s=st.sampled_from([0.0, 0.0, 3.0]))
    def probe_ok(self, n: int, asked_s: float) -> None:
        r = self.pick(n)
        self.note(self.fleet.probe_ok(r.id, self.look(r, self.now_s - asked_s), self.now_s))

    @precondition(lambda self: len(self.fleet) > 0)
    @rule(
        n=st.integers(0, 9), code=st.sampled_from(["refused", "timeout", "edge_404", "unreachable"])
    )
    def probe_fails(self, n: int, code: str) -> None:
        r = self.pick(n)
        self.fleet.probe_sent(r.id, self.now_s)
        self.note(self.fleet.probe_failed(r.id, code, "", self.now_s, self.now_s))

    @precondition(lambda self: len(self.fleet) > 0)
    @rule(
        n=st.integers(0, 9),
        event=st.sampled_from(["refused", "lost", "dead", "edge", "restart", "rejoin", "adapter"]),
        stale=st.booleans(),
    )
    def trouble(self, n: int, event: str, stale: bool) -> None:
        r, now_s = self.pick(n), self.now_s
        epoch = r.epoch - 1 if stale else r.epoch
        before = r.state
        out: tuple[Transition, ...] = ()
        match event:
            case "refused":
                out = self.fleet.connection_refused(r.id, "", now_s, epoch)
            case "lost":
                out = self.fleet.connection_lost(r.id, "", now_s, epoch)
            case "dead":
                out = self.fleet.engine_dead(r.id, "", now_s, epoch)
            case "edge":
                out = self.fleet.not_vllm(r.id, "edge_404", "", now_s, epoch)
            case "adapter":
                out = self.fleet.adapter_lost(r.id, V1, now_s, epoch)
            case "restart":
                self.lives[r.id] = Life()
            case "rejoin":
                self.note(self.fleet.must_rejoin(r.id, "stranded", "", now_s))
        if stale:
            assert out == ()
        if event in ("refused", "dead") and not stale:
            assert r.state is not ReplicaState.READY
        assert before is not ReplicaState.DOWN or r.state is ReplicaState.DOWN
        self.note(out)

    @precondition(lambda self: len(self.fleet) > 0)
    @rule(n=st.integers(0, 9), overtaken=st.booleans(), restarts=st.booleans())
    def catch_up(self, n: int, overtaken: bool, restarts: bool) -> None:
        due = self.fleet.to_catch_up(self.now_s)
        assert all(r.state is ReplicaState.JOINING for r in due)
        if not due:
            return
        r = due[n % len(due)]
        epoch = self.fleet.catch_up_started(r.id)
        life = self.lives[r.id]
        life.listed = dict(self.committed)
        life.identity = MARK
        if overtaken:
            self.commit(V2, n)
        if restarts:
            self.lives[r.id] = Life()
            self.note(self.fleet.connection_refused(r.id, "", self.now_s, epoch))
            self.note(self.fleet.probe_ok(r.id, self.look(r, self.now_s), self.now_s))
        out = self.fleet.joined(r.id, epoch, life.listed, self.now_s, identity=MARK)
        assert (not out) == (overtaken or restarts)
        self.note(out)

    @rule(name=st.sampled_from(NAMES), skip=st.integers(0, 9))
    def commit(self, name: AdapterName, skip: int) -> None:
        """A publication that every routable replica but perhaps one has followed."""
        held_by = [r.id for r in self.fleet.routable() if int(r.id[1:]) != skip]
        self.loads += 1
        self.committed[name] = f"/{name}-{self.loads}"
        for id in held_by:
            self.lives[id].listed[name] = self.committed[name]
        self.fleet.hold(held_by, name, self.committed[name], self.now_s)
        self.note(self.fleet.change_committed(held_by, self.now_s))

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: AdapterName) -> None:
        self.committed.pop(name, None)
        for life in self.lives.values():
            life.listed.pop(name, None)
        self.fleet.close(name)
        self.note(self.fleet.change_committed([r.id for r in self.fleet.routable()], self.now_s))

    @rule(model=st.sampled_from([*NAMES, BASE]), weight=st.integers(1, 8))
    def begin(self, model: str, weight: int) -> None:
        for r in self.fleet.candidates(model)[:1]:
            self.leases.append(self.fleet.start(r.id, weight, model))
            self.running[r.id] += weight

    @precondition(lambda self: bool(self.leases))
    @rule(n=st.integers(0, 99), twice=st.booleans())
    def end(self, n: int, twice: bool) -> None:
        lease = self.leases.pop(n % len(self.leases))
        self.running[lease.replica.id] -= lease.weight
        lease.release()
        self.released.append(lease)
        if twice:
            lease.release()
        self.fleet.answered(lease.replica.id, self.now_s)

    @invariant()
    def routable_is_ready(self) -> None:
        expected = [r for r in self.fleet if r.state is ReplicaState.READY]
        assert list(self.fleet.routable()) == expected

    @invariant()
    def candidates_hold_the_name(self) -> None:
        for model in (*NAMES, BASE, "unknown"):
            expected = [
                r
                for r in self.fleet
                if r.state is ReplicaState.READY and (model in r.adapters or model in r.base_models)
            ]
            assert list(self.fleet.candidates(model)) == expected

    @invariant()
    def every_ready_replica_is_believed_to_hold_what_was_committed(self) -> None:
        for r in self.fleet.routable():
            assert r.adapters == self.committed

    @invariant()
    def what_is_away_for_good_holds_nothing(self) -> None:
        for r in self.fleet:
            if r.state in (ReplicaState.DOWN, ReplicaState.JOINING):
                assert r.adapters == {}

    @invariant()
    def leases_add_up(self) -> None:
        for r in self.fleet:
            assert r.inflight == self.running[r.id]
        assert self.fleet.inflight_names() == {lease.model for lease in self.leases}

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        assert self.fleet.inflight() == 0
        assert self.fleet.inflight_names() == frozenset()
        assert all(lease.replica.inflight == 0 for lease in (*self.leases, *self.released))


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
