"""The ``prefix`` policy in the runs that people have reported: a pure simulation, no sockets.

Rollouts arrive while fewer than ``limit`` are in flight, and end in seeded random order.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from routing.prefix import Prefix
from routing.router import Decision, RouteRequest, RouterSettings

TEMPLATE = list(range(100_000, 100_023))  # 23 tokens: one whole block of 16 and 7 more


@dataclass
class Replica:
    id: str
    inflight: int = 0


@dataclass
class Run:
    """What came of it."""

    reasons: Counter = field(default_factory=Counter)
    served: Counter = field(default_factory=Counter)
    picks: list[str] = field(default_factory=list)
    widest: int = 0

    def share(self, reason: str) -> float:
        return self.reasons[reason] / self.reasons.total()

    def spread(self, replicas: int) -> float:
        """Most over mean, less one."""
        return max(self.served.values()) * replicas / self.served.total() - 1


def simulate(
    prompts: Iterable[Sequence[int] | bytes],
    replicas: int = 2,
    limit: int = 128,
    seed: int = 0,
    router: Prefix | None = None,
    models: Sequence[str] = ("m",),
) -> Run:
    router = router or Prefix(RouterSettings(seed=seed))
    fleet = tuple(Replica(f"r{number}") for number in range(replicas))
    by_id = {replica.id: replica for replica in fleet}
    random, running, run = Random(seed), [], Run()
    for number, prompt in enumerate(prompts):
        while len(running) >= limit:
            by_id[running.pop(random.randrange(len(running)))].inflight -= 1
        request = RouteRequest(models[number % len(models)], prompt)
        decision = router.choose(request, fleet, float(number))
        assert isinstance(decision, Decision)
        by_id[decision.replica].inflight += 1
        running.append(decision.replica)
        run.reasons[decision.reason] += 1
        run.served[decision.replica] += 1
        run.picks.append(decision.replica)
        loads = [replica.inflight for replica in fleet]
        run.widest = max(run.widest, max(loads) - min(loads))
    return run


def own(number: int, length: int) -> list[int]:
    """Tokens that only this prompt has."""
    return [number * 1000 + position for position in range(length)]


def groups(prompts: Iterable[list[int]], size: int = 8) -> list[list[int]]:
    return [prompt for prompt in prompts for _ in range(size)]


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_groups_of_eight_miss_once_each_and_spread_evenly(replicas: int, seed: int) -> None:
    """The reference run's prompts: 135 tokens, of which the template is 23."""
    run = simulate(groups(TEMPLATE + own(n, 112) for n in range(1000)), replicas, 128, seed)
    assert run.share("unmatched") == pytest.approx(0.125, abs=0.005)
    assert run.share("spilled") < 0.05
    assert run.spread(replicas) < (0.02 if replicas == 2 else 0.06)
    assert run.widest <= 8 + 8


def test_interleaved_groups_are_as_good_as_groups_in_a_row() -> None:
    prompts = groups(TEMPLATE + own(n, 112) for n in range(1000))
    mixed = []
    for start in range(0, len(prompts), 256):
        window = prompts[start : start + 256]
        Random(start).shuffle(window)
        mixed += window
    run = simulate(mixed, 2, 128)
    assert run.share("unmatched") == pytest.approx(0.125, abs=0.005)
    assert run.spread(2) < 0.02


def test_every_new_version_of_the_policy_starts_unmatched() -> None:
    """No block of one adapter counts for another."""
    prompt = TEMPLATE + own(1, 112)
    fleet, router = tuple(Replica(f"r{n}") for n in range(4)), Prefix(RouterSettings())
    for model in ("v3", "v4", "", "V4", "v4 ", "é", "e\u0301"):
        first = router.choose(RouteRequest(model, prompt), fleet, 0.0)
        second = router.choose(RouteRequest(model, prompt), fleet, 0.0)
        assert (first.reason, first.matched_blocks) == ("unmatched", 0)
        assert (second.reason, second.replica) == ("affinity", first.replica)


