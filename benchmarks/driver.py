"""Runs the engine model in real time, on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from benchmarks.engine import Engine, Job, Outcome


class Driver:
    """Hands jobs to the engine and their outcomes to who waits. ``on_death`` is called once."""

    def __init__(self, engine: Engine, on_death: Callable[[], None]) -> None:
        self.engine = engine
        self._on_death = on_death
        self._died = False
        self._waiters: dict[str, asyncio.Future[Outcome]] = {}
        self._idle: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        """Jobs that run or wait."""
        return len(self._waiters)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def pump(self) -> None:
        """Bring the engine to the present, hand out what ended, wake up for what is next."""
        engine = self.engine
        engine.advance(self.now())
        for outcome in engine.take_outcomes():
            waiter = self._waiters.pop(outcome.job.id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(outcome)
        if not engine.busy():
            for idle in self._idle:
                if not idle.done():
                    idle.set_result(None)
            self._idle.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = engine.next_event_s()
        if next_s is not None:
            self._timer = asyncio.get_running_loop().call_at(next_s, self.pump)
        if engine.dead and not self._died:
            self._died = True
            self._on_death()

    def submit(self, job: Job) -> asyncio.Future[Outcome]:
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiters[job.id] = waiter
        self.engine.submit(self.now(), job)
        self.pump()
        return waiter

    def abort(self, ids: Sequence[str] | None) -> int:
        """End these jobs, or all; who waits for them gets the outcome. How many there were."""
        count = self.engine.abort(self.now(), ids)
        self.pump()
        return count

    def leave(self, ids: Sequence[str]) -> None:
        """End those of these jobs that are still open; nobody waits for them any more."""
        open_ids = [i for i in ids if i in self._waiters]
        if open_ids:
            for i in open_ids:
                self._waiters.pop(i).cancel()
            self.abort(open_ids)

    async def idle(self) -> None:
        """Until no sequence runs; at once if none does."""
        if self.engine.busy():
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    def stop(self) -> None:
        """No more timers; whoever waits is cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters.values():
            waiter.cancel()
