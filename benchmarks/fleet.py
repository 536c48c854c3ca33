"""Simulated replicas behind a routing policy, on one virtual clock.

The engine model of the simulated replica and the real policies. What drives it hands in requests
and events at the times it likes, and is called for every reply.

A policy gets prompts made of the trace's ids, two tokens a block where the replicas have 16 or 512,
and one for a block that is not whole: chains part where those of the run did, at an eighth of the
cost.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.engine import Adapter, Engine, EngineConfig, Job, Outcome
from benchmarks.trace import Event, Request
from routing.ids import ReplicaId
from routing.router import NoReplica, Router, RouteRequest

ROUTER_BLOCK_TOKENS = 2


@dataclass(slots=True, eq=False)
class Replica:
    """Meets ``ReplicaLoad``."""

    id: ReplicaId
    engine: Engine
    inflight: int = 0
    routed: int = 0
    due_s: float | None = None
    """When its engine moves next by itself; an entry of the clock with another time is old."""


@dataclass(slots=True)
class Running:
    """A request on its replica. ``left``: replies that are still to come, of its ``n``."""

    number: int
    request: Request
    replica: Replica
    began_s: float
    left: int


class Fleet:
    """``replied`` is called once a reply, after it was taken off ``left``: at 0 all are there."""

    def __init__(
        self,
        router: Router,
        replicas: int,
        config: EngineConfig,
        replied: Callable[[Running, Outcome], None],
    ) -> None:
        self.now_s = 0.0
        self.inflight = 0
        """Replies asked for of the requests that have not ended."""
        self.decisions: Counter[str] = Counter()
        """By reason."""
        self.replicas = tuple(
            Replica(ReplicaId(f"r{number}"), Engine(config)) for number in range(replicas)
        )
        self._router = router
        self._block_tokens = config.block_tokens
        self._replied = replied
        self._clock: list[tuple[float, int]] = []  # (time, replica's position)
        self._running: dict[str, Running] = {}
        self._adapters: dict[str, Adapter] = {}
        self._published = 0

    # The clock

    def next_s(self) -> float | None:
        """When a replica moves next by itself, or None while all stand still."""
        while self._clock:
            at_s, position = self._clock[0]
            if self.replicas[position].due_s == at_s:
                return at_s
            heapq.heappop(self._clock)
        return None

    def step(self) -> bool:
        """The next thing that a replica does by itself; False if there is none."""
        if (at_s := self.next_s()) is None:
            return False
        _, position = heapq.heappop(self._clock)
        self.now_s = max(self.now_s, at_s)
        self.replicas[position].engine.advance(self.now_s)
        self._look_at(position)
        return True

    def run_until(self, at_s: float) -> None:
        while (next_s := self.next_s()) is not None and next_s <= at_s:
            self.step()
        self.now_s = max(self.now_s, at_s)

    def _look_at(self, position: int) -> None:
        """After anything that an engine was told: who has ended, and when it moves next."""
        replica = self.replicas[position]
        for outcome in replica.engine.take_outcomes():
            running = self._running.pop(outcome.job.id)
            running.left -= 1
            if not running.left:
                replica.inflight -= running.request.n
                self.inflight -= running.request.n
            self._replied(running, outcome)
        due_s = replica.engine.next_event_s()
        if due_s != replica.due_s and due_s is not None:
            heapq.heappush(self._clock, (due_s, position))
        replica.due_s = due_s

    # Requests and events, at the clock's time

    def send(self, number: int, request: Request) -> None:
        """``number``: the caller's own, different for each request."""
        whole = request.whole_blocks(self._block_tokens)
        tokens = [0] * (ROUTER_BLOCK_TOKENS * whole)
        tokens[::ROUTER_BLOCK_TOKENS] = request.ids[:whole].tolist()
        tokens += request.ids[whole : whole + 1].tolist()
        choice = self._router.choose(
            RouteRequest(request.model, tokens, request.n), self.replicas, self.now_s
        )
        if isinstance(choice, NoReplica):
            raise RuntimeError(f"router {self._router.name} chose none of {len(self.replicas)}")
        position = int(choice.replica[1:])
        replica = self.replicas[position]
        self.decisions[choice.reason] += 1
        replica.routed += 1
        replica.inflight += request.n
        self.inflight += request.n
        running = Running(number, request, replica, self.now_s, request.n)
        blocks = request.ids[:whole]
        for each in range(request.n):
            job = Job(
                f"{number}.{each}",
                blocks,
                request.prompt_tokens,
                request.reply_tokens(each),
                self._adapters.get(request.model),
            )
            self._running[job.id] = running
            replica.engine.submit(self.now_s, job)
        self._look_at(position)

    def apply(self, event: Event) -> None:
        match event.kind:
            case "publish":
                self._published += 1
                adapter = Adapter(self._published, event.model, "", f"{self._published}")
                self._adapters[event.model] = adapter
                self._each(lambda engine: engine.add_adapter(self.now_s, adapter))
            case "unload":
                self._adapters.pop(event.model, None)
                self._router.forget_adapter(event.model)
            case "pause" if event.real:
                self._each(lambda engine: engine.pause(self.now_s, "keep", event.clear_cache))
                if event.clear_cache:
                    self._router.forget_all()
            case "resume" if event.real:
                self.resume()
            case _:
                pass

    def resume(self) -> None:
        self._each(lambda engine: engine.resume(self.now_s))

    def _each(self, act: Callable[[Engine], None]) -> None:
        for position, replica in enumerate(self.replicas):
            act(replica.engine)
            self._look_at(position)

    # What came of it

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens that came from caches."""
        return sum(replica.engine.counters.prefix_hits for replica in self.replicas)

    @property
    def generated_tokens(self) -> int:
        """Of replies that have ended."""
        return sum(replica.engine.counters.generation_tokens for replica in self.replicas)
