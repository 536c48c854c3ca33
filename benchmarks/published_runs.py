"""Whether the simulated loop tells what five published runs showed, with one set of constants.

``python -m benchmarks.published_runs`` prints simulated and published figures side by side, and
what lazy pause would have saved; the exit code is 1 where one is outside its bounds. About a minute
and a half of one core; ``--json`` for programs.

The runs: huggingface/blog, asyncgrpo-lora-hfjobs.md at 081e91b, Qwen2.5-Math-1.5B with LoRA on two
H200, replicas of one H200 each. What each row of ``RUNS`` holds is what was set or measured there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, log
from statistics import NormalDist

from benchmarks.engine import EngineConfig
from benchmarks.replay import Options, policy
from benchmarks.trace import Request
from benchmarks.training import Loop, Simulation, Training
from benchmarks.workloads import Grpo

# --- the runs, as published -----------------------------------------------------------------------

STEP_TOKENS = 6 * 2 * 16_384 * 0.95
"""Of a packed step: 6 micro-batches, a row of 16,384 tokens for each of two GPUs, 95 % full."""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings and measured speeds of one run, and what its dashboard showed (None: not said)."""

    name: str
    steps: int
    """Until it was stopped: 500, or as many as the figures show."""
    forward_backward_s: float
    samples_per_step: int
    sample_tokens: float
    """Prompt and reply. Of packed steps: what fits, shared out. Run 1 was not packed: it takes that
    of run 5, which had its recipe, its 500 steps and its rewards."""
    replicas: int
    inflight: int
    queue: int
    sync_s: float
    waits: str
    """Run 1: "the trainer is the bottleneck"; run 2: rollouts are there at once; run 3: "moved the
    bottleneck to generation"; run 4: "the third replica does basically nothing"; run 5: "training
    is the bottleneck again"."""
    step_s: float | None
    wall_s: float | None
    tokens_per_second: float | None
    queue_mean: float | None
    rollout_wait_s: float | None
    staleness: float | None


RUNS = (
    Run("1, r1-dp2", 500, 21.9, 128, STEP_TOKENS / 168, 2, 128, 512, 8.5,
        "generation", 22.9, 3 * 3600 + 27 * 60, 4_600, 476, 0.02, 1.5),
    Run("2, packed", 154, 5.6, 150, STEP_TOKENS / 150, 2, 128, 512, 7.6,
        "generation", 5.9, None, 25_000, 420, 0.04, None),
    Run("3, no checkpointing", 134, 4.6, 150, STEP_TOKENS / 150, 2, 128, 512, 7.6,
        "trainer", None, None, 25_000, 65.5, 0.6, None),  # 60 to 71
    Run("4, third replica", 134, 4.6, 150, STEP_TOKENS / 150, 3, 128, 512, 5.8,
        "trainer", None, None, 26_000, None, None, None),
    Run("5, 384 in flight", 500, 4.6, 168, STEP_TOKENS / 168, 3, 384, 768, 6.2,
        "generation", 4.8, 53 * 60, None, 690, 0.03, 2.0),
)  # fmt: skip
SYNC_EVERY, MAX_STALENESS = 4, 4
THIRD = RUNS[2]
"""Asked again with a replica more and nothing else changed."""

# --- the constants, the same for all --------------------------------------------------------------

STEP_S = 3.85e-3
"""Of a decode step without its sequences. The one constant that is fitted: with it the trainer of
run 3 waits about as long as published."""
STEP_PER_SEQ_S = 5.4e-6
"""Reading one sequence's cache: 28 layers x 2 heads x 128 x 2 (K and V) x 2 bytes (the model's
config.json) for the 900 tokens of a running one on average, at 4.8 TB/s (H200's data sheet)."""
PREFILL_TOKEN_S = 8e-6
"""2 x 1.54e9 operations (the model card's parameters) at 40 % of 989e12 a second (data sheet)."""
CACHE_TOKENS = 4_000_000
"""90 % of 141 GB (vLLM's default), less 12 GB, at the bytes a token above."""
MAX_NUM_SEQS = 1024
"""vLLM 0.27.1's default for a server on a GPU of this size."""
OVERHEAD_S = 0.25
"""Of a step besides forward and backward: 5.9 - 5.6 and 4.8 - 4.6 s in the runs 2 and 5."""
PROMPT_TOKENS, REPLY_LIMIT = 135, 3_000
"""The example that the post goes through, and the limit that the runs had."""

