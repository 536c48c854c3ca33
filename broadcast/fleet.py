"""The fleet: which replicas there are, what each is believed to hold, and who may get a request.

Rules, in order of weight:

1. Only ``ready`` is routable, and only for names the replica is believed to hold. A belief comes
   from our own commit or from a finished catch-up, never from a listing alone.
2. There is no edge from ``down`` to ``ready``. What comes back holds nothing until a catch-up has
   shown otherwise, so entering ``down`` or ``joining`` drops every belief and starts a new epoch.
3. A refused or broken connection, or an answer that is not vLLM's, takes a replica out of routing
   at once (``suspect``). Traffic says no more than that: a probe decides between back and ``down``.
4. Slow probes alone make a replica ``suspect`` only after ``SLOW_PROBES`` in a row without an
   answer of any kind, and only while another replica stays ready. A busy server answers slowly,
   and one that is paused to take weights in does not answer at all.
5. A deep probe unanswered for ``stall_s``, with no other sign of life, makes it ``down``, unless
   it is paused.
6. What missed a committed change while ``suspect`` goes to ``joining``. So does a replica whose
   marker, names or pause state are not what we left there: it restarted, or somebody meddled.
7. After weights changed in place, a process that did not take part stays out for good.
8. What leaves ``ready`` again soon after it came back waits longer each time, 30 s at most; but
   what a probe has cleared of suspicion comes back sooner where more replicas are suspect than
   ready, for then the trouble lies in between, and waiting mends nothing.

Events return the transitions they caused, for the shell to log and act on. An event about a
replica that was removed meanwhile, or about an earlier epoch of it, changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from broadcast.answer import Cause
from routing.ids import AdapterName, ReplicaId

SLOW_PROBES = 3
"""Slow probes in a row before they count; two in a row are common while a large adapter is read."""
FLAP_S = 30.0
"""A stay in ``ready`` shorter than this counts as a flap: six intervals of the default probe."""
MAX_BACK_OFF_S = 30.0
"""Longest wait before a replica that flaps is tried again."""
DETAIL_CHARS = 500
"""Bound of ``last_error``: it is shown in the status and in the answer to ``/health``."""
OTHER_WEIGHTS = "holds other weights: they were changed in place while it was away"

_SLOW = frozenset({Cause.TIMEOUT, Cause.RESET, Cause.UNREACHABLE})


class ReplicaState(StrEnum):
    JOINING = "joining"
    """Answers, or has not been asked yet; being brought to the fleet's state."""
    READY = "ready"
    """Routable."""
    SUSPECT = "suspect"
    """Out of routing until a probe decides. Its beliefs still stand."""
    DOWN = "down"
    """Does not answer, or not as vLLM would."""
    DRAINING = "draining"
    """Leaves: gets nothing new, finishes what it has."""


EDGES: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.JOINING: frozenset({ReplicaState.READY, ReplicaState.DOWN, ReplicaState.DRAINING}),
    ReplicaState.READY: frozenset(
        {ReplicaState.SUSPECT, ReplicaState.JOINING, ReplicaState.DOWN, ReplicaState.DRAINING}
    ),
    ReplicaState.SUSPECT: frozenset(
        {ReplicaState.READY, ReplicaState.JOINING, ReplicaState.DOWN, ReplicaState.DRAINING}
    ),
    ReplicaState.DOWN: frozenset({ReplicaState.JOINING, ReplicaState.DRAINING}),
    ReplicaState.DRAINING: frozenset(),
}
"""Every change of state there is. Another one is a bug and raises."""


