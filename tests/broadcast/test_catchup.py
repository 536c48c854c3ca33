"""Bringing one replica to the ledger's state, whatever it holds and whatever is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadcast.catchup import (
    MAX_ROUNDS,
    CatchUp,
    GiveUp,
    Joined,
    Load,
    Look,
    Next,
    Pause,
    ResetCache,
    Resume,
    Step,
    StepResult,
    Unload,
    Wait,
    plan,
)
from broadcast.ledger import Ledger, LiveAdapter
from routing.ids import AdapterName

V1, V2, V3, OLD = (AdapterName(f"trl-policy-v{n}") for n in (1, 2, 3, 9))
PAUSE = "/pause?mode=keep"


def live(name: AdapterName, *, own: bool = False) -> LiveAdapter:
    path = f"/lora/{name}"
    return LiveAdapter(name, path, f"/lora/.rollmux/{name}" if own else path, "", 1, 0.0)


def listed(*adapters: LiveAdapter) -> dict[AdapterName, str]:
    return {adapter.name: adapter.loaded_from for adapter in adapters}


A1, A2, OWN1 = live(V1), live(V2), live(V1, own=True)
LOAD1, LOAD2 = Load(V1, A1.loaded_from), Load(V2, A2.loaded_from)


@pytest.mark.parametrize(
    ("wanted", "seen", "options", "steps"),
    [
        pytest.param([A1, A2], listed(A1, A2), {}, (), id="nothing to do"),
        pytest.param([A1, A2], {}, {}, (LOAD1, LOAD2), id="a fresh process, in order of commit"),
        pytest.param([A1, A2], listed(A1), {}, (LOAD2,), id="missed one"),
        pytest.param([A1], {V1: A1.path, OLD: "/x"}, {}, (Unload(OLD),), id="one too many"),
        pytest.param(
            [A1], {V1: "/other"}, {}, (Unload(V1), ResetCache(), LOAD1), id="another path"
        ),
        pytest.param(
            [A1],
            listed(A1),
            {"distrusted": {V1}},
            (Unload(V1), ResetCache(), LOAD1),
            id="the right path from somebody else",
        ),
        pytest.param(
            [OWN1], listed(OWN1), {"distrusted": {V1}}, (), id="a path that names the bytes"
        ),
        pytest.param([A1], listed(A1), {"cache_stale": True}, (ResetCache(),), id="missed a clear"),
        pytest.param([A1], listed(A1, A2), {"retired": [V2]}, (), id="a retired name may stay"),
        pytest.param([A1], listed(A1), {"retired": [V2]}, (), id="a retired name is not loaded"),
        pytest.param(
            [A1],
            listed(A1, A2),
            {"retired": [V2], "distrusted": {V2}},
            (Unload(V2),),
            id="somebody else's retired name goes",
        ),
        pytest.param([], {}, {"paused": True}, (Resume(),), id="left paused"),
        pytest.param([], {}, {"pause_target": PAUSE}, (Pause(PAUSE),), id="the fleet is paused"),
        pytest.param([], {}, {"paused": True, "pause_target": PAUSE}, (), id="both paused"),
        pytest.param(
            [A1],
            {V1: "/other", OLD: "/x"},
            {"paused": True},
            (Unload(V1), Unload(OLD), ResetCache(), LOAD1, Resume()),
            id="all at once, in this order",
        ),
    ],
)
def test_what_is_left_to_do(
    wanted: list[LiveAdapter],
    seen: dict[AdapterName, str],
    options: dict[str, object],
    steps: tuple[Step, ...],
):
    facts: dict[str, object] = {"retired": (), "paused": False, "pause_target": None, **options}
    assert plan(wanted, listed=seen, **facts) == steps  # type: ignore[arg-type]


def ledger(*names: AdapterName) -> Ledger:
    out = Ledger()
    for name in names:
        out.commit(name, f"/lora/{name}", 0.0)
    return out


def look(
    machine: CatchUp, seen: Mapping[AdapterName, str], *, ours: bool = True, now_s: float = 0.0
) -> Next:
    assert machine.next(now_s) == Look()
    machine.looked(seen, paused=False, pause_target=None, ours=ours, now_s=now_s)
    return machine.next(now_s)


def test_it_joins_only_after_a_look_that_finds_nothing_to_do():
    machine = CatchUp(ledger(V1), 0.0)
    assert look(machine, {}) == LOAD1
    machine.stepped(StepResult.OK, "", 1.0)
    assert look(machine, listed(A1), now_s=1.0) == Joined(listed(A1))


def test_a_replica_in_the_right_state_joins_after_one_look():
    assert look(CatchUp(ledger(V1), 0.0), listed(A1)) == Joined(listed(A1))


def test_an_unknown_process_is_emptied_and_its_cache_cleared():
    machine = CatchUp(ledger(V1), 0.0)
    steps = [look(machine, listed(A1), ours=False)]
    for _ in range(2):
        machine.stepped(StepResult.OK, "", 0.0)
        steps.append(machine.next(0.0))
    assert steps == [Unload(V1), ResetCache(), LOAD1]
    machine.stepped(StepResult.OK, "", 0.0)
    assert look(machine, listed(A1)) == Joined(listed(A1))


def test_a_lost_answer_to_an_unload_does_not_make_the_old_name_good():
    machine = CatchUp(ledger(V1), 0.0)
    assert look(machine, listed(A1), ours=False) == Unload(V1)
    machine.stepped(StepResult.UNKNOWN, "reset", 0.0)
    assert look(machine, listed(A1), now_s=1.0) == Unload(V1)


def test_a_lost_answer_to_a_load_is_settled_by_a_look():
    machine = CatchUp(ledger(V1), 0.0)
    assert look(machine, {}) == LOAD1
    machine.stepped(StepResult.UNKNOWN, "reset", 0.0)
    assert look(machine, listed(A1), now_s=1.0) == Joined(listed(A1))


def test_files_that_are_not_visible_are_waited_for_longer_each_time():
    machine = CatchUp(ledger(V1), 0.0, retry_s=0.25, retry_max_s=1.0)
    look(machine, {})
    now_s, waits = 0.0, []
    for _ in range(4):
        machine.stepped(StepResult.LATER, "404 No adapter found", now_s)
        wait = machine.next(now_s)
        assert isinstance(wait, Wait)
        waits.append(wait.seconds)
        now_s += wait.seconds
        assert machine.next(now_s) == LOAD1
    assert waits == [0.25, 0.5, 1.0, 1.0]


def test_it_gives_up_at_the_deadline_and_says_what_it_waited_for():
    machine = CatchUp(ledger(V1), 0.0, deadline_s=10.0)
    look(machine, {})
    machine.stepped(StepResult.LATER, "404 No adapter found", 9.9)
    end = machine.next(10.0)
    assert isinstance(end, GiveUp)
    assert (end.code, V1 in end.why, "No adapter found" in end.why) == ("deadline", True, True)


def test_a_step_that_fails_makes_it_give_up():
    machine = CatchUp(ledger(V1), 0.0)
    look(machine, {})
    machine.stepped(StepResult.FAILED, "rank 16 is greater than 8", 0.0)
    end = machine.next(0.0)
    assert isinstance(end, GiveUp)
    assert (end.code, "rank 16" in end.why) == ("load_failed", True)


def test_a_replica_that_never_settles_makes_it_give_up():
    """O-07: two registries behind one address. It does not reload in a loop."""
    machine = CatchUp(ledger(V1), 0.0)
    loads, end = 0, look(machine, {})
    while end == LOAD1:
        loads += 1
        machine.stepped(StepResult.OK, "", 0.0)
        end = look(machine, {})
    assert isinstance(end, GiveUp)
    assert (end.code, loads) == ("unsettled", MAX_ROUNDS - 1)


def test_what_is_committed_meanwhile_is_loaded_too():
    book = ledger(V1)
    machine = CatchUp(book, 0.0)
    look(machine, {})
    book.commit(V2, A2.path, 1.0)
    machine.stepped(StepResult.OK, "", 1.0)
    assert look(machine, listed(A1), now_s=1.0) == LOAD2


def retired_too() -> Ledger:
    """V1 is retired, V2 is live."""
    book = ledger(V1)
    book.commit(V2, A2.path, 1.0)
    book.retire(V1, 1.0)
    return book


def test_retired_names_are_loaded_again_where_their_files_are_there():
    machine = CatchUp(retired_too(), 0.0, spare={V1})
    assert look(machine, {}) == LOAD1
    machine.stepped(StepResult.OK, "", 0.0)
    assert machine.next(0.0) == LOAD2
    machine.stepped(StepResult.OK, "", 0.0)
    assert look(machine, listed(A1, A2)) == Joined(listed(A1, A2))


@pytest.mark.parametrize("result", [StepResult.LATER, StepResult.UNKNOWN, StepResult.FAILED])
def test_a_retired_name_that_cannot_be_loaded_again_holds_up_nobody(result: StepResult):
    machine = CatchUp(retired_too(), 0.0, spare={V1})
    assert look(machine, {}) == LOAD1
    machine.stepped(result, "no", 0.0)
    assert machine.next(0.0) == LOAD2
    machine.stepped(StepResult.OK, "", 0.0)
    assert look(machine, listed(A2)) == Joined(listed(A2))


def test_a_clear_that_it_missed_is_made_up_for_and_counted():
    book = ledger(V1)
    book.cache_cleared()
    machine = CatchUp(book, 0.0, cache_clears=0)
    assert look(machine, listed(A1)) == ResetCache()
    book.cache_cleared()
    machine.stepped(StepResult.OK, "", 0.0)
    assert machine.cache_clears == 1
    assert look(machine, listed(A1)) == ResetCache()
    machine.stepped(StepResult.OK, "", 0.0)
    assert look(machine, listed(A1)) == Joined(listed(A1))
    assert machine.cache_clears == book.cache_clears


class Server:
    """A replica as vLLM is one: names with a path, and the bytes that were there at the load."""

    def __init__(self, names: Mapping[AdapterName, str], paused: bool) -> None:
        self.names = dict(names)
        self.bytes = dict.fromkeys(names, "somebody else's")
        self.cached = set(names)
        self.paused = paused

    def do(self, step: Step) -> StepResult:
        match step:
            case Unload(name):
                self.names.pop(name, None)
            case Load(name, path):
                if name in self.names:
                    return StepResult.FAILED
                self.names[name] = path
                self.bytes[name] = "ours"
            case ResetCache():
                self.cached.clear()
            case Pause():
                self.paused = True
            case Resume():
                self.paused = False
        return StepResult.OK


NAMES = st.sampled_from([V1, V2, V3, OLD])
LISTS = st.dictionaries(NAMES, NAMES.map(lambda name: f"/lora/{name}"), max_size=4)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_it_held_and_whatever_was_lost_it_joins_in_the_fleets_state(data: st.DataObject):
    book = ledger(*data.draw(st.lists(NAMES, unique=True, max_size=3), "live"))
    for name in data.draw(st.lists(NAMES, unique=True, max_size=2), "retired"):
        book.retire(name, 0.0)
    server = Server(data.draw(LISTS, "listed"), data.draw(st.booleans(), "paused"))
    target = data.draw(st.sampled_from([None, PAUSE]), "fleet's pause")
    machine, now_s = CatchUp(book, 0.0), 0.0
    losses = 0
    while True:
        match machine.next(now_s):
            case Look():
                machine.looked(
                    server.names, paused=server.paused, pause_target=target, ours=False, now_s=now_s
                )
            case Wait(seconds):
                now_s += seconds
            case Joined(adapters):
                break
            case GiveUp() as end:
                # Only so many lost answers, or a change at the last moment, make it give up.
                assert end.code == "unsettled"
                assert losses >= 2
                return
            case step:
                lost = data.draw(st.sampled_from(["no", "no", "no", "call", "answer", "later"]))
                if lost != "call" and lost != "later":
                    result = server.do(step)
                    assert result is StepResult.OK, step
                if lost == "later":
                    machine.stepped(StepResult.LATER, "later", now_s)
                elif lost == "no":
                    machine.stepped(StepResult.OK, "", now_s)
                else:
                    losses += 1
                    machine.stepped(StepResult.UNKNOWN, lost, now_s)
                if data.draw(st.integers(0, 9)) == 0 and losses < 2:
                    losses += 1
                    book.commit(V3, f"/lora/{V3}", now_s)
    wanted = {adapter.name: adapter.loaded_from for adapter in book.live}
    assert adapters == server.names == wanted
    assert {server.bytes[name] for name in wanted} <= {"ours"}
    assert not server.cached
    assert server.paused == (target is not None)
