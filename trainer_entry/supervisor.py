"""The supervisor: what happens to daemon and trainer, decided from what happened to them.

``step(state, event, now_s) -> (state, commands)``; no process, socket or clock is touched here.
The shell in ``run.py`` carries the commands out and sends a ``Tick`` when ``state.deadline_s``
is over. Its rules:

- The trainer starts once, when the fleet is ready and clean. Its exit code becomes ours; death by
  signal n becomes 128 + n.
- The daemon is restarted at once when it dies, at most three times in ten minutes. Past that the
  trainer is stopped and the exit code is 1. A daemon that says "bad settings" (exit code 2) before
  the fleet was ever seen is not restarted: its line has been printed, 2 is passed on.
- SIGTERM, SIGHUP and SIGQUIT are passed on and start a clock: the trainer is killed after
  ``drain_s``, and everything is gone 5 s later. SIGINT is passed on without a clock (a checkpoint
  may take its time); the second asks with SIGTERM and starts a short clock; the third kills.
- On the way out, in this order: the trainer's leftovers end, its files reach the bucket (where
  that is asked for), the fleet is resumed, the daemon stops. Each step has an end of its own.
- Where this node does not lead (``leads`` is false) there is no daemon of ours: the trainer waits
  for the leader's, and runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from signal import Signals
from typing import Final, assert_never

MAX_RESTARTS: Final = 3
RESTART_WINDOW_S: Final = 600.0
"""Contract section 1: at most 3 restarts in 10 minutes."""
BAD_USAGE: Final = 2
START_SLACK_S: Final = 5.0
"""The daemon goes on with ``--min-replicas`` at its own ``--start-timeout-s``; it began counting
a moment later than we did."""
FOLLOWER_SLACK_S: Final = 60.0
"""Nodes of one job do not start at the same second; the leader has its whole time first."""
CLEAN_S: Final = 300.0
"""A resume, the unloads and the cache resets, each up to ``--control-timeout-s`` (60)."""
MAX_CLEANS: Final = 3
"""Calls that a dying daemon cut off and that were made again."""
LEFTOVER_S: Final = 5.0
"""What a finished trainer's own children get between SIGTERM and SIGKILL."""
KILL_WAIT_S: Final = 2.0
"""After SIGKILL only a process in an uninterruptible call is still there; we do not wait for it."""
FLUSH_S: Final = 60.0
"""hf-mount sends a file some 2 s after its close, and gives up 45 s after SIGTERM."""
RELEASE_S: Final = 5.0
STOP_SLACK_S: Final = 5.0
"""From the trainer's SIGKILL to the end of the tree: resume the fleet, stop the daemon."""
LAST_STOP_S: Final = 3.0
"""What is kept of that for the daemon's own stop (it resumes what it paused, too)."""
ESCALATE_S: Final = 5.0
"""From the SIGTERM of a second SIGINT to SIGKILL."""
PROGRESS_S: Final = 10.0
"""A waiting start says something at least so often."""

CLOCKED: Final = frozenset({Signals.SIGTERM, Signals.SIGHUP, Signals.SIGQUIT})
ENDING: Final = CLOCKED | {Signals.SIGINT}
"""Signals that end a start; others are only ever passed on."""
TO_GROUP: Final = frozenset({Signals.SIGINT, Signals.SIGQUIT})
"""A terminal sends these to the whole foreground group; ``kill`` and a cluster's SIGTERM reach one
process, and a trainer that saves a checkpoint on it needs its workers alive."""


class Phase(Enum):
    WAITING = auto()
    """For every replica; a follower: for the leader's daemon."""
    CLEANING = auto()
    TRAINING = auto()
    SWEEPING = auto()
    """The trainer is gone; its leftovers are ending."""
    FLUSHING = auto()
    """What the trainer wrote is on its way to the bucket."""
    RELEASING = auto()
    """The fleet is being resumed."""
    STOPPING = auto()
    """The daemon is being stopped."""
    DONE = auto()


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FleetSeen:
    """One look at the fleet. ``missing`` has one short text per replica that is not ready."""

    ready: bool
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cleaned:
    pass


@dataclass(frozen=True, slots=True)
class CleanRefused:
    """Somebody else is using a replica."""

    message: str


@dataclass(frozen=True, slots=True)
class CleanFailed:
    message: str