@dataclass(slots=True, eq=False)
class Replica:
    """One vLLM server. Only the fleet writes to it; everybody else reads."""

    id: ReplicaId
    url: str
    state: ReplicaState = ReplicaState.JOINING
    inflight: int = 0
    """Prompts chosen for it and not yet released."""
    routed: int = 0
    """Prompts ever chosen for it."""
    adapters: dict[AdapterName, str] = field(default_factory=dict)
    """Names it holds and may serve, with the path each was loaded from."""
    base_models: tuple[str, ...] = ()
    paused: bool = False
    """Really paused, as far as we know; an acknowledged pause does not show here."""
    last_error: str = ""
    error_code: str = ""
    """One word for ``last_error`` (``refused``, ``stalled``, …); empty in ready."""
    was_ready: bool = False
    epoch: int = 0
    """Grows whenever it enters ``down`` or ``joining``: an older answer is about another life."""
    missed_change: bool = False
    """A change was committed without it since its catch-up began."""
    block_tokens: int | None = None
    identity: str | None = None
    """The marker this run left on the process (``/weight_info``), None where it left none."""
    cache_clears: int = 0
    """How many of the fleet's cache clears it is known to have seen."""
    excluded_reason: str = ""
    """Why it must not come back as it is; empty if it may."""
    retry_at_s: float = 0.0
    """Not let back, and no catch-up begun, before then."""
    since_s: float = 0.0
    """When it entered its state."""
    _catching_up: bool = field(default=False, repr=False)
    _held_since_s: dict[AdapterName, float] = field(default_factory=dict, repr=False)
    _paused_since_s: float = field(default=0.0, repr=False)
    _marked_at_s: float = field(default=0.0, repr=False)
    _weights_ok: bool = field(default=True, repr=False)
    _excluded_for_good: bool = field(default=False, repr=False)
    _slow_probes: int = field(default=0, repr=False)
    _flaps: int = field(default=0, repr=False)
    _probing: bool = field(default=False, repr=False)
    _waiting_since_s: float = field(default=0.0, repr=False)


@dataclass(frozen=True, slots=True)
class Probe:
    """What one whole deep probe saw: ``/is_paused``, ``/v1/models``, ``/weight_info``.

    ``listed`` maps the name of each adapter card to its ``root``. ``identity`` is None where
    ``/weight_info`` is not served. ``sent_at_s`` is when the first of the calls was sent.
    """

    sent_at_s: float
    listed: Mapping[AdapterName, str]
    base_models: tuple[str, ...]
    paused: bool
    identity: str | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """A replica changed its state. ``code`` is one word, ``why`` a line for the log."""

    replica: ReplicaId
    old: ReplicaState
    new: ReplicaState
    code: str
    why: str


Transitions = tuple[Transition, ...]
NONE: Transitions = ()


class Lease:
    """A choice that counts as in flight until released. Releasing twice counts once."""

    __slots__ = ("_fleet", "_released", "epoch", "model", "replica", "weight")

    def __init__(self, fleet: Fleet, replica: Replica, model: str, weight: int) -> None:
        self.replica = replica
        self.model = model
        self.weight = weight
        self.epoch = replica.epoch
        self._fleet = fleet
        self._released = False

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._fleet._give_back(self)