# --- how near is near -----------------------------------------------------------------------------

STEP_WITHIN, WALL_WITHIN, TOKENS_WITHIN, STALENESS_WITHIN = 0.10, 0.10, 0.15, 0.5
THIRD_REPLICA_BELOW = 0.05


def simulate(run: Run, *, lazy: bool = False, steps: int | None = None) -> Training:
    engine = EngineConfig(
        num_blocks=CACHE_TOKENS // 16,
        max_num_seqs=MAX_NUM_SEQS,
        step_s=STEP_S,
        step_per_seq_s=STEP_PER_SEQ_S,
        prefill_token_s=PREFILL_TOKEN_S,
    )
    loop = Loop(
        samples_per_step=run.samples_per_step,
        step_s=run.forward_backward_s + OVERHEAD_S,
        inflight=run.inflight,
        queue=run.queue,
        sync_every=SYNC_EVERY,
        sync_s=run.sync_s,
        lazy=lazy,
        max_staleness=MAX_STALENESS,
        steps=steps or run.steps,
    )
    router = policy("prefix", Options())
    return Simulation(rollouts(run), router, run.replicas, engine, loop).run()


def rollouts(run: Run) -> Sequence[Request]:
    """Of one policy: the loop has its own syncs."""
    made = Grpo(
        steps=100,
        sync=100,
        prompt=PROMPT_TOKENS,
        reply=uncut_mean(run.sample_tokens - PROMPT_TOKENS, Grpo().tail_percent / 100),
        longest=REPLY_LIMIT,
    )
    return made.trace().requests


def uncut_mean(cut_mean: float, tail: float) -> int:
    """The mean of log-normal lengths that is ``cut_mean`` once they end at ``REPLY_LIMIT``."""
    low, high, normal = cut_mean, 3.0 * cut_mean, NormalDist()
    while high - low > 0.5:
        middle = (low + high) / 2
        end = (log(REPLY_LIMIT) - log(middle) + tail * tail / 2) / tail
        found = middle * normal.cdf(end - tail) + REPLY_LIMIT * (1 - normal.cdf(end))
        low, high = (middle, high) if found < cut_mean else (low, middle)
    return round(low)


# --- side by side ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    run: Run
    eager: Training
    lazy: Training

    @property
    def wall_s(self) -> float:
        """Of as many steps as the published one."""
        return self.eager.seconds

    @property
    def lazy_saves(self) -> float:
        """Share of the wall clock."""
        return 1 - self.lazy.seconds / self.eager.seconds

    def outside(self) -> Iterator[str]:
        """What is not as near to the published figure as it has to be."""
        run, found = self.run, self.eager
        if found.waits != run.waits:
            yield f"run {run.name}: {found.waits} waits, published: {run.waits}"
        for what, simulated, published, within in (
            ("median step", found.step_s, run.step_s, STEP_WITHIN),
            ("wall clock", self.wall_s, run.wall_s, WALL_WITHIN),
            ("tokens per second", found.tokens_per_second, run.tokens_per_second, TOKENS_WITHIN),
        ):
            if published is not None and abs(simulated / published - 1) > within:
                yield f"run {run.name}: {what} is {simulated / published - 1:+.1%} off"
        if run.queue_mean is not None:
            half = run.queue / 2
            if (found.queue > half) != (run.queue_mean > half):
                yield f"run {run.name}: {found.queue:.0f} in the queue, published: {run.queue_mean}"
        if run.staleness is not None and abs(found.staleness - run.staleness) > STALENESS_WITHIN:
            yield f"run {run.name}: staleness {found.staleness:.2f}, published: {run.staleness}"


