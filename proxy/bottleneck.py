"""The bottleneck: what holds a run back, in words, from what the daemon sees go through it.

The daemon sees rollouts in flight and not the trainer, but that is enough. A client that keeps as
many rollouts in flight as it may never waits for anything but replies; one whose rollouts in flight
fall again and again waits for something on its own side. TRL 1.16 works like that
(async_rollout_worker.py): ``max_inflight_tasks`` slots are filled at once as replies come, and none
is filled while its rollout queue is full, which is while the training step is the slower side.

Rules, the first that holds names the cause:

1. Too few samples, or next to nothing in flight: nothing can be said.
2. Rollouts are held here because no ready replica has their adapter: ``held``.
3. Syncs take more than a third of the time: ``syncs``.
4. In flight falls below its peak: the client's side is what waits: ``trainer``.
5. In flight stays at its peak: ``replicas`` if requests wait in the engines' own queues, else
   ``client_limit``; ``generation`` where the engines do not tell.

Every limit is a pair, one to begin and one to end, and a change of cause shows only after it has
stood for ``CONFIRM_S``, so that a run at the edge of two does not change its hint at every look.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WINDOW_S = 180.0
"""What is looked at. The slowest published run made a training step in 23 s: eight of those."""
MIN_S = 30.0
"""Traffic needed before anything is said."""
MAX_SAMPLES = 1000
"""Bound of the samples kept; at one a second the window holds 180."""
CONFIRM_S = 15.0
"""How long another cause has to stand before it is shown."""
MIN_INFLIGHT = 4
"""A peak below this is no run."""
MIN_DECISIONS = 200
"""Rollouts in the window before their routing is judged: 25 groups of 8."""
BELOW_PEAK = 0.05
"""In flight is at its peak while no more than this share of it is missing: a client that answers
each reply with a new rollout is a few milliseconds behind."""

LIMITS: Mapping[str, tuple[float, float]] = {
    "held": (0.10, 0.05),  # held rollouts, of all that are held or in flight
    "syncs": (0.33, 0.28),  # time in syncs; the published runs spent 9 to 26 % on them
    "trainer": (0.10, 0.05),  # time below the peak; 22 % in a model of published run 2, 0 of run 3
    "replicas": (0.10, 0.05),  # requests in engines' queues, of all in the engines
    "long_syncs": (0.10, 0.07),  # as `syncs`, worth a remark
    "uneven": (1.5, 1.3),  # the busiest replica's rollouts in flight, against the mean
    "low_affinity": (0.50, 0.40),  # rollouts not sent to where their prompt's prefix is
}
"""Where each cause begins and where it ends."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon at one moment; ``at_s`` in monotonic seconds."""

    at_s: float
    inflight: Mapping[str, int]
    """Rollouts in flight by replica, ready replicas only."""
    held: int = 0
    """Rollouts that wait here for a replica."""
    running: float | None = None
    """Requests in the engines' batches by their own ``/metrics``; None where none told."""
    waiting: float | None = None
    """Requests in the engines' queues, likewise."""
    syncing: bool = False
    """Between a pause and its resume, or during a publication."""
    stopped: bool = False
    """The replicas are really paused: in flight says nothing then."""
    decisions: int = 0
    """Rollouts routed so far."""
    affine: int | None = None
    """Of them to where their prefix is; None for a policy that has no such word."""

    @property
    def load(self) -> int:
        return sum(self.inflight.values()) + self.held


