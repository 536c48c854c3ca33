"""Field reports K3: calls to all replicas that fail on some, or whose answer is lost."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from benchmarks.replica import SimulatedReplica
from tests.proxy.trainer import LOAD, UNLOAD, load, policy, publish, save

TOO_HIGH = (
    b'{"error":{"message":"Call to add_lora method failed: LoRA rank 16 is greater than '
    b'max_lora_rank 8.","type":"InternalServerError","param":null,"code":500}}'
)


def unloads(replica: SimulatedReplica) -> list[bytes]:
    """Names a replica was told to unload."""
    return [orjson.loads(c.body).get("lora_name") for c in replica.calls(UNLOAD) if c.body != b"{}"]


async def test_a_roll_back_waits_for_the_load_that_is_still_out(start, pair, tmp_path):
    """O-08. B refuses at once, C succeeds late: nowhere must the name stay."""
    async with SimulatedReplica() as c:
        running = await start([r.url for r in (*pair, c)])
        pair[0].faults.add(LOAD, late_s=0.05)
        pair[1].faults.add(LOAD, status=500, body=TOO_HIGH)
        c.faults.add(LOAD, late_s=0.4)
        answer = await load(running, policy(9), save(tmp_path, 9))
        assert c.calls(LOAD)[0].answered_s is not None
        assert answer.status_code == 500
        message = answer.json()["error"]["message"]
        assert "LoRA rank 16 is greater than max_lora_rank 8." in message
        assert f"r1 is {pair[1].url}" in message
        assert [unloads(r) for r in (*pair, c)] == [[policy(9)], [], [policy(9)]]
        assert [list(r.names) for r in (*pair, c)] == [[], [], []]
        seen = sum(len(r.calls("/v1/completions")) for r in (*pair, c))
        assert (await running.complete(policy(9), [1])).status_code == 404
        assert sum(len(r.calls("/v1/completions")) for r in (*pair, c)) == seen
        assert all(r["state"] == "ready" for r in (await running.status())["replicas"])


async def test_a_load_that_is_never_answered_is_given_up_while_others_serve(start, pair, tmp_path):
    """O-09. Every attempt has its time; at the deadline the silent replica leaves rotation."""
    running = await start([r.url for r in pair], attempt_timeout_s=0.2, load_timeout_s=2.0)
    await publish(running, tmp_path, 0)
    pair[1].faults.add(LOAD, hang=True)
    path = save(tmp_path, 1)
    call = asyncio.ensure_future(load(running, policy(1), path))
    served = 0
    while not call.done():
        assert (await running.complete(policy(0), [served % 300])).status_code == 200
        served += 1
    assert served > 1
    assert (await call).status_code == 200
    assert len(pair[1].calls(LOAD)) > 1
    states = {r["id"]: r["state"] for r in (await running.status())["replicas"]}
    assert states == {"r0": "ready", "r1": "joining"}


async def test_a_silent_replica_is_504_and_rolled_back_where_all_are_needed(start, pair, tmp_path):
    """O-09 under ``--min-replicas all``."""
    running = await start(
        [r.url for r in pair], attempt_timeout_s=0.2, load_timeout_s=1.5, min_replicas="all"
    )
    pair[1].faults.add(LOAD, hang=True)
    answer = await load(running, policy(1), save(tmp_path, 1))
    assert answer.status_code == 504
    message = answer.json()["error"]["message"]
    assert f"r1 is {pair[1].url}" in message
    assert "no answer within 0.2 s" in message
    assert unloads(pair[0]) == [policy(1)]


async def test_a_replica_silent_for_a_while_gets_the_adapter_after_all(start, pair, tmp_path):
    """O-09. Nothing for some attempts, then 200."""
    running = await start([r.url for r in pair], attempt_timeout_s=0.2)
    pair[1].faults.add(LOAD, hang=True, times=2)
    answer = await load(running, policy(1), save(tmp_path, 1))
    assert answer.status_code == 200
    assert [list(r.names) for r in pair] == [[policy(1)]] * 2
    assert (await running.status())["publications"][-1]["attempts"] == {"r0": 1, "r1": 3}


async def test_a_load_carried_out_whose_answer_is_lost_counts_as_loaded(start, pair, tmp_path):
    """O-10. It is looked up instead of done again; vLLM would answer 400 to a second one."""
    running = await start([r.url for r in pair])
    pair[1].faults.add(LOAD, drop=True, times=1)
    answer = await load(running, policy(4), save(tmp_path, 4))
    assert answer.status_code == 200
    assert len(pair[1].calls(LOAD)) == 1
    assert [list(r.names) for r in pair] == [[policy(4)]] * 2
    assert (await running.status())["publications"][-1]["dropped"] == []


async def test_a_load_that_lands_after_its_attempt_was_given_up_counts_as_loaded(
    start, pair, tmp_path
):
    """O-10. The next attempt is told 400, "has already been loaded": by ourselves."""
    async with SimulatedReplica(load_s=0.3) as slow:
        running = await start([pair[0].url, slow.url], attempt_timeout_s=0.2)
        answer = await load(running, policy(4), save(tmp_path, 4))
        assert answer.status_code == 200
        assert list(slow.names) == [policy(4)]
        assert unloads(slow) == []
        assert (await running.status())["publications"][-1]["dropped"] == []


async def test_an_unload_whose_answer_is_lost_in_a_roll_back_strands_nobody(start, pair, tmp_path):
    """O-10. The second one is told 404, "cannot be found": that is what was wanted."""
    running = await start([r.url for r in pair])
    pair[0].faults.add(UNLOAD, drop=True, times=1)
    pair[1].faults.add(LOAD, status=500, body=TOO_HIGH)
    answer = await load(running, policy(4), save(tmp_path, 4))
    assert answer.status_code == 500
    assert answer.headers["x-rollmux-error"] == "adapter_refused"
    assert [call.status for call in pair[0].calls(UNLOAD) if call.body != b"{}"] == [None, 404]
    assert (await running.status())["publications"][-1]["outcome"] == "rolled_back"


async def test_an_unload_whose_answer_is_lost_ends_with_the_name_gone(start, pair, tmp_path):
    """O-10. The trainer has had its 200; the replica is looked at and serves on."""
    running = await start([r.url for r in pair], retire_grace_s=0.1)
    await publish(running, tmp_path, 4)
    pair[1].faults.add(UNLOAD, drop=True, times=1)
    answer = await running.client.post(UNLOAD, json={"lora_name": policy(4)})
    assert answer.status_code == 200
    await running.until(lambda: len(unloads(pair[1])) > 0 and not any(r.names for r in pair))
    await running.until_ready(2)


LONG = "Traceback (most recent call last):\n  " + "Größe überschritten → ∑ " * 1000
"""20 kB and more, of characters of one, two and three bytes."""


@pytest.mark.parametrize(
    "body",
    [
        LONG.encode(),
        orjson.dumps({"error": {"message": LONG, "type": "X", "param": None, "code": 500}}),
        orjson.dumps({"error": LONG}),
        LONG.encode()[:-2] + b"\xff\xfe",
    ],
    ids=["plain", "vllm", "development", "not-utf-8"],
)
@pytest.mark.parametrize("path", ["/pause?mode=keep", LOAD])
async def test_a_long_error_is_shown_bounded_with_who_sent_it(start, pair, tmp_path, path, body):
    """O-11. Never discarded, and never the first replica's success instead."""
    running = await start([r.url for r in pair], pause="eager")
    pair[1].faults.add(path.partition("?")[0], status=500, body=body, content_type="")
    if path == LOAD:
        answer = await load(running, policy(1), save(tmp_path, 1))
    else:
        answer = await running.client.post(path)
    assert answer.status_code == 500
    assert len(answer.content) < 10_000
    message = orjson.loads(answer.content)["error"]["message"]  # raises for bad UTF-8
    assert "r1" in message
    assert pair[1].url in message
    assert "500" in message
    assert "Traceback (most recent call last):\n  Größe überschritten → ∑" in message
    assert len(message) < 3000
