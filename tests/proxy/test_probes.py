"""One look at a replica: what it asks, and what it makes of the answers."""

from __future__ import annotations

import time
from time import monotonic

import pytest

from broadcast.answer import Answer, Cause, NoAnswer
from broadcast.fleet import Probe
from proxy.probes import FLAPPING_S, Failed, look
from routing.ids import ReplicaId

A = ReplicaId("a")
USUAL = {
    "/v1/models": Answer(200, b'{"object": "list", "data": [{"id": "tiny", "parent": null}]}'),
    "/is_paused": Answer(200, b'{"is_paused": false}'),
    "/weight_info": Answer(200, b'{"weight_version": "run-1"}'),
}


def answering(**answers):
    async def calls(replica, method, target, body=None, *, timeout_s):
        return answers.get(target.strip("/").replace("/", "_"), USUAL[target])

    return calls


async def test_a_look_sees_models_pause_and_marker():
    seen = await look(answering(), A, monotonic)
    assert isinstance(seen, Probe)
    assert (seen.base_models, seen.paused, seen.identity) == (("tiny",), False, "run-1")


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("call", ["v1_models", "is_paused", "weight_info"])
async def test_a_call_that_is_not_answered_is_a_failed_look(call, cause):
    """Of the marker, too: none at all would be a restarted server's."""
    seen = await look(answering(**{call: NoAnswer(cause, "nothing")}), A, monotonic)
    assert seen == Failed(cause.value, "nothing")


async def test_a_marker_that_an_edge_hides_is_not_another_marker():
    seen = await look(answering(weight_info=Answer(502, b"<html>")), A, monotonic)
    assert isinstance(seen, Failed)
    assert seen.code == "weight_info_502"
    seen = await look(answering(weight_info=Answer(404, b'{"detail":"Not Found"}')), A, monotonic)
    assert isinstance(seen, Probe)
    assert seen.identity is None


async def test_one_that_breaks_every_connection_is_looked_at_a_few_times_a_second(start, pair):
    running = await start([pair[0].url], hold_s=5)
    pair[0].faults.add("/v1/completions", reset=True)
    before = len(pair[0].calls("/is_paused"))
    began_s = monotonic()
    while (took_s := monotonic() - began_s) < 2:
        await running.complete("tiny", [1])
    looks = len(pair[0].calls("/is_paused")) - before
    assert looks <= took_s / FLAPPING_S + 3
    assert looks >= 3


async def test_a_daemon_that_stood_still_takes_no_replica_for_stalled(start, pair, caplog):
    """Frozen, or moved to another machine: the answers are there, and are yet to be read."""
    for replica in pair:
        replica.faults.add("/is_paused", delay_s=0.1)
    running = await start([r.url for r in pair], probe_s=0.01, stall_s=1.0)
    await running.until(lambda: all(r.calls("/is_paused")[-1].status is None for r in pair))
    time.sleep(3.0)  # noqa: ASYNC251
    value = running.daemon.metrics.registry.get_sample_value
    await running.until(lambda: (value("rollmux_event_loop_lag_seconds") or 0) >= 1.9)
    await running.until_ready(2)
    assert "no sign of life" not in caplog.text
