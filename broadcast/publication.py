"""One publication: a machine that brings one adapter to every replica, or to none.

``step(state, event) -> (state, commands)``; a pair of phase and event that is not in the table at
the end of the file is a bug and raises. The rules:

1. It commits only when every replica that is left lists the name with our path, seen by looking
   after the last load, and they are enough. Otherwise the name ends up nowhere.
2. A name that was there before never counts as loaded: it is unloaded, the prefix cache is cleared
   until the replica says it is (vLLM keys that cache by name), and then ours is loaded.
3. "Not visible yet" is retried on that replica alone. Nothing is done twice without a wait.
4. An answer that never came is unknown, and is resolved by looking.
5. A replica that dies, or is not done at the deadline, is dropped: it leaves rotation and must
   rejoin, which sweeps whatever it holds. The deadline's clock stands while the fleet is low.
6. A refusal rolls back. Nothing is loaded any more; each call that is out is awaited; the name is
   unloaded wherever it may have landed. vLLM serialises loads and unloads of one name
   (``lora_resolver_lock``), so an unload that was answered also covers a load that timed out.
7. An unload that fails for good strands that replica: it is named, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from broadcast.answers import LoadOutcome, UnloadOutcome
from routing.ids import AdapterName, ReplicaId

GROWTH = 1.5
"""Growth of the wait between looks past the learned lag: 6 looks in the first 5 s."""
QUIET_AFTER_S = 60.0
QUIET_S = 32.0
"""A mount that restarts its memory of a miss at each look would never show the files to one that
keeps looking. hf-mount before its PR 226 remembered a miss for 30 s: after a minute of blindness
one wait is longer than that."""
TRIES = 3
"""Tries of a look or an unload where no deadline ends them: with the default control timeout of
60 s three minutes at worst, and TRL waits 30."""
WORDS = 2048
"""Bound of a replica's text in our error, in characters."""


class Phase(StrEnum):
    LOADING = "loading"
    VERIFYING = "verifying"
    ROLLING_BACK = "rolling_back"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    STRANDED = "stranded"

    @property
    def final(self) -> bool:
        return self in (Phase.COMMITTED, Phase.ROLLED_BACK, Phase.STRANDED)


class At(StrEnum):
    """Where one replica is. In the first four a call to it is out."""

    LOOKING = "looking"
    UNLOADING = "unloading"
    RESETTING = "resetting"
    LOADING = "loading"
    WAITING = "waiting"
    LOADED = "loaded"
    VERIFIED = "verified"
    CLEAN = "clean"
    STRANDED = "stranded"
    DROPPED = "dropped"


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Look:
    """Ask for the list of adapters."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Unload:
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Reset:
    """Clear the prefix cache, running requests included."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Wait:
    """Come back with ``Waited`` after ``after_s``."""

    replica: ReplicaId
    after_s: float


@dataclass(frozen=True, slots=True)
class Drop:
    """Take it out of rotation; it must rejoin. What is out to it is not awaited."""

    replica: ReplicaId
    reason: str


Command = Load | Look | Unload | Reset | Wait | Drop
Commands = tuple[Command, ...]


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadAnswered:
    """``status`` is 0 and ``text`` the cause where no answer came.

    ``path`` is what the load named where that is not the publication's own, because the files were
    brought to that replica.
    """

    replica: ReplicaId
    outcome: LoadOutcome
    status: int
    text: str
    now_s: float
    path: str = ""


@dataclass(frozen=True, slots=True)
class Looked:
    """``listed`` maps each adapter's name to the path it was loaded from; None: no answer."""

    replica: ReplicaId
    listed: Mapping[str, str] | None
    now_s: float


@dataclass(frozen=True, slots=True)
class Unloaded:
    replica: ReplicaId
    outcome: UnloadOutcome
    text: str
    now_s: float


@dataclass(frozen=True, slots=True)
class ResetAnswered:
    """``done`` only if the replica said ``"success": true``."""

    replica: ReplicaId
    done: bool
    text: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Waited:
    replica: ReplicaId
    now_s: float


