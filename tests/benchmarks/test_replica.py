"""The simulated replica over real sockets: what tests of the daemon rely on."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.adapter import CONFIG, WEIGHTS, write_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.replica import SimulatedReplica

PROMPT = list(range(10, 60))


@pytest.fixture
async def replica() -> AsyncIterator[SimulatedReplica]:
    async with SimulatedReplica() as one:
        yield one


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as one:
        yield one


async def load(
    client: httpx.AsyncClient, replica: SimulatedReplica, name: str, path: Path | str
) -> httpx.Response:
    return await client.post(
        f"{replica.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}
    )


async def unload(client: httpx.AsyncClient, replica: SimulatedReplica, name: str) -> httpx.Response:
    return await client.post(f"{replica.url}/v1/unload_lora_adapter", json={"lora_name": name})


async def complete(
    client: httpx.AsyncClient, replica: SimulatedReplica, model: str = "tiny", **more: Any
) -> httpx.Response:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
        "logprobs": 0,
    }
    return await client.post(f"{replica.url}/v1/completions", json=body | more)


def ids(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


async def until(condition: Any, seconds: float = 5.0) -> None:
    """Yield to the loop until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is another object's state
            await asyncio.sleep(0.001)


async def test_a_reply_shows_which_weights_made_it(
    replica: SimulatedReplica, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    same, other = write_adapter(tmp_path / "a", 1), write_adapter(tmp_path / "b", 2)
    shutil.copytree(same, tmp_path / "copy")
    for name, path in (("v1", same), ("v2", other), ("v3", tmp_path / "copy")):
        assert (await load(client, replica, name, path)).status_code == 200
    replies = {m: ids(await complete(client, replica, m)) for m in ("tiny", "v1", "v2", "v3")}
    assert replies["v1"] == replies["v3"] == replica.expected_tokens("v1", PROMPT, 8)
    assert len({tuple(r) for r in replies.values()}) == 3


async def test_a_reused_name_answers_with_stale_cache_until_it_is_cleared(
    replica: SimulatedReplica, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await load(client, replica, "v1", write_adapter(tmp_path / "a", 1))
    old = ids(await complete(client, replica, "v1"))
    await unload(client, replica, "v1")
    await load(client, replica, "v1", write_adapter(tmp_path / "b", 2))
    new = replica.expected_tokens("v1", PROMPT, 8)
    mixed = ids(await complete(client, replica, "v1"))
    assert mixed not in (old, new)
    await client.post(f"{replica.url}/reset_prefix_cache")
    assert ids(await complete(client, replica, "v1")) == new


async def test_text_and_token_prompts_of_the_same_bytes_share_a_reply(
    replica: SimulatedReplica, client: httpx.AsyncClient
) -> None:
    text = await complete(client, replica, prompt="What is it?")
    numbers = text.json()["choices"][0]["prompt_token_ids"]
    assert ids(await complete(client, replica, prompt=numbers)) == ids(text)


async def test_a_seed_decides_a_sampled_reply_and_without_one_replies_differ(
    replica: SimulatedReplica, client: httpx.AsyncClient
) -> None:
    seeded = [ids(await complete(client, replica, temperature=1, seed=7)) for _ in range(2)]
    free = [ids(await complete(client, replica, temperature=1)) for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert free[0] != free[1]


async def test_a_stream_carries_the_same_tokens(
    replica: SimulatedReplica, client: httpx.AsyncClient
) -> None:
    whole = ids(await complete(client, replica))
    reply = await complete(client, replica, stream=True)
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [json.loads(e)["choices"][0] for e in events]
    assert [t for c in choices for t in c["token_ids"]] == whole
    assert [c["finish_reason"] for c in choices] == [None] * 7 + ["length"]


async def test_a_half_published_directory_is_refused_as_vllm_does(
    replica: SimulatedReplica, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", 1)
    weights, config = (path / WEIGHTS).read_bytes(), (path / CONFIG).read_text()
    (path / WEIGHTS).write_bytes(weights[:-100])
    reply = await load(client, replica, "v1", path)
    assert (reply.status_code, "file not fully covered" in reply.text) == (500, True)
    (path / WEIGHTS).unlink()
    assert "doesn't contain tensors" in (await load(client, replica, "v1", path)).text
    (path / CONFIG).write_text(config[:10])
    assert (await load(client, replica, "v1", path)).status_code == 500
    (path / CONFIG).unlink()
    reply = await load(client, replica, "v1", path)
    assert (reply.status_code, "No adapter found" in reply.text) == (404, True)
    assert replica.names == {}


async def test_a_lagging_mount_answers_not_found_until_it_shows_the_adapter(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    now = time.time()
    folder = LaggingFolder(tmp_path, 2.5, 1.0, clock=lambda: now)
    async with SimulatedReplica(folder=folder) as replica:
        path = write_adapter(tmp_path / "v1", 1)
        assert (await load(client, replica, "v1", path)).status_code == 404
        now += 4
        assert (await load(client, replica, "v1", path)).status_code == 200


async def test_a_paused_replica_keeps_requests_and_answers_after_resume(
    replica: SimulatedReplica, client: httpx.AsyncClient
) -> None:
    await client.post(f"{replica.url}/pause?mode=keep")
    reply = asyncio.ensure_future(complete(client, replica))
    await until(lambda: replica.in_flight == 1)
    assert (await client.get(f"{replica.url}/health")).status_code == 200
    assert (await client.get(f"{replica.url}/is_paused")).json() == {"is_paused": True}
    assert (await complete(client, replica, "unknown")).status_code == 404
    assert not reply.done()
    await client.post(f"{replica.url}/resume")
    assert len(ids(await reply)) == 8


async def test_pausing_by_abort_cuts_replies_short_with_status_200(
    client: httpx.AsyncClient,
) -> None:
    async with SimulatedReplica(step_s=0.01) as replica:
        reply = asyncio.ensure_future(complete(client, replica, max_tokens=900))
        await until(lambda: replica.engine.busy())
        await client.post(f"{replica.url}/pause")
        choice = (await reply).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) < 900


async def test_pausing_by_wait_answers_when_the_running_are_done(client: httpx.AsyncClient) -> None:
    async with SimulatedReplica(step_s=0.005) as replica:
        reply = asyncio.ensure_future(complete(client, replica, max_tokens=20))
        await until(lambda: replica.engine.busy())
        await client.post(f"{replica.url}/pause?mode=wait")
        assert replica.in_flight == 0
        assert len(ids(await reply)) == 20


async def test_a_client_that_leaves_frees_the_engine(client: httpx.AsyncClient) -> None:
    async with SimulatedReplica(step_s=1.0) as replica:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                f"{replica.url}/v1/completions",
                json={"model": "tiny", "prompt": PROMPT, "max_tokens": 900},
                timeout=0.2,
            )
        await until(lambda: replica.in_flight == 0)
        assert replica.calls("/v1/completions")[0].disconnected_s is not None
        assert replica.engine.counters.finished["abort"] == 1


async def test_an_unloaded_name_is_unknown_but_its_running_request_ends_well(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with SimulatedReplica(step_s=0.002) as replica:
        await load(client, replica, "v1", write_adapter(tmp_path / "a", 1))
        expected = replica.expected_tokens("v1", PROMPT, 30)
        reply = asyncio.ensure_future(complete(client, replica, "v1", max_tokens=30))
        await until(lambda: replica.engine.busy())
        await unload(client, replica, "v1")
        assert (await complete(client, replica, "v1")).status_code == 404
        assert ids(await reply) == expected


async def test_an_evicted_adapter_without_files_takes_the_whole_server_down(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with SimulatedReplica(max_cpu_loras=1, step_s=0.05, notice_s=0.0, exit_s=0.05) as replica:
        for name in ("v1", "v2"):
            await load(client, replica, name, write_adapter(tmp_path / name, name))
        bystander = asyncio.ensure_future(complete(client, replica))
        await until(lambda: replica.engine.busy())
        shutil.rmtree(tmp_path / "v1")
        reply = await complete(client, replica, "v1")
        assert (reply.status_code, "EngineCore encountered" in reply.text) == (500, True)
        assert (await bystander).status_code == 500
        assert (await client.get(f"{replica.url}/health")).status_code == 503
        await until(lambda: not replica._server.listening)
        with pytest.raises(httpx.TransportError):
            await client.get(f"{replica.url}/health")


async def test_a_restart_comes_back_empty_at_the_same_address(
    replica: SimulatedReplica, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await load(client, replica, "v1", write_adapter(tmp_path / "a", 1))
    await client.post(f"{replica.url}/update_weight_version", json={"new_version": "run"})
    url = replica.url
    await replica.restart()
    assert replica.url == url
    listed = (await client.get(f"{url}/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["tiny"]
    assert (await client.get(f"{url}/weight_info")).json() == {"weight_version": "default"}


async def test_base_weights_updated_in_place_change_the_replies(client: httpx.AsyncClient) -> None:
    async with SimulatedReplica(weight_transfer=True) as replica:
        before = ids(await complete(client, replica))
        await client.post(f"{replica.url}/start_weight_update")
        await client.post(f"{replica.url}/update_weights", json={"update_info": {"names": []}})
        finish = {"weight_version": "v7"}
        reply = await client.post(f"{replica.url}/finish_weight_update", json=finish)
        assert reply.json() == {"message": "Weight update finished"}
        assert (await client.get(f"{replica.url}/weight_info")).json() == {"weight_version": "v7"}
        await client.post(f"{replica.url}/reset_prefix_cache")
        assert ids(await complete(client, replica)) == replica.expected_tokens("tiny", PROMPT, 8)
        assert replica.expected_tokens("tiny", PROMPT, 8) != before


async def test_what_the_server_was_not_started_with_is_not_there(client: httpx.AsyncClient) -> None:
    async with SimulatedReplica(runtime_lora=False, dev_mode=False, lora=False) as replica:
        reply = await load(client, replica, "v1", "/lora/v1")
        assert (reply.status_code, reply.json()) == (404, {"detail": "Not Found"})
        assert (await client.post(f"{replica.url}/pause")).status_code == 404


async def test_an_api_key_guards_only_v1(client: httpx.AsyncClient) -> None:
    async with SimulatedReplica(api_key="k") as replica:
        assert (await client.get(f"{replica.url}/v1/models")).json() == {"error": "Unauthorized"}
        assert (await client.get(f"{replica.url}/is_paused")).status_code == 200
        headers = {"authorization": "Bearer k"}
        reply = await client.get(f"{replica.url}/v1/models", headers=headers)
        assert reply.status_code == 200


async def test_remote_control_plants_faults_and_tells_what_arrived(
    replica: SimulatedReplica, client: httpx.AsyncClient
) -> None:
    fault = {"path": "/health", "nth": 2, "status": 502, "body": "<html>"}
    await client.post(f"{replica.url}/sim/faults", json=fault)
    statuses = [(await client.get(f"{replica.url}/health")).status_code for _ in range(3)]
    assert statuses == [200, 502, 200]
    log = (await client.get(f"{replica.url}/sim/log")).json()
    assert [(a["target"], a["status"]) for a in log] == [
        ("/health", 200),
        ("/health", 502),
        ("/health", 200),
    ]


async def test_many_replicas_fit_into_one_loop(client: httpx.AsyncClient) -> None:
    replicas = [SimulatedReplica() for _ in range(64)]
    for one in replicas:
        await one.start()
    replies = await asyncio.gather(*(complete(client, one) for one in replicas))
    assert len({tuple(ids(r)) for r in replies}) == 1
    for one in replicas:
        await one.close()


async def test_a_load_under_way_at_a_restart_does_not_reach_the_new_process(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with SimulatedReplica(load_s=0.05) as replica:
        call = asyncio.ensure_future(load(client, replica, "v1", write_adapter(tmp_path / "a")))
        await until(lambda: replica.engine.adapters)
        await replica.restart()
        with pytest.raises(httpx.TransportError):
            await call
        assert (await load(client, replica, "v2", tmp_path / "a")).status_code == 200
        assert list(replica.names) == ["v2"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "x", "n": "lots"}),
        ("/v1/chat/completions", {"model": "tiny", "messages": "hi"}),
        ("/detokenize", {"model": "tiny", "tokens": "x"}),
        ("/abort_requests", {"request_ids": 5}),
        ("/v1/load_lora_adapter", {"lora_name": "v1", "lora_path": "\0"}),
    ],
)
async def test_a_field_of_a_wrong_type_is_refused_in_vllms_shape(
    client: httpx.AsyncClient, replica: SimulatedReplica, path: str, body: dict[str, Any]
) -> None:
    """Not 500: the daemon would take an answer of another shape for one of an edge."""
    answer = await client.post(f"{replica.url}{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == 400