@dataclass(frozen=True, slots=True)
class CleanUnanswered:
    """The connection broke: the daemon is probably dying."""

    message: str


@dataclass(frozen=True, slots=True)
class DaemonDied:
    code: int
    """Negative: minus the signal it died of."""


@dataclass(frozen=True, slots=True)
class TrainerNotStarted:
    message: str


@dataclass(frozen=True, slots=True)
class TrainerExited:
    code: int
    """Negative: minus the signal it died of."""


@dataclass(frozen=True, slots=True)
class NoneLeft:
    """No process of the trainer is left."""


@dataclass(frozen=True, slots=True)
class FlushSeen:
    """One look at the bucket; ``done``: there is nothing left to wait for."""

    done: bool
    text: str


@dataclass(frozen=True, slots=True)
class Released:
    """The resume was answered. ``problem`` is empty if it worked."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Signalled:
    """The supervisor itself got a signal."""

    signal: Signals


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent at the latest when ``state.deadline_s`` is over."""


Event = (
    FleetSeen
    | Cleaned
    | CleanRefused
    | CleanFailed
    | CleanUnanswered
    | DaemonDied
    | TrainerNotStarted
    | TrainerExited
    | NoneLeft
    | FlushSeen
    | Released
    | Signalled
    | Tick
)


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class StartDaemon:
    pass


@dataclass(frozen=True, slots=True)
class WatchFleet:
    """Send ``FleetSeen`` again and again until one of them is ready."""


@dataclass(frozen=True, slots=True)
class CleanFleet:
    pass


@dataclass(frozen=True, slots=True)
class StartTrainer:
    pass


@dataclass(frozen=True, slots=True)
class SignalTrainer:
    signal: Signals
    group: bool
    """To its whole process group, not only to the process we started."""


@dataclass(frozen=True, slots=True)
class SweepTrainer:
    """SIGTERM to whatever the trainer left behind; send ``NoneLeft`` when all are gone."""


@dataclass(frozen=True, slots=True)
class KillTrainer:
    """SIGKILL to the trainer and to every process it started."""


@dataclass(frozen=True, slots=True)
class WatchFlush:
    """Send ``FlushSeen`` again and again until one of them is done."""


@dataclass(frozen=True, slots=True)
class ReleaseFleet:
    """Resume the replicas that are really paused; answered by ``Released``."""


@dataclass(frozen=True, slots=True)
class StopDaemon:
    pass


@dataclass(frozen=True, slots=True)
class KillDaemon:
    pass


@dataclass(frozen=True, slots=True)
class Exit:
    code: int


Command = (
    Say
    | StartDaemon
    | WatchFleet
    | CleanFleet
    | StartTrainer
    | SignalTrainer
    | SweepTrainer
    | KillTrainer
    | WatchFlush
    | ReleaseFleet
    | StopDaemon
    | KillDaemon
    | Exit
)


# --- state --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator sets."""

    start_timeout_s: float
    drain_s: float
    leads: bool = True
    """This node starts the daemon."""
    flush: bool = False
    """After the trainer, wait until the bucket has its files."""


@dataclass(frozen=True, slots=True)
class State:
    limits: Limits
    phase: Phase
    began_s: float
    deadline_s: float | None
    """When the present step has to be over; None while the trainer may run on."""
    said_s: float
    """Last line about a waiting start."""
    missing: tuple[str, ...] = ()
    restarts: tuple[float, ...] = ()
    """Times of restarts within the window; at most ``MAX_RESTARTS``."""
    fleet_seen: bool = False
    daemon_up: bool = False
    cleans: int = 0
    interrupts: int = 0
    flush_text: str = ""
    """Last line about the bucket."""
    exit_code: int | None = None
    stop_by_s: float | None = None
    """When the whole tree has to be gone."""
    trainer_killed: bool = False
    daemon_killed: bool = False


Step = tuple[State, tuple[Command, ...]]


def begin(limits: Limits, now_s: float) -> Step:
    """The first state and commands."""
    slack_s = START_SLACK_S if limits.leads else FOLLOWER_SLACK_S
    state = State(
        limits=limits,
        phase=Phase.WAITING,
        began_s=now_s,
        deadline_s=now_s + limits.start_timeout_s + slack_s,
        said_s=now_s,
        daemon_up=limits.leads,
    )
    return state, (StartDaemon(), WatchFleet()) if limits.leads else (WatchFleet(),)


