"""`rollmux replay --trainer-step-s`: a trace's rollouts in the loop of a trainer, simulated.

The trace gives prompts and lengths of replies, in order and from the beginning again; when they are
sent, and under which policy, is the loop's (``benchmarks.training``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from benchmarks import report_page
from benchmarks.replay import SWEPT, Options, Progress, about, apart, give, opened, policy, sweep
from benchmarks.trace import Request, Trace
from benchmarks.training import Loop, Simulation, Training
from proxy.settings import SettingsError
from routing import registry

LOOP_SWEPT = {
    "step_s": "trainer step s",
    "samples_per_step": "samples a step",
    "queue": "queue",
    "sync_every": "sync every",
    "sync_s": "sync s",
    "max_staleness": "max staleness",
}
"""Options of which several values can be given, and what a value of theirs is called."""
WORDS = {**SWEPT, **LOOP_SWEPT}
PAUSES = {None: (False, True), "eager": (False,), "lazy": (True,)}
"""Whether each run is lazy."""


@dataclass(frozen=True, slots=True)
class Result:
    router: str
    options: Options
    loop: Loop
    found: Training
    saved: float | None = None
    """Share of the time that lazy pause saves; None for an eager one, or where that was not run."""

    @property
    def point(self) -> dict[str, Any]:
        return asdict(self.options) | asdict(self.loop)

    @property
    def pause(self) -> str:
        return "lazy" if self.loop.lazy else "eager"


def main(parsed: argparse.Namespace) -> int:
    """The command; its exit code: 1 where lines of the trace were left out.

    :raises SettingsError: bad usage.
    """
    report_page.check(parsed.html)
    trace, requests = opened(parsed)
    points = list(product(sweep(parsed, trace), _loops(parsed)))
    if parsed.html and len(points) == 1:
        raise SettingsError("--html: of a trainer's loop it draws sweeps; give several values")
    points = [_with_inflight(options, loop) for options, loop in points]
    routers = parsed.router or ["prefix"]
    total = len(points) * len(routers) * len(PAUSES[parsed.pause])
    results: list[Result] = []
    for options, loop in points:
        for router in routers:
            eager: Training | None = None
            for lazy in PAUSES[parsed.pause]:
                run = replace(loop, lazy=lazy)
                label = f"run {len(results) + 1} of {total}, {router}"
                found = _run(label, trace.block_tokens, requests, router, options, run)
                saved = 1 - found.seconds / eager.seconds if eager else None
                results.append(Result(router, options, run, found, saved))
                eager = found
    failed = len(trace.requests) - len(requests)
    report = about(trace, [options for options, _ in points], failed)
    report["results"] = [_as_dict(result) for result in results]
    head = _heading(trace, len(requests), failed, results)
    shown = _rows(results) if len(points) == 1 else _point_rows(results)
    written = give(parsed, report, head, shown, shown)
    return 1 if trace.faults or not written else 0


def _loops(parsed: argparse.Namespace) -> list[Loop]:
    if parsed.samples_per_step is None:
        raise SettingsError("--samples-per-step: --trainer-step-s needs it")
    usual = Loop(1, 1.0)
    values = [parsed.trainer_step_s]
    values += [getattr(parsed, name) or [getattr(usual, name)] for name in list(LOOP_SWEPT)[1:]]
    return [
        Loop(**dict(zip(LOOP_SWEPT, point, strict=True)), steps=parsed.steps or usual.steps)
        for point in product(*values)
    ]


def _with_inflight(options: Options, loop: Loop) -> tuple[Options, Loop]:
    """Without a number the limit is what TRL makes of its other settings."""
    inflight = options.inflight or max(1, loop.max_staleness) * loop.samples_per_step
    return replace(options, inflight=inflight), replace(loop, inflight=inflight)


def _run(
    label: str,
    block_tokens: int,
    requests: Sequence[Request],
    router: str,
    options: Options,
    loop: Loop,
) -> Training:
    try:
        chosen = policy(router, options)
    except registry.RouterError as exc:
        raise SettingsError(f"--router: {exc}") from exc
    progress = Progress(label, loop.steps, "steps")
    try:
        engine = options.engine(block_tokens)
        return Simulation(requests, chosen, options.replicas, engine, loop, progress).run()
    finally:
        progress.done()


def _as_dict(result: Result) -> dict[str, object]:
    """``router`` is with the pause: lines of a page are told apart by it."""
    return {
        "router": f"{result.router}, {result.pause}",
        "policy": result.router,
        "pause": result.pause,
        "options": result.point,
        **asdict(result.found),
        "lazy_saves_share": result.saved,
    }


def _heading(trace: Trace, requests: int, failed: int, results: Sequence[Result]) -> str:
    return (
        f"{trace.name}: {requests:,} rollouts, over and over"
        f"{f', {failed:,} failed ones left out' if failed else ''}; "
        f"{results[0].loop.steps:,} steps of a trainer, simulated"
    )


def _saved(result: Result) -> str:
    return "-" if result.saved is None else f"{result.saved:.1%}"


def _rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """For people: a run a column."""
    found = [result.found for result in results]
    return [
        ("", [f"{result.router}, {result.pause}" for result in results]),
        ("waits", [each.waits for each in found]),
        ("trainer waits", [f"{each.trainer_waits_share:.1%}" for each in found]),
        ("generation is held", [f"{each.generation_held_share:.1%}" for each in found]),
        ("step", [f"{each.step_s:.2f} s" for each in found]),
        ("rollout wait", [f"{each.rollout_wait_s:.2f} s" for each in found]),
        ("rollout queue", [f"{r.found.queue:,.0f} of {r.loop.queue:,}" for r in results]),
        ("staleness", [f"{each.staleness:.2f}" for each in found]),
        ("dropped as too old", [f"{each.dropped:,}" for each in found]),
        ("tokens per second", [f"{each.tokens_per_second:,.0f}" for each in found]),
        ("prompt tokens from cache", [f"{each.cached_share:.1%}" for each in found]),
        ("all of it took", [f"{each.seconds:,.1f} s" for each in found]),
        ("lazy pause saves", [_saved(result) for result in results]),
    ]


def _point_rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """For people: a run a row."""
    points = [result.point for result in results]
    return [
        ("", ["waits", "step", "wait", "queue", "staleness", "dropped", "tokens/s", "took",
              "lazy saves"]),
        *(
            (
                ", ".join([*apart(r.point, points, WORDS), r.router, r.pause]),
                [
                    r.found.waits,
                    f"{r.found.step_s:.2f} s",
                    f"{r.found.rollout_wait_s:.2f} s",
                    f"{r.found.queue:,.0f}",
                    f"{r.found.staleness:.2f}",
                    f"{r.found.dropped:,}",
                    f"{r.found.tokens_per_second:,.0f}",
                    f"{r.found.seconds:,.1f} s",
                    _saved(r),
                ],
            )
            for r in results
        ),
    ]  # fmt: skip