@dataclass(frozen=True, slots=True)
class ReplicaDown:
    replica: ReplicaId
    reason: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Deadline:
    """The alarm for ``deadline_s``. One that rings early, or while the clock stands, is ignored."""

    now_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The shell will not wait longer, whatever the clock says: the deadline is now."""

    now_s: float


@dataclass(frozen=True, slots=True)
class FleetLow:
    """Fewer replicas answer than are needed: the clock of the deadline stands."""

    now_s: float


@dataclass(frozen=True, slots=True)
class FleetBack:
    now_s: float


Answered = LoadAnswered | Looked | Unloaded | ResetAnswered | Waited | ReplicaDown
Event = Answered | Deadline | GiveUp | FleetLow | FleetBack


# --- state --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """``min_replicas`` is None for "all of them". Seconds, as in the settings of the same names."""

    load_timeout_s: float = 300.0
    load_retry_s: float = 0.25
    load_retry_max_s: float = 2.0
    min_replicas: int | None = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """One replica's share."""

    at: At
    then: At = At.LOADING
    """While waiting: what follows."""
    holds: bool = False
    """The name may be there, ours or another's. Only an unload that was answered clears it."""
    old: bool = False
    """What is there under the name is, or may be, from before."""
    stale: bool = False
    """The prefix cache may hold blocks of other weights under the name."""
    lag_s: float = 0.0
    """Learned: before it no look can succeed."""
    wait_s: float = 0.0
    """The next wait between two tries."""
    quiet_from_s: float = 0.0
    """Since when looks have followed each other closely."""
    attempts: int = 0
    """Loads sent."""
    asked_s: float = 0.0
    """When the last of them was."""
    missed_at_s: float | None = None
    """When the first load was sent that did not see the files."""
    tries: int = 0
    """Failed tries in a row of what is being done."""
    losses: int = 0
    """How often it had loaded the name and did not list it afterwards."""
    path: str = ""
    """What the last load named, where it is not the publication's own path."""
    outcome: LoadOutcome | None = None
    """Of the last load."""
    text: str = ""
    """The last answer that was not what we hoped for; after a drop, why."""
    loaded_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why nothing was published: what the trainer is told, once."""

    status: int
    code: str
    message: str
    culprit: ReplicaId | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """The state. ``needed`` replicas must be left; ``deadline_s`` is None while nothing ticks."""

    name: AdapterName
    path: str
    rules: Rules
    started_s: float
    now_s: float
    needed: int
    deadline_s: float | None
    left_s: float = 0.0
    late: bool = False
    """The deadline has passed."""
    phase: Phase = Phase.LOADING
    replicas: Mapping[ReplicaId, Progress] = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def left(self) -> list[ReplicaId]:
        return [r for r, p in self.replicas.items() if p.at is not At.DROPPED]


Step = tuple[Publication, Commands]


@dataclass(frozen=True, slots=True)
class PublicationResult:
    """How it ended. ``status``, ``code`` and ``message`` are the answer to the trainer.

    ``visible_s`` is, for each replica that loaded, the time from the start to its first success.
    ``missed_s`` is the same for the first load that did not see the files, where one did not.
    ``culprit`` is the replica whose answer the error is about, where it is one replica's.
    ``dropped`` must leave rotation and rejoin, with the reason; ``stranded`` is part of it.
    """

    name: AdapterName
    outcome: Phase
    seconds: float
    attempts: Mapping[ReplicaId, int]
    visible_s: Mapping[ReplicaId, float]
    status: int
    code: str
    message: str
    culprit: ReplicaId | None
    loaded_on: tuple[ReplicaId, ...]
    dropped: Mapping[ReplicaId, str]
    stranded: tuple[ReplicaId, ...]
    missed_s: Mapping[ReplicaId, float] = field(default_factory=dict)
    paths: Mapping[ReplicaId, str] = field(default_factory=dict)
    """What each replica in ``loaded_on`` lists the name with."""

    @property
    def committed(self) -> bool:
        return self.outcome is Phase.COMMITTED


def begin(
    name: AdapterName,
    path: str,
    targets: Collection[ReplicaId],
    rules: Rules,
    *,
    now_s: float,
    listed_before: Mapping[ReplicaId, Mapping[str, str]] | None = None,
    learned_lag_s: Mapping[ReplicaId, float] | None = None,
    used_before: Collection[ReplicaId] = (),
) -> Step:
    """Start a publication of ``path`` under ``name`` on ``targets``.

    ``listed_before`` is what replicas list now; one that is missing there is asked first.
    ``used_before`` are replicas that served the name before, though they may not list it now: their
    prefix cache is cleared before the load.
    """
    needed = len(targets) if rules.min_replicas is None else rules.min_replicas
    state = Publication(
        name, path, rules, now_s, now_s, max(1, needed), deadline_s=now_s + rules.load_timeout_s
    )
    if len(targets) < state.needed:
        text = f"{len(targets)} replicas are there, {state.needed} are needed"
        return _roll_back(state, Failure(504, "replicas_lost", _about(state, text)))
    commands: Commands = ()
    for target in targets:
        lag_s = (learned_lag_s or {}).get(target, 0.0)
        progress = Progress(
            At.LOOKING,
            old=True,
            holds=True,
            stale=target in used_before,
            lag_s=lag_s,
            wait_s=rules.load_retry_s,
            quiet_from_s=now_s + lag_s,
        )
        state = _put(state, target, progress)
        listed = (listed_before or {}).get(target)
        state, more = _ask(state, target) if listed is None else _seen(state, target, listed)
        commands += more
    return state, commands


def step(state: Publication, event: Event) -> Step:
    """The next state, and what to do. Raises for a pair that cannot be."""
    handler = TABLE.get((state.phase, type(event)))
    state = replace(state, now_s=event.now_s)
    replica = getattr(event, "replica", None)
    if replica is not None and _is_dropped(state, replica):
        return state, ()  # its last words, on the way when it was dropped
    if handler is None:
        raise ImpossibleEventError(f"{type(event).__name__} in {state.phase}: {event}")
    return handler(state, event)


def _is_dropped(state: Publication, replica: ReplicaId) -> bool:
    return not state.phase.final and state.replicas[replica].at is At.DROPPED


def result(state: Publication) -> PublicationResult:
    """The outcome of a publication whose phase is final."""
    if not state.phase.final:
        raise ImpossibleEventError(f"no result while {state.phase}")
    replicas = state.replicas.items()
    stranded = tuple(r for r, p in replicas if p.at is At.STRANDED)
    status, code, culprit = 200, "", None
    message = f"Success: LoRA adapter '{state.name}' added successfully."  # vLLM's own words
    if state.failure is not None:
        failure = state.failure
        status, code, message = failure.status, failure.code, failure.message
        culprit = failure.culprit
    if stranded:
        status, code = 500, "adapter_stranded"
        where = "; ".join(f"{r}: {state.replicas[r].text}" for r in stranded)
        message = f"{message} It could not be unloaded everywhere and may still be on {where}"
    return PublicationResult(
        name=state.name,
        outcome=state.phase,
        seconds=state.now_s - state.started_s,
        attempts={r: p.attempts for r, p in replicas},
        visible_s={
            r: p.loaded_at_s - state.started_s for r, p in replicas if p.loaded_at_s is not None
        },
        status=status,
        code=code,
        message=message,
        culprit=culprit,
        loaded_on=tuple(r for r, p in replicas if p.at is At.VERIFIED),
        dropped={r: p.text for r, p in replicas if p.at in (At.DROPPED, At.STRANDED)},
        stranded=stranded,
        missed_s={
            r: p.missed_at_s - state.started_s for r, p in replicas if p.missed_at_s is not None
        },
        paths={r: p.path or state.path for r, p in replicas if p.at is At.VERIFIED},
    )


class ImpossibleEventError(RuntimeError):
    """An event that cannot be in this phase: a bug of the caller or of the table."""


# --- LOADING and VERIFYING ----------------------------------------------------------------------


def _load_answered(state: Publication, event: LoadAnswered) -> Step:
    replica, progress = event.replica, _out(state, event.replica, At.LOADING)
    text = f"{event.status} {event.text}" if event.status else event.text
    path = event.path or progress.path
    progress = replace(progress, outcome=event.outcome, text=_bounded(text), path=path)
    if event.outcome is LoadOutcome.NOT_VISIBLE and progress.missed_at_s is None:
        progress = replace(progress, missed_at_s=progress.asked_s)
    state = _put(state, replica, progress)
    match event.outcome:
        case LoadOutcome.LOADED:
            return _loaded(state, replica)
        case LoadOutcome.NOT_VISIBLE | LoadOutcome.NEVER_RECEIVED:
            return _retry(state, replica, At.LOADING)
        case LoadOutcome.ALREADY | LoadOutcome.UNKNOWN:
            state = _put(state, replica, replace(progress, at=At.LOOKING, holds=True))
            return _ask(state, replica)
        case LoadOutcome.ENGINE_DEAD | LoadOutcome.NOT_VLLM:
            return _drop(state, replica, f"{event.outcome}: {text}")
        case LoadOutcome.REFUSED:
            # 404 would tell TRL that the endpoint is missing; below 400 is no refusal to pass on.
            status = event.status if event.status >= 400 and event.status != 404 else 502
            message = _about(state, f"replica {replica} refused it: {_bounded(text)}")
            failure = Failure(status, "adapter_refused", message, replica)
        case LoadOutcome.ENDPOINT_MISSING:
            failure = _no_endpoint(state, replica)
    return _roll_back(_clean(state, replica), failure)


def _looked(state: Publication, event: Looked) -> Step:
    replica, progress = event.replica, _out(state, event.replica, At.LOOKING)
    if event.listed is not None:
        return _seen(state, replica, event.listed)
    progress = replace(progress, tries=progress.tries + 1, text="no answer to /v1/models")
    state = _put(state, replica, progress)
    if state.late and progress.tries >= TRIES:
        return _drop(state, replica, "no answer to /v1/models")
    return _retry(state, replica, At.LOOKING)


def _seen(state: Publication, replica: ReplicaId, listed: Mapping[str, str]) -> Step:
    """What to do about a replica, given its list."""
    progress = replace(state.replicas[replica], tries=0)
    path = listed.get(state.name)
    if path == (progress.path or state.path) and not progress.old:
        return _loaded(_put(state, replica, replace(progress, holds=True)), replica)
    if state.phase is Phase.VERIFYING:
        # It had answered that it is loaded. Restarted, or two registries behind one address.
        progress = replace(progress, losses=progress.losses + 1)
        if state.late or progress.losses >= TRIES:
            return _drop(state, replica, "it does not list the adapter that it had loaded")
        state = _back_to_loading(state)
    if path is not None:
        taken = replace(progress, at=At.UNLOADING, holds=True, old=True, stale=True)
        first = progress.old and progress.attempts == 0
        state = _put(state, replica, taken)
        return _ask(state, replica) if first else _retry(state, replica, At.UNLOADING)
    # A load that timed out may still land: only where none was sent is nothing there.
    holds = progress.holds and progress.attempts > 0
    state = _put(state, replica, replace(progress, old=False, holds=holds))
    if progress.attempts:
        return _retry(state, replica, At.LOADING)
    return _advance(state, replica)


def _unloaded(state: Publication, event: Unloaded) -> Step:
    replica, progress = event.replica, _out(state, event.replica, At.UNLOADING)
    state = _put(state, replica, replace(progress, text=_bounded(event.text)))
    match event.outcome:
        case UnloadOutcome.GONE:
            state = _put(state, replica, replace(progress, old=False, holds=False))
            return _advance(state, replica)
        case UnloadOutcome.UNKNOWN | UnloadOutcome.NEVER_RECEIVED:
            return _retry(state, replica, At.UNLOADING)
        case UnloadOutcome.ENDPOINT_MISSING:
            return _roll_back(_clean(state, replica), _no_endpoint(state, replica))
        case UnloadOutcome.ENGINE_DEAD | UnloadOutcome.NOT_VLLM | UnloadOutcome.REFUSED:
            text = f"cannot take the name over, unload: {event.outcome}: {event.text}"
            return _drop(state, replica, text)


def _reset_answered(state: Publication, event: ResetAnswered) -> Step:
    replica, progress = event.replica, _out(state, event.replica, At.RESETTING)
    if not event.done:
        text = f"prefix cache not cleared: {_bounded(event.text)}"
        state = _put(state, replica, replace(progress, text=text))
        return _retry(state, replica, At.RESETTING)
    return _advance(_put(state, replica, replace(progress, stale=False)), replica)


def _advance(state: Publication, replica: ReplicaId) -> Step:
    """The name is not there: clear the cache if it may be stale, else load, not before the lag."""
    progress = state.replicas[replica]
    if progress.stale:
        return _ask(_put(state, replica, replace(progress, at=At.RESETTING)), replica)
    early_s = state.started_s + progress.lag_s - state.now_s
    if early_s > 0:
        waiting = replace(progress, at=At.WAITING, then=At.LOADING)
        return _put(state, replica, waiting), (Wait(replica, early_s),)
    return _ask(_put(state, replica, replace(progress, at=At.LOADING)), replica)


def _loaded(state: Publication, replica: ReplicaId) -> Step:
    progress = state.replicas[replica]
    verified = state.phase is Phase.VERIFYING
    first = state.now_s if progress.loaded_at_s is None else progress.loaded_at_s
    done = replace(
        progress,
        at=At.VERIFIED if verified else At.LOADED,
        holds=True,
        tries=0,
        loaded_at_s=first,
    )
    return _settle(_put(state, replica, done))


def _waited(state: Publication, event: Waited) -> Step:
    progress = state.replicas[event.replica]
    if progress.at is not At.WAITING:
        return state, ()  # the wait was overtaken by a roll back
    return _ask(_put(state, event.replica, replace(progress, at=progress.then)), event.replica)


def _went_down(state: Publication, event: ReplicaDown) -> Step:
    return _drop(state, event.replica, event.reason)


def _deadline(state: Publication, event: Deadline) -> Step:
    if state.deadline_s is None or state.now_s < state.deadline_s:
        return state, ()
    return _give_up(state, GiveUp(event.now_s))


def _give_up(state: Publication, event: GiveUp) -> Step:
    state = replace(state, late=True, deadline_s=None)
    if state.phase is Phase.VERIFYING:
        return state, ()  # the looks that are out are awaited, and bounded by TRIES from here on
    commands: Commands = ()
    for replica, progress in state.replicas.items():
        if progress.at not in (At.LOADED, At.DROPPED):
            reason = f"not loaded at the deadline: {progress.text or 'no answer'}"
            state, more = _dropped(state, replica, reason)
            commands += more
    state, more = _settle(state)
    return state, commands + more


def _fleet_low(state: Publication, event: FleetLow) -> Step:
    if state.deadline_s is None:
        return state, ()
    return replace(state, left_s=state.deadline_s - state.now_s, deadline_s=None), ()


def _fleet_back(state: Publication, event: FleetBack) -> Step:
    if state.deadline_s is not None or state.late:
        return state, ()
    return replace(state, deadline_s=state.now_s + state.left_s), ()


def _settle(state: Publication) -> Step:
    """After any change: enough left? all loaded? all verified?"""
    left = state.left
    if len(left) < state.needed:
        return _roll_back(state, _too_few(state))
    if state.phase is Phase.VERIFYING:
        if all(state.replicas[r].at is At.VERIFIED for r in left):
            return replace(state, phase=Phase.COMMITTED, deadline_s=None), ()
        return state, ()
    if not all(state.replicas[r].at is At.LOADED for r in left):
        return state, ()
    state = replace(state, phase=Phase.VERIFYING)
    for replica in left:
        state = _put(state, replica, replace(state.replicas[replica], at=At.LOOKING))
    return state, tuple(Look(r) for r in left)


def _back_to_loading(state: Publication) -> Publication:
    """One replica lost the name again: what was verified is verified anew at the end."""
    replicas = {
        r: replace(p, at=At.LOADED) if p.at is At.VERIFIED else p for r, p in state.replicas.items()
    }
    return replace(state, phase=Phase.LOADING, replicas=replicas)


def _drop(state: Publication, replica: ReplicaId, reason: str) -> Step:
    state, commands = _dropped(state, replica, reason)
    settle = _settle_back if state.phase is Phase.ROLLING_BACK else _settle
    state, more = settle(state)
    return state, commands + more


def _dropped(state: Publication, replica: ReplicaId, reason: str) -> Step:
    progress = replace(state.replicas[replica], at=At.DROPPED, text=_bounded(reason))
    return _put(state, replica, progress), (Drop(replica, progress.text),)


def _too_few(state: Publication) -> Failure:
    gone = {r: p for r, p in state.replicas.items() if p.at is At.DROPPED}
    each = "; ".join(
        f"{r} after {p.attempts} attempts in {state.now_s - state.started_s:.1f} s: {p.text}"
        for r, p in gone.items()
    )
    text = f"{len(state.left)} of {len(state.replicas)} replicas are left, {state.needed} needed"
    blind = any(p.outcome is LoadOutcome.NOT_VISIBLE for p in gone.values())
    code = "replicas_lost"  # the shell begins again after this one alone
    if state.late:
        code = "adapter_not_visible" if blind else "adapter_timeout"
    culprit = next(iter(gone)) if len(gone) == 1 else None
    return Failure(504, code, _about(state, f"{text}: {each}"), culprit)


def _no_endpoint(state: Publication, replica: ReplicaId) -> Failure:
    text = (
        f"replica {replica} has no endpoint for it; start it with --enable-lora and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    )
    return Failure(501, "runtime_lora_disabled", _about(state, text), replica)


# --- ROLLING_BACK -------------------------------------------------------------------------------


def _roll_back(state: Publication, failure: Failure) -> Step:
    state = replace(state, phase=Phase.ROLLING_BACK, failure=failure, deadline_s=None)
    commands: Commands = ()
    for replica, progress in state.replicas.items():
        if progress.at in (At.WAITING, At.LOADED, At.VERIFIED, At.CLEAN):
            state, more = _undo(state, replica)
            commands += more
    state, more = _settle_back(state)
    return state, commands + more


def _undo(state: Publication, replica: ReplicaId) -> Step:
    """Nothing is out to this replica: unload if the name may be there."""
    progress = replace(state.replicas[replica], tries=0, wait_s=state.rules.load_retry_s)
    if not progress.holds:
        return _put(state, replica, replace(progress, at=At.CLEAN)), ()
    return _ask(_put(state, replica, replace(progress, at=At.UNLOADING)), replica)


def _straggler(state: Publication, replica: ReplicaId, holds: bool) -> Step:
    progress = state.replicas[replica]
    state = _put(state, replica, replace(progress, holds=progress.holds or holds))
    state, commands = _undo(state, replica)
    state, more = _settle_back(state)
    return state, commands + more


def _load_answered_late(state: Publication, event: LoadAnswered) -> Step:
    _out(state, event.replica, At.LOADING)
    if event.outcome in (LoadOutcome.ENGINE_DEAD, LoadOutcome.NOT_VLLM):
        return _drop(state, event.replica, f"{event.outcome}: {event.text}")
    landed = (LoadOutcome.LOADED, LoadOutcome.ALREADY, LoadOutcome.UNKNOWN)
    return _straggler(state, event.replica, event.outcome in landed)


def _looked_late(state: Publication, event: Looked) -> Step:
    progress = _out(state, event.replica, At.LOOKING)
    listed = event.listed
    if listed is not None and state.name not in listed and not progress.attempts:
        # Never there, and nothing sent: nothing to unload.
        state = _put(state, event.replica, replace(progress, holds=False))
    return _straggler(state, event.replica, listed is not None and state.name in listed)


def _reset_answered_late(state: Publication, event: ResetAnswered) -> Step:
    _out(state, event.replica, At.RESETTING)
    return _straggler(state, event.replica, False)


def _unloaded_back(state: Publication, event: Unloaded) -> Step:
    replica, progress = event.replica, _out(state, event.replica, At.UNLOADING)
    progress = replace(progress, tries=progress.tries + 1)
    if event.outcome is UnloadOutcome.GONE:
        progress = replace(progress, at=At.CLEAN, holds=False)
        return _settle_back(_put(state, replica, progress))
    if event.outcome is UnloadOutcome.ENGINE_DEAD:
        return _drop(state, replica, f"engine_dead: {event.text}")
    again = event.outcome in (UnloadOutcome.UNKNOWN, UnloadOutcome.NEVER_RECEIVED)
    if again and progress.tries < TRIES:
        return _retry(_put(state, replica, progress), replica, At.UNLOADING)
    text = _bounded(f"unload {event.outcome}: {event.text}")
    state = _put(state, replica, replace(progress, at=At.STRANDED, text=text))
    state, more = _settle_back(state)
    return state, (Drop(replica, text), *more)


def _settle_back(state: Publication) -> Step:
    ends = {p.at for p in state.replicas.values()}
    if not ends <= {At.CLEAN, At.STRANDED, At.DROPPED}:
        return state, ()
    phase = Phase.STRANDED if At.STRANDED in ends else Phase.ROLLED_BACK
    return replace(state, phase=phase), ()


def _went_down_back(state: Publication, event: ReplicaDown) -> Step:
    if state.replicas[event.replica].at is At.STRANDED:
        return state, ()  # dropped already
    return _drop(state, event.replica, event.reason)


# --- both ---------------------------------------------------------------------------------------

_CALLS: Mapping[At, Callable[[ReplicaId], Command]] = {
    At.LOOKING: Look,
    At.UNLOADING: Unload,
    At.RESETTING: Reset,
    At.LOADING: Load,
}


def _ask(state: Publication, replica: ReplicaId) -> Step:
    """Send the call that the replica's place says is out."""
    progress = state.replicas[replica]
    if progress.at is At.LOADING:
        sent = replace(progress, attempts=progress.attempts + 1, asked_s=state.now_s)
        state = _put(state, replica, sent)
    return state, (_CALLS[progress.at](replica),)


