"""Looks at replicas: one task each, that probes it, and brings it back when it has to rejoin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

from broadcast.answer import Answer, NoAnswer
from broadcast.answers import read_models
from broadcast.fleet import Probe, Replica, ReplicaState, Transition
from proxy.calls import Calls
from proxy.judge import Verdict, judge
from proxy.replicas import Replicas
from proxy.tasks import Tasks
from routing.ids import AdapterName, ReplicaId

log = logging.getLogger("rollmux")

PROBE_TIMEOUT_S = 10.0
"""One call of a probe. A server busy reading a large adapter answers late (field report: 7 s)."""
EAGER_S = 1.0
"""Wait between looks at a replica that is not ready: it may be back any moment."""
FLAPPING_S = 0.2
"""Wait before a look at one that flaps. It may come back at once where most do, so this bounds how
often it comes and goes."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A probe that showed no living vLLM. ``code`` is one word."""

    code: str
    detail: str
    engine_dead: bool = False


async def look(calls: Calls, replica: ReplicaId, now_s: Callable[[], float]) -> Probe | Failed:
    """One deep probe. ``/is_paused`` goes through the engine's loop; ``/health`` would not.

    A server without the development endpoints still counts as alive: then only its list of models
    is known.
    """
    sent_at_s = now_s()
    models, paused, weights = await asyncio.gather(
        calls(replica, "GET", "/v1/models", timeout_s=PROBE_TIMEOUT_S),
        calls(replica, "GET", "/is_paused", timeout_s=PROBE_TIMEOUT_S),
        calls(replica, "GET", "/weight_info", timeout_s=PROBE_TIMEOUT_S),
    )
    for answer in (models, paused, weights):
        if failed := _failed(answer):
            return failed
    assert isinstance(models, Answer)
    assert isinstance(paused, Answer)
    assert isinstance(weights, Answer)
    if paused.status >= 500:
        # The API server still lists its models while its engine is dead.
        return Failed(f"is_paused_{paused.status}", f"/is_paused: {paused.text(300)}")
    if models.status != 200:
        code = "edge" if judge(models.status, models.body) is Verdict.EDGE else "models"
        return Failed(f"{code}_{models.status}", f"/v1/models: {models.status} {models.text(200)}")
    if weights.status >= 500:  # says nothing; no marker at all would be a restarted server's
        return Failed(f"weight_info_{weights.status}", f"/weight_info: {weights.text(300)}")
    listed = read_models(models)
    if listed is None:
        return Failed("not_vllm", f"/v1/models is not a list of models: {models.text(200)}")
    return Probe(
        sent_at_s,
        listed={AdapterName(name): path for name, path in listed.adapters.items()},
        base_models=listed.base,
        paused=_field(paused, "is_paused") is True,
        identity=_text(_field(weights, "weight_version")),
    )


def _failed(answer: Answer | NoAnswer) -> Failed | None:
    """What an answer says of the replica, if that is bad."""
    if isinstance(answer, NoAnswer):
        return Failed(answer.cause.value, answer.detail)
    verdict = judge(answer.status, answer.body)
    if verdict is Verdict.TOKEN_REJECTED:
        return Failed("token_rejected", f"{answer.status}: the token was rejected")
    if verdict is Verdict.ENGINE_DEAD:
        return Failed("engine_dead", answer.text(300), engine_dead=True)
    return None


def _field(answer: Answer, name: str) -> object:
    if not answer.ok:
        return None
    try:
        data = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return data.get(name) if isinstance(data, dict) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


class Probes:
    """Keeps looking at every replica; ``catch_up`` brings one to the fleet's state."""

    def __init__(
        self,
        replicas: Replicas,
        calls: Calls,
        *,
        probe_s: float,
        catch_up: Callable[[Replica], Awaitable[None]],
        tasks: Tasks,
    ) -> None:
        self._replicas = replicas
        self._calls = calls
        self._probe_s = probe_s
        self._catch_up = catch_up
        self._tasks = tasks
        self._kicks: dict[ReplicaId, asyncio.Event] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._closing = False
        replicas.on_transition.append(self._moved)

    def watch(self, replica: Replica) -> None:
        """Start looking at a new replica."""
        self._kicks[replica.id] = asyncio.Event()
        watch = self._tasks.start(self._watch(replica), f"probe {replica.id}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def close(self, timeout_s: float) -> None:
        """Let the looks that are under way end; a call broken off may leave its socket open."""
        self._closing = True
        for kick in self._kicks.values():
            kick.set()
        if self._watches:
            await asyncio.wait(self._watches, timeout=timeout_s)

    def watch_fleet(self) -> None:
        self._tasks.start(self._tick(), "stalls")

    def _moved(self, moved: Transition) -> None:
        """What left ``ready`` is looked at again at once."""
        kick = self._kicks.get(moved.replica)
        if kick is not None and moved.new is not ReplicaState.READY:
            kick.set()

    async def _watch(self, replica: Replica) -> None:
        fleet = self._replicas.fleet
        kick = self._kicks[replica.id]
        while replica.id in fleet and not self._closing:
            kick.clear()
            flaps = self._replicas.now_s() < replica.retry_at_s
            if flaps and replica.state is ReplicaState.SUSPECT:
                await asyncio.sleep(FLAPPING_S)
            try:
                if replica in fleet.to_catch_up(self._replicas.now_s()):
                    await self._catch_up(replica)
                else:
                    await self.probe(replica)
            except Exception as exc:  # outermost guard: a replica nobody looks at is lost for good
                log.error("looking at %s failed: %s: %s", replica.id, type(exc).__name__, exc)
                log.debug("its traceback", exc_info=exc)
            drained = replica.state is ReplicaState.DRAINING and not replica.inflight
            if drained and replica.id in fleet:
                self._replicas.remove(replica.id)
                break
            wait_s = self._probe_s
            if replica.state is not ReplicaState.READY:
                wait_s = min(EAGER_S, wait_s)
            try:
                async with asyncio.timeout(wait_s):
                    await kick.wait()
            except TimeoutError:
                continue
        self._kicks.pop(replica.id, None)
        if replica.id not in fleet:
            await self._calls.forget(replica.id)

    async def probe(self, replica: Replica) -> None:
        """One look, and what follows from it."""
        fleet = self._replicas.fleet
        sent_at_s = self._replicas.now_s()
        fleet.probe_sent(replica.id, sent_at_s)
        seen = await look(self._calls, replica.id, self._replicas.now_s)
        now_s = self._replicas.now_s()
        if isinstance(seen, Probe):
            self._replicas.apply(fleet.probe_ok(replica.id, seen, now_s))
        elif seen.engine_dead:
            self._replicas.died(replica, seen.detail)
        else:
            if seen.code == "refused":
                self._replicas.found_dead(replica.id)
            self._replicas.apply(
                fleet.probe_failed(replica.id, seen.code, seen.detail, sent_at_s, now_s)
            )

    async def _tick(self) -> None:
        """Find engines that stand still, and measure how late this loop is."""
        loop = asyncio.get_running_loop()
        worst: list[float] = []
        while True:
            due_s = loop.time() + 1.0
            await asyncio.sleep(1.0)
            late_s = max(0.0, loop.time() - due_s)
            worst = [*worst[-9:], late_s]
            self._replicas.metrics.loop_lag.set(max(worst))
            fleet = self._replicas.fleet
            # While this process stood still (frozen, its machine moved) answers came that it has
            # yet to read.
            if late_s < fleet.stall_s / 2:
                self._replicas.apply(fleet.tick(self._replicas.now_s()))