@pytest.mark.parametrize("own_tokens", [1, 15, 16, 17, 60])
@pytest.mark.parametrize("template", [0, 8, 23, 640, 645])
def test_new_prompts_spread_from_the_first_request_and_their_rollouts_follow(
    template: int, own_tokens: int
) -> None:
    """A long template that all share, one that is an exact multiple of a block, and prompts with
    less than one block: none of them makes one replica a monopoly."""
    shared = own(900, template)
    prompts = [shared + own(n, own_tokens) for n in range(200)]
    router = Prefix(RouterSettings())
    first = simulate(prompts, 4, 1, router=router)
    # With room left in the last block a prompt may first look like the going on of another.
    assert first.picks[:4] == ["r0", "r1", "r2", "r3"]
    assert first.reasons["unmatched"] >= 199
    assert all(45 <= count <= 55 for count in first.served.values())
    rest = simulate(groups(prompts, 7), 4, 64, router=router)
    assert rest.share("affinity") >= 0.85
    assert rest.spread(4) < 0.05


def test_prompts_with_a_second_template_spread_as_well() -> None:
    prompts = [own(900 + n % 2, 640) + own(n, 60) for n in range(200)]
    run = simulate(prompts, 4, 1)
    assert all(45 <= count <= 55 for count in run.served.values())


def test_near_duplicates_spread() -> None:
    """Prompts that share all but the last block: scoring by shared blocks sends most to one."""
    for share, length in ((480, 16), (480, 40), (475, 9)):
        shared = own(900, share)
        run = simulate([shared + own(n, length) for n in range(492)], 2, 32)
        assert run.spread(2) < 0.10, (share, length, run.served)


def test_only_one_prompt_fills_both_replicas_evenly() -> None:
    """After one spill every block of it is common to both, and each pick is an affinity."""
    run = simulate([TEMPLATE + own(1, 112)] * 1000, 2, 64)
    assert run.spread(2) < 0.05
    assert run.reasons["unmatched"] == 1
    assert run.reasons["spilled"] == 1


def test_what_every_replica_holds_goes_to_each_in_turn() -> None:
    """Served by all, a block tells the replicas apart no more, however special it is."""
    fleet, router = (Replica("a"), Replica("b")), Prefix(RouterSettings())
    request = RouteRequest("m", own(1, 100))
    for failed in ("a", "b"):
        router.choose(RouteRequest("m", own(1, 100), 1, frozenset({failed})), fleet, 0.0)
    decisions = [router.choose(request, fleet, 0.0) for _ in range(6)]
    assert Counter(decision.replica for decision in decisions) == {"a": 3, "b": 3}
    assert {decision.reason for decision in decisions} == {"affinity"}
    grown = router.choose(RouteRequest("m", own(1, 200)), fleet, 0.0)
    assert (grown.reason, grown.matched_blocks) == ("unmatched", 6)


def test_480_prompts_at_once_keep_within_the_spill_threshold() -> None:
    run = simulate(groups(TEMPLATE + own(n, 112) for n in range(60)), 8, 480)
    assert run.widest <= 8 + 8
    assert set(run.served) == {f"r{n}" for n in range(8)}


