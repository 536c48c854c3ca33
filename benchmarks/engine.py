"""One vLLM engine as a model on a virtual clock: batches, prefix cache, adapter slots, pauses.

Pure and event-driven: it costs a few heap operations a request, whatever its length, so that
it serves a simulated replica in real time and a replay of a million requests alike. Time is
handed in as ``now_s`` (any origin, never backwards) and each call first brings the model there.

What it leaves out, on purpose: prompts are prefilled one after another beside the decoding
batch and do not slow it; memory for prompt and reply is reserved when a request is admitted, so
nothing is preempted for want of it; GPU slots hold adapters only as a limit on how many distinct
ones run at once. Behaviour is that of vLLM 0.27.1 (v1/core/sched/scheduler.py,
v1/engine/core.py, lora/worker_manager.py) as far as a client can tell.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

BASE = "base"
"""The digest that stands for the base model's own weights."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and speeds. The defaults answer in milliseconds: they are for tests.

    A 1.5B model on an H200 is nearer to ``step_s=0.008, step_per_seq_s=0.00002,
    prefill_token_s=0.00002``.
    """

    block_tokens: int = 16
    num_blocks: int = 131_072  # of a real CPU replica with 1 GiB for its cache
    max_num_seqs: int = 64
    max_loras: int = 6
    max_cpu_loras: int = 12
    step_s: float = 0.0002
    step_per_seq_s: float = 0.0
    prefill_token_s: float = 1e-6
    load_s: float = 0.0
    """How long one adapter load holds up the whole engine (add_lora runs in its loop)."""


_DUE_S = 1e-9
"""What is due within it is due now. A clock that has run for hours cannot tell apart less than
2e-12 s: the rest of a step could be too short to add to it, and time would stand still."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One load of one adapter. ``number`` is fresh for each load, like vLLM's lora_int_id."""

    number: int
    name: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate. ``blocks``: chained hashes, one per whole prompt block."""

    id: str
    blocks: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    adapter: Adapter | None = None
    reason: str = "length"
    """What the finish is called when all ``output_tokens`` are there: length or stop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. ``tokens`` were produced; ``reason``: length, stop, abort or error.

    ``weights`` says what computed them: a digest, or several joined by ``+`` where blocks in the
    prefix cache came from other weights under the same name.
    """

    job: Job
    tokens: int
    reason: str
    at_s: float
    weights: str
    cached_tokens: int


class Pause(StrEnum):
    NONE = "none"
    NO_NEW = "no_new"
    """Running sequences go on, waiting ones wait."""
    FROZEN = "frozen"


@dataclass(slots=True)
class Counters:
    """Since the engine started; what vLLM's counters of like names count."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )


@dataclass(frozen=True, slots=True)
class Gauges:
    """As of the last step: they stand still while the engine is frozen, as vLLM's do."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    kv_usage: float = 0.0


@dataclass(slots=True, eq=False)
class _Sequence:
    job: Job
    order: int
    produced: int = 0
    """Tokens there when it last left the waiting queue."""
    since_step: float = -1.0
    """The step of the first token of this stint; negative while it waits or is prefilled."""
    prefill_left_s: float = 0.0
    weights: str = ""
    cached_tokens: int = 0
    blocks_held: int = 0


def chain(name: str, tokens: Sequence[int], block_tokens: int) -> list[int]:
    """One hash per whole block, length ``len(tokens) // block_tokens``, seeded with ``name``."""
    out: list[int] = []
    parent = hash(name)
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        parent = hash((parent, *tokens[end - block_tokens : end]))
        out.append(parent)
    return out


