"""What do rollmux's policies and vllm-router's cache_aware make of the same rollouts, over HTTP?

Run ``python -m benchmarks.peers``, with traces or made-up ones (``grpo:steps=20``) if others are
wanted. For each policy it is sent by ``rollmux replay --url`` through a proxy that was just started
to simulated replicas that were just started, each a process; all policies at once, ``--rounds``
times. Read: shares and spread are what they are. Seconds are the simulated replicas' own, about
those of an H200, and are to be compared within one row, if the machine keeps up: where requests
were sent late, or ``--faster`` made it too fast, they tell of the machine. A cell is the median of
the rounds, and what is in brackets their least and most.

vllm-router is the peer that routes by cached prefixes too. It is installed once, outside the tree;
``--vllm-router PATH`` names one that is there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.daemon import HERE, DaemonGone, connect, daemon, end
from benchmarks.origin import line, origin
from benchmarks.overhead.process import free_port
from benchmarks.overhead.proxies import ROUTER_VERSION, find_router, router_command
from benchmarks.replay import Options
from benchmarks.trace import Trace, TraceError, read
from benchmarks.workloads import WorkloadError, make

PEER = "vllm-router"
OURS = ("prefix", "round-robin", "least-loaded")
WORKLOADS = (
    "grpo:steps=8",
    "near-duplicates:steps=8",
    "agents:steps=1,inflight=32",
    "few-shot:steps=8,inflight=64",
)
"""About 90 s each, at a pace that four columns of two replicas can keep on two cores."""
START_S = 60.0
CONTEXT_TOKENS = 1_000_000
"""Of the simulated replicas: no request is too long."""
Value = Callable[[Mapping[str, Any]], float | None]


def _of_ideal(found: Mapping[str, Any]) -> float | None:
    cached, best = found["cached_share"], found["ideal_share"]
    return cached / best if cached is not None and best else None


def _percentile(what: str, which: str) -> Value:
    return lambda found: found[what][which] if found[what] else None


ROWS: dict[str, tuple[str, Value]] = {
    "prompt tokens from cache": (".1%", lambda found: found["cached_share"]),
    "of the ideal": (".1%", _of_ideal),
    "spread of requests": (".1%", lambda found: found["spread"]),
    "tokens per second": (",.0f", lambda found: found["tokens_per_second"]),
    "request, p90, s": (".2f", _percentile("request_s", "p90")),
    "group, p50, s": (".2f", _percentile("group_s", "p50")),
    "group, p90, s": (".2f", _percentile("group_s", "p90")),
    "sent late by, p99, s": (".2f", _percentile("late_s", "p99")),
    "failed": (".0f", lambda found: float(sum(found["failures"].values()))),
}


def opened(word: str) -> tuple[Trace, list[str]]:
    """A file, or a made-up trace, and what names it on the command line.

    Raises TraceError, WorkloadError.
    """
    if Path(word).is_file():
        return read(Path(word)), [word]
    return make(word), ["--workload", word]


@contextlib.asynccontextmanager
async def replicas(
    count: int, block_tokens: int, given: argparse.Namespace
) -> AsyncIterator[list[str]]:
    """URLs of simulated replicas with empty caches."""
    engine = Options(cache_tokens=given.cache_tokens).engine(block_tokens)
    command = [
        *(sys.executable, "-m", "benchmarks.replica", "--port", "0", "--model", "model"),
        *("--max-model-len", str(CONTEXT_TOKENS), "--vocab-size", "32000"),
        *("--block-size", str(block_tokens)),
        *("--num-blocks", str(engine.num_blocks)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--step-s", str(engine.step_s / given.faster)),
        *("--step-per-seq-s", str(engine.step_per_seq_s / given.faster)),
        *("--prefill-token-s", str(engine.prefill_token_s / given.faster)),
    ]
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for _ in range(count):
            child = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, cwd=HERE
            )
            stack.push_async_callback(end, child)
            assert child.stdout is not None
            async with asyncio.timeout(START_S):
                urls.append((await child.stdout.readline()).decode().strip())
        yield urls


@contextlib.asynccontextmanager
async def peer(command: Path, urls: Sequence[str], log: Path) -> AsyncIterator[str]:
    """vllm-router with its default policy and thresholds. Raises DaemonGone."""
    port = free_port()
    words = router_command(command, port, urls)
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(*words, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(START_S), connect(url) as client:
            while child.returncode is None:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
            else:
                raise DaemonGone("(vllm-router) did not come up", log)
        yield url
    finally:
        await end(child)


async def replayed(what: Sequence[str], url: str, urls: Sequence[str], seed: int) -> Any:
    """One result of `rollmux replay --url --json`."""
    words = ["replay", *what, "--url", url, "--model", "model", "--json", "--seed", str(seed)]
    for each in urls:
        words += ["--replica-metrics", each]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *words),
        cwd=HERE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await child.communicate()
    finally:
        await end(child)
    if not out:
        raise RuntimeError(f"the replay failed: {err.decode(errors='replace').strip()}")
    return json.loads(out)["results"][0]


async def measure(
    word: str, columns: Sequence[str], given: argparse.Namespace
) -> dict[str, list[Any]]:
    """Results by column, one a round. All columns at once: what else the machine does hits all."""
    trace, what = opened(word)
    if inflight := given.inflight or trace.inflight:
        what += ["--inflight", str(inflight)]
    else:
        what += ["--speed", str(given.faster)]

    async def run(column: str, log: Path) -> Any:
        async with replicas(given.replicas, trace.block_tokens, given) as urls:
            if column == PEER:
                front = peer(given.vllm_router, urls, log)
            else:
                front = daemon(urls, log, ["--router", column])
            async with front as url:
                return await replayed(what, url, urls, given.seed)

    found: dict[str, list[Any]] = {column: [] for column in columns}
    for turn in range(given.rounds):
        print(f"{trace.name}: round {turn + 1} of {given.rounds}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            runs = [run(column, Path(scratch) / f"{column}.log") for column in columns]
            for column, result in zip(columns, await asyncio.gather(*runs), strict=True):
                found[column].append(result)
    return found


def table(found: Mapping[str, Sequence[Any]]) -> str:
    rows = [["", *found]]
    for name, (form, value) in ROWS.items():
        cells = []
        for results in found.values():
            values = [each for each in map(value, results) if each is not None]
            if not values:
                cells.append("-")
                continue
            text = format(statistics.median(values), form)
            if len(values) > 1:
                text += f" ({min(values):{form}}, {max(values):{form}})"
            cells.append(text)
        rows.append([name, *cells])
    width = max(len(cell) for row in rows for cell in row[1:]) + 2
    return "\n".join(
        f"{name:<26}{''.join(f'{c:>{width}}' for c in cells)}" for name, *cells in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("traces", metavar="TRACE", nargs="*", help="a file, or NAME[:KEY=VALUE,…]")
    add("--router", action="append", help=f"of rollmux (default: {', '.join(OURS)})")
    add("--replicas", type=int, default=2, help="simulated (default: %(default)d)")
    add("--inflight", type=int, default=None, help="rollouts (default: the trace's, or its times)")
    add("--faster", type=float, default=1.0, help="than an H200 (default: %(default)g times)")
    add("--cache-tokens", type=int, default=2_000_000, help="of a replica (default: %(default)d)")
    add("--rounds", type=int, default=1, help="of each column (default: %(default)d)")
    add("--seed", type=int, default=0, help="of the prompts (default: %(default)d)")
    add("--vllm-router", type=Path, default=None, metavar="PATH", help="its command")
    add("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args(argv)
    columns = list(given.router or OURS)
    settings = {
        name: getattr(given, name)
        for name in ("replicas", "inflight", "faster", "cache_tokens", "rounds")
    }
    came = origin(given.seed, settings)
    given.vllm_router = find_router(given.vllm_router)
    if given.vllm_router is not None:
        columns.append(PEER)
    results = {}
    for word in given.traces or WORKLOADS:
        try:
            found = results[word] = asyncio.run(measure(word, columns, given))
        except (TraceError, WorkloadError) as exc:
            print(f"{word}: {exc}", file=sys.stderr)
            return 2
        except (DaemonGone, RuntimeError, TimeoutError) as exc:
            print(f"{word}: {exc}", file=sys.stderr)
            return 1
        if not given.json:
            print(f"\n{word}\n\n{table(found)}\n", flush=True)
    if given.json:
        print(json.dumps({"origin": came, "peer": f"{PEER} {ROUTER_VERSION}", "results": results}))
    else:
        print(line(came))
    return 0


if __name__ == "__main__":
    sys.exit(main())
