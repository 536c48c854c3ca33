"""One look at a replica: what it costs, and what it asks."""

from __future__ import annotations

from time import monotonic

import pytest

from benchmarks.replica import SimulatedReplica
from broadcast.answer import Answer, Cause, NoAnswer
from broadcast.fleet import Probe
from proxy.calls import Calls
from proxy.probes import Failed, look
from proxy.tokens import Bearer
from routing.ids import ReplicaId

A = ReplicaId("a")


async def test_a_look_takes_one_connection():
    async with SimulatedReplica(model="tiny") as replica:
        calls = Calls({A: replica.url}.get, Bearer())
        seen = await look(calls, A, monotonic)
        assert isinstance(seen, Probe)
        assert seen.base_models == ("tiny",)
        assert [len(replica.calls(p)) for p in ("/v1/models", "/is_paused", "/weight_info")] == [
            1, 1, 1,
        ]  # fmt: skip
        assert replica.connections_made == 1
        await calls.close()


def answering(**answers):
    """Calls that are answered with a listing of one model, no pause and no marker, or as told."""
    usual = {
        "/v1/models": Answer(200, b'{"object": "list", "data": [{"id": "tiny", "parent": null}]}'),
        "/is_paused": Answer(200, b'{"is_paused": false}'),
        "/weight_info": Answer(200, b'{"weight_version": "run-1"}'),
    }
    asked = []

    async def calls(replica, method, target, body=None, *, timeout_s):
        asked.append((target, timeout_s))
        answer = answers.get(target.strip("/").replace("/", "_"), usual[target])
        return answer(len(asked)) if callable(answer) else answer

    calls.asked = asked
    return calls


@pytest.mark.parametrize("cause", set(Cause) - {Cause.RESET})
async def test_one_that_does_not_answer_is_asked_once(cause):
    calls = answering(v1_models=NoAnswer(cause, "nothing"))
    assert await look(calls, A, monotonic) == Failed(cause.value, "nothing")
    assert [target for target, _ in calls.asked] == ["/v1/models"]


async def test_a_connection_closed_behind_the_answer_before_is_no_failure():
    """By something in between that does not announce it: the next call meets a closed one."""
    reset = NoAnswer(Cause.RESET, "closed")
    calls = answering(is_paused=lambda n: reset if n == 2 else Answer(200, b'{"is_paused":true}'))
    seen = await look(calls, A, monotonic)
    assert isinstance(seen, Probe)
    assert (seen.paused, seen.identity) == (True, "run-1")
    calls = answering(is_paused=reset)
    assert await look(calls, A, monotonic) == Failed("reset", "closed")


async def test_a_marker_that_could_not_be_read_is_not_another_marker():
    calls = answering(weight_info=NoAnswer(Cause.TIMEOUT, "slow"))
    assert await look(calls, A, monotonic) == Failed("timeout", "slow")
    seen = await look(answering(weight_info=Answer(404, b"")), A, monotonic)
    assert isinstance(seen, Probe)
    assert seen.identity is None


async def test_the_calls_of_a_look_share_its_time():
    times = iter([0.0, 0.0, 7.0, 12.0])
    calls = answering()
    await look(calls, A, lambda: next(times))
    assert [timeout_s for _, timeout_s in calls.asked] == [10.0, 3.0, 0.1]
