"""What does one routing decision cost? No sockets: the pure router, on this machine, now.

Run ``python -m benchmarks.decisions``. Read: a line's three numbers are µs per decision for a new
prompt, for another rollout of a known one, and the share of either that is hashing. Growth in
candidates comes from reading every load once; the table's fill should not matter much. Each number
is CPU time, and the best of five rounds: what the code costs, not what else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from routing import registry
from routing.blocks import chain
from routing.ids import ReplicaId
from routing.router import Router, RouteRequest, RouterSettings

TEMPLATE = list(range(23))
BOUND = 500_000
ROUNDS = 5


@dataclass(slots=True)
class Load:
    id: ReplicaId
    inflight: int = 0


def fleet_of(count: int) -> tuple[Load, ...]:
    return tuple(Load(ReplicaId(f"r{number}"), number % 5) for number in range(count))


def prompt(number: int, length: int) -> list[int]:
    """Shaped like the reference run's: a template of 23 tokens, then its own."""
    first = number * 7919
    return [*TEMPLATE, *(((first + k) * 2_654_435_761) % 151_936 for k in range(length - 23))]


def best_us(act: Callable[[int], object], count: int) -> float:
    """µs per call: ``act`` gets 0, 1, 2, …, never the same number twice."""
    best = float("inf")
    for number in range(ROUNDS):
        start = time.process_time()
        for position in range(number * count, (number + 1) * count):
            act(position)
        best = min(best, time.process_time() - start)
    return best / count * 1e6


def measure(
    router: Router, fleet: Sequence[Load], length: int, count: int, first: int
) -> tuple[float, float]:
    """A new prompt, and a rollout of a known one."""
    requests = [
        RouteRequest("v1", prompt(first + number, length)) for number in range(ROUNDS * count)
    ]
    new = best_us(lambda number: router.choose(requests[number], fleet, 0.0), count)
    known = best_us(lambda number: router.choose(requests[number], fleet, 0.0), count)
    return new, known


def hash_one(tokens: list[int], _: int) -> None:
    chain("v1", tokens, 16)


def fill(router: Router, blocks: int) -> None:
    """Until the table holds as many: prompts of 2,048 tokens on four replicas."""
    fleet, number = fleet_of(4), 10_000_000
    while router.tracked_blocks < blocks:
        before = router.tracked_blocks
        router.choose(RouteRequest("v0", prompt(number, 2048)), fleet, 0.0)
        if router.tracked_blocks <= before:
            break  # at its bound, or a policy that keeps no table
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", default="prefix", help="name or module:factory")
    parser.add_argument("--bound", type=int, default=BOUND, help="max_tracked_blocks, in blocks")
    given = parser.parse_args()
    print(f"{given.router}, Python {platform.python_version()}, {platform.machine()}, best of 5")
    print(" tokens candidates  table   new µs  known µs  hash µs")
    for share in (0.0, 0.5, 1.0):
        router = registry.load(
            given.router, RouterSettings(max_tracked_blocks=given.bound, spill_threshold=8)
        )
        start = time.process_time()
        fill(router, int(share * given.bound))
        filled_s = time.process_time() - start
        gc.collect()
        for length, count in ((135, 500), (4000, 60)):
            hash_us = best_us(partial(hash_one, prompt(1, length)), count)
            for candidates in (2, 64, 1000):
                new, known = measure(
                    router, fleet_of(candidates), length, count, candidates * 10_000
                )
                print(
                    f"{length:>7} {candidates:>10} {share:>6.0%} {new:>8.1f} {known:>9.1f} "
                    f"{hash_us:>8.1f}"
                )
        blocks = router.tracked_blocks
        start = time.process_time()
        router.forget_adapter("v0")
        forget_us = (time.process_time() - start) * 1e6
        start = time.process_time()
        gc.collect()
        collect_ms = (time.process_time() - start) * 1e3
        print(
            f"        filled in {filled_s:.1f} s; forgetting an adapter in {forget_us:.0f} µs: "
            f"{blocks} to {router.tracked_blocks} blocks; full collection {collect_ms:.0f} ms"
        )


if __name__ == "__main__":
    main()