def step(state: State, event: Event, now_s: float) -> Step:
    """What to do about one event. Late answers to a step that is over are ignored."""
    if state.phase is Phase.DONE:
        return state, ()
    match event:
        case Signalled():
            return _signalled(state, event.signal, now_s)
        case DaemonDied():
            return _daemon_died(state, event.code, now_s)
        case TrainerExited():
            return _trainer_exited(state, event.code, now_s)
        case Tick():
            return _tick(state, now_s)
        case FleetSeen():
            return _fleet_seen(state, event, now_s) if state.phase is Phase.WAITING else (state, ())
        case Cleaned() | CleanRefused() | CleanFailed() | CleanUnanswered():
            return _cleaned(state, event, now_s) if state.phase is Phase.CLEANING else (state, ())
        case TrainerNotStarted():
            return _fail(state, BAD_USAGE, event.message, now_s)
        case NoneLeft():
            return _flush(state, now_s) if state.phase is Phase.SWEEPING else (state, ())
        case FlushSeen():
            return (
                _flush_seen(state, event, now_s) if state.phase is Phase.FLUSHING else (state, ())
            )
        case Released():
            if state.phase is not Phase.RELEASING:
                return state, ()
            said = (Say(f"the fleet was not resumed: {event.problem}"),) if event.problem else ()
            return _then(said, _stop(state, now_s))
        case _:
            assert_never(event)


# --- the start ----------------------------------------------------------------------------------


def _fleet_seen(state: State, seen: FleetSeen, now_s: float) -> Step:
    news = seen.missing != state.missing or now_s - state.said_s >= PROGRESS_S
    state = replace(state, missing=seen.missing)
    waited_s = now_s - state.began_s
    if not seen.ready:
        if not news:
            return state, ()
        line = (
            f"waiting for {'; '.join(seen.missing)} "
            f"({waited_s:.0f} s of {state.limits.start_timeout_s:.0f} s)"
        )
        return replace(state, said_s=now_s), (Say(line),)
    state = replace(state, fleet_seen=True)
    said = Say(
        f"going on without {'; '.join(seen.missing)}"
        if seen.missing
        else f"the fleet is ready after {waited_s:.0f} s"
    )
    if not state.limits.leads:
        return _then((said,), _train(state))
    state = replace(
        state, phase=Phase.CLEANING, deadline_s=now_s + CLEAN_S, cleans=state.cleans + 1
    )
    return state, (said, CleanFleet())


def _cleaned(
    state: State, event: Cleaned | CleanRefused | CleanFailed | CleanUnanswered, now_s: float
) -> Step:
    match event:
        case Cleaned():
            return _train(state)
        case CleanRefused():
            return _fail(state, BAD_USAGE, event.message, now_s)
        case CleanFailed():
            return _fail(state, 1, f"the fleet could not be cleaned: {event.message}", now_s)
        case CleanUnanswered():
            if state.cleans >= MAX_CLEANS:
                why = f"the fleet could not be cleaned in {MAX_CLEANS} attempts: {event.message}"
                return _fail(state, 1, why, now_s)
            return _wait_again(state, now_s)


def _wait_again(state: State, now_s: float) -> Step:
    deadline_s = now_s + state.limits.start_timeout_s + START_SLACK_S
    return replace(state, phase=Phase.WAITING, deadline_s=deadline_s), (WatchFleet(),)


def _train(state: State) -> Step:
    return replace(state, phase=Phase.TRAINING, deadline_s=None), (StartTrainer(),)


# --- what goes wrong ----------------------------------------------------------------------------


