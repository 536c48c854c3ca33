"""What do the rollouts lose while a policy is published?

Run ``python -m benchmarks.syncs``: the real daemon as a child, two simulated replicas behind a
mount that lags 2.5 s, rollouts without a pause and syncs as TRL makes them; first with ``--pause
lazy``, then with ``--pause eager``. Read: tokens per second of all replicas, from a sync's first
call to its resume, and from there to the next sync. Lazy may lose 5 % at most; the exit code is 1
if it loses more. Eager is what a fleet does that passes each pause on. Preempted: requests whose
computed prefix was thrown away. Cached: prompt tokens that came from a replica's prefix cache.

The tokens are the engines' own, those of unfinished replies too. Rollouts cost this machine work,
and what else it does slows both columns alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import uvloop

from benchmarks import demo, origin
from benchmarks.bucket import LaggingFolder
from benchmarks.daemon import DaemonGone, connect, daemon
from benchmarks.replica import SimulatedReplica

LOST = 0.05
LAG_S, NEGATIVE_TTL_S = 2.5, 1.0
"""hf-mount shows a file 2 to 3 s after it was written, and remembers a miss for 1 s."""
BETWEEN_S = 3.0
"""About as long as a sync takes, so that both columns rest on as many tokens."""
IN_FLIGHT_PER_REPLICA = 32
WARM_UP_S = 4.0
"""Until the first rollouts, which all began together, have ended at different times."""
# Half the demo's speed: a simulated token costs nothing, but a rollout costs this machine 2 ms.
REPLICA = replace(demo.REPLICA, engine=replace(demo.REPLICA.engine, step_s=0.012))


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens per second, one value a sync, of all replicas together."""

    pause: str
    during: tuple[float, ...]
    between: tuple[float, ...]
    sync_p50_s: float
    preempted: int
    cached: float
    """Share of the prompt tokens."""
    rollouts: int

    @property
    def kept(self) -> float:
        """Of the pace between syncs, the share that is left during them."""
        return statistics.mean(self.during) / statistics.mean(self.between)


async def measure(pause: str, syncs: int, count: int, folder: Path) -> Pace:
    policies = folder / "run" / ".vllm_lora"
    policies.mkdir(parents=True)
    tally = demo.Tally(started_s=time.monotonic())
    async with contextlib.AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                SimulatedReplica(REPLICA, folder=LaggingFolder(folder, LAG_S, NEGATIVE_TTL_S))
            )
            for _ in range(count)
        ]
        urls = [replica.url for replica in replicas]
        log = folder.with_suffix(".log")
        url = await stack.enter_async_context(daemon(urls, log, ["--pause", pause]))
        client = await stack.enter_async_context(connect(url))
        trainer = demo.Trainer(client, policies, tally)
        await trainer.sync()
        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(trainer.roll_out(), name=f"rollout {number}")
                for number in range(IN_FLIGHT_PER_REPLICA * count)
            ]
            during, between = await paces(trainer, replicas, syncs)
            for worker in workers:
                worker.cancel()
    if tally.failures or tally.wrong:
        raise RuntimeError(f"{tally.wrong} wrong replies; failures: {tally.failures[:3]}")
    counters = [replica.engine.counters for replica in replicas]
    return Pace(
        pause,
        during,
        between,
        statistics.median(tally.syncs_s[1:]),
        sum(c.preemptions for c in counters),
        sum(c.prefix_hits for c in counters) / sum(c.prefix_queries for c in counters),
        tally.rollouts,
    )


async def paces(
    trainer: demo.Trainer, replicas: Sequence[SimulatedReplica], syncs: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Tokens per second during each sync, and after each until the next."""
    await asyncio.sleep(WARM_UP_S)
    during, between = [], []
    was = tokens_and_time(replicas)
    for _ in range(syncs):
        await trainer.sync()
        now = tokens_and_time(replicas)
        during.append((now[0] - was[0]) / (now[1] - was[1]))
        await asyncio.sleep(BETWEEN_S)
        was = tokens_and_time(replicas)
        between.append((was[0] - now[0]) / (was[1] - now[1]))
    return tuple(during), tuple(between)


def tokens_and_time(replicas: Sequence[SimulatedReplica]) -> tuple[int, float]:
    for replica in replicas:
        replica.driver.pump()  # the engines, brought to the present
    return sum(replica.engine.generated() for replica in replicas), time.monotonic()


async def run(args: argparse.Namespace) -> list[Pace]:
    found = []
    with tempfile.TemporaryDirectory(prefix="rollmux-syncs-") as scratch:
        for pause in ("lazy", "eager"):
            found.append(await measure(pause, args.syncs, args.replicas, Path(scratch, pause)))
            print(f"{pause}: {found[-1].kept:.1%} of the pace kept", file=sys.stderr, flush=True)
    return found


def table(found: Sequence[Pace]) -> str:
    lines = [" pause   during  between    kept   sync p50 s  preempted  cached  rollouts  verdict"]
    for pace in found:
        verdict = ""
        if pace.pause == "lazy":
            verdict = "met" if pace.kept >= 1 - LOST else "MISSED"
        lines.append(
            f" {pace.pause:<6} {statistics.mean(pace.during):>7.0f} "
            f"{statistics.mean(pace.between):>8.0f} {pace.kept:>7.1%} {pace.sync_p50_s:>12.2f} "
            f"{pace.preempted:>10} {pace.cached:>7.0%} {pace.rollouts:>9}  {verdict}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--syncs", type=int, default=8, help="of each kind (default 8)")
    parser.add_argument("--replicas", type=int, default=2, help="simulated ones (default 2)")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    args = parser.parse_args()
    settings = {"replicas": args.replicas, "syncs": args.syncs, "lag_s": LAG_S}
    came = origin.origin(0, settings | {"in_flight_per_replica": IN_FLIGHT_PER_REPLICA})
    try:
        found = uvloop.run(run(args))
    except (DaemonGone, RuntimeError, httpx.TransportError) as error:
        print(f"benchmarks.syncs: {error}", file=sys.stderr)
        return 1
    if args.json:
        rows = [asdict(pace) | {"kept": pace.kept} for pace in found]
        print(json.dumps({"origin": came, "pauses": rows}))
    else:
        print(origin.line(came))
        print(table(found))
    (lazy,) = (pace for pace in found if pace.pause == "lazy")
    return 0 if lazy.kept >= 1 - LOST else 1


if __name__ == "__main__":
    sys.exit(main())