class Engine:
    """The model. ``reload(adapter)`` reads an evicted adapter again: its digest, or None if gone.

    A reload that finds nothing kills the engine, as it does in vLLM (facts: the read happens
    inside execute_model).
    """

    def __init__(
        self, config: EngineConfig, reload: Callable[[Adapter], str | None] = lambda a: a.digest
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.dead = False
        self.paused = Pause.NONE
        self.base_weights = BASE
        self.counters = Counters()
        self.gauges = Gauges()
        self.adapters: OrderedDict[int, Adapter] = OrderedDict()
        """Copies in CPU memory, least recently used first. Unloading a name frees none."""
        self._reload = reload
        self._orders = 0
        self._updates = 0
        self._steps = 0.0
        self._stalled_until_s = 0.0
        self._cache: OrderedDict[int, str] = OrderedDict()
        self._held = 0
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: deque[_Sequence] = deque()
        self._decoding: dict[str, _Sequence] = {}
        self._finishes: list[tuple[float, int, _Sequence]] = []
        self._outcomes: list[Outcome] = []

    def __repr__(self) -> str:
        return (
            f"<Engine at {self.now_s:.3f} s: {len(self._running())} running, "
            f"{len(self._waiting)} waiting, {len(self._cache)} blocks cached, "
            f"{len(self.adapters)} adapters, {'dead' if self.dead else self.paused}>"
        )

    # Time

    def next_event_s(self) -> float | None:
        """When something happens next by itself, or None if nothing will."""
        if self.dead or self.paused is Pause.FROZEN:
            return None
        start = max(self.now_s, self._stalled_until_s)
        at_s = min(
            start + self._prefilling[0].prefill_left_s if self._prefilling else inf,
            start + (self._next_finish() - self._steps) * self.step_s(),
        )
        return None if at_s == inf else at_s

    def step_s(self) -> float:
        """Seconds a decode step takes with the batch as it is."""
        return self.config.step_s + self.config.step_per_seq_s * len(self._decoding)

    def advance(self, now_s: float) -> None:
        """Let everything happen that happens until ``now_s``."""
        while (at_s := self.next_event_s()) is not None and at_s <= now_s:
            self._run_until(at_s)
            if self._prefilling and self._prefilling[0].prefill_left_s <= _DUE_S:
                self._start_decoding(self._prefilling.popleft())
            while (self._next_finish() - self._steps) * self.step_s() <= _DUE_S:
                self._steps = max(self._steps, self._finishes[0][0])
                sequence = heapq.heappop(self._finishes)[2]
                self._finish(sequence, sequence.job.reason)
            self._admit()
        self._run_until(now_s)

    def _run_until(self, at_s: float) -> None:
        start = max(self.now_s, self._stalled_until_s)
        if at_s > start and not self.dead and self.paused is not Pause.FROZEN:
            if self._decoding:
                self._steps += (at_s - start) / self.step_s()
            if self._prefilling:
                self._prefilling[0].prefill_left_s -= at_s - start
        self.now_s = max(self.now_s, at_s)
        self._measure()

    def _next_finish(self) -> float:
        while self._finishes:
            step, _, sequence = self._finishes[0]
            alive = self._decoding.get(sequence.job.id) is sequence
            if alive and step == sequence.since_step + sequence.job.output_tokens - (
                sequence.produced + 1
            ):
                return step
            heapq.heappop(self._finishes)  # aborted, or preempted and begun again
        return inf

    # Jobs

    def submit(self, now_s: float, job: Job) -> None:
        """Queue a job. Its outcome comes with ``take_outcomes``, at once if the engine is dead."""
        self.advance(now_s)
        self._orders += 1
        sequence = _Sequence(job, self._orders)
        self._sequences[job.id] = sequence
        if self.dead:
            self._finish(sequence, "error")
            return
        self._waiting.append(sequence)
        self._admit()

    def abort(self, now_s: float, ids: Iterable[str] | None = None) -> int:
        """End jobs with reason ``abort``; all of them without ``ids``. How many there were."""
        self.advance(now_s)
        victims = list(self._sequences) if ids is None else [i for i in ids if i in self._sequences]
        for i in victims:
            self._finish(self._sequences[i], "abort")
        self._admit()
        return len(victims)

    def produced(self, job_id: str) -> int:
        """Tokens a job has so far, as of the last advance; 0 if unknown."""
        sequence = self._sequences.get(job_id)
        return 0 if sequence is None else self._tokens(sequence)

    def generated(self) -> int:
        """Tokens made since the start, those of unfinished jobs too, as of the last advance."""
        return self.counters.generation_tokens + sum(map(self._tokens, self._sequences.values()))

    def weights(self, job_id: str) -> str:
        """What computes this job's tokens, empty before it was admitted."""
        sequence = self._sequences.get(job_id)
        return "" if sequence is None else sequence.weights

    def busy(self) -> bool:
        """Whether a sequence is running (waiting ones do not count)."""
        return bool(self._decoding or self._prefilling)

    def running_adapters(self) -> set[str]:
        return {s.job.adapter.name for s in self._running() if s.job.adapter is not None}

    def waiting_adapters(self) -> set[str]:
        return {s.job.adapter.name for s in self._waiting if s.job.adapter is not None}

    def take_outcomes(self) -> list[Outcome]:
        """The jobs that ended since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _running(self) -> list[_Sequence]:
        return [*self._prefilling, *self._decoding.values()]

    def _tokens(self, sequence: _Sequence) -> int:
        if sequence.since_step < 0:
            return sequence.produced
        tokens = sequence.produced + 1 + int(self._steps - sequence.since_step + 1e-9)
        return min(tokens, sequence.job.output_tokens)

    def _admit(self) -> None:
        """First come, first served; who would need one adapter too many is passed over."""
        if self.paused is not Pause.NONE or self.dead:
            return
        if not self._waiting:
            self._measure()
            return
        passed: deque[_Sequence] = deque()
        running = self._running()
        numbers = {s.job.adapter.number for s in running if s.job.adapter is not None}
        count = len(running)
        while self._waiting and count < self.config.max_num_seqs:
            sequence = self._waiting[0]
            job = sequence.job
            need = -(-(job.prompt_tokens + job.output_tokens) // self.config.block_tokens)
            if self._held and self._held + need > self.config.num_blocks:
                break
            self._waiting.popleft()
            if job.adapter is not None:
                if len(numbers | {job.adapter.number}) > self.config.max_loras:
                    passed.append(sequence)
                    continue
                if not self._ensure(job.adapter):
                    self._waiting.appendleft(sequence)
                    self._waiting.extendleft(reversed(passed))
                    self.die()
                    return
                numbers.add(job.adapter.number)
            sequence.blocks_held = need
            self._held += need
            self._prefill(sequence)
            count += 1
        self._waiting.extendleft(reversed(passed))
        self._measure()

    def _prefill(self, sequence: _Sequence) -> None:
        job, size = sequence.job, self.config.block_tokens
        digest = self._digest(job.adapter)
        foreign: set[str] = set()
        hit = 0
        for block in job.blocks[: (job.prompt_tokens - 1) // size]:
            weights = self._cache.get(block)
            if weights is None:
                break
            self._cache.move_to_end(block)
            foreign.update(weights.split("+"))
            hit += 1
        foreign.discard(digest)
        sequence.weights = "+".join([digest, *sorted(foreign)])
        if not sequence.produced:
            sequence.cached_tokens = hit * size
            self.counters.prefix_queries += job.prompt_tokens
            self.counters.prefix_hits += hit * size
            self.counters.prompt_tokens += job.prompt_tokens
        left = job.prompt_tokens + sequence.produced - hit * size
        sequence.prefill_left_s = left * self.config.prefill_token_s
        sequence.since_step = -1.0
        # In the cache once they are allocated, before they are computed: whoever is admitted next
        # finds them (vLLM, v1/core/kv_cache_manager.py, allocate_slots caches unless it is told
        # to delay). Prompts are computed one after another, so it cannot overtake them.
        self.store(job.blocks, sequence.weights)
        self._prefilling.append(sequence)

    def _start_decoding(self, sequence: _Sequence) -> None:
        sequence.since_step = self._steps
        self._decoding[sequence.job.id] = sequence
        last = self._steps + sequence.job.output_tokens - (sequence.produced + 1)
        heapq.heappush(self._finishes, (last, sequence.order, sequence))

    def _finish(self, sequence: _Sequence, reason: str) -> None:
        tokens = self._tokens(sequence)
        self._withdraw(sequence)
        self._sequences.pop(sequence.job.id, None)
        self.counters.generation_tokens += tokens
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._outcomes.append(
            Outcome(
                sequence.job,
                tokens,
                reason,
                self.now_s,
                sequence.weights or self._digest(sequence.job.adapter),
                sequence.cached_tokens,
            )
        )

    def _withdraw(self, sequence: _Sequence) -> None:
        """Out of whichever queue it is in, its memory given back."""
        if self._decoding.pop(sequence.job.id, None) is None:
            for queue in (self._prefilling, self._waiting):
                if sequence in queue:
                    queue.remove(sequence)
        self._held -= sequence.blocks_held
        sequence.blocks_held = 0

    # Pause and caches

    def pause(self, now_s: float, mode: str, clear_cache: bool = True) -> None:
        """``abort`` ends all jobs, ``wait`` admits no more, ``keep`` freezes them.

        The cache is cleared in every mode (whatever vLLM's docstring says); with ``wait`` the
        caller does that itself, with ``reset_prefix_cache``, once ``busy`` is false.
        """
        self.advance(now_s)
        if mode == "abort":
            self.abort(now_s)
        self.paused = Pause.NO_NEW if mode == "wait" else Pause.FROZEN
        if clear_cache and mode != "wait":
            self._measure()
            self.reset_prefix_cache(now_s, reset_running=True)

    def resume(self, now_s: float) -> None:
        """Also right when nothing is paused."""
        self.advance(now_s)
        self.paused = Pause.NONE
        self._admit()

    def reset_prefix_cache(self, now_s: float, reset_running: bool = False) -> bool:
        """Forget all blocks. False, and nothing done, while running sequences hold some.

        With ``reset_running`` these are preempted: they wait again, and all their tokens are
        computed anew.
        """
        self.advance(now_s)
        running = sorted(self._running(), key=lambda s: s.order)
        if running and not reset_running:
            return False
        for sequence in reversed(running):
            sequence.produced = self._tokens(sequence)
            self._withdraw(sequence)
            sequence.since_step = -1.0
            self._waiting.appendleft(sequence)
            self.counters.preemptions += 1
        self._cache.clear()
        self._admit()
        return True

    def store(self, blocks: Iterable[int], weights: str) -> None:
        """Remember blocks as computed by ``weights``; the least recently used go first."""
        for block in blocks:
            self._cache.setdefault(block, weights)
            self._cache.move_to_end(block)
        while len(self._cache) > self.config.num_blocks:
            self._cache.popitem(last=False)

    # Weights

    def add_adapter(self, now_s: float, adapter: Adapter) -> None:
        """Put a copy into memory, evicting the least recently used one if there is no room.

        Adapters that run are touched every step, so they go only when there is nothing else;
        then they are read again at once.
        """
        self.advance(now_s)
        self._stalled_until_s = max(self._stalled_until_s, now_s) + self.config.load_s
        running = {s.job.adapter.number: s.job.adapter for s in self._running() if s.job.adapter}
        for number in running:
            if number in self.adapters:
                self.adapters.move_to_end(number)
        self._register(adapter)
        for sequence in self._running():
            if sequence.job.adapter is not None and sequence.job.adapter.number == adapter.number:
                self._mix(sequence, adapter.digest)  # loaded in place under a running request
        if not all(self._ensure(a) for a in running.values()):
            self.die()

    def update_base_weights(self, now_s: float) -> None:
        """An in-place update of the base model: whatever runs on it goes on with a mixture."""
        self.advance(now_s)
        self._updates += 1
        self.base_weights = f"{BASE}{self._updates}"
        for sequence in self._running():
            if sequence.job.adapter is None:
                self._mix(sequence, self.base_weights)

    def die(self) -> None:
        """Every job ends with reason ``error``; nothing moves any more."""
        self.dead = True
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "error")

    def _digest(self, adapter: Adapter | None) -> str:
        if adapter is None:
            return self.base_weights
        return self.adapters.get(adapter.number, adapter).digest

    @staticmethod
    def _mix(sequence: _Sequence, digest: str) -> None:
        parts = sequence.weights.split("+")
        if digest not in parts:
            sequence.weights = "+".join([digest, *sorted(parts)])

    def _register(self, adapter: Adapter) -> None:
        self.adapters.pop(adapter.number, None)
        if len(self.adapters) + 1 > self.config.max_cpu_loras:
            self.adapters.popitem(last=False)
        self.adapters[adapter.number] = adapter

    def _ensure(self, adapter: Adapter) -> bool:
        """Registered, read again if it was evicted. False if its files are gone."""
        if adapter.number in self.adapters:
            self.adapters.move_to_end(adapter.number)
            return True
        digest = self._reload(adapter)
        if digest is None:
            return False
        self._register(Adapter(adapter.number, adapter.name, adapter.path, digest))
        return True

    def _measure(self) -> None:
        if self.paused is Pause.FROZEN or self.dead:
            return
        running = len(self._prefilling) + len(self._decoding)
        deferred = len(self._waiting) if running < self.config.max_num_seqs else 0
        self.gauges = Gauges(
            running, len(self._waiting), deferred, self._held / self.config.num_blocks
        )
