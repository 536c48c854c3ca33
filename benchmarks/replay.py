"""`rollmux replay`: a recorded trace through routing policies and simulated replicas, no sockets.

Pure: a virtual clock, the engine model of the simulated replica, the real policies. Equal input and
seed give equal output. Two timings: as recorded, or (``--inflight``) the next request as soon as
fewer than so many are in flight, which is how a trainer with that limit would have sent them.

A policy gets prompts made of the trace's ids, two tokens a block where the replicas have 16 or 512,
and one for a block that is not whole: chains part where those of the run did, at an eighth of the
cost.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import ideal
from benchmarks.curves import Curves, Timeline
from benchmarks.engine import Adapter, Engine, EngineConfig, Job
from benchmarks.trace import Event, Request, Trace, TraceError, read
from proxy.settings import SettingsError
from proxy.version import version
from routing import registry
from routing.ids import ReplicaId
from routing.router import NoReplica, Router, RouteRequest, RouterSettings

WORDS = ("affinity", "spilled", "unmatched")
PERCENTILES = ("p50", "p90", "p99")
ROUTER_BLOCK_TOKENS = 2
TOLD_FAULTS = 20
"""Damaged lines told one by one; the rest is a number."""
TELL_EVERY_S = 1.0

STEP_S, STEP_PER_SEQ_S, PREFILL_TOKEN_S = 0.008, 2e-5, 2e-5
"""Near a 1.5B model on an H200; see EngineConfig."""
MAX_NUM_SEQS = 256
"""vLLM 0.27.1's default for a server on most GPUs; 1,024 on the largest."""


@dataclass(frozen=True, slots=True)
class Options:
    """What if."""

    replicas: int = 2
    inflight: int | None = None
    """Rollouts in flight, at most, timing as fast as that goes; None: as recorded."""
    spill_threshold: int = 8
    max_tracked_blocks: int = 500_000
    cache_tokens: int = 2_000_000
    """Of one replica's prefix cache."""
    seed: int = 0


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


@dataclass(slots=True, eq=False)
class _Replica:
    """Meets ``ReplicaLoad``."""

    id: ReplicaId
    engine: Engine
    inflight: int = 0
    routed: int = 0
    due_s: float | None = None
    """When its engine moves next by itself; an entry of the clock with another time is old."""