class Fleet:
    """All replicas of one run. Times are monotonic seconds, handed in."""

    def __init__(
        self,
        *,
        min_replicas: int | Literal["all"] = 1,
        start_timeout_s: float = 1800.0,
        stall_s: float = 60.0,
        now_s: float = 0.0,
    ) -> None:
        self.min_replicas = min_replicas
        self.start_timeout_s = start_timeout_s
        self.stall_s = stall_s
        self.weights_changed = False
        """Weights were changed in place at least once."""
        self._replicas: dict[ReplicaId, Replica] = {}
        self._next = 0
        self._started_at_s = now_s
        self._been_complete = False
        self._pause: bool | None = False
        self._pause_since_s = now_s
        self._inflight_of: Counter[tuple[ReplicaId, str]] = Counter()
        # Rebuilt as a whole by the first look after a change, for the names replicas hold and no
        # others: so it is bounded by replicas times names, and a client cannot make it grow.
        self._routable: tuple[Replica, ...] | None = None
        self._by_model: dict[str, tuple[Replica, ...]] = {}

    def __repr__(self) -> str:
        states = ", ".join(f"{r.id} {r.state} {r.inflight}" for r in self)
        return f"<Fleet {states or 'empty'}>"

    def __iter__(self) -> Iterator[Replica]:
        """In order of joining the fleet."""
        return iter(tuple(self._replicas.values()))

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica: object) -> bool:
        return replica in self._replicas

    def __getitem__(self, replica: ReplicaId) -> Replica:
        return self._replicas[replica]

    def get(self, replica: ReplicaId) -> Replica | None:
        return self._replicas.get(replica)

    # Membership

    def add(self, url: str, now_s: float) -> Replica:
        """A new replica, ``joining``. Ids are never used twice. A known url raises ValueError."""
        if any(r.url == url and r.state is not ReplicaState.DRAINING for r in self):
            raise ValueError(f"{url} is in the fleet already")
        replica = Replica(ReplicaId(f"r{self._next}"), url, since_s=now_s, retry_at_s=now_s)
        self._next += 1
        replica._weights_ok = not self.weights_changed
        self._replicas[replica.id] = replica
        self._settle_exclusion(replica)
        return replica

    def remove(self, replica: ReplicaId) -> Replica:
        """Out of the fleet at once; leases on it may still be released. Raises KeyError."""
        gone = self._replicas.pop(replica)
        self._changed()
        return gone

    def drain(self, replica: ReplicaId, now_s: float) -> Transitions:
        """Nothing new for it; ``remove`` it once ``inflight`` is 0. Raises KeyError."""
        r = self._replicas[replica]
        if r.state is ReplicaState.DRAINING:
            return NONE  # asked twice: by an operator and by a list it is no longer in, say
        return self._move(r, ReplicaState.DRAINING, "drain", "asked to leave", now_s)

    # Reading, on the way of every request

    def routable(self) -> tuple[Replica, ...]:
        """Every ready replica, in order of joining. The same object until something changes."""
        if self._routable is None:
            self._rebuild()
        assert self._routable is not None
        return self._routable

    def candidates(self, model: str) -> tuple[Replica, ...]:
        """Ready replicas that hold ``model``, an adapter or the base model. One look in a table."""
        if self._routable is None:
            self._rebuild()
        return self._by_model.get(model, ())

    def inflight_names(self) -> frozenset[str]:
        """Models that a running request names."""
        return frozenset(model for _, model in self._inflight_of)

    def runs(self, replica: ReplicaId, model: str) -> bool:
        """Whether a running request there names ``model``."""
        return (replica, model) in self._inflight_of

    def inflight(self) -> int:
        return sum(r.inflight for r in self)

    def start(self, replica: ReplicaId, weight: int = 1, model: str = "") -> Lease:
        """Count ``weight`` prompts as in flight on ``replica``, until the lease is released."""
        r = self._replicas[replica]
        r.inflight += weight
        r.routed += weight
        self._inflight_of[replica, model] += weight
        return Lease(self, r, model, weight)

    # Health

    def needed(self) -> int:
        """How many replicas have to be ready for the fleet to go on."""
        if self.min_replicas == "all":
            staying = sum(r.state is not ReplicaState.DRAINING for r in self)
            return max(1, staying)
        return self.min_replicas

    def enough(self) -> bool:
        return len(self.routable()) >= self.needed()

    def healthy(self, now_s: float) -> bool:
        """Whether ``/health`` is 200.

        It is once every replica has been ready, or the start has timed out with enough of them;
        from then on while enough are.
        """
        if not self._been_complete:
            staying = [r for r in self if r.state is not ReplicaState.DRAINING]
            complete = bool(staying) and all(r.was_ready for r in staying)
            late = now_s - self._started_at_s >= self.start_timeout_s
            self._been_complete = complete or (late and self.enough())
        return self._been_complete and self.enough()

    def missing(self) -> tuple[str, ...]:
        """One line for each replica that should be ready and is not: id, url, state, reason."""
        return tuple(
            f"{r.id} ({r.url}) is {r.state}: "
            f"{r.excluded_reason or r.last_error or 'has not been looked at yet'}"
            for r in self
            if r.state not in (ReplicaState.READY, ReplicaState.DRAINING)
        )

    # What traffic saw. ``epoch`` is that of the lease or call; an older one is not about this life.

    def answered(self, replica: ReplicaId, now_s: float) -> Transitions:
        """A generation or a call that needs the engine came back: a sign of life."""
        r = self._replicas.get(replica)
        if r is not None:
            r._slow_probes = 0
            r._waiting_since_s = now_s
        return NONE

    def connection_refused(
        self, replica: ReplicaId, detail: str, now_s: float, epoch: int | None = None
    ) -> Transitions:
        """Nothing listens there, or it cannot be reached."""
        return self._doubt(replica, Cause.REFUSED, detail, now_s, epoch)

    def connection_lost(
        self, replica: ReplicaId, detail: str, now_s: float, epoch: int | None = None
    ) -> Transitions:
        """A connection broke before a whole answer came."""
        return self._doubt(replica, "lost", detail, now_s, epoch)

    def not_vllm(
        self, replica: ReplicaId, code: str, detail: str, now_s: float, epoch: int | None = None
    ) -> Transitions:
        """An answer from something in between: a rejected token, an edge's HTML."""
        return self._doubt(replica, code, detail, now_s, epoch)

    def engine_dead(
        self, replica: ReplicaId, detail: str, now_s: float, epoch: int | None = None
    ) -> Transitions:
        """vLLM says its engine is dead: there is nothing to wait for."""
        r = self._current(replica, epoch)
        if r is None or r.state in (ReplicaState.DOWN, ReplicaState.DRAINING):
            return NONE
        return self._move(r, ReplicaState.DOWN, "engine_dead", detail, now_s)

    def adapter_lost(
        self, replica: ReplicaId, name: AdapterName, now_s: float, epoch: int | None = None
    ) -> Transitions:
        """It answered 404 for a name it is believed to hold."""
        r = self._current(replica, epoch)
        if r is None or name not in r.adapters:
            return NONE
        return self.must_rejoin(
            replica, "lost_adapter", f"answered 404 for {name}, which it should hold", now_s
        )

    # What probes saw

    def probe_sent(self, replica: ReplicaId, now_s: float) -> None:
        """Starts the stall clock, unless an earlier probe is still unanswered."""
        r = self._replicas.get(replica)
        if r is not None and not r._probing:
            r._probing = True
            r._waiting_since_s = now_s

    def probe_ok(self, replica: ReplicaId, probe: Probe, now_s: float) -> Transitions:
        """A deep probe was answered in full.

        Feed it also the look that begins a catch-up: it shows whether this is the process we knew.
        """
        r = self._replicas.get(replica)
        if r is None:
            return NONE
        r._slow_probes = 0
        r._probing = False
        r._waiting_since_s = now_s
        if probe.sent_at_s < r.since_s:
            return NONE
        if r.base_models != probe.base_models:
            r.base_models = probe.base_models
            self._changed()
        if probe.sent_at_s >= r._paused_since_s:
            r.paused = probe.paused
        match r.state:
            case ReplicaState.DRAINING:
                return NONE
            case ReplicaState.DOWN:
                if not r._excluded_for_good:
                    r.excluded_reason = ""  # whoever was told the reason may have mended it
                self._recognise(r, probe)
                return self._move(r, ReplicaState.JOINING, r.error_code, "answers again", now_s)
            case ReplicaState.JOINING:
                self._recognise(r, probe)
                return NONE
        code, detail = self._differs(r, probe)
        if code:
            if code == "restarted":
                self._recognise(r, probe)
            return self._move(r, ReplicaState.JOINING, code, detail, now_s)
        if r.state is ReplicaState.READY:
            return NONE
        if r.missed_change:
            return self._move(
                r, ReplicaState.JOINING, "missed_change", "a change was made without it", now_s
            )
        if now_s < r.retry_at_s and len(self.routable()) >= self._suspects():
            return NONE
        return self._move(r, ReplicaState.READY, "", "answers again", now_s)

    def probe_failed(
        self, replica: ReplicaId, code: str, detail: str, sent_at_s: float, now_s: float
    ) -> Transitions:
        """A probe was not answered, or not by a living vLLM.

        ``code`` is the value of a ``Cause`` where there was no answer, else a word for the answer
        (``token_rejected``, ``edge_404``); for a dead engine call ``engine_dead`` instead.
        """
        r = self._replicas.get(replica)
        if r is None or sent_at_s < r.since_s:
            return NONE
        if r.state in (ReplicaState.DOWN, ReplicaState.DRAINING):
            self._note(r, code, detail)
            return NONE
        if code in _SLOW:
            if r.paused or self._pause is not False:
                return NONE
            r._slow_probes += 1
            if r._slow_probes < SLOW_PROBES:
                return NONE
            others = any(other is not r for other in self.routable())
            if r.state is ReplicaState.READY and not others:
                return NONE
        if r.state is ReplicaState.READY:
            return self._move(r, ReplicaState.SUSPECT, code, detail, now_s)
        return self._move(r, ReplicaState.DOWN, code, detail, now_s)

    def tick(self, now_s: float) -> Transitions:
        """Find the replicas whose engine stands still. A catch-up has a deadline of its own."""
        if self._pause is not False:
            return NONE
        out: list[Transition] = []
        for r in self:
            waited_s = now_s - r._waiting_since_s
            if (
                r._probing
                and not r.paused
                and waited_s >= self.stall_s
                and r.state in (ReplicaState.READY, ReplicaState.SUSPECT)
            ):
                detail = f"no sign of life for {waited_s:.0f} s"
                out += self._move(r, ReplicaState.DOWN, "stalled", detail, now_s)
        return tuple(out)

    # What the fleet did

    def hold(
        self, replicas: Collection[ReplicaId], name: AdapterName, path: str, now_s: float
    ) -> None:
        """A publication committed: these replicas hold ``name`` and may serve it."""
        for r in self._known(replicas):
            r.adapters[name] = path
            r._held_since_s[name] = now_s
        self._changed()

    def close(self, name: AdapterName, replicas: Collection[ReplicaId] | None = None) -> None:
        """Nothing more for ``name`` there (on all replicas, if none are given)."""
        for r in self._known(replicas):
            r.adapters.pop(name, None)
            r._held_since_s.pop(name, None)
        self._changed()

    def change_committed(self, held_by: Collection[ReplicaId], now_s: float) -> Transitions:
        """The desired state changed and only ``held_by`` have followed: the rest must rejoin."""
        out: list[Transition] = []
        for r in self:
            if r.id in held_by:
                continue
            r.missed_change = True
            if r.state is ReplicaState.READY:
                out += self._move(
                    r, ReplicaState.JOINING, "missed_change", "a change was made without it", now_s
                )
        return tuple(out)

    def weights_changed_in_place(self, held_by: Collection[ReplicaId], now_s: float) -> Transitions:
        """Other weights under the same name on ``held_by``: who missed it is out for good."""
        self.weights_changed = True
        for r in self:
            r._weights_ok = r._weights_ok and r.id in held_by
            self._settle_exclusion(r)
        return self.change_committed(held_by, now_s)

    def exclude(
        self,
        replica: ReplicaId,
        code: str,
        reason: str,
        now_s: float,
        *,
        for_good: bool = False,
    ) -> Transitions:
        """Out until it was down and is back, perhaps with other options; or for the whole run."""
        r = self._replicas.get(replica)
        if r is None or r.state is ReplicaState.DRAINING:
            return NONE
        out = self.must_rejoin(replica, code, reason, now_s)
        r.excluded_reason = reason[:DETAIL_CHARS]
        r._excluded_for_good = for_good
        return out

    def must_rejoin(self, replica: ReplicaId, code: str, detail: str, now_s: float) -> Transitions:
        """It is not in the fleet's state (dropped by a publication, stranded, restarted)."""
        r = self._replicas.get(replica)
        if r is None or r.state in (ReplicaState.DOWN, ReplicaState.DRAINING):
            return NONE
        if r.state is ReplicaState.JOINING:
            self._new_life(r, now_s)
            self._note(r, code, detail)
            return NONE
        return self._move(r, ReplicaState.JOINING, code, detail, now_s)

    def expect_paused(self, paused: bool | None, now_s: float) -> None:
        """Whether ready replicas should be really paused; None while a pause or resume is on.

        A ready replica that a later probe finds otherwise has to rejoin. No stall is seen while
        this is not False.
        """
        if self._pause is not False and paused is False:
            for r in self:
                r._waiting_since_s = now_s
        self._pause = paused
        self._pause_since_s = now_s

    def set_paused(self, replicas: Collection[ReplicaId], paused: bool, now_s: float) -> None:
        """These replicas answered a pause or a resume."""
        for r in self._known(replicas):
            r.paused = paused
            r._paused_since_s = now_s
            r._waiting_since_s = now_s

    def marked(self, replica: ReplicaId, identity: str | None, now_s: float) -> None:
        """The process carries this marker now.

        Say None before writing another marker: a probe that reads the new one before it is known
        here would take the process for a restarted one.
        """
        for r in self._known((replica,)):
            r.identity = identity
            r._marked_at_s = now_s

    def cache_cleared(self, replicas: Collection[ReplicaId], clears: int) -> None:
        """These replicas have seen ``clears`` clears of the prefix cache."""
        for r in self._known(replicas):
            r.cache_clears = clears

    # Catching up

    def to_catch_up(self, now_s: float) -> tuple[Replica, ...]:
        """Replicas whose catch-up should begin now."""
        return tuple(
            r
            for r in self
            if r.state is ReplicaState.JOINING
            and not r._catching_up
            and not r.excluded_reason
            and now_s >= r.retry_at_s
        )

    def catch_up_started(self, replica: ReplicaId) -> int:
        """Call before the first look of a catch-up; hand the epoch back to ``joined``."""
        r = self._replicas[replica]
        r._catching_up = True
        r.missed_change = False
        return r.epoch

    def joined(
        self,
        replica: ReplicaId,
        epoch: int,
        adapters: Mapping[AdapterName, str],
        now_s: float,
        *,
        identity: str | None = None,
        cache_clears: int = 0,
    ) -> Transitions:
        """A catch-up is done and the replica holds ``adapters``: ready.

        Nothing happens if the catch-up was for an earlier epoch, or if something was committed
        meanwhile: then the replica is joining still, and another catch-up is due at once.
        """
        r = self._current(replica, epoch)
        if r is None or r.state is not ReplicaState.JOINING:
            return NONE
        r._catching_up = False
        # The catch-up's own looks were answered; an older probe says nothing now.
        r._probing = False
        if r.missed_change or r.excluded_reason:
            return NONE
        r.adapters = dict(adapters)
        r._held_since_s = dict.fromkeys(adapters, now_s)
        r.identity = identity
        r._marked_at_s = now_s
        r.cache_clears = cache_clears
        return self._move(r, ReplicaState.READY, "", "caught up", now_s)

    def catch_up_failed(
        self, replica: ReplicaId, epoch: int, code: str, detail: str, now_s: float
    ) -> Transitions:
        """A catch-up gave up. The next is due after a growing wait."""
        r = self._current(replica, epoch)
        if r is None or r.state is not ReplicaState.JOINING:
            return NONE
        r._catching_up = False
        self._note(r, code, detail)
        self._back_off(r, now_s)
        return NONE

    # Inside

    def _current(self, replica: ReplicaId, epoch: int | None) -> Replica | None:
        r = self._replicas.get(replica)
        return r if r is not None and epoch in (None, r.epoch) else None

    def _known(self, replicas: Collection[ReplicaId] | None) -> Iterator[Replica]:
        if replicas is None:
            return iter(self)
        return (self._replicas[id] for id in replicas if id in self._replicas)

    def _doubt(
        self, replica: ReplicaId, code: str, detail: str, now_s: float, epoch: int | None
    ) -> Transitions:
        """Traffic met something bad. What is suspect already stays so: a probe decides."""
        r = self._current(replica, epoch)
        if r is None:
            return NONE
        if r.state is ReplicaState.READY:
            return self._move(r, ReplicaState.SUSPECT, code, detail, now_s)
        if r.state is ReplicaState.JOINING:
            return self._move(r, ReplicaState.DOWN, code, detail, now_s)
        return NONE

    def _differs(self, r: Replica, probe: Probe) -> tuple[str, str]:
        """Code and words for what the probe found other than we left it; empty if all is well."""
        if (
            r.identity is not None
            and probe.identity != r.identity
            and probe.sent_at_s >= r._marked_at_s
        ):
            return (
                "restarted",
                f"its marker is {probe.identity!r}, not {r.identity!r}: it restarted",
            )
        for name, path in r.adapters.items():
            # A name that was committed after the probe was sent need not be in its listing.
            if probe.sent_at_s < r._held_since_s[name]:
                continue
            if name not in probe.listed:
                return "lost_adapter", f"does not list {name} any more"
            if probe.listed[name] != path:
                return "lost_adapter", f"lists {name} from {probe.listed[name]}, not from {path}"
        if (
            self._pause is not None
            and probe.paused != self._pause
            and probe.sent_at_s >= max(self._pause_since_s, r._paused_since_s)
        ):
            return "pause_differs", "is paused" if probe.paused else "is not paused as it should be"
        return "", ""

    def _recognise(self, r: Replica, probe: Probe) -> None:
        """Is this the process we knew? What cannot show our marker is not."""
        if r.identity is None or probe.identity != r.identity:
            r.identity = None
            r.cache_clears = 0
            r._weights_ok = not self.weights_changed
        self._settle_exclusion(r)

    def _settle_exclusion(self, r: Replica) -> None:
        if not r._weights_ok and not r.excluded_reason:
            r.excluded_reason = OTHER_WEIGHTS

    def _note(self, r: Replica, code: str, detail: str) -> None:
        r.error_code = code
        r.last_error = f"{code}: {detail}"[:DETAIL_CHARS] if code else ""

    def _back_off(self, r: Replica, now_s: float) -> None:
        r._flaps = min(r._flaps + 1, 16)
        r.retry_at_s = now_s + min(MAX_BACK_OFF_S, 2.0**r._flaps - 1)

    def _suspects(self) -> int:
        return sum(r.state is ReplicaState.SUSPECT for r in self)

    def _new_life(self, r: Replica, now_s: float) -> None:
        r.epoch += 1
        r.since_s = now_s
        r._catching_up = False
        r.adapters = {}
        r._held_since_s = {}

    def _move(
        self, r: Replica, new: ReplicaState, code: str, detail: str, now_s: float
    ) -> Transitions:
        old = r.state
        if new not in EDGES[old]:
            raise AssertionError(f"no edge from {old} to {new} ({r.id}, {code}: {detail})")
        if old is ReplicaState.READY and new is not ReplicaState.DRAINING:
            if now_s - r.since_s < FLAP_S:
                self._back_off(r, now_s)
            else:
                r._flaps = 0
                r.retry_at_s = now_s
        r.state = new
        r.since_s = now_s
        r._slow_probes = 0
        if new in (ReplicaState.DOWN, ReplicaState.JOINING):
            self._new_life(r, now_s)
        if new is ReplicaState.READY:
            r.was_ready = True
            r.missed_change = False
            self._note(r, "", "")
        elif code:
            self._note(r, code, detail)
        self._changed()
        return (Transition(r.id, old, new, code, detail),)

    def _give_back(self, lease: Lease) -> None:
        lease.replica.inflight -= lease.weight
        key = (lease.replica.id, lease.model)
        self._inflight_of[key] -= lease.weight
        if self._inflight_of[key] <= 0:
            del self._inflight_of[key]

    def _changed(self) -> None:
        self._routable = None

    def _rebuild(self) -> None:
        self._routable = tuple(r for r in self if r.state is ReplicaState.READY)
        by_model: dict[str, list[Replica]] = {}
        for r in self._routable:
            for name in {*r.adapters, *r.base_models}:
                by_model.setdefault(name, []).append(r)
        self._by_model = {name: tuple(replicas) for name, replicas in by_model.items()}
