"""One control call to many replicas at once, and the wait for enough of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from broadcast.answer import Answer, Cause, NoAnswer
from broadcast.answers import words
from broadcast.fleet import Replica
from proxy.calls import Calls
from proxy.errors import FleetOutage
from proxy.judge import Verdict, judge
from proxy.replicas import Replicas
from routing.ids import ReplicaId

log = logging.getLogger("rollmux")

Answers = dict[ReplicaId, Answer | NoAnswer]


class Fanout:
    """Sends, waits for all, and tells the fleet what it saw of each replica."""

    def __init__(self, replicas: Replicas, calls: Calls, *, outage_s: float) -> None:
        self._replicas = replicas
        self._calls = calls
        self._outage_s = outage_s

    async def enough(self, call: str) -> None:
        """Until enough replicas are ready; ``FleetOutage`` after ``--outage-s``."""
        replicas = self._replicas
        deadline_s = replicas.now_s() + self._outage_s
        waiting = False
        while not replicas.fleet.enough():
            left_s = deadline_s - replicas.now_s()
            if left_s <= 0:
                raise FleetOutage(
                    f"{call} found fewer than {replicas.fleet.needed()} ready replicas for "
                    f"{self._outage_s:g} s: {replicas.missing()}"
                )
            if not waiting:
                waiting = True
                log.warning("%s waits for enough replicas: %s", call, replicas.missing())
            await replicas.changed(left_s)

    async def all(
        self,
        targets: Iterable[Replica],
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        timeout_s: float,
    ) -> Answers:
        """Every target's answer, in the fleet's order."""
        targets = list(targets)
        epochs = {r.id: r.epoch for r in targets}
        given = await asyncio.gather(
            *(self._calls(r.id, method, target, body, timeout_s=timeout_s) for r in targets)
        )
        answers = {r.id: answer for r, answer in zip(targets, given, strict=True)}
        for replica in targets:
            self.note(replica, answers[replica.id], epochs[replica.id])
        return answers

    async def one(
        self, replica: Replica, method: str, target: str, body: bytes | None = None, *,
        timeout_s: float,
    ) -> Answer | NoAnswer:  # fmt: skip
        return (await self.all([replica], method, target, body, timeout_s=timeout_s))[replica.id]

    def note(self, replica: Replica, answer: Answer | NoAnswer, epoch: int) -> None:
        """What an answer to a control call says about its replica."""
        replicas = self._replicas
        now_s = replicas.now_s()
        if isinstance(answer, NoAnswer):
            if answer.cause is Cause.TIMEOUT:
                return  # busy or standing still: probes tell, and who missed a change must rejoin
            lost = (
                replicas.fleet.connection_refused
                if answer.never_received
                else replicas.fleet.connection_lost
            )
            replicas.apply(lost(replica.id, answer.detail, now_s, epoch))
            return
        verdict = judge(answer.status, answer.body) if answer.status != 200 else Verdict.PASS
        if verdict in (Verdict.ENGINE_DEAD, Verdict.TOKEN_REJECTED):
            replicas.judged(replica, epoch, verdict, "", answer.status, words(answer, 300))

    def urls(self) -> dict[ReplicaId, str]:
        return {r.id: r.url for r in self._replicas.fleet}
