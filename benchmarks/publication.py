"""How long does a trainer wait for its load call, by a bucket mount that lags, and by a push?

Run ``python -m benchmarks.publication``: the real daemon as a child, two simulated replicas, and
syncs as TRL makes them. Three mounts: one that shows files at once; one that shows them 2.5 s after
they were written and remembers a miss for 1 s; one like it that shows an adapter's configuration a
second before its weights. And the second one again, before replicas that take pushed adapters.
Read: after five publications, in which the daemon learns the lag, p50 of the load call may be at
most the lag + 0.5 s, or 0.3 s by a push; the exit code is 1 if it is more. The lag is the time
until the whole adapter shows, so a load through a mount can not be shorter. Attempts: load calls to
the replicas for each publication; one a replica is the least.

On real replicas: ``--url URL --url URL --folder DIR --lag-s 2.5``. DIR is where trainer and daemon
write, and the replicas must see it under the same path, so late. ``--adapter DIR`` is an adapter
that fits their model; without it one is made for the tiny model of the end-to-end tests. With
``--push`` the replicas have the push endpoint, its key is in ROLLMUX_PUSH_KEY, and no folder is
needed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks import origin
from benchmarks.adapter import CONFIG, write_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.config import ReplicaConfig
from benchmarks.daemon import DaemonGone, connect, daemon
from benchmarks.replica import SimulatedReplica

ALLOWED_S = 0.5
"""Of the load call's p50 above the lag."""
PUSHED_S = 0.3
"""Of the load call's p50 where the adapter is pushed."""
LEARNING = 5
"""Publications before the counted ones."""
LAG_S, NEGATIVE_TTL_S = 2.5, 1.0
"""hf-mount shows a file 2 to 3 s after it was written, and remembers a miss for 1 s."""
AHEAD_S = 1.0
"""Of the configuration before the weights, where a mount's upload was cut in two."""
STALENESS = 4
SIMULATED_KEY = "simulated"
BETWEEN_S = 0.2
"""From one sync to the next; a miss of the last one may still be remembered then."""


class HalfPublished(LaggingFolder):
    """Shows an adapter's configuration ``AHEAD_S`` before the rest."""

    def __init__(self, source: Path) -> None:
        super().__init__(source, LAG_S, NEGATIVE_TTL_S)
        self._early = LaggingFolder(source, LAG_S - AHEAD_S, NEGATIVE_TTL_S)

    def read(self, path: str) -> bytes:
        return self._early.read(path) if path.endswith(CONFIG) else super().read(path)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    lag_s: float
    mount: Callable[[Path], LaggingFolder]
    pushed: bool = False


CASES = (
    Case("at once", 0.0, lambda folder: LaggingFolder(folder, 0.0, NEGATIVE_TTL_S)),
    Case("late", LAG_S, lambda folder: LaggingFolder(folder, LAG_S, NEGATIVE_TTL_S)),
    Case("half published", LAG_S, HalfPublished),
    Case("late, pushed", LAG_S, lambda folder: LaggingFolder(folder, LAG_S, NEGATIVE_TTL_S), True),
)


@dataclass(frozen=True, slots=True)
class Times:
    """Load calls through one mount, those of the learning included in ``loads_s``."""

    mount: str
    lag_s: float
    loads_s: tuple[float, ...]
    attempts: tuple[int, ...]
    """Summed over the replicas."""
    pushed: bool = False

    @property
    def counted(self) -> tuple[float, ...]:
        return self.loads_s[LEARNING:]

    @property
    def p50_s(self) -> float:
        return statistics.median(self.counted)

    @property
    def allowed_s(self) -> float:
        return PUSHED_S if self.pushed else self.lag_s + ALLOWED_S

    @property
    def met(self) -> bool:
        return self.p50_s <= self.allowed_s


class Failed(Exception):
    """A call was refused: nothing can be measured."""


async def measure(
    replicas: Sequence[str],
    folder: Path,
    adapter: Path,
    count: int,
    case: str,
    lag_s: float,
    push_key: str | None = None,
) -> Times:
    """``count`` publications after the learning. Whatever was published is unloaded again.

    With ``push_key`` all of them are pushed.
    """
    loads_s, attempts, live = [], [], []
    run = folder / "run" / ".vllm_lora"
    run.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rollmux-daemon-") as scratch:
        log, cache = Path(scratch, "log"), str(Path(scratch, "cache"))
        options = ("--adapter-transport", "push", "--push-cache", cache) if push_key else ()
        environ = {"ROLLMUX_PUSH_KEY": push_key} if push_key else {}
        async with daemon(replicas, log, options, environ) as url, connect(url) as client:
            for number in range(LEARNING + count):
                # A name of its own for each process: replicas may know those of an earlier one.
                live.append(f"publication-{os.getpid()}-v{number}")
                loads_s.append(await sync(client, run, adapter, live))
                status = (await client.get("/proxy/status")).json()
                attempts.append(sum(status["publications"][-1]["attempts"].values()))
                await asyncio.sleep(BETWEEN_S)
        for replica in replicas:
            await unload_ours(replica)
    shutil.rmtree(run)
    return Times(case, lag_s, tuple(loads_s), tuple(attempts), push_key is not None)


