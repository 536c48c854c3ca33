"""The simulated loop: who waits, for how long, and how old samples are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.engine import EngineConfig
from benchmarks.fleet import ROUTER_BLOCK_TOKENS
from benchmarks.trace import Request
from benchmarks.training import SCORE_QUEUE_GROUPS, SCORE_S, Loop, Simulation, Training
from benchmarks.workloads import Grpo
from routing import registry
from routing.router import RouterSettings

GROUP = 8
ENGINE = EngineConfig(max_num_seqs=1024, step_s=0.004, prefill_token_s=1e-5)
ROLLOUTS = Grpo(steps=10, sync=10, reply=300, longest=1200).trace().requests
LOOP = Loop(samples_per_step=64, step_s=1.0, inflight=64, queue=256, sync_s=2.0, steps=24)


def run(loop: Loop, rollouts: Sequence[Request] = ROLLOUTS, engine=ENGINE, replicas=2) -> Training:
    router = registry.load("prefix", RouterSettings(ROUTER_BLOCK_TOKENS, 8, 500_000, 0))
    return Simulation(rollouts, router, replicas, engine, loop).run()


SLOW, FAST = replace(LOOP, step_s=10.0), replace(LOOP, step_s=0.1)


def test_equal_input_gives_equal_output():
    assert run(LOOP) == run(LOOP)


def test_generation_waits_for_a_slow_trainer_with_the_queue_full():
    found = run(SLOW)
    assert found.waits == "generation"
    assert found.step_s == pytest.approx(SLOW.step_s, abs=1e-6)
    assert found.queue > 0.8 * SLOW.queue
    assert found.trainer_waits_share == 0
    assert found.samples == SLOW.steps * SLOW.samples_per_step


def test_a_fast_trainer_waits_with_the_queue_empty():
    found = run(FAST)
    assert found.waits == "trainer"
    assert found.queue < 0.2 * FAST.queue
    assert found.step_s == pytest.approx(FAST.step_s + found.rollout_wait_s, rel=0.2)
    assert found.generation_held_share == 0


def test_lazy_pause_saves_time_where_the_trainer_waits_and_none_where_generation_does():
    saved = run(FAST).seconds - run(replace(FAST, lazy=True)).seconds
    syncs = FAST.steps // FAST.sync_every
    assert 0.5 * syncs * FAST.sync_s < saved <= syncs * FAST.sync_s
    assert run(replace(SLOW, lazy=True)).seconds == pytest.approx(run(SLOW).seconds, rel=0.01)


def test_seconds_of_a_loop_that_can_be_told_by_hand():
    """One rollout of 10 s at a time, a step of 4 s for each, and no sync: the trainer waits 6 s."""
    engine = EngineConfig(step_s=1.0, prefill_token_s=0.0)
    loop = Loop(1, 4.0, inflight=1, sync_every=100, steps=5)
    found = run(loop, [Request(0.0, 20, 11, array("q", [0]))], engine, 1)
    assert found.rollout_wait_s == pytest.approx(6.0)
    assert found.step_s == pytest.approx(10.0)
    assert found.seconds == pytest.approx(5 * 10.0 + SCORE_S + 4.0)
    assert found.tokens_per_second == pytest.approx(5 * 11 / found.seconds)
    assert found.staleness == 0


@pytest.mark.parametrize("lazy", [False, True])
def test_an_eager_sync_stops_what_is_being_generated_and_a_lazy_one_does_not(lazy: bool):
    """Its 3 s come on top of the 10 s, less up to a token's second, for computing anew what was
    preempted makes a token; or they pass while the next rollout is on its way."""
    engine = EngineConfig(step_s=1.0, prefill_token_s=0.0)
    loop = Loop(1, 4.0, inflight=1, sync_every=1, sync_s=3.0, steps=6, lazy=lazy)
    found = run(loop, [Request(0.0, 20, 11, array("q", [0]))], engine, 1)
    assert found.step_s == pytest.approx(10.0) if lazy else 12.0 <= found.step_s <= 13.0
    assert found.staleness == pytest.approx(5 / 6)  # a rollout began before the sync, but for one


def test_samples_that_are_too_old_are_dropped_and_made_up_for():
    strict = replace(SLOW, sync_every=1, max_staleness=1)
    found = run(strict)
    assert found.dropped > 0
    assert found.samples == strict.steps * strict.samples_per_step
    assert found.staleness <= strict.max_staleness
    assert run(replace(strict, max_staleness=100)).dropped == 0


def test_a_larger_queue_makes_samples_older():
    small, large = (run(replace(SLOW, queue=n, max_staleness=99)) for n in (64, 1024))
    assert large.staleness > small.staleness + 0.5


def test_no_more_is_sent_than_there_is_room_for():
    found = run(SLOW)
    waiting = SLOW.queue + SLOW.inflight + GROUP * (SCORE_QUEUE_GROUPS + 2)
    assert found.samples < sum(found.per_replica) <= found.samples + waiting


def test_more_replicas_help_only_with_more_in_flight():
    def tokens(replicas: int, inflight: int) -> float:
        return run(replace(FAST, inflight=inflight), replicas=replicas).tokens_per_second

    assert tokens(4, 64) < 1.05 * tokens(2, 64)
    assert tokens(4, 128) > 1.3 * tokens(2, 64)


def test_what_another_policy_computed_is_not_taken_from_the_cache():
    often, never = (run(replace(FAST, lazy=True, sync_every=n)) for n in (1, 100))
    assert often.cached_share < never.cached_share
    repeated = ROLLOUTS[:GROUP]
    found = run(replace(FAST, sync_every=1, lazy=True, samples_per_step=GROUP), repeated)
    syncs = FAST.steps
    assert sum(found.per_replica) * (1 - found.cached_share) >= syncs / 2  # prompts computed anew


def test_a_request_for_n_replies_is_n_samples():
    """One of 8 tokens, and seven of 80: 71 on average."""
    requests = [
        Request(0.0, 20, n * tokens, array("q", [n]), n=n) for n, tokens in ((1, 8), (7, 80))
    ]
    found = run(replace(FAST, inflight=8, samples_per_step=8, steps=40), requests)
    assert found.tokens_per_second * found.seconds / found.samples == pytest.approx(71, rel=0.1)


def test_ids_may_be_of_any_size():
    def cached(*ids: int) -> float:
        requests = [Request(0.0, 40, 8, array("q", [each, each - 1])) for each in ids]
        return run(replace(FAST, inflight=8, samples_per_step=8, steps=8), requests).cached_share

    assert cached(2**62, -(2**62), 7) == cached(1, 3, 5)


def test_progress_is_told_step_by_step():
    told: list[int] = []
    router = registry.load("prefix", RouterSettings(ROUTER_BLOCK_TOKENS, 8, 500_000, 0))
    Simulation(ROLLOUTS, router, 1, ENGINE, replace(LOOP, steps=3), told.append).run()
    assert told == [1, 2, 3]