def test_a_conversation_stays_where_it_is() -> None:
    """Each turn adds 200 tokens; other conversations with the same template run beside it."""
    router, fleet = Prefix(RouterSettings()), tuple(Replica(f"r{n}") for n in range(3))
    where = {}
    for turn in range(20):
        for talk in range(12):
            prompt = TEMPLATE + own(talk, 100 + 200 * turn)
            decision = router.choose(RouteRequest("m", prompt), fleet, 0.0)
            if turn == 0:
                where[talk] = decision.replica
            assert decision.replica == where[talk]
            assert decision.reason == ("affinity" if turn else "unmatched")
    assert set(Counter(where.values()).values()) == {4}


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_conversation_that_spilled_stays_where_it_spilled_to(replicas: int) -> None:
    router, fleet = Prefix(RouterSettings()), tuple(Replica(f"r{n}") for n in range(replicas))
    first = router.choose(RouteRequest("m", TEMPLATE + own(1, 100)), fleet, 0.0).replica
    busy = next(replica for replica in fleet if replica.id == first)
    busy.inflight = 9
    spilled = router.choose(RouteRequest("m", TEMPLATE + own(1, 300)), fleet, 0.0)
    assert (spilled.reason, spilled.replica != first) == ("spilled", True)
    busy.inflight = 0
    for turn in range(2, 20):
        decision = router.choose(RouteRequest("m", TEMPLATE + own(1, 100 + 200 * turn)), fleet, 0.0)
        assert (decision.reason, decision.replica) == ("affinity", spilled.replica)


def test_conversations_that_crowd_one_replica_move_once_each_at_most() -> None:
    """24 conversations; those elsewhere end early, 12 are left on one replica."""
    router, fleet = Prefix(RouterSettings()), tuple(Replica(f"r{n}") for n in range(2))
    by_id = {replica.id: replica for replica in fleet}
    where = {}
    for talk in range(24):
        where[talk] = router.choose(RouteRequest("m", own(talk, 100)), fleet, 0.0).replica
    talks = [talk for talk in where if where[talk] == "r0"]
    assert len(talks) == 12
    by_id["r0"].inflight = 12
    moves = Counter()
    for turn in range(1, 20):
        for talk in talks:
            by_id[where[talk]].inflight -= 1
            prompt = own(talk, 100 + 49 * turn)
            replica = router.choose(RouteRequest("m", prompt), fleet, 0.0).replica
            moves[talk] += replica != where[talk]
            where[talk] = replica
            by_id[replica].inflight += 1
    assert max(moves.values()) == 1
    assert 1 <= moves.total() <= 4
    assert by_id["r0"].inflight - by_id["r1"].inflight <= 9


def test_spill_happens_past_the_threshold_and_not_at_it() -> None:
    fleet = (Replica("a"), Replica("b"))
    router = Prefix(RouterSettings(spill_threshold=3))
    request = RouteRequest("m", own(1, 100))
    assert router.choose(request, fleet, 0.0).replica == "a"
    fleet[0].inflight = 3
    assert router.choose(request, fleet, 0.0).reason == "affinity"
    fleet[0].inflight = 4
    decision = router.choose(request, fleet, 0.0)
    assert (decision.reason, decision.replica) == ("spilled", "b")


def test_a_failed_replica_is_passed_over_and_the_prompt_then_lives_elsewhere() -> None:
    fleet = tuple(Replica(f"r{n}") for n in range(3))
    router, prompt = Prefix(RouterSettings()), own(1, 100)
    first = router.choose(RouteRequest("m", prompt), fleet, 0.0).replica
    again = router.choose(RouteRequest("m", prompt, 1, frozenset({first})), fleet, 0.0)
    assert again.replica != first
    assert again.reason == "unmatched"
    router.forget_replica(first)
    after = router.choose(RouteRequest("m", prompt), fleet, 0.0)
    assert (after.reason, after.replica) == ("affinity", again.replica)


def test_one_replica_alone_matches_what_it_served() -> None:
    """With one candidate every block would be common by its owners; that rule is off then."""
    fleet, router = (Replica("r0"),), Prefix(RouterSettings())
    router.choose(RouteRequest("m", own(1, 100)), fleet, 0.0)
    grown = router.choose(RouteRequest("m", own(1, 300)), fleet, 0.0)
    assert (grown.reason, grown.matched_blocks, grown.total_blocks) == ("affinity", 6, 18)


