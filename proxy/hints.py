"""The hint's shell: takes a sample of the daemon each second, and logs when the hint changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import islice

from broadcast.answer import Answer
from broadcast.fleet import ReplicaState
from broadcast.pause import Pause
from proxy.bottleneck import CODES, Bottleneck, Sample
from proxy.calls import Calls
from proxy.engine_load import EngineLoad, read
from proxy.metrics import Metrics
from proxy.replicas import Replicas
from proxy.status import Status
from routing.ids import ReplicaId

log = logging.getLogger("rollmux")

SAMPLE_S = 1.0
READ_TIMEOUT_S = 5.0
"""Of one replica's ``/metrics``: a busy server answers late, and nothing waits for this."""
READ_AT_ONCE = 32
"""Replicas asked in one round, so that a large fleet costs no more: 32 pages are 30 ms of CPU."""


class Hints:
    """Feeds one ``Bottleneck``. The replicas' queues are read every ``probe_s`` at most."""

    def __init__(
        self,
        replicas: Replicas,
        calls: Calls,
        pause: Pause,
        status: Status,
        metrics: Metrics,
        *,
        probe_s: float,
    ) -> None:
        self._replicas = replicas
        self._calls = calls
        self._pause = pause
        self._status = status
        self._metrics = metrics
        self._read_s = max(probe_s, SAMPLE_S)
        self._bottleneck = Bottleneck()
        self._next = 0
        self._reading = asyncio.Lock()

    async def watch(self) -> None:
        """Sample, for ever."""
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_S)

    def look(self) -> None:
        """One sample, and what follows from it."""
        bottleneck = self._bottleneck
        if bottleneck.add(self._sample()):
            log.info("what holds the run back: %s", bottleneck.hint.text)
            for remark in bottleneck.hint.remarks:
                log.info("beside that: %s", remark.text)
        self._status.hint = bottleneck.hint
        for code in CODES:
            self._metrics.bottleneck.labels(code).set(code == bottleneck.hint.code)

    def _sample(self) -> Sample:
        replicas, status = self._replicas, self._status
        ready = replicas.fleet.routable()
        told = [load for r in ready if (load := status.engine_loads.get(r.id)) is not None]
        decisions, affine = status.routed()
        return Sample(
            replicas.now_s(),
            {r.id: r.inflight for r in ready},
            held=status.held(),
            running=sum(load.running for load in told) if told else None,
            waiting=sum(load.waiting for load in told) if told else None,
            syncing=self._pause.paused or status.is_publishing(),
            stopped=self._pause.real,
            decisions=decisions,
            affine=affine,
        )

    async def read_engines(self) -> None:
        """Ask the replicas for their queues, for ever."""
        while True:
            await asyncio.sleep(self._read_s)
            async with self._reading:
                await self.read_once()

    async def close(self, timeout_s: float) -> None:
        """Let the round under way end; a call broken off may leave its socket open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._reading.acquire()  # and never given back: no further round

    async def read_once(self) -> None:
        """One round: all of a small fleet, the next ``READ_AT_ONCE`` of a large one."""
        fleet, loads = self._replicas.fleet, self._status.engine_loads
        ids = [r.id for r in fleet if r.state is ReplicaState.READY]
        for gone in loads.keys() - set(ids):
            del loads[gone]
        start = self._next if self._next < len(ids) else 0
        self._next = start + READ_AT_ONCE
        await asyncio.gather(*(self._read(id) for id in islice(ids, start, self._next)))

    async def _read(self, replica: ReplicaId) -> None:
        answer = await self._calls(replica, "GET", "/metrics", timeout_s=READ_TIMEOUT_S)
        load: EngineLoad | None = None
        if isinstance(answer, Answer) and answer.ok:
            load = read(answer.body)
        if load is None:
            self._status.engine_loads.pop(replica, None)
        elif replica in self._replicas.fleet:
            self._status.engine_loads[replica] = load
