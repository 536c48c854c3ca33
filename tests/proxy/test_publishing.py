"""Adapters through the daemon: published everywhere or nowhere, retired, taken over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.adapter import write_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.replica import SimulatedReplica

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
NO_ADAPTER = (
    b'{"error":{"message":"Loading lora trl-policy-v1 failed: No adapter found for /lora/x",'
    b'"type":"NotFoundError","param":null,"code":404}}'
)
TOO_HIGH = (
    b'{"error":{"message":"Call to add_lora method failed: LoRA rank 16 is greater than '
    b'max_lora_rank 8.","type":"InternalServerError","param":null,"code":500}}'
)


def adapter(folder: Path, name: str, seed: int) -> str:
    path = folder / name
    write_adapter(path, seed=seed)
    return str(path)


async def load(running, name: str, path: str, **fields):
    body = {"lora_name": name, "lora_path": path, "load_inplace": False}
    return await running.client.post(LOAD, json=body | fields)


async def names_on(replica: SimulatedReplica) -> list[str]:
    return list(replica.names)


async def test_an_adapter_is_on_every_replica_once_the_load_is_answered(start, pair, tmp_path):
    running = await start([r.url for r in pair])
    answer = await load(running, "trl-policy-v1", adapter(tmp_path, "trl-policy-v1", 1))
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'trl-policy-v1' added successfully."
    assert [list(r.names) for r in pair] == [["trl-policy-v1"]] * 2
    prompt = list(range(30))
    replies = [await running.complete("trl-policy-v1", prompt) for _ in range(4)]
    expected = pair[0].expected_tokens("trl-policy-v1", prompt, 8)
    assert [r.json()["choices"][0]["token_ids"] for r in replies] == [expected] * 4
    assert expected != pair[0].expected_tokens("tiny", prompt, 8)
    status = await running.status()
    assert status["policy"] == {
        "latest": "trl-policy-v1",
        "live": ["trl-policy-v1"],
        "retired": [],
    }
    assert status["publications"][0]["outcome"] == "committed"
    assert status["publications"][0]["attempts"] == {"r0": 1, "r1": 1}


async def test_a_replica_that_cannot_see_the_files_yet_is_asked_again_alone(start, pair, tmp_path):
    pair[1].faults.add(LOAD, status=404, body=NO_ADAPTER, times=3)
    running = await start([r.url for r in pair])
    answer = await load(running, "trl-policy-v1", adapter(tmp_path, "trl-policy-v1", 1))
    assert answer.status_code == 200
    assert [len(r.calls(LOAD)) for r in pair] == [1, 4]
    page = (await running.client.get("/metrics")).text
    assert 'rollmux_adapter_load_retries_total{replica="r1"} 3.0' in page
    assert 'rollmux_adapter_load_attempts_total{replica="r1",result="not_visible"} 3.0' in page
    assert 'rollmux_adapter_publications_total{outcome="committed"} 1.0' in page


async def test_a_half_published_directory_is_waited_for(start, tmp_path):
    """Behind a mount that lags, and shows files one by one, the publication still commits."""
    folder = LaggingFolder(tmp_path, lag_s=2.0)  # no machine takes so long to get to the first look
    async with SimulatedReplica() as a, SimulatedReplica(folder=folder) as b:
        running = await start([a.url, b.url])
        answer = await load(running, "trl-policy-v1", adapter(tmp_path, "trl-policy-v1", 1))
        assert answer.status_code == 200
        assert len(a.calls(LOAD)) == 1
        assert len(b.calls(LOAD)) > 1


async def test_a_refusal_by_one_replica_unloads_the_others_and_names_it(start, pair, tmp_path):
    pair[1].faults.add(LOAD, status=500, body=TOO_HIGH)
    running = await start([r.url for r in pair])
    answer = await load(running, "trl-policy-v1", adapter(tmp_path, "trl-policy-v1", 1))
    assert answer.status_code == 500
    assert answer.headers["x-rollmux-error"] == "adapter_refused"
    message = answer.json()["error"]["message"]
    assert "r1" in message
    assert "LoRA rank 16 is greater than max_lora_rank 8." in message
    assert [list(r.names) for r in pair] == [[], []]
    refused = await running.complete("trl-policy-v1", [1, 2, 3])
    assert refused.status_code == 404
    assert "does not exist" in refused.json()["error"]["message"]


async def test_files_that_stay_invisible_everywhere_are_504_and_never_404(start, pair, tmp_path):
    for replica in pair:
        replica.faults.add(LOAD, status=404, body=NO_ADAPTER)
    running = await start([r.url for r in pair], load_timeout_s=0.5)
    answer = await load(running, "trl-policy-v1", "/nowhere/trl-policy-v1")
    assert answer.status_code == 504
    assert answer.headers["x-rollmux-error"] == "adapter_not_visible"


async def test_a_blind_replica_leaves_rotation_and_the_rest_commits(start, pair, tmp_path):
    pair[1].faults.add(LOAD, status=404, body=NO_ADAPTER)
    running = await start([r.url for r in pair], load_timeout_s=1.5)
    answer = await load(running, "trl-policy-v1", adapter(tmp_path, "trl-policy-v1", 1))
    assert answer.status_code == 200
    states = {r["id"]: r["state"] for r in (await running.status())["replicas"]}
    assert states == {"r0": "ready", "r1": "joining"}
    pair[1].faults.clear()
    await running.until_ready(2)
    assert list(pair[1].names) == ["trl-policy-v1"]


async def test_runtime_loading_switched_off_is_501_with_the_variable_to_set(start, tmp_path):
    async with SimulatedReplica(runtime_lora=False) as a, SimulatedReplica() as b:
        running = await start([a.url, b.url])
        answer = await load(running, "trl-policy-v1", adapter(tmp_path, "trl-policy-v1", 1))
        assert answer.status_code == 501
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in answer.json()["error"]["message"]
        assert list(b.names) == []


async def test_two_loads_of_one_name_at_once_are_one_publication(start, pair, tmp_path):
    pair[1].faults.add(LOAD, late_s=0.3)
    running = await start([r.url for r in pair])
    path = adapter(tmp_path, "trl-policy-v1", 1)
    first, second = await asyncio.gather(
        load(running, "trl-policy-v1", path), load(running, "trl-policy-v1", path)
    )
    assert (first.status_code, second.status_code) == (200, 200)
    assert [len(r.calls(LOAD)) for r in pair] == [1, 1]


async def test_a_load_goes_on_when_its_caller_hangs_up(start, pair, tmp_path):
    pair[1].faults.add(LOAD, late_s=0.3)
    running = await start([r.url for r in pair])
    path = adapter(tmp_path, "trl-policy-v1", 1)
    call = asyncio.ensure_future(load(running, "trl-policy-v1", path))
    await running.until(lambda: len(pair[1].calls(LOAD)) == 1)
    call.cancel()
    await running.until(lambda: running.daemon.replicas.ledger.known("trl-policy-v1"))
    assert [list(r.names) for r in pair] == [["trl-policy-v1"]] * 2


async def test_a_fleet_lost_under_a_load_is_waited_for_and_the_load_begins_again(
    start, pair, tmp_path
):
    for replica in pair:
        replica.faults.add(LOAD, hang=True, times=1)
    running = await start([r.url for r in pair])
    call = asyncio.ensure_future(
        load(running, "trl-policy-v1", adapter(tmp_path, "trl-policy-v1", 1))
    )
    await running.until(lambda: all(len(r.calls(LOAD)) == 1 for r in pair))
    for replica in pair:
        replica.refuse()
    await running.until(lambda: not running.daemon.replicas.fleet.routable())
    for replica in pair:
        await replica.restart()
    assert (await call).status_code == 200
    assert any(list(r.names) == ["trl-policy-v1"] for r in pair)
    await running.until_ready(2)
    assert [list(r.names) for r in pair] == [["trl-policy-v1"]] * 2


async def test_the_base_models_name_is_refused_for_an_adapter(start, pair, tmp_path):
    running = await start([r.url for r in pair])
    answer = await load(running, "tiny", adapter(tmp_path, "x", 1))
    assert answer.status_code == 400
    assert "base model" in answer.json()["error"]["message"]
    assert not any(r.calls(LOAD) for r in pair)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"not json", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"lora_name": "a"}', "must be provided"),
        (b'{"lora_name": "", "lora_path": "/x"}', "must be provided"),
    ],
)
async def test_a_bad_load_body_is_400_and_reaches_no_replica(start, pair, body, words):
    running = await start([r.url for r in pair])
    answer = await running.client.post(LOAD, content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not any(r.calls(LOAD) for r in pair)


async def test_an_unloaded_name_is_served_until_nobody_names_it(start, pair, tmp_path):
    running = await start([r.url for r in pair], retire_grace_s=1.5)
    await load(running, "trl-policy-v1", adapter(tmp_path, "trl-policy-v1", 1))
    answer = await running.client.post(UNLOAD, json={"lora_name": "trl-policy-v1"})
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'trl-policy-v1' removed successfully."
    late = await running.complete("trl-policy-v1", [1, 2, 3])
    assert late.status_code == 200
    await running.until(lambda: not running.daemon.replicas.ledger.known("trl-policy-v1"))
    await running.until(lambda: all(not r.names for r in pair))
    gone = await running.complete("trl-policy-v1", [1, 2, 3])
    assert gone.status_code == 404


async def test_unloading_an_unknown_name_is_vllms_own_404(start, pair):
    running = await start([r.url for r in pair])
    answer = await running.client.post(UNLOAD, json={"lora_name": "nobody"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The lora adapter 'nobody' cannot be found."


async def test_a_name_loaded_again_with_other_bytes_answers_with_the_new_ones(
    start, pair, tmp_path
):
    """vLLM keys its prefix cache by name: without a reset the old blocks would answer."""
    running = await start([r.url for r in pair])
    prompt = list(range(64))
    await load(running, "trl-policy-v1", adapter(tmp_path / "one", "trl-policy-v1", 1))
    old = await running.complete("trl-policy-v1", prompt)
    answer = await load(running, "trl-policy-v1", adapter(tmp_path / "two", "trl-policy-v1", 2))
    assert answer.status_code == 200
    new = [
        (await running.complete("trl-policy-v1", prompt)).json()["choices"][0]["token_ids"]
        for _ in range(4)
    ]
    expected = pair[0].expected_tokens("trl-policy-v1", prompt, 8)
    assert old.json()["choices"][0]["token_ids"] != expected
    assert new == [expected] * 4


async def test_replicas_load_from_a_copy_that_the_trainer_cannot_delete(start, pair, tmp_path):
    running = await start([r.url for r in pair], own_copies="auto", retire_grace_s=0.2)
    path = adapter(tmp_path, "trl-policy-v1", 1)
    answer = await load(running, "trl-policy-v1", path)
    assert answer.status_code == 200
    copies = list((tmp_path / ".rollmux").iterdir())
    assert len(copies) == 1
    assert copies[0].name.startswith("trl-policy-v1-")
    models = (await running.client.get("/v1/models")).json()["data"]
    assert models[1]["root"] == path
    await running.client.post(UNLOAD, json={"lora_name": "trl-policy-v1"})
    await running.until(lambda: not copies[0].exists())


async def test_an_adapter_with_truncated_weights_ends_in_one_clear_error(start, pair, tmp_path):
    running = await start([r.url for r in pair], load_timeout_s=0.3)
    path = Path(adapter(tmp_path, "trl-policy-v1", 1))
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    answer = await load(running, "trl-policy-v1", str(path))
    assert answer.status_code == 504
    assert "not whole" in answer.json()["error"]["message"]
    assert not any(r.calls(LOAD) for r in pair)


async def test_a_name_whose_takeover_was_refused_is_unknown_again(start, pair, tmp_path):
    """What it stood for is gone from the replicas, and to wait for it would be in vain."""
    running = await start([r.url for r in pair], hold_s=0.2)
    path = adapter(tmp_path / "one", "trl-policy-v1", 1)
    assert (await load(running, "trl-policy-v1", path)).status_code == 200
    pair[1].faults.add(LOAD, status=500, body=TOO_HIGH)
    other = adapter(tmp_path / "two", "trl-policy-v1", 2)
    assert (await load(running, "trl-policy-v1", other)).status_code == 500
    assert (await running.status())["policy"]["live"] == []
    assert (await running.complete("trl-policy-v1", [1, 2, 3])).status_code == 404
