"""`rollmux replay`: a recorded trace through routing policies and simulated replicas, no sockets.

Pure: a virtual clock, the engine model of the simulated replica, the real policies. Equal input and
seed give equal output. Two timings: as recorded, or (``--inflight``) the next request as soon as
fewer than so many are in flight, which is how a trainer with that limit would have sent them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import ideal, report_page
from benchmarks.curves import Curves, Timeline
from benchmarks.engine import EngineConfig, Outcome
from benchmarks.fleet import ROUTER_BLOCK_TOKENS, Fleet, Running
from benchmarks.trace import Event, Request, Trace, TraceError, read
from benchmarks.workloads import WorkloadError, make
from proxy.settings import SettingsError
from proxy.version import version
from routing import registry
from routing.router import Router, RouterSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PERCENTILES = ("p50", "p90", "p99")
TOLD_FAULTS = 20
"""Damaged lines told one by one; the rest is a number."""
TELL_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """What if. The speeds are near those of a 1.5B model on an H200; see EngineConfig."""

    replicas: int = 2
    inflight: int | None = None
    """Rollouts in flight, at most, timing as fast as that goes; None: as recorded."""
    spill_threshold: int = 8
    max_tracked_blocks: int = 500_000
    cache_tokens: int = 2_000_000
    """Of one replica's prefix cache."""
    max_num_seqs: int = 256
    """Sequences that a replica runs at once: vLLM 0.27.1's default for a server on most GPUs; 1,024
    on the largest."""
    step_ms: float = 8.0
    sequence_us: float = 20.0
    """What each sequence adds to a step."""
    prefill_us: float = 20.0
    """For a token of a prompt."""
    seed: int = 0

    def engine(self, block_tokens: int) -> EngineConfig:
        return EngineConfig(
            block_tokens=block_tokens,
            num_blocks=max(1, self.cache_tokens // block_tokens),
            max_num_seqs=self.max_num_seqs,
            step_s=self.step_ms / 1e3,
            step_per_seq_s=self.sequence_us / 1e6,
            prefill_token_s=self.prefill_us / 1e6,
        )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds, by nearest rank."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy made of the trace. Times are the virtual clock's."""

    router: str
    options: Options
    requests: int
    decisions: dict[str, int]
    """By reason."""
    cached_share: float
    """Of all prompt tokens, those that came from a replica's cache."""
    ideal_share: float
    """What it could be; see ``benchmarks.ideal``."""
    per_replica: list[int]
    """Requests sent to each."""
    seconds: float
    """From the first request to the last token."""
    tokens_per_second: float
    """Generated, by all replicas together."""
    request_s: Percentiles
    group_s: Percentiles | None
    """From a group's first request to its last reply, of groups with more than one; None without
    such."""
    curves: Curves | None = None
    """What the page draws."""

    @property
    def spread(self) -> float:
        """The most requests of a replica less the fewest, as a share of their mean."""
        mean = sum(self.per_replica) / len(self.per_replica)
        return (max(self.per_replica) - min(self.per_replica)) / mean


class Replay:
    """One run of one policy. ``told``: called now and then with how many requests were sent."""

    def __init__(
        self, trace: Trace, router: Router, options: Options, told: Callable[[int], None]
    ) -> None:
        self._requests = [r for r in trace.requests if r.ok]
        self._events = trace.events
        self._block_tokens = trace.block_tokens
        self._router = router
        self._options = options
        self._told = told
        config = options.engine(trace.block_tokens)
        self._fleet = Fleet(router, options.replicas, config, self._replied)
        self._took_s = array("d")
        self._timeline = Timeline()
        self._groups = ideal.groups(self._requests)
        self._group_size = Counter(self._groups)
        self._group_began: dict[int, float] = {}
        self._group_ended: dict[int, float] = {}

    def run(self) -> Result:
        limit = self._options.inflight
        fleet = self._fleet
        for number, item in self._items():
            if limit is None:
                fleet.run_until(item.at_s)
            if isinstance(item, Event):
                fleet.apply(item)
                continue
            while limit is not None and fleet.inflight and fleet.inflight + item.n > limit:
                self._step()
            self._timeline.inflight(fleet.now_s, item.n)
            self._group_began.setdefault(self._groups[number], fleet.now_s)
            fleet.send(number, item)
            if number % 256 == 0:
                self._told(number)
        while fleet.inflight:
            self._step()
        return self._result()

    def _items(self) -> Iterator[tuple[int, Request | Event]]:
        """By time; at the same time events come first."""
        events = iter(self._events)
        event = next(events, None)
        for number, request in enumerate(self._requests):
            while event is not None and event.at_s <= request.at_s:
                yield -1, event
                event = next(events, None)
            yield number, request
        while event is not None:
            yield -1, event
            event = next(events, None)

    def _step(self) -> None:
        if not self._fleet.step():
            # All stand still: the trace ends, or waits for a reply, inside a pause.
            self._fleet.resume()

    def _replied(self, running: Running, outcome: Outcome) -> None:
        self._timeline.tokens(running.began_s, outcome.at_s, outcome.tokens)
        if running.left:
            return
        self._timeline.inflight(outcome.at_s, -running.request.n)
        self._took_s.append(outcome.at_s - running.began_s)
        self._group_ended[self._groups[running.number]] = outcome.at_s

    # The end

    def _result(self) -> Result:
        requests = self._requests
        fleet = self._fleet
        prompt = sum(request.prompt_tokens * request.n for request in requests)
        best = ideal.cached_tokens(requests, self._block_tokens, len(fleet.replicas))
        began_s, ended_s = min(self._group_began.values()), max(self._group_ended.values())
        seconds = max(ended_s - began_s, 1e-9)
        took = [
            ended_s - self._group_began[group]
            for group, ended_s in self._group_ended.items()
            if self._group_size[group] > 1
        ]
        return Result(
            self._router.name,
            self._options,
            len(requests),
            dict(sorted(fleet.decisions.items())),
            fleet.prefix_hits / prompt,
            best / prompt,
            [replica.routed for replica in fleet.replicas],
            seconds,
            fleet.generated_tokens / seconds,
            percentiles(self._took_s),
            percentiles(took) if took else None,
            self._timeline.curves(ended_s, self._took_s, took),
        )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Of at least one value."""
    ordered = sorted(values)
    p50, p90, p99 = (ordered[-(-len(ordered) * p // 100) - 1] for p in (50, 90, 99))
    return Percentiles(p50, p90, p99)


def replay(
    trace: Trace, router: str, options: Options, told: Callable[[int], None] = lambda sent: None
) -> Result:
    """The trace through the policy of that name (or ``module:factory``).

    :raises registry.RouterError: there is none.
    """
    return Replay(trace, policy(router, options), options, told).run()


def policy(router: str, options: Options) -> Router:
    """The policy of that name (or ``module:factory``).

    :raises registry.RouterError: there is none.
    """
    settings = RouterSettings(
        ROUTER_BLOCK_TOKENS, options.spill_threshold, options.max_tracked_blocks, options.seed
    )
    return registry.load(router, settings)


# --- the command ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """On standard error, once a second; nothing of what takes less."""

    label: str
    total: int
    unit: str = "requests"
    next_s: float = field(default_factory=lambda: time.monotonic() + TELL_EVERY_S)
    shown: bool = False

    def __call__(self, done: int) -> None:
        if time.monotonic() < self.next_s:
            return
        self.next_s = time.monotonic() + TELL_EVERY_S
        self.shown = True
        begin, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
        text = f"{begin}{self.label}: {done:,} of {self.total:,} {self.unit}"
        print(text, end=end, file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr)


def main(parsed: argparse.Namespace) -> int:
    """The command; its exit code: 1 where lines of the trace were left out.

    :raises SettingsError: bad usage.
    """
    report_page.check(parsed.html)
    trace, requests = opened(parsed)
    points, results = sweep(parsed, trace), []
    for options in points:
        for router in parsed.router or ["prefix"]:
            progress = Progress(label(router, options, points), len(requests))
            try:
                results.append(replay(trace, router, options, progress))
            except registry.RouterError as exc:
                raise SettingsError(f"--router: {exc}") from exc
            finally:
                progress.done()
    failed = len(trace.requests) - len(requests)
    report = _as_dict(trace, points, results, failed)
    head = heading(trace, points, results, failed)
    shown = rows(results) if len(points) == 1 else point_rows(results, points)
    written = give(parsed, report, head, shown, shown)
    return 1 if trace.faults or not written else 0


def give(
    parsed: argparse.Namespace,
    report: Mapping[str, object],
    head: str,
    shown: report_page.Rows,
    on_page: report_page.Rows,
) -> bool:
    """Write the report's page if one was asked for, and print it; False if there is no page."""
    written = report_page.write(parsed.html, report, head, on_page)  # first: a pipe may be gone
    if parsed.json:
        print(json.dumps(report, indent=2))
    else:
        print(head, table(shown), sep="\n\n")
    return written


SWEPT = {
    "replicas": "replicas",
    "inflight": "in flight",
    "spill_threshold": "spill threshold",
    "cache_tokens": "cache tokens",
    "max_num_seqs": "sequences",
    "step_ms": "step ms",
    "sequence_us": "sequence µs",
    "prefill_us": "prefill µs",
}
"""Options of which several values can be given, and what a value of theirs is called."""


def sweep(parsed: argparse.Namespace, trace: Trace) -> list[Options]:
    """All combinations of what was given."""
    usual = Options()
    instead = asdict(usual) | {
        "replicas": trace.replicas() or usual.replicas,
        "inflight": trace.inflight,
    }
    values = [getattr(parsed, name) or [instead[name]] for name in SWEPT]
    return [
        Options(**dict(zip(SWEPT, point, strict=True)), seed=parsed.seed)
        for point in product(*values)
    ]


def label(router: str, options: Options, points: Sequence[Options]) -> str:
    """What tells one point of a sweep from the others."""
    return ", ".join([*apart(asdict(options), [asdict(each) for each in points], SWEPT), router])


def apart(
    point: Mapping[str, object], points: Sequence[Mapping[str, object]], words: Mapping[str, str]
) -> list[str]:
    """The values of a point that are not the same in all, after their words."""
    return [
        f"{word} {point[name]:,}"
        for name, word in words.items()
        if len({each[name] for each in points}) > 1
    ]


def opened(parsed: argparse.Namespace) -> tuple[Trace, list[Request]]:
    """The trace, its damaged lines told, and those of its requests that are sent.

    :raises SettingsError: there is nothing to send.
    """
    trace = _trace(parsed)
    _tell_faults(trace)
    requests = [request for request in trace.requests if request.ok]
    if not requests:
        raise SettingsError(f"{trace.name}: holds no request that was answered with 200")
    return trace, requests


def _trace(parsed: argparse.Namespace) -> Trace:
    if (parsed.trace is None) == (parsed.workload is None):
        raise SettingsError("TRACE: name a trace, or a made-up one with --workload, and not both")
    try:
        return read(Path(parsed.trace)) if parsed.trace is not None else make(parsed.workload)
    except TraceError as exc:
        raise SettingsError(str(exc)) from exc
    except WorkloadError as exc:
        raise SettingsError(f"--workload: {exc}") from exc


def _tell_faults(trace: Trace) -> None:
    for fault in trace.faults[:TOLD_FAULTS]:
        print(f"{trace.name}, line {fault.line}: {fault.why}", file=sys.stderr)
    if (more := len(trace.faults) - TOLD_FAULTS) > 0:
        print(f"{trace.name}: and {more:,} lines more", file=sys.stderr)
    if trace.faults:
        print(f"{trace.name}: {len(trace.faults):,} damaged lines are left out", file=sys.stderr)


def _as_dict(
    trace: Trace, points: Sequence[Options], results: Sequence[Result], failed: int
) -> dict[str, object]:
    return about(trace, points, failed) | {
        "results": [asdict(result) | {"spread": result.spread} for result in results],
    }


def about(trace: Trace, points: Sequence[DataclassInstance], failed: int) -> dict[str, object]:
    """What was replayed, for programs; of the options those that all points have."""
    first = asdict(points[0])
    return {
        "rollmux": version(),
        "trace": trace.name,
        "trace_blake3": trace.digest,
        "block_size": trace.block_tokens,
        "damaged_lines": len(trace.faults),
        "failed_requests": failed,
        "options": {
            name: value
            for name, value in first.items()
            if all(getattr(point, name) == value for point in points)
        },
    }


def _seconds(found: Percentiles | None, which: str) -> str:
    return f"{getattr(found, which):,.2f} s" if found else "-"


def heading(trace: Trace, points: Sequence[Options], results: Sequence[Result], failed: int) -> str:
    """What was replayed, in a line."""
    replicas = sorted({point.replicas for point in points})
    inflight = sorted({point.inflight or 0 for point in points})
    timing = f"{_listed(inflight)} in flight" if inflight[0] else "as recorded"
    return (
        f"{trace.name}: {results[0].requests:,} requests"
        f"{f', {failed:,} failed ones left out' if failed else ''}; "
        f"simulated on {_listed(replicas)} replicas, timing {timing}"
    )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(f"{value:,}" for value in values)


def point_rows(results: Sequence[Result], points: Sequence[Options]) -> list[tuple[str, list[str]]]:
    """For people: a point of a sweep a row, the names of its figures in the first."""
    return [
        ("", ["cached", "of ideal", "unmatched", "spread", "tokens/s", "took",
              "request p90", "group p90"]),
        *(
            (
                label(r.router, r.options, points),
                [
                    f"{r.cached_share:.1%}",
                    f"{r.cached_share / r.ideal_share:.1%}" if r.ideal_share else "-",
                    f"{r.decisions.get('unmatched', 0) / r.requests:.1%}",
                    f"{r.spread:.1%}",
                    f"{r.tokens_per_second:,.0f}",
                    f"{r.seconds:,.1f} s",
                    _seconds(r.request_s, "p90"),
                    _seconds(r.group_s, "p90"),
                ],
            )
            for r in results
        ),
    ]  # fmt: skip


def rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """For people: a policy a column, its name in the first row."""
    words = report_page.reasons(word for result in results for word in result.decisions)
    return [
        ("", [r.router for r in results]),
        ("prompt tokens from cache", [f"{r.cached_share:.1%}" for r in results]),
        ("of the ideal", [f"{r.cached_share / r.ideal_share:.1%}" if r.ideal_share else "-"
                          for r in results]),
        *(
            (word, [f"{r.decisions.get(word, 0) / r.requests:.1%}" for r in results])
            for word in words
        ),
        ("spread of requests", [f"{r.spread:.1%}" for r in results]),
        ("tokens per second", [f"{r.tokens_per_second:,.0f}" for r in results]),
        ("all of it took", [f"{r.seconds:,.1f} s" for r in results]),
        *[(f"request, {p}", [_seconds(r.request_s, p) for r in results]) for p in PERCENTILES],
        *[(f"group, {p}", [_seconds(r.group_s, p) for r in results]) for p in PERCENTILES],
    ]  # fmt: skip


def table(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """For a terminal."""
    first = max(24, *(len(name) for name, _ in rows)) + 2
    width = max(len(cell) for _, cells in rows for cell in cells) + 2
    return "\n".join(
        f"{name:<{first}}{''.join(f'{cell:>{width}}' for cell in cells)}" for name, cells in rows
    )
