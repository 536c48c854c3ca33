"""The replicas as the daemon holds them: the pure fleet, and what each has of sockets and tasks.

Everything that happens to a replica passes through here once: the fleet decides, and this shell
logs the transition, moves the metrics, tells the router and wakes whoever waits.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from blake3 import blake3

from broadcast.answer import Cause
from broadcast.fleet import Fleet, Lease, Replica, ReplicaState, Transition
from broadcast.ledger import Ledger
from broadcast.suspects import Suspects
from broadcast.suspects import Verdict as Suspicion
from proxy.body import Generation
from proxy.judge import Verdict
from proxy.metrics import Metrics
from proxy.tokens import Bearer
from proxy.upstream import Upstream, UpstreamBroken
from routing.ids import AdapterName, ReplicaId
from routing.router import Decision, Router, RouteRequest

log = logging.getLogger("rollmux")

FREE, DRAINING = Suspicion.FREE, ReplicaState.DRAINING  # looked up for every generation

DEATH_WINDOW_S = 10.0
"""A connection lost no longer than this before its replica is found dead was lost to that death."""


class Replicas:
    """Fleet, ledger and router of one daemon, with a connection stack for every replica.

    ``make_router`` gets the replicas' block size in tokens once it is known, before that None.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        make_router: Callable[[int | None], Router],
        *,
        bearer: Bearer,
        metrics: Metrics,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.fleet = fleet
        self.ledger = ledger
        self.router = make_router(None)
        self.metrics = metrics
        self.rebuilding = True
        """The ledger is not known to be right yet: no name is called unknown meanwhile."""
        self.files_gone: frozenset[str] = frozenset()
        """Retired names whose files cannot be read any more. A replica that pushed one of them out
        of its slots would die reading it back: they go only where a request of them runs."""
        self.one_alone = asyncio.Lock()
        """Held while a suspect body is tried alone on a replica."""
        self.on_transition: list[Callable[[Transition], None]] = []
        self._make_router = make_router
        self._block_tokens: int | None = None
        self._bearer = bearer
        self._context = context
        self._upstreams: dict[ReplicaId, Upstream] = {}
        self._may_have_token: set[ReplicaId] = set()
        self._bodies: dict[ReplicaId, dict[int, bytes]] = {}
        self._lost: dict[ReplicaId, list[tuple[float, bytes]]] = {}  # digests
        self._past_models: set[str] = set()
        """Base models of replicas that left: an empty fleet has not forgotten what it serves."""
        self._suspects = Suspects()
        self._reserved: set[ReplicaId] = set()
        self._changed = asyncio.Event()

    # Membership

    def add(self, url: str, *, named: bool = False) -> Replica:
        """A new replica, joining. Raises ValueError when its URL is in the fleet already.

        ``named``: the operator named it, or the list it comes from, so its host may have the token.
        """
        replica = self.fleet.add(url, self.now_s())
        if named:
            self._bearer.trust(url)
        self._upstreams[replica.id] = Upstream(url, context=self._context)
        self._bodies[replica.id] = {}
        if self._bearer.allowed(url):
            self._may_have_token.add(replica.id)
        for state in ReplicaState:
            self.metrics.replica_state.labels(replica.id, state.value).set(state == replica.state)
        self.metrics.replica_info.labels(replica.id, url).set(1)
        self.metrics.load_retries.labels(replica.id)  # 0 from the start: a rate needs a first value
        self.metrics.replica_inflight.labels(replica.id).set_function(lambda: replica.inflight)
        self.notify()
        return replica

    def drain(self, replica: ReplicaId) -> None:
        """Nothing new for it. Raises KeyError."""
        self.apply(self.fleet.drain(replica, self.now_s()))

    def remove(self, replica: ReplicaId) -> None:
        """Out of the fleet; what it still carries moves to another. Raises KeyError."""
        gone = self.fleet.remove(replica)
        self._past_models.update(gone.base_models)
        upstream = self._upstreams.pop(replica)
        upstream.break_all(Cause.RESET, "the replica was removed")
        upstream.close()
        self._bodies.pop(replica, None)
        self._lost.pop(replica, None)
        self._may_have_token.discard(replica)
        self.router.forget_replica(replica)
        self.metrics.forget_replica(replica, gone.url, tuple(ReplicaState))
        log.info("%s (%s) left the fleet", replica, gone.url)
        self.notify()

    def close(self) -> None:
        for upstream in self._upstreams.values():
            upstream.close()

    # Looking, on the way of every generation

    def known(self, model: str) -> bool:
        """Whether a request for ``model`` may yet be answered."""
        return (
            not model
            or self.rebuilding
            or self.ledger.known(AdapterName(model))
            or bool(self.fleet.candidates(model))
            or any(model in r.base_models for r in self.fleet)
            or model in self._past_models
        )

    def candidates(self, model: str) -> tuple[Replica, ...]:
        """Replicas that may get a request for ``model``; an empty name is the base model."""
        found = self.fleet.candidates(model) if model else self.fleet.routable()
        if model in self.files_gone:
            found = tuple(r for r in found if self.fleet.runs(r.id, model))
        if self._reserved:
            return tuple(r for r in found if r.id not in self._reserved)
        return found

    def reserves_one(self, model: str) -> bool:
        """Whether a replica would be a candidate, were it not reserved."""
        return any(self.serves(self.fleet[r], model) for r in self._reserved if r in self.fleet)

    def serves(self, replica: Replica, model: str) -> bool:
        """Whether a replica chosen earlier is still one that may get a request for ``model``."""
        return replica in (self.fleet.candidates(model) if model else self.fleet.routable())

    def choose(self, request: RouteRequest, candidates: Sequence[Replica]) -> Decision | None:
        choice = self.router.choose(request, candidates, self.now_s())
        return choice if isinstance(choice, Decision) else None

    def use_block_tokens(self, tokens: int) -> None:
        """The first replica's block size decides; called before anything is routed."""
        if self._block_tokens is None:
            self._block_tokens = tokens
            self.router = self._make_router(tokens)
        elif tokens != self._block_tokens:
            log.warning(
                "a replica's block size is %d tokens, the first one's %d: start them alike",
                tokens,
                self._block_tokens,
            )

    def upstream(self, replica: ReplicaId) -> Upstream:
        return self._upstreams[replica]

    def authorization(self, replica: ReplicaId) -> bytes:
        """The bearer header for a replica that may see the token; else nothing."""
        return self._bearer.value() if replica in self._may_have_token else b""

    def suspicion(self, body: bytes) -> Suspicion:
        """Whether this body was in flight when engines died."""
        return self._suspects.verdict(_digest(body)) if len(self._suspects) else FREE

    def redact(self, text: str) -> str:
        """``text`` without the token, should something in between have echoed it."""
        return self._bearer.redact(text)

    def begin(self, replica: Replica, generation: Generation, body: bytes) -> Lease:
        """Count it in the replica's load, exactly until ``end`` gets what this gives."""
        self.ledger.named(generation.model, monotonic())
        lease = self.fleet.start(replica.id, generation.weight, generation.model)
        self._bodies[replica.id][id(lease)] = body
        return lease

    def end(self, lease: Lease) -> None:
        replica = lease.replica
        if (bodies := self._bodies.get(replica.id)) is not None:  # None: it was removed since
            bodies.pop(id(lease), None)
        lease.release()
        if self._reserved or replica.state is DRAINING:
            self.notify()

    @contextmanager
    def reserved(self, replica: ReplicaId) -> Iterator[None]:
        """Nothing new goes to this replica as long as the block lasts."""
        self._reserved.add(replica)
        try:
            yield
        finally:
            self._reserved.discard(replica)
            self.notify()

    def label(self, replica: str) -> str:
        """Id and URL, for people."""
        found = self.fleet.get(ReplicaId(replica))
        return f"{replica} ({found.url})" if found else replica

    def believed(self, model: str) -> bool:
        """Whether a ready replica ought to hold this adapter."""
        return self.ledger.known(model)

    def missing(self) -> str:
        """Who is not ready, and why, in one line."""
        if not len(self.fleet):
            return "the fleet is empty"
        return "; ".join(self.fleet.missing()) or "all replicas are ready"

    # What traffic saw

    def answered(self, replica: Replica) -> None:
        """A whole answer, or the beginning of a stream."""
        self.apply(self.fleet.answered(replica.id, self.now_s()))

    def finished(self, body: bytes) -> None:
        """The whole answer is here and its engine lives: this body was not what killed others."""
        if len(self._suspects):
            self._suspects.finished(_digest(body))

    def broken(self, replica: Replica, epoch: int, error: UpstreamBroken, body: bytes) -> None:
        """No whole reply to ``body`` came."""
        now_s = self.now_s()
        if error.cause in (Cause.REFUSED, Cause.UNREACHABLE):
            moved = self.fleet.connection_refused(replica.id, error.detail, now_s, epoch)
            if error.cause is Cause.REFUSED:
                self.found_dead(replica.id)
        else:
            if replica.epoch == epoch:  # else its death is known and has been counted
                self._lost[replica.id] = [*self._just_lost(replica.id), (now_s, _digest(body))]
            moved = self.fleet.connection_lost(replica.id, error.detail, now_s, epoch)
        self.apply(moved)

    def judged(
        self, replica: Replica, epoch: int, verdict: Verdict, model: str, status: int, detail: str
    ) -> None:
        """An answer came that says something about the replica rather than the request."""
        now_s = self.now_s()
        match verdict:
            case Verdict.ENGINE_DEAD:
                self.died(replica, detail, epoch)
            case Verdict.ADAPTER_LOST:
                name = AdapterName(model)
                self.apply(self.fleet.adapter_lost(replica.id, name, now_s, epoch))
            case Verdict.TOKEN_REJECTED:
                self._bearer.rejected()
                self.apply(self.fleet.not_vllm(replica.id, "token_rejected", detail, now_s, epoch))
            case Verdict.EDGE:
                self.apply(self.fleet.not_vllm(replica.id, f"edge_{status}", detail, now_s, epoch))
            case _:
                pass

    def died(self, replica: Replica, detail: str, epoch: int | None = None) -> None:
        """vLLM says its engine is dead: all that is in flight there was so at that death."""
        if epoch in (None, replica.epoch) and replica.state is not ReplicaState.DOWN:
            lost = [digest for _, digest in self._just_lost(replica.id)]
            running = [_digest(body) for body in self._bodies.get(replica.id, {}).values()]
            self._suspects.in_flight_at_death(lost + running)
        self.apply(self.fleet.engine_dead(replica.id, detail, self.now_s(), epoch))

    def found_dead(self, replica: ReplicaId) -> None:
        """Nothing listens there any more: what was lost just now was lost to a death."""
        self._suspects.in_flight_at_death([digest for _, digest in self._just_lost(replica)])

    def _just_lost(self, replica: ReplicaId) -> list[tuple[float, bytes]]:
        oldest_s = self.now_s() - DEATH_WINDOW_S
        return [lost for lost in self._lost.pop(replica, ()) if lost[0] >= oldest_s]

    # Changes

    def apply(self, transitions: Sequence[Transition]) -> None:
        """Log, count and pass on what the fleet decided."""
        for moved in transitions:
            replica = self.fleet.get(moved.replica)
            url = replica.url if replica else ""
            level = logging.INFO
            if moved.new in (ReplicaState.SUSPECT, ReplicaState.DOWN):
                level = logging.WARNING
            log.log(
                level,
                "%s (%s): %s -> %s%s",
                moved.replica,
                url,
                moved.old.value,
                moved.new.value,
                f": {self._bearer.redact(moved.why)}" if moved.why else "",
            )
            for state in ReplicaState:
                self.metrics.replica_state.labels(moved.replica, state.value).set(
                    state == moved.new
                )
            if moved.new in (ReplicaState.DOWN, ReplicaState.JOINING):
                self.router.forget_replica(moved.replica)
            if moved.new is ReplicaState.DOWN:
                upstream = self._upstreams.get(moved.replica)
                if upstream is not None:
                    upstream.break_all(Cause.RESET, f"the replica is down: {moved.code}")
            if moved.code == "restarted":
                self.found_dead(moved.replica)
            elif moved.old is ReplicaState.SUSPECT and moved.new is not ReplicaState.DOWN:
                self._lost.pop(moved.replica, None)  # lost to a living engine: no suspicion
            for listener in self.on_transition:
                listener(moved)
        if transitions:
            self.notify()

    def notify(self) -> None:
        """Something changed: whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Until something changes, or the time is up."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._changed.wait()
        except TimeoutError:
            return

    def now_s(self) -> float:
        return monotonic()


def _digest(body: bytes) -> bytes:
    return blake3(body).digest(length=16)