@dataclass(slots=True)
class _Running:
    request: int
    replica: _Replica
    began_s: float
    left: int


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
        config = EngineConfig(
            block_tokens=trace.block_tokens,
            num_blocks=max(1, options.cache_tokens // trace.block_tokens),
            max_num_seqs=MAX_NUM_SEQS,
            step_s=STEP_S,
            step_per_seq_s=STEP_PER_SEQ_S,
            prefill_token_s=PREFILL_TOKEN_S,
        )
        self._replicas = tuple(
            _Replica(ReplicaId(f"r{number}"), Engine(config)) for number in range(options.replicas)
        )
        self._clock: list[tuple[float, int]] = []  # (time, replica's position)
        self._now_s = 0.0
        self._running: dict[str, _Running] = {}
        self._inflight = 0
        self._adapters: dict[str, Adapter] = {}
        self._published = 0
        self._decisions: Counter[str] = Counter()
        self._took_s = array("d")
        self._timeline = Timeline()
        self._groups = ideal.groups(self._requests)
        self._group_size = Counter(self._groups)
        self._group_began: dict[int, float] = {}
        self._group_ended: dict[int, float] = {}

    def run(self) -> Result:
        limit = self._options.inflight
        for number, item in self._items():
            if limit is None:
                self._run_until(item.at_s)
            if isinstance(item, Event):
                self._apply(item)
                continue
            while limit is not None and self._inflight and self._inflight + item.n > limit:
                self._step()
            self._send(number, item)
            if number % 256 == 0:
                self._told(number)
        while self._running:
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

    # The clock

    def _run_until(self, at_s: float) -> None:
        while self._clock and self._clock[0][0] <= at_s:
            self._step()
        self._now_s = max(self._now_s, at_s)

    def _step(self) -> None:
        """The next thing that a replica does by itself."""
        while self._clock:
            at_s, position = heapq.heappop(self._clock)
            if self._replicas[position].due_s == at_s:
                self._now_s = max(self._now_s, at_s)
                self._replicas[position].engine.advance(self._now_s)
                self._look_at(position)
                return
        # All stand still: the trace ends, or waits for a reply, inside a pause.
        if self._running:
            self._resume()

    def _look_at(self, position: int) -> None:
        """After anything that an engine was told: who has ended, and when it moves next."""
        replica = self._replicas[position]
        for outcome in replica.engine.take_outcomes():
            running = self._running.pop(outcome.job.id)
            self._timeline.tokens(running.began_s, outcome.at_s, outcome.tokens)
            running.left -= 1
            if running.left:
                continue
            request = self._requests[running.request]
            replica.inflight -= request.n
            self._inflight -= request.n
            self._timeline.inflight(outcome.at_s, -request.n)
            self._took_s.append(outcome.at_s - running.began_s)
            self._group_ended[self._groups[running.request]] = outcome.at_s
        due_s = replica.engine.next_event_s()
        if due_s != replica.due_s and due_s is not None:
            heapq.heappush(self._clock, (due_s, position))
        replica.due_s = due_s

    # Items of the trace

    def _send(self, number: int, request: Request) -> None:
        whole = request.whole_blocks(self._block_tokens)
        tokens = [0] * (ROUTER_BLOCK_TOKENS * whole)
        tokens[::ROUTER_BLOCK_TOKENS] = request.ids[:whole].tolist()
        tokens += request.ids[whole : whole + 1].tolist()
        choice = self._router.choose(
            RouteRequest(request.model, tokens, request.n), self._replicas, self._now_s
        )
        if isinstance(choice, NoReplica):
            raise RuntimeError(f"router {self._router.name} chose none of {len(self._replicas)}")
        position = int(choice.replica[1:])
        replica = self._replicas[position]
        self._decisions[choice.reason] += 1
        replica.routed += 1
        replica.inflight += request.n
        self._inflight += request.n
        self._timeline.inflight(self._now_s, request.n)
        self._group_began.setdefault(self._groups[number], self._now_s)
        running = _Running(number, replica, self._now_s, request.n)
        blocks = request.ids[:whole]
        for each in range(request.n):
            # The tokens of all replies, shared out: the first ones get what is left over.
            output = max(1, (request.output_tokens + request.n - 1 - each) // request.n)
            job = Job(
                f"{number}.{each}",
                blocks,
                request.prompt_tokens,
                output,
                self._adapters.get(request.model),
            )
            self._running[job.id] = running
            replica.engine.submit(self._now_s, job)
        self._look_at(position)

    def _apply(self, event: Event) -> None:
        match event.kind:
            case "publish":
                self._published += 1
                adapter = Adapter(self._published, event.model, "", f"{self._published}")
                self._adapters[event.model] = adapter
                self._each(lambda engine: engine.add_adapter(self._now_s, adapter))
            case "unload":
                self._adapters.pop(event.model, None)
                self._router.forget_adapter(event.model)
            case "pause" if event.real:
                self._each(lambda engine: engine.pause(self._now_s, "keep", event.clear_cache))
                if event.clear_cache:
                    self._router.forget_all()
            case "resume" if event.real:
                self._resume()
            case _:
                pass

    def _resume(self) -> None:
        self._each(lambda engine: engine.resume(self._now_s))

    def _each(self, act: Callable[[Engine], None]) -> None:
        for position, replica in enumerate(self._replicas):
            act(replica.engine)
            self._look_at(position)

    # The end

    def _result(self) -> Result:
        requests = self._requests
        counters = [replica.engine.counters for replica in self._replicas]
        prompt = sum(request.prompt_tokens * request.n for request in requests)
        best = ideal.cached_tokens(requests, self._block_tokens, len(self._replicas))
        began_s, ended_s = min(self._group_began.values()), max(self._group_ended.values())
        seconds = max(ended_s - began_s, 1e-9)
        took = [
            ended_s - self._group_began[group]
            for group, ended_s in self._group_ended.items()
            if self._group_size[group] > 1
        ]
        return Result(
            self._router.name,
            len(requests),
            dict(sorted(self._decisions.items())),
            sum(each.prefix_hits for each in counters) / prompt,
            best / prompt,
            [replica.routed for replica in self._replicas],
            seconds,
            sum(each.generation_tokens for each in counters) / seconds,
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
    settings = RouterSettings(
        ROUTER_BLOCK_TOKENS, options.spill_threshold, options.max_tracked_blocks, options.seed
    )
    return Replay(trace, registry.load(router, settings), options, told).run()


# --- the command ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Progress:
    """On standard error, once a second; nothing of what takes less."""

    label: str
    total: int
    next_s: float = field(default_factory=lambda: time.monotonic() + TELL_EVERY_S)
    shown: bool = False

    def __call__(self, sent: int) -> None:
        if time.monotonic() < self.next_s:
            return
        self.next_s = time.monotonic() + TELL_EVERY_S
        self.shown = True
        begin, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
        text = f"{begin}{self.label}: {sent:,} of {self.total:,} requests"
        print(text, end=end, file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr)


def main(parsed: argparse.Namespace) -> int:
    """The command; its exit code: 1 where lines of the trace were left out.

    :raises SettingsError: bad usage.
    """
    if parsed.url is not None:
        raise SettingsError("--url: replay over HTTP is not in this version; leave it out")
    try:
        trace = read(Path(parsed.trace))
    except TraceError as exc:
        raise SettingsError(str(exc)) from exc
    _tell_faults(trace)
    requests = [request for request in trace.requests if request.ok]
    if not requests:
        raise SettingsError(f"{parsed.trace}: holds no request that was answered with 200")
    options = Options(
        replicas=parsed.replicas or trace.replicas() or Options().replicas,
        inflight=parsed.inflight,
        spill_threshold=parsed.spill_threshold,
        cache_tokens=parsed.cache_tokens,
        seed=parsed.seed,
    )
    results = []
    for router in parsed.router or ["prefix"]:
        progress = _Progress(router, len(requests))
        try:
            results.append(replay(trace, router, options, progress))
        except registry.RouterError as exc:
            raise SettingsError(f"--router: {exc}") from exc
        finally:
            progress.done()
    failed = len(trace.requests) - len(requests)
    if parsed.json:
        print(json.dumps(_as_dict(trace, options, results, failed), indent=2))
    else:
        print(table(trace, options, results, failed))
    return 1 if trace.faults else 0


def _tell_faults(trace: Trace) -> None:
    for fault in trace.faults[:TOLD_FAULTS]:
        print(f"{trace.name}, line {fault.line}: {fault.why}", file=sys.stderr)
    if (more := len(trace.faults) - TOLD_FAULTS) > 0:
        print(f"{trace.name}: and {more:,} lines more", file=sys.stderr)
    if trace.faults:
        print(f"{trace.name}: {len(trace.faults):,} damaged lines are left out", file=sys.stderr)


def _as_dict(
    trace: Trace, options: Options, results: Sequence[Result], failed: int
) -> dict[str, object]:
    return {
        "rollmux": version(),
        "trace": trace.name,
        "trace_blake3": trace.digest,
        "block_size": trace.block_tokens,
        "damaged_lines": len(trace.faults),
        "failed_requests": failed,
        "options": asdict(options),
        "results": [asdict(result) | {"spread": result.spread} for result in results],
    }


def _seconds(found: Percentiles | None, which: str) -> str:
    return f"{getattr(found, which):,.2f} s" if found else "-"


def table(trace: Trace, options: Options, results: Sequence[Result], failed: int) -> str:
    """For people: a policy a column."""
    words = [*WORDS, *sorted({w for r in results for w in r.decisions} - set(WORDS))]

    rows: list[tuple[str, list[str]]] = [
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
    timing = "as recorded" if options.inflight is None else f"{options.inflight} in flight"
    head = (
        f"{trace.name}: {results[0].requests:,} requests"
        f"{f', {failed:,} failed ones left out' if failed else ''}; "
        f"simulated on {options.replicas} replicas, timing {timing}"
    )
    width = max(len(cell) for _, cells in rows for cell in cells) + 2
    lines = [f"{name:<26}{''.join(f'{cell:>{width}}' for cell in cells)}" for name, cells in rows]
    return "\n".join([head, "", *lines])