@dataclass(frozen=True, slots=True)
class Remark:
    """Something beside the cause that costs time. ``code`` is one of ``LIMITS``."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Hint:
    """``code`` is one word, ``text`` a sentence or two for people."""

    code: str
    text: str
    remarks: tuple[Remark, ...] = field(default=())

    @property
    def codes(self) -> tuple[str, ...]:
        return (self.code, *(remark.code for remark in self.remarks))


UNKNOWN = Hint("unknown", "Too little has gone through yet to say what holds the run back.")
CODES = ("unknown", "held", "syncs", "trainer", "replicas", "client_limit", "generation")


class Bottleneck:
    """The last samples and the hint that they give."""

    def __init__(self) -> None:
        self.hint = UNKNOWN
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._next: tuple[str, ...] = UNKNOWN.codes
        self._next_since_s = -math.inf

    def __repr__(self) -> str:
        return f"<Bottleneck {' '.join(self.hint.codes)}, {len(self._samples)} samples>"

    def add(self, sample: Sample) -> bool:
        """Take a sample in. True if the hint is another one now, not only in its numbers."""
        samples = self._samples
        samples.append(sample)
        while samples[0].at_s < sample.at_s - WINDOW_S:
            samples.popleft()
        found = self._judge(tuple(samples))
        if found.codes == self.hint.codes:
            self.hint = found
            self._next = found.codes
            return False
        if found.codes != self._next:
            self._next, self._next_since_s = found.codes, sample.at_s
        if sample.at_s - self._next_since_s < CONFIRM_S:
            return False
        self.hint = found
        return True

    def _over(self, code: str, value: float) -> bool:
        """Whether a value is over its limit: the lower one while it is the hint already."""
        begins, ends = LIMITS[code]
        return value > (ends if code in self.hint.codes else begins)

    def _judge(self, samples: Sequence[Sample]) -> Hint:
        flowing = [s for s in samples if not s.stopped]
        if not flowing or samples[-1].at_s - samples[0].at_s < MIN_S:
            return UNKNOWN
        peak = _peak([s.load for s in flowing])
        if peak < MIN_INFLIGHT:
            return UNKNOWN
        cause = self._cause(samples, flowing, peak)
        return Hint(cause.code, cause.text, self._remarks(cause.code, samples, flowing))

    def _cause(self, samples: Sequence[Sample], flowing: Sequence[Sample], peak: int) -> Hint:
        load = _mean([s.load for s in flowing])
        held = _mean([s.held for s in flowing])
        if self._over("held", held / load):
            return Hint(
                "held",
                f"{held:.0f} of {load:.0f} rollouts wait here, because no ready replica has "
                "their adapter. See which replicas are not ready, and why.",
            )
        share = _share([s.syncing for s in samples])
        if self._over("syncs", share):
            return Hint(
                "syncs",
                f"Syncs take {share:.0%} of the time, and the trainer waits for each. See what "
                "the publications below take; sync less often, or bring adapters to the replicas "
                "in a quicker way.",
            )
        below = _share([s.load < peak - max(1.0, BELOW_PEAK * peak) for s in flowing])
        if self._over("trainer", below):
            return Hint(
                "trainer",
                f"The trainer's side is what takes the time: rollouts in flight are below their "
                f"peak of {peak} for {below:.0%} of the time, {load:.0f} on average, so replicas "
                "wait for it. A quicker training step (or rewards, or tools) would help; more "
                "replicas would not.",
            )
        told = [s for s in flowing if s.running is not None and s.waiting is not None]
        if not told:
            return Hint(
                "generation",
                f"Generation is what takes the time: {peak} rollouts in flight, all the time. "
                "Whether the replicas are full is not known, for they do not serve /metrics.",
            )
        running, waiting = (_mean([getattr(s, f) or 0 for s in told]) for f in _QUEUES)
        queued = waiting / max(running + waiting, 1.0)
        if self._over("replicas", queued):
            return Hint(
                "replicas",
                f"The replicas are full: of {running + waiting:.0f} requests {waiting:.0f} wait in "
                "their queues. Add replicas, or give the engines more room (--max-num-seqs, KV "
                "cache).",
            )
        return Hint(
            "client_limit",
            f"In flight stays at {peak}, which looks like the trainer's own limit, and nothing "
            "waits in the replicas' queues: more replicas would bring little. Raise that limit "
            "(TRL: max_inflight_tasks), and the rollout queue's with it.",
        )

    def _remarks(
        self, cause: str, samples: Sequence[Sample], flowing: Sequence[Sample]
    ) -> tuple[Remark, ...]:
        found: list[Remark] = []
        syncs = _share([s.syncing for s in samples])
        if cause != "syncs" and self._over("long_syncs", syncs):
            found.append(Remark("long_syncs", f"Syncs take {syncs:.0%} of the time."))
        means = _means(flowing)
        mean = _mean(list(means.values()))
        if len(means) > 1 and mean >= MIN_INFLIGHT:
            busiest = max(means, key=lambda replica: means[replica])
            if self._over("uneven", means[busiest] / mean):
                found.append(
                    Remark(
                        "uneven",
                        f"Load is uneven: {busiest} has {means[busiest]:.0f} rollouts in flight, "
                        f"the mean is {mean:.0f}. A lower --spill-threshold evens it.",
                    )
                )
        routed = samples[-1].decisions - samples[0].decisions
        first, last = samples[0].affine, samples[-1].affine
        if len(means) > 1 and routed >= MIN_DECISIONS and first is not None and last is not None:
            missed = 1 - (last - first) / routed
            if self._over("low_affinity", missed):
                found.append(
                    Remark(
                        "low_affinity",
                        f"{missed:.0%} of the rollouts went to a replica that does not have their "
                        "prompt in its cache. With 8 rollouts a prompt 12.5 % is the least; if "
                        "prompts do come again, see --spill-threshold and --max-tracked-blocks.",
                    )
                )
        return tuple(found)


_QUEUES = ("running", "waiting")


def _peak(loads: Sequence[int]) -> int:
    """All but the highest 5 %: somebody else's short burst is not the client's limit."""
    return sorted(loads)[int(0.95 * (len(loads) - 1))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def _means(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean in flight of the replicas that were ready all the time."""
    always = set(samples[0].inflight).intersection(*(s.inflight for s in samples))
    return {r: _mean([s.inflight[r] for s in samples]) for r in sorted(always)}