async def sync(client: httpx.AsyncClient, run: Path, adapter: Path, live: list[str]) -> float:
    """One sync of the newest of ``live``, call by call as TRL 1.16 makes it.

    Returns the seconds from its load call to the answer.
    """
    await control(client, "/pause?mode=keep")
    hidden = shutil.copytree(adapter, run / f".{live[-1]}.tmp")
    path = hidden.rename(run / live[-1])
    begun_s = time.monotonic()
    await control(client, "/v1/load_lora_adapter", lora_name=live[-1], lora_path=str(path))
    took_s = time.monotonic() - begun_s
    await control(client, "/resume")
    if len(live) > STALENESS + 1:
        oldest = live.pop(0)
        await control(client, "/v1/unload_lora_adapter", lora_name=oldest)
        shutil.rmtree(run / oldest)
    return took_s


async def control(client: httpx.AsyncClient, path: str, **body: Any) -> None:
    answer = await client.post(path, json=body or None)
    if answer.status_code != 200:
        raise Failed(f"{path} was answered {answer.status_code}: {answer.text[:500]}")


async def unload_ours(replica: str) -> None:
    async with connect(replica) as client:
        models = (await client.get("/v1/models")).json()["data"]
        for name in [m["id"] for m in models if m["id"].startswith(f"publication-{os.getpid()}-")]:
            await control(client, "/v1/unload_lora_adapter", lora_name=name)


@contextlib.asynccontextmanager
async def simulated(case: Case, folder: Path, count: int) -> AsyncIterator[list[str]]:
    """Replicas with a mount each, and, where the case pushes, that take pushes; yields URLs."""
    key = SIMULATED_KEY if case.pushed else None
    async with contextlib.AsyncExitStack() as stack:
        # Loads of 7 ms: seen on a real vLLM 0.27.1 on the CPU, with a small adapter.
        replicas = [
            await stack.enter_async_context(
                SimulatedReplica(
                    ReplicaConfig(),
                    folder=case.mount(folder),
                    load_s=0.007,
                    push_key=key,
                    push_root=folder.with_suffix(".pushed"),
                )
            )
            for _ in range(count)
        ]
        yield [replica.url for replica in replicas]


async def run(args: argparse.Namespace) -> list[Times]:
    with tempfile.TemporaryDirectory(prefix="rollmux-publication-") as scratch:
        adapter = args.adapter or write_adapter(Path(scratch, "adapter"), args.seed)
        if args.url:
            key = os.environ["ROLLMUX_PUSH_KEY"] if args.push else None
            name = "of real replicas" if key is None else "none, pushed"
            folder = args.folder or Path(scratch, "local")
            times = await measure(args.url, folder, adapter, args.count, name, args.lag_s, key)
            return [times]
        all_times = []
        for number, case in enumerate(CASES):
            folder = Path(scratch, f"bucket-{number}")
            async with simulated(case, folder, args.replicas) as urls:
                key = SIMULATED_KEY if case.pushed else None
                times = await measure(urls, folder, adapter, args.count, case.name, case.lag_s, key)
            print(f"{case.name}: p50 {times.p50_s:.2f} s", file=sys.stderr, flush=True)
            all_times.append(times)
        return all_times


def table(all_times: Sequence[Times]) -> str:
    lines = [" mount            lag s   p50 s  at most   max s  first s  attempts  verdict"]
    for times in all_times:
        attempts = statistics.mean(times.attempts[LEARNING:])
        lines.append(
            f" {times.mount:<16} {times.lag_s:>5.2f} {times.p50_s:>7.2f} "
            f"{times.allowed_s:>8.2f} {max(times.counted):>7.2f} "
            f"{times.loads_s[0]:>8.2f} {attempts:>9.1f}  {'met' if times.met else 'MISSED'}"
        )
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--count", type=int, default=15, help="publications counted, after five (default 15)")
    add("--replicas", type=int, default=2, help="simulated ones (default 2)")
    add("--url", action="append", help="a real replica; repeat it")
    add("--folder", type=Path, help="with --url: what the replicas see late, under the same path")
    add("--lag-s", type=float, default=0.0, help="with --url: how late (default 0)")
    add("--push", action="store_true", help="with --url: by the replicas' push endpoint")
    add("--adapter", type=Path, help="with --url: an adapter that fits their model")
    add("--seed", type=int, default=0, help="of the adapter's weights (default 0)")
    add("--json", action="store_true", help="the result as JSON")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.url and not args.push and args.folder is None:
        parser.error("--url needs --folder")
    if args.push and not (args.url and os.environ.get("ROLLMUX_PUSH_KEY")):
        parser.error("--push needs --url, and the key in ROLLMUX_PUSH_KEY")
    settings = {"replicas": len(args.url or ()) or args.replicas, "count": args.count}
    came = origin.origin(args.seed, settings | {"real": bool(args.url)})
    try:
        all_times = uvloop.run(run(args))
    except (DaemonGone, Failed, httpx.TransportError) as error:
        print(f"benchmarks.publication: {error}", file=sys.stderr)
        return 1
    if args.json:
        rows = [asdict(t) | {"p50_s": t.p50_s, "met": t.met} for t in all_times]
        print(json.dumps({"origin": came, "mounts": rows}))
    else:
        print(origin.line(came))
        print(table(all_times))
    return 0 if all(times.met for times in all_times) else 1


if __name__ == "__main__":
    sys.exit(main())
