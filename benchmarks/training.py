"""The loop around generation, simulated: a trainer, the rollout worker that feeds it, the fleet.

It says which side waits. The loop is that of TRL 1.16.0's AsyncGRPOTrainer
(trl/experimental/async_grpo/async_rollout_worker.py and async_grpo_trainer.py):

- The worker keeps up to ``inflight`` rollouts going, groups in order. A group that is whole goes to
  the scorer, at most ``SCORE_QUEUE_GROUPS`` wait there. While there is no room the worker stands:
  it takes no reply and sends nothing new.
- The scorer puts samples into the rollout queue, and stands while that is full.
- The trainer takes all samples of a step at its beginning, and drops those that are more than
  ``max_staleness`` versions old.
- After every ``sync_every`` steps it publishes a new policy, which takes ``sync_s``. With an eager
  pause generation stands for so long, and each replica's prefix cache is cleared, which preempts
  what runs.

Left out: a micro-batch that the data loader fetches ahead, what a worker computes itself, and
checkpoints. Pure, on a virtual clock; equal input gives equal output.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import mean, median

from benchmarks import ideal
from benchmarks.engine import EngineConfig, Outcome
from benchmarks.fleet import Fleet, Running
from benchmarks.trace import Event, Request
from routing.router import Router

SCORE_QUEUE_GROUPS = 16
"""TRL's ``score_queue_maxsize``, which a trainer cannot set."""
SCORE_S = 0.1
"""For a group. Of the published runs no figure; it matters where groups come faster than this."""
SETTLED = 0.5
"""Who waits is read off the last half of the steps: the queue fills or drains before."""
WAITS_SHARE = 0.01
"""Who waits for less of the time is not said to wait."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What the trainer is told and how fast it is. Defaults: TRL's, or the published runs'."""

    samples_per_step: int
    step_s: float
    """A step without any waiting: forward, backward, optimizer."""
    inflight: int = 128
    queue: int = 1024
    """Samples that the rollout queue holds."""
    sync_every: int = 4
    """Steps."""
    sync_s: float = 8.5
    lazy: bool = False
    """Whether generation goes on during a sync."""
    max_staleness: int = 4
    """Versions."""
    steps: int = 200


@dataclass(frozen=True, slots=True)
class Training:
    """What came of it. Medians are of the steps without a sync."""

    waits: str
    """``generation``, ``trainer`` or ``neither``."""
    generation_held_share: float
    """Of the settled time, how long samples found the rollout queue full."""
    trainer_waits_share: float
    """And how long the trainer found it empty."""
    seconds: float
    """All steps, from the first rollout that was sent."""
    step_s: float
    """Median."""
    rollout_wait_s: float
    """Of a step, median."""
    tokens_per_second: float
    """Generated, over all the time."""
    logged_tokens_per_second: float
    """As ``rollout/generated_tok_s`` shows it: of each step, median. Of little use where generation
    is held: replies are taken by the hundred then, every few steps."""
    queue: float
    """Samples in the queue when one is taken: mean of a step, median."""
    staleness: float
    """Versions, mean of all samples."""
    samples: int
    dropped: int
    """Too old."""
    cached_share: float
    """Of all prompt tokens, those that came from a replica's cache."""
    per_replica: list[int]
    decisions: dict[str, int]


@dataclass(slots=True, eq=False)
class _Group:
    """``rollouts``: of one prompt; whole once none of them is missing."""

    rollouts: Sequence[Request]
    version: int = 0
    missing: int = 0


@dataclass(slots=True)
class _Step:
    seconds: float
    waited_s: float
    synced: bool
    queue: float
    tokens_per_second: float | None
    held_s: float


@dataclass(slots=True, eq=False)
class _Signal:
    """What a process can wait for."""

    waiting: list[_Process] = field(default_factory=list)


_Process = Generator[float | _Signal]
"""Yields the seconds until it goes on, or a signal."""


