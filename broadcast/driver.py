"""The driver of a publication: carries out its commands and feeds the answers back, to the end.

The only place in ``broadcast`` that awaits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from broadcast.answer import Answer, Call, NoAnswer
from broadcast.answers import (
    RESET,
    LoadOutcome,
    ResetOutcome,
    classify_load,
    classify_reset,
    classify_unload,
    is_hopeless,
    read_list,
    words,
)
from broadcast.publication import (
    Command,
    Commands,
    Deadline,
    Drop,
    Event,
    FleetBack,
    FleetLow,
    GiveUp,
    Load,
    LoadAnswered,
    Look,
    Looked,
    Publication,
    PublicationResult,
    ReplicaDown,
    Reset,
    ResetAnswered,
    Unload,
    Unloaded,
    Wait,
    Waited,
    result,
    step,
)
from broadcast.transport import Deliver, Undelivered
from routing.ids import ReplicaId

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
MODELS = "/v1/models"

Notice = ReplicaDown | GiveUp | FleetLow | FleetBack
"""What the shell may tell a publication from outside, through ``notices``."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds one call to one replica may take; the settings of the same names."""

    attempt_timeout_s: float = 120.0
    """One load."""
    control_timeout_s: float = 60.0
    """One unload, reset or look."""


async def publish(
    begun: tuple[Publication, Commands],
    call: Call,
    notices: asyncio.Queue[Notice],
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    timeouts: Timeouts = Timeouts(),
    fields: Mapping[str, object] | None = None,
    deliver: Deliver | None = None,
    on_attempt: Callable[[ReplicaId, LoadOutcome, float], None] = lambda *_: None,
    on_drop: Callable[[ReplicaId, str], None] = lambda *_: None,
) -> PublicationResult:
    """Run what ``publication.begin`` returned until its phase is final.

    ``clock`` is the one that gave ``begin`` its ``now_s``. ``fields`` are further fields of the
    load's body. ``deliver`` brings the files to a replica before each load; without it every
    replica reads the publication's own path. ``on_attempt`` is told each load's outcome and
    seconds, ``on_drop`` each replica that must leave rotation, at once; neither may raise.

    Run it in a task of its own, and shield that from its callers: a trainer that hangs up must not
    stop it half-way. If the task itself is cancelled, what is out is abandoned and replicas may be
    left holding the name.
    """
    name, path = begun[0].name, begun[0].path
    unload_body = json.dumps({"lora_name": name}).encode()
    inbox: asyncio.Queue[Event] = asyncio.Queue()
    out: dict[ReplicaId, asyncio.Task[None]] = {}

    async def load(replica: ReplicaId) -> Event:
        sent_s = clock()
        found = path if deliver is None else await deliver(replica)
        if isinstance(found, Undelivered):
            outcome, now_s = LoadOutcome.NEVER_RECEIVED, clock()
            on_attempt(replica, outcome, now_s - sent_s)
            return LoadAnswered(replica, outcome, 0, found.text, now_s)
        body = json.dumps({**(fields or {}), "lora_name": name, "lora_path": found}).encode()
        answer = await call(replica, "POST", LOAD, body, timeout_s=timeouts.attempt_timeout_s)
        outcome, now_s = classify_load(answer), clock()
        on_attempt(replica, outcome, now_s - sent_s)
        status = answer.status if isinstance(answer, Answer) else 0
        return LoadAnswered(replica, outcome, status, _text(answer), now_s, path=found)

    async def perform(command: Command) -> None:
        replica, limit_s = command.replica, timeouts.control_timeout_s
        event: Event
        match command:
            case Load():
                event = await load(replica)
            case Look():
                answer = await call(replica, "GET", MODELS, timeout_s=limit_s)
                event = _hopeless(replica, MODELS, answer, clock()) or Looked(
                    replica, read_list(answer), clock()
                )
            case Unload():
                answer = await call(replica, "POST", UNLOAD, unload_body, timeout_s=limit_s)
                event = Unloaded(replica, classify_unload(answer), _text(answer), clock())
            case Reset():
                answer = await call(replica, "POST", RESET, timeout_s=limit_s)
                done = classify_reset(answer) is ResetOutcome.CLEARED
                event = _hopeless(replica, RESET, answer, clock()) or ResetAnswered(
                    replica, done, _text(answer), clock()
                )
            case Wait():
                await sleep(command.after_s)
                event = Waited(replica, clock())
            case Drop():
                return
        inbox.put_nowait(event)

    async def forward() -> None:
        while True:
            inbox.put_nowait(await notices.get())

    async def ring(at_s: float) -> None:
        while (early_s := at_s - clock()) > 0:  # a loop's timer may wake a tick too soon
            await sleep(early_s)
        inbox.put_nowait(Deadline(clock()))

    async with asyncio.TaskGroup() as group:
        forwarder = group.create_task(forward(), name=f"publish {name}: notices")
        alarm: asyncio.Task[None] | None = None
        alarm_s: float | None = None
        state, commands = begun
        while True:
            for command in commands:
                replica = command.replica
                if replica in out:  # done, or a wait that was overtaken, or dropped with a call out
                    out.pop(replica).cancel()
                if isinstance(command, Drop):
                    on_drop(replica, command.reason)
                else:
                    label = f"publish {name}: {type(command).__name__.lower()} {replica}"
                    out[replica] = group.create_task(perform(command), name=label)
            if state.deadline_s != alarm_s:
                if alarm is not None:
                    alarm.cancel()
                alarm_s = state.deadline_s
                if alarm_s is not None:
                    alarm = group.create_task(ring(alarm_s), name=f"publish {name}: deadline")
            if state.phase.final:
                break
            event = await inbox.get()
            known = not isinstance(event, ReplicaDown) or event.replica in state.replicas
            state, commands = step(state, event) if known else (state, ())
        for task in (forwarder, *out.values()):  # no alarm: a final phase has no deadline
            task.cancel()
    return result(state)


def _hopeless(
    replica: ReplicaId, target: str, answer: Answer | NoAnswer, now_s: float
) -> ReplicaDown | None:
    if not isinstance(answer, Answer) or not is_hopeless(answer):
        return None
    return ReplicaDown(replica, f"{target}: {answer.status} {words(answer)}", now_s)


def _text(answer: Answer | NoAnswer) -> str:
    if isinstance(answer, Answer):
        return words(answer)
    return f"{answer.cause}: {answer.detail}" if answer.detail else str(answer.cause)
