"""What passes through a generation, in both directions: bytes, paths, headers, statuses."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.httpd import Arrival, Reply
from routing import blocks
from tests.proxy.scripted import OK, ScriptedReplica, error, ok

ROUTED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate")
ODD_BODIES = (
    b'{"model":"tiny","prompt":[1,2],"prompt":[3,4]}',
    b'{"prompt":[1],"model":"tiny","seed":9223372036854775807}',
    b'{"model":"tiny","prompt":"x","temperature":1.0,"top_p":1,"logit_bias":NaN}',
    '{"model":"tiny","prompt":"äöü\\u2028 \U0001f600 \\ud83d"}'.encode(),
    b'  {"model" : "tiny" ,\n"prompt":"x","never_heard_of":{"a":[null,1e-7]}}\n ',
    b'{"model":"tiny","prompt":[1,2],"seed":123456789012345678901234567890}',
)
ODD_REPLY = (
    b'{"choices":[{"logprobs":[-9999.0,null,-0.12345678901234567,1e-45],"text":"\\u00e4\xc3\xa4",'
    b'"text":"again","token_ids":[0,1.0]}],"zz":NaN , "a":1}'
)


async def test_a_request_arrives_with_the_bytes_it_was_sent_with(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        for body in ODD_BODIES:
            answer = await running.client.post("/v1/completions", content=body)
            assert answer.status_code == 200
            assert replica.generations[-1].body == body


async def test_a_reply_arrives_with_the_bytes_it_was_sent_with(start):
    async def script(arrival: Arrival) -> Reply:
        return Reply(200, ODD_REPLY)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        answer = await running.complete("tiny", [1, 2])
        assert answer.content == ODD_REPLY


async def test_a_reply_of_30_mb_and_a_prompt_of_a_million_tokens_pass(start):
    """Log-probabilities make such replies; the body is 7 MB."""
    big = b'{"choices":[{"text":"' + b"x" * 30_000_000 + b'"}]}'

    async def script(arrival: Arrival) -> Reply:
        return Reply(200, big)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        body = json.dumps({"model": "tiny", "prompt": [123456] * 1_000_000}).encode()
        answer = await running.client.post("/v1/completions", content=body)
        assert answer.status_code == 200
        # Only "same or not": pytest would draw the difference of 30 MB for minutes.
        assert (len(answer.content), answer.content == big) == (len(big), True)
        assert (replica.generations[0].body == body) is True


async def test_a_compressed_reply_passes_as_it_came(start):
    raw = b"\x1f\x8b not really gzip"

    async def script(arrival: Arrival) -> Reply:
        return Reply(200, raw, headers=(("content-encoding", "gzip"),))

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        async with running.client.stream(
            "POST", "/v1/completions", json={"model": "tiny", "prompt": "x"}
        ) as answer:
            got = b"".join([piece async for piece in answer.aiter_raw()])
        assert got == raw
        assert answer.headers["content-encoding"] == "gzip"
        assert replica.generations[0].header("accept-encoding") == "identity"


async def test_every_routed_path_is_carried_with_its_query_string(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        for path in ROUTED:
            target = f"{path}?a=1&b=%2F%20x&a=2&empty="
            answer = await running.client.post(target, json={"model": "tiny", "prompt": path})
            assert answer.status_code == 200
            assert answer.headers["x-rollmux-replica"] == "r0"
            assert answer.headers["x-rollmux-route"] == "unmatched"
            assert "x-rollmux-error" not in answer.headers
            assert replica.generations[-1].target == target


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 4}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}),
    ],
)
async def test_every_routed_path_is_answered_by_a_simulated_vllm(start, pair, path, body):
    running = await start([r.url for r in pair])
    answer = await running.client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rollmux-replica"] in ("r0", "r1")


async def test_chat_turns_of_one_conversation_stay_on_one_replica(start, pair):
    running = await start([r.url for r in pair])
    turns = [{"role": "user", "content": "once upon a time there was a fleet " * 6}]
    replicas, routes = [], []
    for _ in range(3):
        answer = await running.client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": turns, "max_tokens": 2}
        )
        replicas.append(answer.headers["x-rollmux-replica"])
        routes.append(answer.headers["x-rollmux-route"])
        turns = [*turns, answer.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
        turns = [{"role": t["role"], "content": t["content"]} for t in turns]
    assert len(set(replicas)) == 1
    assert routes[1:] == ["affinity", "affinity"]


async def test_headers_of_one_connection_stay_there_and_the_others_pass(start):
    async def script(arrival: Arrival) -> Reply:
        passing = (("x-vllm-thing", "1"), ("keep-alive", "timeout=5"), ("connection", "keep-alive"))
        return Reply(200, OK, headers=passing)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        sent = {
            "x-mine": "yes", "endpoint-load-metrics-format": "JSON", "connection": "keep-alive",
            "keep-alive": "timeout=9", "te": "trailers", "proxy-authorization": "Basic eDp5",
            "proxy-connection": "keep-alive", "upgrade": "websocket", "expect": "100-continue",
        }  # fmt: skip
        answer = await running.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=sent
        )
        names = [name for name, _ in replica.generations[0].headers]
        assert {*sent} & {*names} == {"x-mine", "endpoint-load-metrics-format"}
        assert len(names) == len(set(names))
        assert answer.headers["x-vllm-thing"] == "1"
        assert "keep-alive" not in answer.headers
        assert "connection" not in answer.headers


async def test_headers_that_connection_names_stay_there_too(start):
    """RFC 9110, 7.6.1; the case of a name is nobody's business, and there may be several lines."""

    async def script(arrival: Arrival) -> Reply:
        lines = (
            ("connection", "close, X-Hop"), ("connection", "x-other"), ("x-hop", "1"),
            ("x-other", "1"), ("x-vllm-thing", "1"),
        )  # fmt: skip
        return Reply(200, OK, headers=lines)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url])
        sent = {"connection": "keep-alive, X-Mine-Only", "x-mine-only": "1", "x-mine": "yes"}
        answer = await running.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=sent
        )
        names = {name for name, _ in replica.generations[0].headers}
        assert {*sent} & names == {"x-mine"}
        assert answer.content == OK
        assert {"x-hop", "x-other", "x-vllm-thing"} & {*answer.headers} == {"x-vllm-thing"}


