"""`rollmux demo`: the whole system on this machine, with simulated replicas and no GPU.

A trainer as TRL's AsyncGRPOTrainer is one: eight rollouts a prompt under a shared template, an
adapter sync every few seconds (pause, save, load, resume, unload, delete) through a bucket that
lags, or pushed to the replicas. The daemon is the real one, as a child process. Each reply is
checked against the weights that its policy name stands for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import tokens
from benchmarks.adapter import read_adapter, write_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.config import ReplicaConfig
from benchmarks.daemon import DaemonGone, connect, daemon
from benchmarks.engine import EngineConfig, Pause
from benchmarks.replica import SimulatedReplica

GROUP = 8  # rollouts a prompt, as in the published recipe
IN_FLIGHT_PER_REPLICA = 48  # a few above what one prompt group brings, below max_num_seqs
TEMPLATE_TOKENS, QUESTION_TOKENS = 96, (24, 120)
MEAN_REPLY_TOKENS, MAX_REPLY_TOKENS = 120, 400
SYNC_EVERY_S = 2.0  # between the end of one sync and the start of the next
MAX_STALENESS = 2
PUSH_KEY = "demo"
LAG_S = 1.5  # a bucket shows a file 2 to 3 s after it was written; shortened for a short demo
VIEW_S = 0.25

REPLICA = ReplicaConfig(
    max_model_len=2048,
    vocab_size=1000,
    mean_output_tokens=MEAN_REPLY_TOKENS,
    # About a tenth of a 1.5B model's time per token, so that 20 s show something.
    engine=EngineConfig(step_s=0.006, step_per_seq_s=2e-5, prefill_token_s=5e-5, max_cpu_loras=16),
)


@dataclass(slots=True)
class Tally:
    """What the demo saw itself."""

    rollouts: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)
    syncs_s: list[float] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)
    phase: str = "starting"
    started_s: float = 0.0
    ended_s: float = 0.0
    frozen_s: float = 0.0
    """Summed over replicas: how long their engines stood still."""

    @property
    def seconds(self) -> float:
        return max((self.ended_s or time.monotonic()) - self.started_s, 1e-9)


class Trainer:
    """Rollouts and syncs against one base URL, which is all a trainer knows of the fleet."""

    def __init__(self, client: httpx.AsyncClient, folder: Path, tally: Tally) -> None:
        self.client = client
        self.folder = folder
        self.tally = tally
        self.version = 0
        self.digests: dict[str, str] = {}
        self._random = random.Random(0)
        self._template = [self._token() for _ in range(TEMPLATE_TOKENS)]
        self._rollouts = self._endless()

    @property
    def policy(self) -> str:
        return f"trl-policy-v{self.version}"

    def _token(self) -> int:
        return self._random.randrange(3, REPLICA.vocab_size)

    def _endless(self) -> Any:
        while True:
            length = self._random.randint(*QUESTION_TOKENS)
            prompt = self._template + [self._token() for _ in range(length)]
            for _ in range(GROUP):
                yield prompt, self._random.getrandbits(63)

    async def roll_out(self) -> None:
        """Rollouts one after another, for ever: one of the many in flight."""
        # A client each: httpx looks through its whole pool for every request it sends.
        async with connect(str(self.client.base_url)) as client:
            while True:
                prompt, seed = next(self._rollouts)
                await self._roll_out(client, prompt, seed)

    async def _roll_out(self, client: httpx.AsyncClient, prompt: list[int], seed: int) -> None:
        policy = self.policy
        body = {
            "model": policy,
            "prompt": prompt,
            "max_tokens": MAX_REPLY_TOKENS,
            "temperature": 1.0,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": seed,
        }
        try:
            reply = await client.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            self._fail(f"a rollout of {policy}: {error!r}")
            await asyncio.sleep(0.1)
            return
        if reply.status_code != 200:
            self._fail(f"a rollout of {policy}: {reply.status_code} {reply.text[:200]}")
            await asyncio.sleep(0.1)
            return
        made: list[int] = reply.json()["choices"][0]["token_ids"]
        draw = f"seed {seed} 0"
        right = tokens.reply_tokens(self.digests[policy], prompt, draw, len(made))
        self.tally.rollouts += 1
        # The last token may be the end-of-reply token instead.
        self.tally.wrong += made[:-1] != right[:-1]

    async def sync(self) -> None:
        """One adapter sync, call by call as TRL 1.16 makes it."""
        tally, version = self.tally, self.version + 1
        name = f"trl-policy-v{version}"
        begun = time.monotonic()
        tally.phase = "pause"
        await self._control("/pause?mode=keep")
        tally.phase = "save"
        path = self._save(name)
        tally.phase = f"load {name}"
        load_begun = time.monotonic()
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": False}
        await self._control("/v1/load_lora_adapter", body)
        tally.loads_s.append(time.monotonic() - load_begun)
        tally.phase = "resume"
        await self._control("/resume")
        oldest = version - (MAX_STALENESS + 1)
        if oldest > 0:
            await self._control("/v1/unload_lora_adapter", {"lora_name": f"trl-policy-v{oldest}"})
        shutil.rmtree(self.folder / f"trl-policy-v{oldest - 1}", ignore_errors=True)
        self.version = version
        tally.syncs_s.append(time.monotonic() - begun)
        tally.phase = "train"

    def _save(self, name: str) -> Path:
        hidden = write_adapter(self.folder / f".{name}.tmp", name, rank=1, layers=1)
        self.digests[name] = read_adapter(str(hidden), 8, lambda p: Path(p).read_bytes())
        return hidden.rename(self.folder / name)

    async def _control(self, target: str, body: object = None) -> None:
        try:
            reply = await self.client.post(target, json=body)
        except httpx.TransportError as error:
            self._fail(f"{target}: {error!r}")
            return
        if reply.status_code != 200:
            self._fail(f"{target}: {reply.status_code} {reply.text[:200]}")

    def _fail(self, what: str) -> None:
        if len(self.tally.failures) < 100:  # enough to see what is wrong
            self.tally.failures.append(what)

    async def train(self) -> None:
        """Syncs for ever, the first one at once."""
        while True:
            await self.sync()
            await asyncio.sleep(SYNC_EVERY_S)


async def watch(
    client: httpx.AsyncClient, replicas: list[SimulatedReplica], tally: Tally, until_s: float
) -> None:
    """The live view, and the one who measures how long engines stand still."""
    view = View(sys.stderr)
    last, recent = time.monotonic(), deque([(0.0, 0)], maxlen=9)
    while time.monotonic() < until_s:
        await asyncio.sleep(VIEW_S)
        now = time.monotonic()
        frozen = sum(r.engine.paused is Pause.FROZEN for r in replicas)
        tally.frozen_s += frozen * (now - last)
        last = now
        try:
            status = (await client.get("/proxy/status")).json()
        except httpx.TransportError:
            break  # ``run`` finds out too, and says so
        recent.append((now - tally.started_s, tally.rollouts))
        (then_s, then), (now_s, count) = recent[0], recent[-1]
        view.show(status, tally, (count - then) / max(now_s - then_s, 1e-9))
    view.end()


class View:
    """A screenful that is drawn over on a terminal; elsewhere a line every two seconds."""

    LINE_EVERY = 8

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.drawn = 0
        self.calls = 0

    def show(self, status: dict[str, Any], tally: Tally, rate: float) -> None:
        router = status["router"]
        routed = max(router["routed"], 1)
        head = (
            f"{tally.seconds:5.1f} s  rollouts {tally.rollouts:5d} ({rate:4.0f}/s)  "
            f"affinity {router['affinity'] / routed:4.0%}  syncs {len(tally.syncs_s)}  "
            f"now: {tally.phase}"
        )
        self.calls += 1
        if not self.out.isatty():
            if self.calls % self.LINE_EVERY == 1:
                print(head, file=self.out, flush=True)
            return
        lines = [head]
        for replica in status["replicas"]:
            inflight = replica["inflight"]
            bar = "▇" * min(inflight, 60)
            newest = ", ".join(a.removeprefix("trl-policy-") for a in replica["adapters"][-4:])
            lines.append(
                f"  {replica['id']:>3} {replica['state']:<8} {newest:<16} {inflight:4} {bar}"
            )
        if self.drawn:
            self.out.write(f"\x1b[{self.drawn}A")
        # A line that wraps would be two to go back over.
        width = shutil.get_terminal_size().columns - 1
        self.out.write("".join(f"\x1b[2K{line[:width]}\n" for line in lines))
        self.out.flush()
        self.drawn = len(lines)

    def end(self) -> None:
        if self.drawn:
            self.out.write("\n")


async def run(seconds: float, count: int, folder: Path, *, push: bool = False) -> dict[str, Any]:
    """The demo itself; ``folder`` is the bucket. Returns the result, see ``summary``."""
    # Without this the daemon would outlive a demo that is told to stop.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    tally = Tally()
    policies = folder / "run" / ".vllm_lora"
    policies.mkdir(parents=True)
    replicas = [
        SimulatedReplica(
            REPLICA,
            folder=LaggingFolder(folder, LAG_S, 1.0),
            push_key=PUSH_KEY if push else None,
            push_root=folder.with_suffix(".pushed"),
        )
        for _ in range(count)
    ]
    options: tuple[str, ...] = ("--push-cache", str(folder.with_suffix(".cache")))
    options += ("--adapter-transport", "push" if push else "path")
    environ = {"ROLLMUX_PUSH_KEY": PUSH_KEY} if push else {}
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        log = folder.with_suffix(".log")
        urls = [replica.url for replica in replicas]
        url = await stack.enter_async_context(daemon(urls, log, options, environ))
        client = await stack.enter_async_context(connect(url))
        trainer = Trainer(client, policies, tally)
        tally.started_s = time.monotonic()
        await trainer.sync()
        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(trainer.roll_out(), name=f"rollout {i}")
                for i in range(IN_FLIGHT_PER_REPLICA * count)
            ]
            syncs = group.create_task(trainer.train(), name="syncs")
            try:
                await watch(client, replicas, tally, tally.started_s + seconds)
            finally:
                tally.ended_s = time.monotonic()
                for task in (*workers, syncs):
                    task.cancel()
        try:
            status = (await client.get("/proxy/status")).json()
            page = (await client.get("/metrics")).text
        except httpx.TransportError as error:
            raise DaemonGone("is gone", log) from error
        return summary(tally, status, page, replicas)


def summary(
    tally: Tally, status: dict[str, Any], page: str, replicas: list[SimulatedReplica]
) -> dict[str, Any]:
    """What the table shows and ``--json`` prints. Durations in seconds."""
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]

    def total(name: str, **labels: str) -> int:
        fits = (s for s in samples if s.name == name and labels.items() <= s.labels.items())
        return int(sum(s.value for s in fits))

    counters = [r.engine.counters for r in replicas]
    queried = sum(c.prefix_queries for c in counters)
    router = status["router"]
    return {
        "seconds": round(tally.seconds, 1),
        "replicas": len(replicas),
        "rollouts": tally.rollouts,
        "rollouts_per_s": round(tally.rollouts / tally.seconds, 1),
        "wrong_weights": tally.wrong,
        "failures": tally.failures,
        "affinity": router["affinity"],
        "spilled": router["spilled"],
        "unmatched": router["unmatched"],
        "routed_per_replica": {r["id"]: r["routed"] for r in status["replicas"]},
        "prefix_cache_hits": round(sum(c.prefix_hits for c in counters) / max(queried, 1), 3),
        "publications": len(tally.loads_s),
        "publication_p50_s": round(statistics.median(tally.loads_s), 2) if tally.loads_s else None,
        "publication_max_s": round(max(tally.loads_s), 2) if tally.loads_s else None,
        "pushed_bytes": total("rollmux_pushed_bytes_total"),
        "load_attempts": total("rollmux_adapter_load_attempts_total"),
        "load_retries": total("rollmux_adapter_load_retries_total"),
        "syncs_s": round(sum(tally.syncs_s), 1),
        "stalled_s": round(tally.frozen_s / len(replicas), 2),
        "preemptions": sum(c.preemptions for c in counters),
    }


def table(result: dict[str, Any]) -> str:
    routed = max(result["affinity"] + result["spilled"] + result["unmatched"], 1)

    def share(key: str) -> str:
        return f"{key} {result[key]:,} ({result[key] / routed:.1%})"

    right = result["rollouts"] - result["wrong_weights"]
    pushed = result["pushed_bytes"]
    how = f"{pushed / 1e3:,.0f} kB pushed; " if pushed else ""
    rows = [
        ("rollouts", f"{result['rollouts']:,} in {result['seconds']} s"),
        ("by the right weights", f"{right:,} of {result['rollouts']:,}"),
        ("failed calls", f"{len(result['failures'])}"),
        ("routed", "  ".join(share(key) for key in ("affinity", "spilled", "unmatched"))),
        (
            "per replica",
            "  ".join(f"{name} {n:,}" for name, n in result["routed_per_replica"].items()),
        ),
        ("prompt tokens from cache", f"{result['prefix_cache_hits']:.0%}"),
        (
            "publications",
            f"{result['publications']}, p50 {result['publication_p50_s']} s, "
            f"max {result['publication_max_s']} s ({how}the bucket lags {LAG_S} s)",
        ),
        ("load attempts", f"{result['load_attempts']}, of them retries {result['load_retries']}"),
        (
            "generation stalled by syncs",
            f"{result['stalled_s']} s of {result['syncs_s']} s that the syncs took; "
            f"{result['preemptions']} requests preempted",
        ),
    ]
    return "\n".join(f"{name:<28} {value}" for name, value in rows)


def main(args: argparse.Namespace) -> int:
    """``args``: seconds, replicas, push, json. 0, or 1 if a call failed or a reply was wrong."""
    with tempfile.TemporaryDirectory(prefix="rollmux-demo-") as directory:
        try:
            folder = Path(directory) / "bucket"
            result = uvloop.run(run(args.seconds, args.replicas, folder, push=args.push))
        except DaemonGone as error:
            print(f"rollmux demo: {error}", file=sys.stderr)
            return 1
        except asyncio.CancelledError:
            print("rollmux demo: told to stop before its end", file=sys.stderr)
            return 1
    print(json.dumps(result) if args.json else table(result))
    for failure in result["failures"][:5]:
        print(f"failed: {failure}", file=sys.stderr)
    bad = result["failures"] or result["wrong_weights"] or not result["rollouts"]
    return 1 if bad else 0