def _retry(state: Publication, replica: ReplicaId, then: At) -> Step:
    """Wait, then do it again there. Waits grow only past the learned lag."""
    progress, rules, now_s = state.replicas[replica], state.rules, state.now_s
    wait_s = progress.wait_s
    grown_s, quiet_from_s = wait_s, progress.quiet_from_s
    if now_s - state.started_s >= progress.lag_s:
        longest_s = max(rules.load_retry_max_s, rules.load_retry_s)
        grown_s = min(wait_s * GROWTH, longest_s)
    in_time = state.deadline_s is None or now_s + QUIET_S < state.deadline_s
    if then is At.LOADING and in_time and now_s - quiet_from_s >= QUIET_AFTER_S:
        wait_s = max(wait_s, QUIET_S)
        quiet_from_s = now_s + wait_s
    waiting = replace(progress, at=At.WAITING, then=then, wait_s=grown_s, quiet_from_s=quiet_from_s)
    return _put(state, replica, waiting), (Wait(replica, wait_s),)


def _ignore(state: Publication, event: Event) -> Step:
    return state, ()


def _put(state: Publication, replica: ReplicaId, progress: Progress) -> Publication:
    return replace(state, replicas={**state.replicas, replica: progress})


def _clean(state: Publication, replica: ReplicaId) -> Publication:
    """Its call was answered and is not out any more; ``_roll_back`` undoes the rest."""
    return _put(state, replica, replace(state.replicas[replica], at=At.CLEAN))