async def test_the_host_is_the_replicas_and_its_base_path_is_kept(start):
    async with ScriptedReplica(base="/team/a") as replica:
        running = await start([replica.url])
        answer = await running.client.post(
            "/v1/completions?q=1",
            json={"model": "tiny", "prompt": "x"},
            headers={"host": "localhost:8000"},
        )
        assert answer.status_code == 200
        arrival = replica.generations[0]
        assert arrival.target == "/team/a/v1/completions?q=1"
        assert arrival.header("host") == f"127.0.0.1:{replica.server.port}"


async def test_a_chunked_request_arrives_whole_with_its_length(start):
    async def pieces():
        yield b'{"model":"tiny",'
        yield b'"prompt":"x"}'

    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        answer = await running.client.post("/v1/completions", content=pieces())
        assert answer.status_code == 200
        assert replica.generations[0].body == b'{"model":"tiny","prompt":"x"}'
        assert replica.generations[0].header("content-length") == "29"
        assert replica.generations[0].header("transfer-encoding") is None


async def test_the_request_id_is_echoed_and_a_second_attempt_has_its_own(start):
    """vLLM may still know the first one's id; the client sees only what it sent."""

    async def script(arrival: Arrival) -> Reply:
        number = len(a.generations) + len(b.generations)
        if number == 1:
            return error(503, "busy", "ServiceUnavailable")
        return Reply(200, OK, headers=(("x-request-id", arrival.header("x-request-id") or ""),))

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        answer = await running.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "x"},
            headers={"x-request-id": "mine"},
        )
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == ["mine"]
        ids = [r.generations[0].header("x-request-id") for r in (a, b)]
        assert sorted(ids) == ["mine", "mine-2"]


async def test_a_redirect_is_not_followed(start):
    """It could lead the token to another host. What redirects is not vLLM."""
    elsewhere = ScriptedReplica()

    async def script(arrival: Arrival) -> Reply:
        return Reply(307, b"", "", (("location", f"{elsewhere.url}/v1/completions"),))

    async with elsewhere, ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url], hold_s=0.3)
        answer = await running.complete("tiny", [1])
        assert answer.status_code in (502, 503)
        assert "x-rollmux-error" in answer.headers
        assert not elsewhere.generations
        assert len(a.generations) + len(b.generations) == 2


async def test_a_4xx_in_vllms_shape_passes_unchanged_and_is_asked_once(start):
    async def script(arrival: Arrival) -> Reply:
        return error(status, "the prompt is too long for tiny")

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        for asked, status in enumerate((400, 404, 405, 409, 422, 429), start=1):
            answer = await running.complete("tiny", [1])
            assert answer.status_code == status
            assert answer.content == error(status, "the prompt is too long for tiny").body
            assert answer.headers["x-rollmux-replica"] in ("r0", "r1")
            assert "x-rollmux-error" not in answer.headers
            assert len(a.generations) + len(b.generations) == asked
        assert all(r.state == "ready" for r in running.daemon.replicas.fleet)


async def test_a_5xx_of_the_requests_own_fault_is_asked_twice_and_passed_on(start):
    """A NaN log-probability fails on every replica alike; that says nothing about them."""
    message = "Out of range float values are not JSON compliant: nan"

    async def script(arrival: Arrival) -> Reply:
        return error(500, message, "InternalServerError")

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == message
        assert "x-rollmux-error" not in answer.headers
        assert (len(a.generations), len(b.generations)) == (1, 1)
        assert all(r.state == "ready" for r in running.daemon.replicas.fleet)


async def test_without_a_second_replica_a_5xx_is_passed_on_at_once(start):
    async def script(arrival: Arrival) -> Reply:
        return error(500, "no", "InternalServerError")

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url], hold_s=30.0)
        async with asyncio.timeout(10):
            answer = await running.complete("tiny", [1])
        assert answer.status_code == 500
        assert len(replica.generations) == 1


async def test_idle_connections_are_used_again(start):
    async with ScriptedReplica(ok) as replica:
        running = await start([replica.url])
        for _ in range(5):
            await running.complete("tiny", [1])
        assert len({arrival.connection for arrival in replica.generations}) == 1


async def test_a_group_is_hashed_once_and_each_of_it_arrives_with_its_own_seed(start, monkeypatch):
    hashed = []
    digest = blocks.prompt_digest
    monkeypatch.setattr(
        blocks, "prompt_digest", lambda *given: (hashed.append(given), digest(*given))[1]
    )
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        for adapter in ("", "tiny"):
            for seed in range(8):
                prompt = list(range(100))
                answer = await running.complete(adapter, prompt, seed=seed)
                assert answer.headers["x-rollmux-route"] == ("affinity" if seed else "unmatched")
                assert json.loads(replica.generations[-1].body)["seed"] == seed
        assert [model for model, _ in hashed] == ["", "tiny"]