def _daemon_died(state: State, code: int, now_s: float) -> Step:
    state = replace(state, daemon_up=False)
    how = _how(code)
    if state.phase is Phase.STOPPING:
        return _exit(state)
    if state.phase is Phase.RELEASING:
        said = Say(f"the daemon {how} before the fleet was resumed; the next start here resumes it")
        return _then((said,), _exit(state))
    if code == BAD_USAGE and not state.fleet_seen:
        return _exit(replace(state, exit_code=BAD_USAGE))
    recent = tuple(t for t in state.restarts if now_s - t < RESTART_WINDOW_S)
    if len(recent) < MAX_RESTARTS:
        state = replace(state, daemon_up=True, restarts=(*recent, now_s))
        said = Say(f"the daemon {how}; restart {len(state.restarts)} of {MAX_RESTARTS}")
        if state.phase is Phase.CLEANING:
            return _then((said, StartDaemon()), _wait_again(state, now_s))
        return state, (said, StartDaemon())
    why = f"the daemon {how}, the {MAX_RESTARTS + 1}th time in {RESTART_WINDOW_S / 60:.0f} minutes"
    if state.phase is Phase.TRAINING:
        said = Say(f"{why}; stopping the trainer. See the daemon's last lines for the cause")
        state = _hurry(replace(state, exit_code=1), _drained_s(state, now_s))
        return state, (said, SignalTrainer(Signals.SIGTERM, group=False))
    if state.phase is Phase.SWEEPING:  # the trainer's own code stands
        return state, (Say(why),)
    if state.phase is Phase.FLUSHING:  # nobody is left who could ask the Hub
        return _then((Say(why),), _release(state, now_s))
    return _fail(state, 1, f"{why}. See its last lines for the cause", now_s)


def _tick(state: State, now_s: float) -> Step:
    if state.deadline_s is None or now_s < state.deadline_s:
        return state, ()
    match state.phase:
        case Phase.WAITING:
            missing = "; ".join(state.missing) or "an answer of the daemon"
            why = f"no ready fleet after {now_s - state.began_s:.0f} s, still missing: {missing}"
            return _fail(state, 1, why, now_s)
        case Phase.CLEANING:
            return _fail(state, 1, f"the fleet was not clean after {CLEAN_S:.0f} s", now_s)
        case Phase.TRAINING | Phase.SWEEPING:
            return _kill_trainer(state, now_s)
        case Phase.FLUSHING:
            said = Say(f"not everything reached the bucket in time: {state.flush_text}")
            return _then((said,), _release(state, now_s))
        case Phase.RELEASING:
            said = Say("no answer about resuming the fleet in time; the daemon's stop tries again")
            return _then((said,), _stop(state, now_s))
        case Phase.STOPPING:
            return _kill_daemon(state, now_s)
        case Phase.DONE:
            return state, ()


def _signalled(state: State, signal: Signals, now_s: float) -> Step:
    if signal is Signals.SIGINT:
        state = replace(state, interrupts=state.interrupts + 1)
    if signal in CLOCKED and state.phase not in (Phase.WAITING, Phase.CLEANING):
        state = _hurry(state, _drained_s(state, now_s))
    match state.phase:
        case Phase.WAITING | Phase.CLEANING:
            if signal not in ENDING:
                return state, ()
            return _fail(state, 128 + signal, f"{signal.name} before the trainer started", now_s)
        case Phase.TRAINING if signal is Signals.SIGINT and state.interrupts == 2:
            state = _hurry(state, now_s + ESCALATE_S + STOP_SLACK_S)
            said = Say(f"second SIGINT: SIGTERM to the trainer, SIGKILL in {ESCALATE_S:.0f} s")
            return state, (said, SignalTrainer(Signals.SIGTERM, group=True))
        case Phase.TRAINING | Phase.SWEEPING if signal is Signals.SIGINT and state.interrupts > 2:
            return _kill_trainer(state, now_s)
        case Phase.TRAINING:
            return state, (SignalTrainer(signal, group=signal in TO_GROUP),)
        case Phase.FLUSHING if signal is Signals.SIGINT:
            said = Say(f"{signal.name}: not waiting for the bucket: {state.flush_text}")
            return _then((said,), _release(state, now_s))
        case Phase.STOPPING if signal is Signals.SIGINT and state.interrupts >= 2:
            return _kill_daemon(state, now_s)
        case _:  # on the way out already; the clock above is all it adds
            return state, ()


# --- the way out --------------------------------------------------------------------------------