def third_replica_brings(few: Training) -> float:
    """Share of tokens per second that run 3, of which ``few`` came, has more of with another."""
    many = simulate(replace(THIRD, replicas=THIRD.replicas + 1))
    return many.tokens_per_second / few.tokens_per_second - 1


def table(outcomes: Sequence[Outcome], third: float) -> str:
    def number(value: float | None, form: str = "{:,.1f}") -> str:
        return "-" if value is None else form.format(value)

    def minutes(value: float | None) -> str:
        return "-" if value is None else f"{value / 60:,.0f} min"

    found, runs = [o.eager for o in outcomes], [o.run for o in outcomes]
    rows: list[tuple[str, list[str]]] = [
        ("run", [run.name for run in runs]),
        ("waits", [each.waits for each in found]),
        ("  published", [run.waits for run in runs]),
        ("median step", [number(each.step_s, "{:.1f} s") for each in found]),
        ("  published", [number(run.step_s, "{:.1f} s") for run in runs]),
        ("steps", [f"{run.steps}" for run in runs]),
        ("wall clock", [minutes(o.wall_s) for o in outcomes]),
        ("  published", [minutes(run.wall_s) for run in runs]),
        ("generated tokens per second", [number(e.tokens_per_second, "{:,.0f}") for e in found]),
        ("  published", [number(run.tokens_per_second, "{:,.0f}") for run in runs]),
        ("  as logged, median", [number(e.logged_tokens_per_second, "{:,.0f}") for e in found]),
        ("rollout queue", [f"{each.queue:.0f} of {o.run.queue}"
                           for o, each in zip(outcomes, found, strict=True)]),
        ("  published", [number(run.queue_mean, "{:.0f}") for run in runs]),
        ("rollout wait", [number(each.rollout_wait_s, "{:.2f} s") for each in found]),
        ("  published", [number(run.rollout_wait_s, "{:.2f} s") for run in runs]),
        ("staleness", [number(each.staleness) for each in found]),
        ("  published", [number(run.staleness) for run in runs]),
        ("with lazy pause", [minutes(o.lazy.seconds) for o in outcomes]),
        ("  saved", [f"{o.lazy_saves:.1%}" for o in outcomes]),
    ]  # fmt: skip
    width = max(len(cell) for _, cells in rows for cell in cells) + 2
    lines = [f"{name:<28}{''.join(f'{cell:>{width}}' for cell in cells)}" for name, cells in rows]
    lines.append(f"\na third replica brings run 3 {third:+.1%} tokens per second")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_runs",
        description="The simulated training loop beside five published runs.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parsed = parser.parse_args()
    outcomes, told_s = [], -inf
    for run in RUNS:
        if time.monotonic() > told_s + 1:
            print(f"run {run.name} …", file=sys.stderr, flush=True)
            told_s = time.monotonic()
        outcomes.append(Outcome(run, simulate(run), simulate(run, lazy=True)))
    third = third_replica_brings(outcomes[RUNS.index(THIRD)].eager)
    outside = [what for outcome in outcomes for what in outcome.outside()]
    if third >= THIRD_REPLICA_BELOW:
        outside.append(f"a third replica brings {third:.1%}")
    if parsed.json:
        runs = [asdict(o) | {"lazy_saves": o.lazy_saves} for o in outcomes]
        print(json.dumps({"runs": runs, "third_replica": third, "outside": outside}, indent=2))
    else:
        print(table(outcomes, third))
        print("\n".join(["", *outside]) if outside else "\nall within their bounds")
    return 1 if outside else 0


if __name__ == "__main__":
    raise SystemExit(main())