class Simulation:
    """One run. ``told``: called after each step with how many are done."""

    def __init__(
        self,
        rollouts: Sequence[Request],
        router: Router,
        replicas: int,
        engine: EngineConfig,
        loop: Loop,
        told: Callable[[int], None] = lambda steps: None,
    ) -> None:
        """``rollouts`` begin again when they end. One that asks for n replies stands for n."""
        self._loop = loop
        self._told = told
        self._fleet = Fleet(router, replicas, engine, self._replied)
        self._groups, self._ids = _groups(rollouts)
        # The clock of the processes; the fleet has its own.
        self._due: list[tuple[float, int, _Process]] = []
        self._order = count()
        self._ended = False
        # The worker.
        self._group_of: dict[int, _Group] = {}
        """Of a rollout that is in flight, by its number."""
        self._finished: list[tuple[int, int]] = []
        """Number and tokens of replies that the worker has not taken yet."""
        self._to_score: deque[_Group] = deque()
        self._queue: deque[int] = deque()
        """The version that each sample is from."""
        self._reply = _Signal()
        self._score_room = _Signal()
        self._group_whole = _Signal()
        self._queue_room = _Signal()
        self._sample = _Signal()
        self._taken_tokens = 0
        self._logged: list[tuple[int, float]] = []
        """Tokens, and seconds in which they were taken, one entry a group since the last log."""
        self._held_s = 0.0
        self._prompt_tokens = 0
        # The trainer.
        self._version = 0
        self._steps: list[_Step] = []
        self._staleness = array("q")
        self._dropped = 0

    def run(self) -> Training:
        self._publish()
        for process in (self._generate(), self._score(), self._train()):
            self._go_on(process)
        while not self._ended:
            next_s = self._fleet.next_s()
            if self._due and (next_s is None or self._due[0][0] <= next_s):
                at_s, _, process = heapq.heappop(self._due)
                self._fleet.run_until(at_s)
                self._go_on(process)
            elif not self._fleet.step():
                raise RuntimeError("nothing moves any more")
        return self._result()

    # Processes

    def _go_on(self, process: _Process) -> None:
        what = next(process, None)
        if isinstance(what, _Signal):
            what.waiting.append(process)
        elif what is not None:
            self._call(process, what)

    def _call(self, process: _Process, in_s: float) -> None:
        heapq.heappush(self._due, (self._fleet.now_s + in_s, next(self._order), process))

    def _fire(self, signal: _Signal) -> None:
        for process in signal.waiting:
            self._call(process, 0.0)
        signal.waiting.clear()

    # The worker

    def _generate(self) -> _Process:
        numbers = count()
        rollouts = self._rollouts()
        free = self._loop.inflight
        while True:
            while free:
                group, rollout = next(rollouts)
                free -= 1
                number = next(numbers)
                self._group_of[number] = group
                self._prompt_tokens += rollout.prompt_tokens
                self._fleet.send(number, rollout)
            while not self._finished:
                yield self._reply
            done, self._finished = self._finished, []
            for number, tokens in done:
                free += 1
                self._taken_tokens += tokens
                group = self._group_of.pop(number)
                group.missing -= 1
                if group.missing:
                    continue
                while len(self._to_score) >= SCORE_QUEUE_GROUPS:
                    yield self._score_room
                self._to_score.append(group)
                self._fire(self._group_whole)

    def _rollouts(self) -> Iterator[tuple[_Group, Request]]:
        """Each under the newest policy; a group counts as the one of its first rollout."""
        while True:
            for requests in self._groups:
                group = _Group(requests, self._version, len(requests))
                ids, version = array("q"), -1
                for request in requests:
                    if version != self._version:
                        version = self._version
                        ids = array("q", [version * self._ids + each for each in request.ids])
                    yield (
                        group,
                        Request(
                            0.0,
                            request.prompt_tokens,
                            request.output_tokens,
                            ids,
                            _policy(version),
                        ),
                    )

    def _replied(self, running: Running, outcome: Outcome) -> None:
        self._finished.append((running.number, outcome.tokens))
        self._fire(self._reply)

    def _score(self) -> _Process:
        pushed_tokens, pushed_s = 0, 0.0
        while True:
            while not self._to_score:
                yield self._group_whole
            group = self._to_score.popleft()
            self._fire(self._score_room)
            yield SCORE_S
            now_s = self._fleet.now_s
            self._logged.append((self._taken_tokens - pushed_tokens, now_s - pushed_s))
            pushed_tokens, pushed_s = self._taken_tokens, now_s
            for _ in group.rollouts:
                began_s = self._fleet.now_s
                while len(self._queue) >= self._loop.queue:
                    yield self._queue_room
                self._held_s += self._fleet.now_s - began_s
                self._queue.append(group.version)
                self._fire(self._sample)

    # The trainer

    def _train(self) -> _Process:
        loop, fleet = self._loop, self._fleet
        for step in range(1, loop.steps + 1):
            began_s, held_s = fleet.now_s, self._held_s
            taken, sizes = 0, 0
            while taken < loop.samples_per_step:
                while not self._queue:
                    yield self._sample
                version = self._queue.popleft()
                self._fire(self._queue_room)
                if self._version - version > loop.max_staleness:
                    self._dropped += 1
                    continue
                self._staleness.append(self._version - version)
                taken += 1
                sizes += len(self._queue)
            waited_s = fleet.now_s - began_s
            yield loop.step_s
            synced = step % loop.sync_every == 0
            if synced:
                yield from self._sync()
            tokens = sum(each for each, _ in self._logged)
            seconds = sum(each for _, each in self._logged)
            self._logged.clear()
            self._steps.append(
                _Step(
                    fleet.now_s - began_s,
                    waited_s,
                    synced,
                    sizes / taken,
                    tokens / seconds if seconds else None,
                    self._held_s - held_s,
                )
            )
            self._told(step)
        self._ended = True

    def _sync(self) -> _Process:
        if not self._loop.lazy:
            self._fleet.apply(Event(0.0, "pause", real=True, clear_cache=True))
        yield self._loop.sync_s
        self._publish()
        if not self._loop.lazy:
            self._fleet.resume()
        old = self._version - self._loop.max_staleness - 1
        if old > 0:
            self._fleet.apply(Event(0.0, "unload", _policy(old)))

    def _publish(self) -> None:
        self._version += 1
        self._fleet.apply(Event(0.0, "publish", _policy(self._version)))

    # The end

    def _result(self) -> Training:
        steps, fleet = self._steps, self._fleet
        plain = [step for step in steps if not step.synced] or steps
        settled = steps[int(len(steps) * SETTLED) :]
        settled_s = sum(step.seconds for step in settled)
        held = sum(step.held_s for step in settled) / settled_s
        waits = sum(step.waited_s for step in settled) / settled_s
        if max(held, waits) < WAITS_SHARE:
            who = "neither"
        else:
            who = "generation" if held > waits else "trainer"
        return Training(
            who,
            held,
            waits,
            fleet.now_s,
            median(step.seconds for step in plain),
            median(step.waited_s for step in plain),
            fleet.generated_tokens / fleet.now_s,
            median(step.tokens_per_second or 0.0 for step in plain),
            median(step.queue for step in plain),
            mean(self._staleness),
            len(self._staleness),
            self._dropped,
            fleet.prefix_hits / self._prompt_tokens,
            [replica.routed for replica in fleet.replicas],
            dict(sorted(fleet.decisions.items())),
        )


def _policy(version: int) -> str:
    return f"policy-v{version}"


def _groups(rollouts: Sequence[Request]) -> tuple[list[list[Request]], int]:
    """Requests of a trace by group, groups by their first request; and how many ids there are.

    Ids are numbered anew, from 0: a trace's may be of any size.
    """
    groups: dict[int, list[Request]] = {}
    numbers: dict[int, int] = {}
    for group, request in zip(ideal.groups(rollouts), rollouts, strict=True):
        ids = array("q", [numbers.setdefault(each, len(numbers)) for each in request.ids])
        replies = groups.setdefault(group, [])
        for each in range(request.n):
            replies.append(Request(0.0, request.prompt_tokens, request.reply_tokens(each), ids))
    return list(groups.values()), len(numbers)