def _trainer_exited(state: State, code: int, now_s: float) -> Step:
    if state.phase is not Phase.TRAINING:
        return state, ()
    by_s = now_s + LEFTOVER_S
    if state.trainer_killed:
        by_s = now_s + KILL_WAIT_S
    elif state.stop_by_s is not None:  # they get the rest of the trainer's time
        by_s = max(now_s, state.stop_by_s - STOP_SLACK_S)
    exit_code = state.exit_code if state.exit_code is not None else _exit_code(code)
    state = replace(state, phase=Phase.SWEEPING, exit_code=exit_code, deadline_s=by_s)
    return state, (Say(f"the trainer {_how(code)}"), SweepTrainer())


def _kill_trainer(state: State, now_s: float) -> Step:
    """First time: SIGKILL. Second time: it cannot be killed, go on without it."""
    if state.trainer_killed:
        return _then((Say("a process of the trainer cannot be killed"),), _flush(state, now_s))
    state = replace(state, trainer_killed=True, deadline_s=now_s + KILL_WAIT_S)
    said = Say(
        "the trainer's time is over: SIGKILL"
        if state.phase is Phase.TRAINING
        else "what the trainer left behind did not end: SIGKILL"
    )
    return state, (said, KillTrainer())


def _flush(state: State, now_s: float) -> Step:
    if not (state.limits.flush and state.daemon_up):
        return _release(state, now_s)
    by_s = now_s + FLUSH_S
    if state.stop_by_s is not None:
        by_s = min(by_s, state.stop_by_s - STOP_SLACK_S)
    state = replace(state, phase=Phase.FLUSHING, deadline_s=by_s, flush_text="no answer yet")
    return state, (WatchFlush(),)


def _flush_seen(state: State, seen: FlushSeen, now_s: float) -> Step:
    if seen.done:
        return _then((Say(seen.text),), _release(state, now_s))
    said = (Say(seen.text),) if seen.text != state.flush_text else ()
    return replace(state, flush_text=seen.text), said


def _release(state: State, now_s: float) -> Step:
    if not state.daemon_up:
        return _exit(state)
    by_s = now_s + RELEASE_S
    if state.stop_by_s is not None:
        by_s = min(by_s, state.stop_by_s - LAST_STOP_S)
    return replace(state, phase=Phase.RELEASING, deadline_s=by_s), (ReleaseFleet(),)


def _stop(state: State, now_s: float) -> Step:
    if not state.daemon_up:
        return _exit(state)
    by_s = _drained_s(state, now_s)
    return replace(state, phase=Phase.STOPPING, deadline_s=by_s), (StopDaemon(),)


def _kill_daemon(state: State, now_s: float) -> Step:
    """First time: SIGKILL. Second time: it cannot be killed, go without it."""
    if state.daemon_killed:
        return _exit(state)
    state = replace(state, daemon_killed=True, deadline_s=now_s + KILL_WAIT_S)
    return state, (Say("the daemon did not stop in time: SIGKILL"), KillDaemon())


def _fail(state: State, code: int, why: str, now_s: float) -> Step:
    return _then((Say(why),), _stop(replace(state, exit_code=code), now_s))


def _exit(state: State) -> Step:
    code = 1 if state.exit_code is None else state.exit_code
    return replace(state, phase=Phase.DONE, deadline_s=None, exit_code=code), (Exit(code),)


def _hurry(state: State, stop_by_s: float) -> State:
    """Set when everything has to be gone, and shorten the present step to fit.

    A later reason to stop never prolongs an earlier one.
    """
    if state.stop_by_s is not None:
        stop_by_s = min(stop_by_s, state.stop_by_s)
    kept_s = {
        Phase.TRAINING: STOP_SLACK_S,
        Phase.SWEEPING: STOP_SLACK_S,
        Phase.FLUSHING: STOP_SLACK_S,
        Phase.RELEASING: LAST_STOP_S,
    }.get(state.phase, 0.0)
    by_s = stop_by_s - kept_s
    if state.deadline_s is not None:
        by_s = min(by_s, state.deadline_s)
    return replace(state, stop_by_s=stop_by_s, deadline_s=by_s)


def _drained_s(state: State, now_s: float) -> float:
    """The end of the tree if it began to stop now, or began already."""
    by_s = now_s + state.limits.drain_s + STOP_SLACK_S
    return by_s if state.stop_by_s is None else min(by_s, state.stop_by_s)


def _then(first: tuple[Command, ...], rest: Step) -> Step:
    return rest[0], (*first, *rest[1])


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"died of {Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"died of signal {-code}"
