"""Catching up: what brings one replica to the ledger's state, step by step.

Rules:

1. Every round begins and ends with a look. Only a look that finds nothing to do makes it joined.
2. A name that is listed is believed only if its path is the wanted one. On a process without this
   run's marker, what it listed at first is believed only if the path names the bytes too: an
   earlier trainer may have loaded other files from the same path.
3. Names nobody wants go first, then the prefix cache, then loads in order of commit, then the pause
   state: vLLM keys cached blocks by name (vLLM issue 42125), so a cache is cleared after an unload
   of a name that will be loaded again and before the load. An unknown process, and one that missed
   a clear of the fleet, clear it as well.
4. Retired names stay where they are listed, and are loaded again where their files are known to
   be there (``spare``), for the trainer's retries may still name them. One that cannot be is left.
5. Files that are not visible yet are waited for, up to the deadline. A step that fails for good, a
   replica that does not settle in ``MAX_ROUNDS`` looks, or the deadline, make it give up: the
   replica stays ``joining`` and is tried again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from broadcast.ledger import Ledger, LiveAdapter
from routing.ids import AdapterName

MAX_ROUNDS = 6
"""One to find the work, one to see it done, and a few for what is committed meanwhile."""


@dataclass(frozen=True, slots=True)
class Look:
    """Read ``/v1/models``, ``/is_paused`` and ``/weight_info``; report to ``looked``."""


@dataclass(frozen=True, slots=True)
class Unload:
    name: AdapterName
    """An answer that it is not there is as good as done."""


@dataclass(frozen=True, slots=True)
class ResetCache:
    """``/reset_prefix_cache?reset_running_requests=true``; ``success`` false is LATER."""


@dataclass(frozen=True, slots=True)
class Load:
    name: AdapterName
    path: str
    """The shared one; a replica to which files are pushed gets its own."""


@dataclass(frozen=True, slots=True)
class Pause:
    target: str
    """Path and query string of the fleet's own pause."""


