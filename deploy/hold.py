"""Holds replies back, to see whether what lies between here and a replica cuts a long one off.

A paused vLLM takes a request and answers it after the resume (vLLM 0.27.1, ``/pause?mode=keep``),
so a reply of one token can be made to take any time, exactly, on a model of any speed. It is for
idle replicas only, and the pause is undone whatever happens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from broadcast.answer import Answer, NoAnswer
from broadcast.answers import words
from deploy.symptoms import Held
from proxy.calls import Calls
from routing.ids import ReplicaId

PAUSE = "/pause?mode=keep&clear_cache=false"
CONTROL_S = 30.0
REPLY_S = 60.0
"""What the reply may take after the resume."""


class Hold:
    """One measurement. ``models`` gives each replica's base model; ``told`` fills meanwhile."""

    def __init__(self, calls: Calls, models: Mapping[ReplicaId, str], seconds: float) -> None:
        self.told: dict[ReplicaId, Held] = {}
        self._calls = calls
        self._models = models
        self._seconds = seconds
        self._began_s = asyncio.get_running_loop().time()

    def progress(self) -> str:
        passed_s = asyncio.get_running_loop().time() - self._began_s
        return (
            f"replies held for {passed_s:.0f} of {self._seconds:g} s on {len(self._models)} "
            f"replicas; cut off so far: {sum(bool(held.trouble) for held in self.told.values())}"
        )

    async def measure(self) -> dict[ReplicaId, Held]:
        self._began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for replica, model in self._models.items():
                group.create_task(self._hold(replica, model), name=f"hold {replica}")
        return self.told

    async def _hold(self, replica: ReplicaId, model: str) -> None:
        try:
            paused = await self._calls(replica, "POST", PAUSE, timeout_s=CONTROL_S)
            if isinstance(paused, NoAnswer) or not paused.ok:
                self.told[replica] = Held(0.0, f"it cannot be paused: {_words(paused)}")
                return
            async with asyncio.TaskGroup() as group:
                sent_s = asyncio.get_running_loop().time()
                asking = self._reply(replica, model, sent_s)
                reply = group.create_task(asking, name=f"reply {replica}")
                await asyncio.wait((reply,), timeout=self._seconds)
                await self._resume(replica)
            self.told[replica] = reply.result()
        finally:
            await self._resume(replica)  # once more: the first may have been lost, or never sent

    async def _reply(self, replica: ReplicaId, model: str, sent_s: float) -> Held:
        body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0}
        answer = await self._calls(
            replica,
            "POST",
            "/v1/completions",
            json.dumps(body).encode(),
            timeout_s=self._seconds + REPLY_S,
        )
        seconds = asyncio.get_running_loop().time() - sent_s
        whole = isinstance(answer, Answer) and answer.ok and b'"choices"' in answer.body
        return Held(seconds, "" if whole else _words(answer))

    async def _resume(self, replica: ReplicaId) -> None:
        await self._calls(replica, "POST", "/resume", timeout_s=CONTROL_S)


def _words(answer: Answer | NoAnswer) -> str:
    if isinstance(answer, NoAnswer):
        return answer.detail or answer.cause.value
    return f"{answer.status} {words(answer, 200)}"