def _out(state: Publication, replica: ReplicaId, at: At) -> Progress:
    """The replica's progress, if such a call to it is out."""
    progress = state.replicas[replica]
    if progress.at is not at:
        raise ImpossibleEventError(f"{replica} is {progress.at}, and was answered as if {at}")
    return progress


def _about(state: Publication, text: str) -> str:
    return f"LoRA adapter '{state.name}' was not published: {text.rstrip('.')}."


def _bounded(text: str) -> str:
    return text if len(text) <= WORDS else text[:WORDS] + "…"


_E = TypeVar("_E", bound=Event)
_Handler = Callable[[Publication, Event], Step]
TABLE: dict[tuple[Phase, type], _Handler] = {}
"""What each event means in each phase. Nothing may happen in a final phase."""


def _on(phase: Phase, event: type[_E], handler: Callable[[Publication, _E], Step]) -> None:
    TABLE[phase, event] = handler  # type: ignore[assignment]  # the key says which event it gets


_on(Phase.LOADING, LoadAnswered, _load_answered)
_on(Phase.LOADING, Looked, _looked)
_on(Phase.LOADING, Unloaded, _unloaded)
_on(Phase.LOADING, ResetAnswered, _reset_answered)
_on(Phase.LOADING, Waited, _waited)
_on(Phase.LOADING, ReplicaDown, _went_down)
_on(Phase.LOADING, Deadline, _deadline)
_on(Phase.LOADING, GiveUp, _give_up)
_on(Phase.LOADING, FleetLow, _fleet_low)
_on(Phase.LOADING, FleetBack, _fleet_back)

_on(Phase.VERIFYING, Looked, _looked)
_on(Phase.VERIFYING, Waited, _waited)
_on(Phase.VERIFYING, ReplicaDown, _went_down)
_on(Phase.VERIFYING, Deadline, _deadline)
_on(Phase.VERIFYING, GiveUp, _give_up)
_on(Phase.VERIFYING, FleetLow, _fleet_low)
_on(Phase.VERIFYING, FleetBack, _fleet_back)

_on(Phase.ROLLING_BACK, LoadAnswered, _load_answered_late)
_on(Phase.ROLLING_BACK, Looked, _looked_late)
_on(Phase.ROLLING_BACK, Unloaded, _unloaded_back)
_on(Phase.ROLLING_BACK, ResetAnswered, _reset_answered_late)
_on(Phase.ROLLING_BACK, Waited, _waited)
_on(Phase.ROLLING_BACK, ReplicaDown, _went_down_back)
_on(Phase.ROLLING_BACK, Deadline, _ignore)
_on(Phase.ROLLING_BACK, GiveUp, _ignore)
_on(Phase.ROLLING_BACK, FleetLow, _ignore)
_on(Phase.ROLLING_BACK, FleetBack, _ignore)