@dataclass(frozen=True, slots=True)
class Resume:
    """``POST /resume``."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask ``next`` again after so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Joined:
    """It holds ``adapters`` (name to path), retired ones that it still lists included."""

    adapters: Mapping[AdapterName, str]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """``code`` is one word, ``why`` a line that says which step failed."""

    code: str
    why: str


Step = Unload | ResetCache | Load | Pause | Resume
Next = Look | Step | Wait | Joined | GiveUp


class StepResult(StrEnum):
    OK = "ok"
    LATER = "later"
    """Not yet: files not visible, cache blocks still held."""
    UNKNOWN = "unknown"
    """No whole answer: a look will tell."""
    FAILED = "failed"


def plan(
    live: Sequence[LiveAdapter],
    retired: Collection[AdapterName],
    listed: Mapping[AdapterName, str],
    *,
    paused: bool,
    pause_target: str | None,
    distrusted: Collection[AdapterName] = frozenset(),
    cache_stale: bool = False,
    spare: Sequence[LiveAdapter] = (),
) -> tuple[Step, ...]:
    """What is left to do on a replica that lists ``listed`` (name to path); empty if nothing is.

    ``distrusted`` are names that somebody else may have loaded. ``cache_stale`` says that the
    prefix cache may hold blocks of other weights under a name in use. ``pause_target`` is None
    while the fleet runs. ``spare`` are retired adapters worth loading.
    """
    wanted = {adapter.name: adapter for adapter in live}
    unloads = []
    for name, path in listed.items():
        adapter = wanted.get(name)
        if adapter is None:
            good = name in retired and name not in distrusted
        else:
            good = adapter.is_at(path) and (name not in distrusted or adapter.names_the_bytes(path))
        if not good:
            unloads.append(Unload(name))
    going = {step.name for step in unloads}
    loads = [
        Load(adapter.name, adapter.loaded_from)
        for adapter in (*spare, *live)
        if adapter.name in going or adapter.name not in listed
    ]
    steps: list[Step] = [*unloads]
    if cache_stale or going & {load.name for load in loads}:
        steps.append(ResetCache())
    steps += loads
    if paused and pause_target is None:
        steps.append(Resume())
    elif pause_target is not None and not paused:
        steps.append(Pause(pause_target))
    return tuple(steps)


class CatchUp:
    """One attempt on one replica. The driver: ``next``, carry it out, report, until final.

    A look that fails ends the attempt: what cannot be looked at cannot join.
    ``Joined`` has to be handed to ``Fleet.joined`` without an await in between.
    """

    def __init__(
        self,
        ledger: Ledger,
        now_s: float,
        *,
        cache_clears: int = 0,
        deadline_s: float = 300.0,
        retry_s: float = 0.25,
        retry_max_s: float = 2.0,
        spare: Collection[AdapterName] = frozenset(),
    ) -> None:
        """``cache_clears`` is what the replica has seen, ``deadline_s`` counts from ``now_s``.

        ``spare`` are retired names whose files are there.
        """
        self.cache_clears = cache_clears
        self._ledger = ledger
        self._deadline_s = now_s + deadline_s
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._wait_s = retry_s
        self._not_before_s = now_s
        self._rounds = 0
        self._distrusted: frozenset[AdapterName] = frozenset()
        self._cache_trusted = False
        self._spare = set(spare)
        self._clearing = 0
        self._steps: deque[Step] = deque()
        self._why_later = ""
        self._end: Joined | GiveUp | None = None
        self._must_look = True

    def __repr__(self) -> str:
        return f"<CatchUp round {self._rounds} left {list(self._steps)} end {self._end}>"

    def next(self, now_s: float) -> Next:
        """What to do now. The same answer until it is reported, but for ``Wait``."""
        if self._end is None and now_s >= self._deadline_s:
            at = f"at {self._steps[0]}" if self._steps else "while looking"
            self._end = GiveUp("deadline", f"not done in time, {at}: {self._why_later}")
        if self._end is not None:
            return self._end
        if now_s < self._not_before_s:
            return Wait(self._not_before_s - now_s)
        if self._must_look:
            return Look()
        step = self._steps[0]
        if isinstance(step, ResetCache):
            # Taken before the call: a clear that falls into it may not be covered by it.
            self._clearing = self._ledger.cache_clears
        return step

    def looked(
        self,
        listed: Mapping[AdapterName, str],
        *,
        paused: bool,
        pause_target: str | None,
        ours: bool,
        now_s: float,
    ) -> None:
        """The look came back.

        ``ours``: the process carries this run's marker. Only the first look's word counts, so that
        a driver may mark the process right after it.
        """
        if self._rounds == 0:
            self._cache_trusted = ours
            self._distrusted = frozenset() if ours else frozenset(listed)
        else:
            self._distrusted &= listed.keys()
        self._rounds += 1
        stale = not self._cache_trusted or self.cache_clears < self._ledger.cache_clears
        steps = plan(
            self._ledger.live,
            self._ledger.retired_names(),
            listed,
            paused=paused,
            pause_target=pause_target,
            distrusted=self._distrusted,
            cache_stale=stale,
            spare=self._still_retired(),
        )
        if not steps:
            held = {name: path for name, path in listed.items() if self._ledger.known(name)}
            self._end = Joined(held)
        elif self._rounds >= MAX_ROUNDS:
            self._end = GiveUp("unsettled", f"after {self._rounds} looks there is still {steps[0]}")
        self._steps = deque(steps)
        self._must_look = False

    def _still_retired(self) -> list[LiveAdapter]:
        names = [name for name in self._ledger.retired_names() if name in self._spare]
        return [adapter for name in names if (adapter := self._ledger.get(name)) is not None]

    def stepped(self, result: StepResult, detail: str, now_s: float) -> None:
        """The step that ``next`` named came back. ``detail`` is a line for the log."""
        step = self._steps[0]
        if isinstance(step, Load) and step.name in self._spare:
            # Tried once: what only stragglers want holds up nobody.
            self._spare.discard(step.name)
            self._steps.popleft()
            self._must_look = not self._steps
            return
        match result:
            case StepResult.LATER:
                self._why_later = detail
                self._not_before_s = now_s + self._wait_s
                self._wait_s = min(self._retry_max_s, self._wait_s * 2)
            case StepResult.FAILED:
                self._end = GiveUp(type(step).__name__.lower() + "_failed", f"{step}: {detail}")
            case StepResult.UNKNOWN:
                self._why_later = detail
                self._not_before_s = now_s + self._wait_s
                self._must_look = True
            case StepResult.OK:
                self._wait_s = self._retry_s
                if isinstance(step, ResetCache):
                    self._cache_trusted = True
                    self.cache_clears = self._clearing
                elif isinstance(step, Unload):
                    self._distrusted -= {step.name}
                self._steps.popleft()
                self._must_look = not self._steps
