"""Does a large fleet replay, and what bounds it? A million requests on 1,000 simulated replicas.

Run ``python -m benchmarks.scale``; some ten minutes of one core. Read: seconds of CPU by part, and
µs for each request. ``decisions`` is the policy, and of it ``loads`` what reading all replicas'
loads takes once a decision, which no policy can be spared; ``engines`` are the simulated replicas.
The shape is GRPO's, with steps of as many rollouts as are in flight, and a new adapter every four.
Memory is the process's at its most; the trace has 380 bytes of it for each request.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.origin import line, origin
from benchmarks.replay import Options, Progress, Replay, Result, policy
from benchmarks.workloads import Grpo
from routing.ids import ReplicaId
from routing.router import (
    Decision,
    NoReplica,
    ReplicaLoad,
    Router,
    RouteRequest,
)

GROUP = 8
LOOKS = 200
"""Readings of all loads that are timed."""


EVERY = 13
"""One decision of so many is timed, because to read the clock of CPU time takes up to 3 µs. No
divisor of a group, so that first rollouts are timed as often as they come."""


class Timed:
    """A policy, and the CPU time of its decisions."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.name = router.name
        self.decided = 0
        self._timed_s, self._timed = 0.0, 0
        self.candidates: Sequence[ReplicaLoad] = ()
        """Those of the last decision."""

    @property
    def spent_s(self) -> float:
        return self._timed_s / max(1, self._timed) * self.decided

    @property
    def tracked_blocks(self) -> int:
        return self._router.tracked_blocks

    def choose(
        self, request: RouteRequest, candidates: Sequence[ReplicaLoad], now_s: float
    ) -> Decision | NoReplica:
        self.candidates = candidates
        self.decided += 1
        if self.decided % EVERY:
            return self._router.choose(request, candidates, now_s)
        begun_s = time.process_time()
        choice = self._router.choose(request, candidates, now_s)
        self._timed_s += time.process_time() - begun_s
        self._timed += 1
        return choice

    def forget_adapter(self, model: str) -> None:
        self._router.forget_adapter(model)

    def forget_replica(self, replica: ReplicaId) -> None:
        self._router.forget_replica(replica)

    def forget_all(self) -> None:
        self._router.forget_all()


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds."""

    trace: float
    decisions: float
    loads: float
    """A part of the decisions: one look at every replica's load, for each."""
    engines: float
    """And the clock, the ideal, and what is counted."""

    @property
    def all_of_it(self) -> float:
        return self.trace + self.decisions + self.engines


def measure(options: Options, requests: int, router: str, seed: int) -> tuple[Spent, Result]:
    inflight = options.inflight or requests
    step = max(1, min(requests, inflight) // GROUP)
    began_s = time.process_time()
    workload = Grpo(
        prompts=step,
        group=GROUP,
        steps=max(1, requests // (step * GROUP)),
        inflight=inflight,
        seed=seed,
    )
    trace = workload.trace()
    made_s = time.process_time()
    timed, total = Timed(policy(router, options)), len(trace.requests)
    progress = Progress(router, total)
    result = Replay(trace, timed, options, progress).run()
    progress.done()
    ran_s = time.process_time() - made_s
    return Spent(
        made_s - began_s, timed.spent_s, _look_s(timed.candidates) * total, ran_s - timed.spent_s
    ), result


def _look_s(candidates: Sequence[ReplicaLoad]) -> float:
    """CPU seconds for one reading of all loads and the least of them: the best of many."""
    best = float("inf")
    for _ in range(LOOKS):
        begun_s = time.process_time()
        min([candidate.inflight for candidate in candidates])
        best = min(best, time.process_time() - begun_s)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=1_000)
    parser.add_argument("--inflight", type=int, default=100_000)
    parser.add_argument("--router", default="prefix", help="name or module:factory")
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if min(given.requests, given.replicas, given.inflight) < 1:
        parser.error("--requests, --replicas and --inflight: must be at least 1")
    options = Options(replicas=given.replicas, inflight=given.inflight)
    came = origin(given.seed, {"router": given.router, "replicas": given.replicas,
                               "in flight": given.inflight})  # fmt: skip
    spent, result = measure(options, given.requests, given.router, given.seed)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    if given.json:
        print(json.dumps({"origin": came, "requests": result.requests, "cpu_s": asdict(spent),
                          "peak_mb": peak_mb, "spread": result.spread,
                          "cached_share": result.cached_share, "ideal_share": result.ideal_share,
                          "decisions": result.decisions}, indent=2))  # fmt: skip
        return
    print(line(came))
    print(f"{result.requests:,} requests, {result.seconds:,.0f} s of the virtual clock")
    print("             CPU s    µs a request")
    rows = [*asdict(spent).items(), ("all of it", spent.all_of_it)]
    for name, cpu_s in rows:
        label = "  of it loads" if name == "loads" else name
        print(f"{label:<13}{cpu_s:>6.1f} {cpu_s / result.requests * 1e6:>13.1f}")
    unmatched = result.decisions.get("unmatched", 0) / result.requests
    of_ideal = result.cached_share / result.ideal_share
    print(
        f"peak memory {peak_mb:,.0f} MB; of the ideal {of_ideal:.1%}; "
        f"unmatched {unmatched:.1%}; spread {result.spread:.1%}"
    )


if __name__ == "__main__":
    main()
