"""``least-loaded``, ``round-robin`` and ``consistent-hash``."""

from collections import Counter
from dataclasses import dataclass

from routing import consistent_hash, least_loaded, round_robin
from routing.router import NoReplica, RouteRequest, RouterSettings


@dataclass
class Replica:
    id: str
    inflight: int = 0


def fleet_of(*loads: int) -> tuple[Replica, ...]:
    return tuple(Replica(f"r{number}", load) for number, load in enumerate(loads))


def picks(router, fleet, count: int, **request) -> list[str]:
    return [
        router.choose(RouteRequest("m", [number] * 40, **request), fleet, 0.0).replica
        for number in range(count)
    ]


def test_least_loaded_picks_the_fewest_in_flight() -> None:
    router = least_loaded.create(RouterSettings())
    assert picks(router, fleet_of(3, 1, 2), 3) == ["r1"] * 3
    assert picks(router, fleet_of(0, 1, 2), 1, exclude=frozenset({"r0"})) == ["r1"]


def test_least_loaded_takes_turns_among_equals() -> None:
    router = least_loaded.create(RouterSettings(seed=2))
    assert picks(router, fleet_of(0, 5, 0, 0), 6) == ["r2", "r3", "r0"] * 2


def test_round_robin_takes_turns_whatever_the_load() -> None:
    router = round_robin.create(RouterSettings(seed=1))
    assert picks(router, fleet_of(9, 0, 4), 4) == ["r1", "r2", "r0", "r1"]


def test_round_robin_goes_on_with_the_fleet_that_is_left() -> None:
    router = round_robin.create(RouterSettings())
    picks(router, fleet_of(0, 0, 0), 3)
    assert sorted(picks(router, fleet_of(0, 0), 4)) == ["r0", "r0", "r1", "r1"]
    assert set(picks(router, fleet_of(0, 0), 4, exclude=frozenset({"r0"}))) == {"r1"}


def test_no_candidate_is_no_replica() -> None:
    for module in (least_loaded, round_robin, consistent_hash):
        router = module.create(RouterSettings())
        assert router.choose(RouteRequest("m", b""), (), 0.0) == NoReplica()


def test_consistent_hash_sends_a_prompt_to_one_place_from_any_process_and_order() -> None:
    one, other = (consistent_hash.create(RouterSettings(seed=seed)) for seed in (0, 9))
    fleet = fleet_of(0, 0, 0, 0)
    assert picks(one, fleet, 100) == picks(one, fleet, 100) == picks(other, fleet[::-1], 100)


def test_consistent_hash_spreads_evenly_and_moves_only_what_it_must() -> None:
    router, fleet = consistent_hash.create(RouterSettings()), fleet_of(*[0] * 8)
    before = picks(router, fleet, 4000)
    assert all(400 < count < 600 for count in Counter(before).values())
    after = picks(router, fleet[:-1], 4000)
    assert all(old in (new, "r7") for old, new in zip(before, after, strict=True))
    moved = Counter(new for old, new in zip(before, after, strict=True) if old == "r7")
    assert len(moved) == 7  # its prompts are shared out, not handed to a neighbour


def test_consistent_hash_passes_over_a_replica_past_the_threshold() -> None:
    router, fleet = consistent_hash.create(RouterSettings(spill_threshold=2)), fleet_of(0, 0, 0)
    request = RouteRequest("m", [1] * 40)
    own = router.choose(request, fleet, 0.0)
    assert own.reason == "hashed"
    replica = next(replica for replica in fleet if replica.id == own.replica)
    replica.inflight = 2
    assert router.choose(request, fleet, 0.0) == own
    replica.inflight = 3
    spilled = router.choose(request, fleet, 0.0)
    assert (spilled.reason, spilled.replica != own.replica) == ("spilled", True)
    assert router.choose(request, fleet, 0.0) == spilled