def test_a_decision_counts_the_template_among_what_the_replica_holds() -> None:
    fleet, router = tuple(Replica(f"r{n}") for n in range(2)), Prefix(RouterSettings())
    shared = own(900, 64)
    for number in range(2):
        router.choose(RouteRequest("m", shared + own(number, 32)), fleet, 0.0)
    decision = router.choose(RouteRequest("m", shared + own(5, 32)), fleet, 0.0)
    assert (decision.reason, decision.matched_blocks, decision.total_blocks) == ("unmatched", 4, 6)


def test_the_rotation_starts_where_the_seed_says() -> None:
    fleet = tuple(Replica(f"r{n}") for n in range(4))
    picks = [
        Prefix(RouterSettings(seed=seed)).choose(RouteRequest("m", own(1, 9)), fleet, 0.0).replica
        for seed in range(8)
    ]
    assert picks == ["r0", "r1", "r2", "r3"] * 2


def test_a_list_of_candidates_may_change_between_two_calls() -> None:
    """Only a tuple is remembered: the same list may hold others the next time."""
    fleet, router = [Replica("r0"), Replica("r1")], Prefix(RouterSettings())
    for number in range(4):
        router.choose(RouteRequest("m", own(number, 40)), fleet, 0.0)
    fleet[:] = [Replica("r7")]
    assert router.choose(RouteRequest("m", own(1, 40)), fleet, 0.0).replica == "r7"


def test_two_versions_at_once_are_both_served_evenly() -> None:
    """Around a sync, rollouts of two policies are in flight; each has its own candidates."""
    prompts = groups(TEMPLATE + own(n, 112) for n in range(600))
    run = simulate(prompts, 2, 128, models=("v7", "v8"))
    assert run.share("unmatched") == pytest.approx(0.25, abs=0.005)  # groups of 4 a version
    assert run.spread(2) < 0.02


def test_a_full_table_still_spreads_and_matches() -> None:
    """The bound holds 50 prompts of 9 entries; 16 groups are in flight at once."""
    router = Prefix(RouterSettings(max_tracked_blocks=450))
    run = simulate(groups(TEMPLATE + own(n, 112) for n in range(500)), 2, 128, router=router)
    assert router.tracked_blocks <= 450
    assert run.share("unmatched") == pytest.approx(0.125, abs=0.005)
    assert run.spread(2) < 0.02


def test_new_prompts_make_up_for_what_a_replica_was_sent_less() -> None:
    """By more than a group of 8, and only where it is at most 1 busier than the least loaded."""
    for busier, picked in ((1, "a"), (2, "b")):
        fleet, router = (Replica("a"), Replica("b")), Prefix(RouterSettings())
        fleet[0].inflight = 5
        for number in range(9):
            assert router.choose(RouteRequest("m", own(number, 100)), fleet, 0.0).replica == "b"
        fleet[0].inflight = busier
        decision = router.choose(RouteRequest("m", own(10, 100)), fleet, 0.0)
        assert (decision.reason, decision.replica) == ("unmatched", picked)
        # A prompt that is at home stays there.
        assert router.choose(RouteRequest("m", own(0, 100)), fleet, 0.0).replica == "b"
    fleet, router = (Replica("a"), Replica("b")), Prefix(RouterSettings())
    fleet[0].inflight = 1
    picks = [
        router.choose(RouteRequest("m", own(number, 100)), fleet, 0.0).replica
        for number in range(10)
    ]
    assert picks == ["b"] * 9 + ["a"]


def test_a_threshold_of_0_evens_out_among_equals_only() -> None:
    fleet, router = (Replica("a"), Replica("b")), Prefix(RouterSettings(spill_threshold=0))
    fleet[0].inflight = 1
    for number in range(20):
        assert router.choose(RouteRequest("m", own(number, 100)), fleet, 0.0).replica == "b"
    fleet[0].inflight = 0
    assert router.choose(RouteRequest("m", own(20, 100)), fleet, 0.0).replica == "a"
