"""One look at a replica: what it costs, and what it asks."""

from __future__ import annotations

from time import monotonic

import pytest

from benchmarks.replica import SimulatedReplica
from broadcast.answer import Cause, NoAnswer
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


@pytest.mark.parametrize("cause", Cause)
async def test_one_that_does_not_answer_is_asked_once(cause):
    asked = []

    async def calls(replica, method, target, body=None, *, timeout_s):
        asked.append(target)
        return NoAnswer(cause, "nothing")

    assert await look(calls, A, monotonic) == Failed(cause.value, "nothing")
    assert asked == ["/v1/models"]
