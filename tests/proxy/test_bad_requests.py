"""Bad input: a clear error, nothing sent to a replica, nothing lost."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.replica import SimulatedReplica
from proxy.client import MAX_BODY_BYTES
from tests.proxy.scripted import ScriptedReplica

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"prompt=hello", "not JSON"),
        (b'{"model":"tiny","prompt":"cut', "not JSON"),
        (b"\xff\xfe\xfd", "not JSON"),
        (b'[{"model":"tiny"}]', "JSON array"),
        (b"null", "JSON null"),
    ],
)
async def test_a_body_that_is_no_json_object_is_400(start, body, words):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        answer = await running.client.post(PATH, content=body)
        assert answer.status_code == 400
        assert answer.headers["x-rollmux-error"] == "bad_request"
        error = answer.json()["error"]
        assert words in error["message"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert not replica.generations


async def test_the_log_names_what_was_refused_once_in_a_while(start, caplog):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        for _ in range(3):
            await running.client.post(PATH, content=b"prompt=hello")
            await running.complete("never-heard-of", [1])
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.partition(":")[0] for line in lines if "a generation was answered" in line] == [
        "a generation was answered 400 bad_request",
        "a generation was answered 404 unknown_model",
    ]
    assert "never-heard-of" in caplog.text


async def test_a_64_mb_prompt_is_413_and_the_connection_goes_on(start):
    """The client sends to its end and then reads the reason, instead of a broken pipe."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        body = b'{"model":"tiny","prompt":"' + b"x" * (64 * 1024 * 1024) + b'"}'
        answer = await running.client.post(PATH, content=body)
        assert answer.status_code == 413
        assert answer.headers["x-rollmux-error"] == "body_too_large"
        assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]
        assert not replica.generations
        assert (await running.complete("tiny", [1])).status_code == 200


async def test_headers_past_the_limit_are_431_and_named_in_the_log(start, caplog):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        for method, path in (("POST", PATH), ("GET", "/health")):
            answer = await running.client.request(method, path, headers={"x-a": "y" * 300_000})
            assert answer.status_code == 431
            assert answer.headers["x-rollmux-error"] == "headers_too_large"
            assert f"{method} {path}: 300" in caplog.text
        assert not replica.generations


@pytest.mark.parametrize(
    "load",
    [
        {"lora_name": "x" * 256, "lora_path": "/l/x"},
        {"lora_name": "é" * 128, "lora_path": "/l/x"},
        {"lora_name": "x", "lora_path": "/l/\0"},
    ],
)
async def test_a_load_that_can_be_no_adapter_is_400_and_asks_no_replica(start, load):
    async with SimulatedReplica() as replica:
        running = await start([replica.url])
        answer = await running.client.post("/v1/load_lora_adapter", json=load)
        assert answer.status_code == 400
        assert answer.headers["x-rollmux-error"] == "bad_request"
        assert not replica.calls("/v1/load_lora_adapter")


async def test_a_bug_of_the_daemon_is_in_its_log_and_said_in_vllms_shape(
    start, caplog, monkeypatch
):
    async with SimulatedReplica() as replica:
        running = await start([replica.url])
        monkeypatch.setattr(running.daemon.status, "metrics_page", lambda: 1 / 0)
        answer = await running.client.get("/metrics")
        assert answer.status_code == 500
        assert answer.headers["x-rollmux-error"] == "bug"
        assert answer.json()["error"]["code"] == 500
        assert "GET /metrics failed inside the daemon" in caplog.text
        assert "ZeroDivisionError" in caplog.text


async def test_a_body_at_the_limit_passes(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        head = b'{"model":"tiny","prompt":"'
        body = head + b"x" * (MAX_BODY_BYTES - len(head) - 2) + b'"}'
        answer = await running.client.post(PATH, content=body)
        assert answer.status_code == 200
        assert len(replica.generations[0].body) == MAX_BODY_BYTES


async def test_a_body_that_comes_too_slowly_is_408(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], body_timeout_s=0.2)
        url = httpx.URL(running.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"x-rollmux-error: body_timeout" in head
        writer.close()
        assert not replica.generations


async def test_a_body_in_drips_passes(start):
    body = json.dumps({"model": "tiny", "prompt": list(range(200))}).encode()

    async def drips():
        for first in range(0, len(body), 50):
            yield body[first : first + 50]

    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        answer = await running.client.post(PATH, content=drips())
        assert answer.status_code == 200
        assert replica.generations[0].body == body


ODD_PROMPTS = (
    [1, 2, 3], "text", ["one", "two"], [[1, 2], [3]], None, [], [5], [2**31, 2**40], [2**70],
    [-1], [1.5], ["a", 1], {"a": 1}, 17, True, "", [[]], "\ud800", [None],
)  # fmt: skip


async def test_a_prompt_of_any_kind_reaches_vllm_as_it_is(start):
    """Whether it is good is for vLLM to say; routing takes whatever comes."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        for prompt in ODD_PROMPTS:
            body = json.dumps({"model": "tiny", "prompt": prompt}).encode()
            answer = await running.client.post(PATH, content=body)
            assert (prompt, answer.status_code) == (prompt, 200)
            assert replica.generations[-1].body == body


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": None}, {"prompt": []}, {"prompt": [2**31]}, {"prompt": "x", "n": 0}],
    ids=repr,
)
async def test_what_vllm_refuses_is_refused_in_its_words(start, fields):
    async with SimulatedReplica() as replica:
        running = await start([replica.url])
        body = {"model": "tiny"} | fields
        async with httpx.AsyncClient(trust_env=False) as direct:
            expected = await direct.post(replica.url + PATH, json=body)
        answer = await running.client.post(PATH, json=body)
        assert answer.status_code == expected.status_code
        assert answer.content == expected.content
        assert 400 <= answer.status_code < 500
        assert running.daemon.replicas.fleet["r0"].state == "ready"


async def test_many_and_large_headers_pass(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        headers = {f"x-{n}": "v" for n in range(100)} | {"x-large": "y" * 70_000}
        answer = await running.client.post(
            f"{PATH}?q={'z' * 20_000}", json={"model": "tiny", "prompt": "x"}, headers=headers
        )
        assert answer.status_code == 200
        assert replica.generations[0].header("x-large") == "y" * 70_000


async def test_good_requests_do_not_wait_for_bad_ones(start):
    """One prompt sent again and again, as TRL does, and always refused."""
    async with SimulatedReplica() as a, SimulatedReplica() as b:
        running = await start([a.url, b.url])
        async with asyncio.TaskGroup() as group:
            bad = [
                group.create_task(running.complete("tiny", [1] * 1020, max_tokens=500))
                for _ in range(30)
            ]
            unknown = [group.create_task(running.complete("gone", [1])) for _ in range(30)]
            good = [group.create_task(running.complete("tiny", [n])) for n in range(30)]
        assert {task.result().status_code for task in bad} == {400}
        assert {task.result().status_code for task in unknown} == {404}
        assert {task.result().status_code for task in good} == {200}
        assert len(running.daemon.replicas.fleet.routable()) == 2
        assert len(a.calls(PATH)) + len(b.calls(PATH)) == 60
