"""The driver carries a publication to its end, whatever the replicas do, and leaves nothing out.

Time jumps: the loop below advances its clock to the next timer instead of sleeping.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from broadcast.answer import Answer, Cause, NoAnswer
from broadcast.answers import RESET, LoadOutcome
from broadcast.driver import LOAD, MODELS, UNLOAD, Notice, Timeouts, publish
from broadcast.publication import (
    FleetBack,
    FleetLow,
    GiveUp,
    Phase,
    PublicationResult,
    ReplicaDown,
    Rules,
    begin,
)
from broadcast.transport import Undelivered
from routing.ids import AdapterName, ReplicaId

NAME = AdapterName("trl-policy-v7")
PATH = "/l/.rollmux/trl-policy-v7-abc"
A, B, C = ReplicaId("r0"), ReplicaId("r1"), ReplicaId("r2")
RULES = Rules()


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when there is nothing else to do."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing left that could ever happen"
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


def played(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def missing(path: str = "x") -> Answer:
    message = f"Loading lora x failed: No adapter found for {path}"
    return Answer(404, json.dumps({"error": {"message": message}}).encode(), "application/json")


Behaviour = Callable[["Fleet", ReplicaId, str], Awaitable[Answer | NoAnswer | None]]


class Fleet:
    """Scripted replicas. ``script[replica, target]`` may answer instead of the replica."""

    def __init__(self, *replicas: ReplicaId) -> None:
        self.listed: dict[ReplicaId, dict[str, str]] = {r: {} for r in replicas}
        self.script: dict[tuple[ReplicaId, str], Behaviour] = {}
        self.log: list[tuple[float, ReplicaId, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.out = 0

    async def __call__(
        self,
        replica: ReplicaId,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        timeout_s: float,
    ) -> Answer | NoAnswer:
        self.log.append((now() - 1000, replica, target))
        assert method == ("GET" if target == MODELS else "POST")
        self.out += 1
        try:
            async with asyncio.timeout(timeout_s):
                behave = self.script.get((replica, target))
                answer = await behave(self, replica, target) if behave else None
                return self.answer(replica, target, body) if answer is None else answer
        except TimeoutError:
            return NoAnswer(Cause.TIMEOUT, f"no answer within {timeout_s:g} s")
        finally:
            self.out -= 1

    def answer(self, replica: ReplicaId, target: str, body: bytes | None) -> Answer:
        listed = self.listed[replica]
        data = json.loads(body) if body else {}
        if target == MODELS:
            cards = [{"id": "base", "root": "/m", "parent": None}]
            cards += [{"id": n, "root": p, "parent": "base"} for n, p in listed.items()]
            return Answer(200, json.dumps({"data": cards}).encode(), "application/json")
        if target == RESET:
            return Answer(200, b'{"success":true}', "application/json")
        if target == UNLOAD:
            if listed.pop(data["lora_name"], None) is None:
                return Answer(404, b'{"error":{"message":"The lora adapter cannot be found."}}')
            return Answer(200, b"Success")
        self.bodies.append(data)
        if data["lora_name"] in listed:
            return Answer(400, b'{"error":{"message":"It has already been loaded."}}')
        listed[data["lora_name"]] = data["lora_path"]
        return Answer(200, b"Success: LoRA adapter added successfully.")

    def calls(self, replica: ReplicaId, target: str) -> list[float]:
        """When such calls were sent, in seconds since the start."""
        return [at for at, r, t in self.log if (r, t) == (replica, target)]

    async def publish(
        self,
        *,
        rules: Rules = RULES,
        notices: asyncio.Queue[Notice] | None = None,
        lag: dict[ReplicaId, float] | None = None,
        **extra: Any,
    ) -> PublicationResult:
        begun = begin(NAME, PATH, list(self.listed), rules, now_s=now(), learned_lag_s=lag)
        queue: asyncio.Queue[Notice] = asyncio.Queue() if notices is None else notices
        before = asyncio.all_tasks()
        end = await publish(begun, self, queue, clock=now, **extra)
        assert now() - begun[0].started_s == pytest.approx(end.seconds), "it waited for something"
        assert self.out == 0, "a call was left out"
        assert asyncio.all_tasks() <= before, "a task was left behind"
        return end


def late(delay_s: float) -> Behaviour:
    async def behave(fleet: Fleet, replica: ReplicaId, target: str) -> None:
        await asyncio.sleep(delay_s)

    return behave


def visible_at(at_s: float) -> Behaviour:
    async def behave(fleet: Fleet, replica: ReplicaId, target: str) -> Answer | None:
        return missing() if now() - 1000 < at_s else None

    return behave


def always(answer: Answer | NoAnswer) -> Behaviour:
    async def behave(fleet: Fleet, replica: ReplicaId, target: str) -> Answer | NoAnswer:
        return answer

    return behave


def once(first: Behaviour) -> Behaviour:
    """The first call behaves so, later ones as usual."""
    used: list[None] = []

    async def behave(fleet: Fleet, replica: ReplicaId, target: str) -> Answer | NoAnswer | None:
        if used:
            return None
        used.append(None)
        return await first(fleet, replica, target)

    return behave


def test_all_replicas_load_at_once_and_the_trainers_fields_travel() -> None:
    async def main() -> None:
        fleet = Fleet(A, B)
        seen: list[tuple[ReplicaId, LoadOutcome, float]] = []
        fleet.script = {(A, LOAD): late(2), (B, LOAD): late(3)}
        end = await fleet.publish(
            fields={"load_inplace": False, "lora_path": "/given"},
            on_attempt=lambda *args: seen.append(args),
        )
        assert end.committed
        assert end.seconds == pytest.approx(3)
        assert fleet.calls(A, LOAD) == fleet.calls(B, LOAD) == [0.0]
        assert fleet.bodies[0] == {"lora_name": NAME, "lora_path": PATH, "load_inplace": False}
        assert [(r, o) for r, o, _ in seen] == [(A, LoadOutcome.LOADED), (B, LoadOutcome.LOADED)]
        assert [s for *_, s in seen] == pytest.approx([2, 3])

    played(main)


def test_lagging_replica_alone_is_retried_until_its_files_show() -> None:
    async def main() -> None:
        fleet = Fleet(A, B)
        fleet.script[B, LOAD] = visible_at(29)
        end = await fleet.publish()
        assert end.committed
        assert len(fleet.calls(A, LOAD)) == 1
        assert 29 <= end.seconds <= 31
        assert end.visible_s[B] == pytest.approx(end.seconds)

    played(main)


def test_learned_lag_makes_the_first_look_the_last() -> None:
    async def main() -> None:
        fleet = Fleet(A)
        fleet.script[A, LOAD] = visible_at(2.5)
        end = await fleet.publish(lag={A: 2.6})
        assert end.attempts == {A: 1}
        assert end.seconds == pytest.approx(2.6)

    played(main)


def test_mount_that_restarts_its_memory_of_a_miss_for_30_s_is_outwaited() -> None:
    async def main() -> None:
        fleet = Fleet(A)
        missed_at = [1000.0]

        async def behave(fleet: Fleet, replica: ReplicaId, target: str) -> Answer | None:
            forgotten = now() - missed_at[0] > 30
            missed_at[0] = now()
            return None if forgotten else missing()

        fleet.script[A, LOAD] = behave
        end = await fleet.publish()
        assert end.committed
        assert end.seconds < 100

    played(main)


def test_answer_lost_after_the_load_was_done_commits_after_one_load() -> None:
    async def main() -> None:
        fleet = Fleet(A, B)

        async def drop_after_apply(fleet: Fleet, replica: ReplicaId, target: str) -> NoAnswer:
            fleet.listed[replica][NAME] = PATH
            return NoAnswer(Cause.RESET)

        fleet.script[B, LOAD] = drop_after_apply
        end = await fleet.publish()
        assert end.committed
        assert end.attempts == {A: 1, B: 1}

    played(main)


def test_load_that_hangs_is_cut_at_the_attempt_timeout_and_tried_again() -> None:
    async def main() -> None:
        fleet = Fleet(A)
        fleet.script[A, LOAD] = once(late(10_000))
        end = await fleet.publish(timeouts=Timeouts(attempt_timeout_s=7))
        assert end.committed
        assert end.attempts == {A: 2}
        assert 7 <= end.seconds < 8

    played(main)


def test_silent_replica_is_dropped_at_the_deadline_and_told_of_at_once() -> None:
    async def main() -> None:
        fleet = Fleet(A, B)
        fleet.script[B, LOAD] = late(10_000)
        drops: list[ReplicaId] = []
        end = await fleet.publish(
            rules=Rules(load_timeout_s=50), on_drop=lambda replica, reason: drops.append(replica)
        )
        assert end.committed
        assert end.seconds == pytest.approx(50)
        assert drops == [B]

    played(main)


def test_refusal_waits_for_the_slow_load_and_then_unloads_it() -> None:
    async def main() -> None:
        fleet = Fleet(A, B, C)
        text = b'{"error":{"message":"LoRA rank 16 is greater than max_lora_rank 8."}}'
        fleet.script = {(B, LOAD): always(Answer(500, text)), (C, LOAD): late(3)}
        end = await fleet.publish()
        assert end.outcome is Phase.ROLLED_BACK
        assert end.status == 500
        assert "LoRA rank 16" in end.message
        assert fleet.listed == {A: {}, B: {}, C: {}}
        assert fleet.calls(C, UNLOAD) == pytest.approx([3])
        assert fleet.calls(B, UNLOAD) == []

    played(main)


def test_name_from_before_is_taken_over_in_order() -> None:
    async def main() -> None:
        fleet = Fleet(A)
        fleet.listed[A][NAME] = PATH
        fleet.script[A, RESET] = once(always(Answer(200, b'{"success":false}')))
        end = await fleet.publish()
        assert end.committed
        assert [t for *_, t in fleet.log] == [MODELS, UNLOAD, RESET, RESET, LOAD, MODELS]

    played(main)


@pytest.mark.parametrize(
    ("target", "answer"),
    [
        (MODELS, Answer(401, b"<html>", "text/html")),
        (RESET, Answer(404, b'{"detail":"Not Found"}', "application/json")),
    ],
)
def test_replica_that_will_never_answer_is_dropped_at_once(target: str, answer: Answer) -> None:
    """A rejected token, or no server dev mode, does not hold the trainer up to the deadline."""

    async def main() -> None:
        fleet = Fleet(A, B)
        fleet.listed[B][NAME] = "/old"
        fleet.script[B, target] = always(answer)
        end = await fleet.publish()
        assert end.committed
        assert end.seconds < 1
        assert f"{target}: {answer.status}" in end.dropped[B]

    played(main)


def test_notice_of_a_death_lets_the_rest_commit_at_once() -> None:
    async def main() -> None:
        fleet = Fleet(A, B)
        fleet.script[B, LOAD] = late(10_000)
        notices: asyncio.Queue[Notice] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.call_later(4, notices.put_nowait, ReplicaDown(ReplicaId("r9"), "not ours", 1004))
        loop.call_later(5, notices.put_nowait, ReplicaDown(B, "refused", 1005))
        end = await fleet.publish(notices=notices)
        assert end.committed
        assert end.seconds == pytest.approx(5)
        assert end.dropped == {B: "refused"}

    played(main)


def test_clock_stands_while_the_fleet_is_low() -> None:
    async def main() -> None:
        fleet = Fleet(A)
        fleet.script[A, LOAD] = always(NoAnswer(Cause.REFUSED))
        notices: asyncio.Queue[Notice] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.call_later(10, lambda: notices.put_nowait(FleetLow(now())))
        loop.call_later(610, lambda: notices.put_nowait(FleetBack(now())))
        end = await fleet.publish(rules=Rules(load_timeout_s=30), notices=notices)
        assert end.status == 504
        assert end.seconds == pytest.approx(630)

    played(main)


def test_shell_may_give_up_earlier() -> None:
    async def main() -> None:
        fleet = Fleet(A)
        fleet.script[A, LOAD] = visible_at(10_000)
        notices: asyncio.Queue[Notice] = asyncio.Queue()
        asyncio.get_running_loop().call_later(3, lambda: notices.put_nowait(GiveUp(now())))
        end = await fleet.publish(notices=notices)
        assert (end.status, end.code) == (504, "adapter_not_visible")
        assert end.seconds == pytest.approx(3)

    played(main)


def test_caller_that_hangs_up_does_not_stop_a_shielded_publication() -> None:
    async def main() -> None:
        fleet = Fleet(A)
        fleet.script[A, LOAD] = late(5)
        work = asyncio.ensure_future(fleet.publish())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.shield(work)
        assert fleet.listed[A] == {}
        assert (await work).committed
        assert fleet.listed[A] == {NAME: PATH}

    played(main)


@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.5, 5.0])
def test_cancelled_at_any_await_it_leaves_no_task_and_no_call(at_s: float) -> None:
    async def main() -> None:
        fleet = Fleet(A, B)
        fleet.listed[A][NAME] = "/old"
        for target in (MODELS, UNLOAD, RESET, LOAD):
            fleet.script[A, target] = late(1)
        fleet.script[B, LOAD] = visible_at(4.2)
        task = asyncio.ensure_future(fleet.publish())
        await asyncio.sleep(at_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fleet.out == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    played(main)


def test_each_replica_loads_from_where_its_files_were_brought() -> None:
    async def main() -> None:
        fleet = Fleet(A, B)

        async def deliver(replica: ReplicaId) -> str:
            return PATH if replica == A else f"/dev/shm/{replica}/trl-policy-v7-abc"

        end = await fleet.publish(deliver=deliver)
        assert end.committed
        assert end.paths == {A: PATH, B: "/dev/shm/r1/trl-policy-v7-abc"}
        assert {r: listed[NAME] for r, listed in fleet.listed.items()} == end.paths

    played(main)


def test_the_name_under_another_path_than_the_delivered_one_is_not_ours() -> None:
    async def main() -> None:
        fleet = Fleet(A)

        async def elsewhere(fleet: Fleet, replica: ReplicaId, target: str) -> Answer:
            fleet.listed[replica][NAME] = PATH  # the shared path, though the files were brought
            return Answer(200, b"Success")

        async def deliver(replica: ReplicaId) -> str:
            return "/dev/shm/r0/trl-policy-v7-abc"

        fleet.script = {(A, LOAD): once(elsewhere)}
        end = await fleet.publish(deliver=deliver)
        assert end.committed
        assert fleet.listed[A][NAME] == "/dev/shm/r0/trl-policy-v7-abc"
        assert len(fleet.calls(A, UNLOAD)) == 1

    played(main)


def test_files_that_do_not_arrive_are_sent_again_and_nothing_is_loaded_before() -> None:
    async def main() -> None:
        fleet = Fleet(A)
        lost = [Undelivered("reset"), Undelivered("reset")]

        async def deliver(replica: ReplicaId) -> str | Undelivered:
            return lost.pop() if lost else PATH

        seen: list[LoadOutcome] = []
        end = await fleet.publish(
            deliver=deliver, on_attempt=lambda _, outcome, __: seen.append(outcome)
        )
        assert end.committed
        assert seen == [LoadOutcome.NEVER_RECEIVED] * 2 + [LoadOutcome.LOADED]
        assert len(fleet.calls(A, LOAD)) == 1

    played(main)


def test_a_replica_whose_files_never_arrive_is_left_out_at_the_deadline_with_the_reason() -> None:
    async def main() -> None:
        fleet = Fleet(A, B)

        async def deliver(replica: ReplicaId) -> str | Undelivered:
            return PATH if replica == A else Undelivered("no room")

        end = await fleet.publish(deliver=deliver)
        assert end.committed
        assert end.loaded_on == (A,)
        assert "no room" in end.dropped[B]
        assert not fleet.calls(B, LOAD)

    played(main)
