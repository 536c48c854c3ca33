"""One answer out of many: sums, weakest values, and errors that name who differs or failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadcast import joins
from broadcast.answer import Answer, Cause, NoAnswer
from broadcast.ledger import LiveAdapter
from routing.ids import AdapterName, ReplicaId

A, B, C = ReplicaId("r0"), ReplicaId("r1"), ReplicaId("r2")
URLS = {A: "http://a:8000", B: "http://b:8000", C: "http://c:8000"}
BASE = "Qwen/Qwen2.5-Math-1.5B"
V1 = AdapterName("trl-policy-v1")
LOST = NoAnswer(Cause.RESET, "connection reset")


def answer(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value, separators=(",", ":")).encode(), "application/json")


def body(joined: joins.Joined) -> Any:
    return json.loads(joined.body)


def message(joined: joins.Joined) -> str:
    error = body(joined)["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, joined.status)
    return str(error["message"])


# Broadcasts


def test_equal_successes_are_passed_as_they_came():
    text = Answer(200, b"Success: LoRA adapter 'a1' added successfully.", "")
    joined = joins.joined_success({A: text, B: text}, URLS, "/v1/load_lora_adapter")
    assert joined == joins.Joined(200, text.body, "")


def test_different_successes_are_given_per_replica():
    answers = {A: answer({"message": "one"}), B: Answer(200, b"plain")}
    assert body(joins.joined_success(answers, URLS, "/x")) == {
        "replicas": {"r0": {"message": "one"}, "r1": "plain"}
    }


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ({A: answer({}), B: answer({"error": "boom"}, 500)}, 500),
        ({A: LOST, B: answer({"error": "boom"}, 400)}, 400),
        ({A: answer({}), B: LOST}, 502),
        ({A: Answer(204), B: answer({})}, 502),
        ({}, 503),
    ],
)
def test_a_failure_anywhere_is_never_a_success(
    answers: dict[ReplicaId, Answer | NoAnswer], status: int
):
    joined = joins.joined_success(answers, URLS, "/pause")
    assert (joined.status, joined.ok) == (status, False)


def test_a_failure_names_replica_url_status_and_bounded_text():
    """O-11: the real error was visible only in the server's log."""
    trace = Answer(500, b"Traceback \xff\xf0\x9f" + b"x" * 20_000, "text/plain")
    joined = joins.joined_success({A: answer({}), B: trace, C: LOST}, URLS, "/pause")
    words = message(joined)
    for part in ("r1", "http://b:8000", "500", "Traceback", "r2", "connection reset", "/pause"):
        assert part in words
    assert "r0" not in words
    assert len(joined.body) < 8_000
    joined.body.decode("utf-8")


def test_a_cache_reset_succeeds_only_where_it_did_everywhere():
    yes, no = answer({"success": True}), answer({"success": False})
    assert joins.reset_cache({A: yes, B: yes}, URLS).body == b'{"success":true}'
    assert joins.reset_cache({A: yes, B: no}, URLS).body == b'{"success":false}'
    assert joins.reset_cache({A: yes, B: LOST}, URLS).status == 502
    assert joins.reset_cache({A: Answer(200), B: Answer(200)}, URLS).body == b""
    assert joins.reset_cache({A: yes, B: Answer(200)}, URLS).status == 502


def test_aborted_requests_are_summed():
    answers = {A: answer({"status": "aborted", "aborted": 3}), B: answer({"aborted": 4})}
    assert joins.abort_requests(answers, URLS).body == b'{"status":"aborted","aborted":7}'
    answers[B] = answer({"aborted": True})
    assert joins.abort_requests(answers, URLS).status == 502


def test_results_of_workers_follow_one_another():
    answers = {A: answer({"results": [1, None]}), B: answer({"results": ["x"]})}
    assert body(joins.collective_rpc(answers, URLS)) == {"results": [1, None, "x"]}
    assert joins.collective_rpc({A: Answer(200), B: Answer(200)}, URLS) == joins.Joined(
        200, b"", ""
    )
    assert joins.collective_rpc({A: answer({"results": 1})}, URLS).status == 502


# Reads


def test_the_world_is_all_replicas_workers():
    answers = {A: answer({"world_size": 2}), B: answer({"world_size": 1})}
    assert joins.world_size(answers, URLS).body == b'{"world_size":3}'


@pytest.mark.parametrize("size", [0, -1, True, "2", None, 1.0])
def test_a_world_size_that_is_none_is_an_error(size: object):
    joined = joins.world_size({A: answer({"world_size": 2}), B: answer({"world_size": size})}, URLS)
    assert (joined.status, joined.error, "r1" in message(joined)) == (
        502,
        "unexpected_answer",
        True,
    )


def test_is_paused_is_what_the_trainer_was_told():
    assert joins.is_paused(True).body == b'{"is_paused":true}'


def test_some_asleep_is_an_error():
    yes, no = answer({"is_sleeping": True}), answer({"is_sleeping": False})
    assert joins.is_sleeping({A: yes, B: yes}, URLS).body == b'{"is_sleeping":true}'
    assert joins.is_sleeping({A: no, B: no}, URLS).body == b'{"is_sleeping":false}'
    mixed = joins.is_sleeping({A: yes, B: no}, URLS)
    assert (mixed.status, mixed.error) == (502, "replicas_disagree")
    assert joins.is_sleeping({A: answer({"is_sleeping": "no"})}, URLS).status == 502


def card(name: str, **more: object) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 1, "owned_by": "vllm", **more}


def listing(length: int | None, *adapters: tuple[str, str], base: str = BASE) -> Answer:
    cards = [card(base, root="/m", parent=None, max_model_len=length, permission=[{"id": "p"}])]
    cards += [
        card(name, root=root, parent=base, max_model_len=None, permission=[{"id": "q"}])
        for name, root in adapters
    ]
    return answer({"object": "list", "data": cards})


def adapter(name: AdapterName) -> LiveAdapter:
    return LiveAdapter(name, f"/lora/{name}", f"/lora/.rollmux/{name}-abc", "abc", 1, 0.0)


def test_models_are_the_base_first_with_the_least_length_then_the_live_adapters():
    """TRL reads ``data[0].max_model_len``."""
    v2 = AdapterName("trl-policy-v2")
    answers = {
        A: listing(4096, (v2, "/own/v2"), ("left-over", "/x"), (V1, "/own/v1")),
        B: listing(2048, (V1, "/own/v1")),
    }
    data = body(joins.models(answers, [adapter(V1), adapter(v2)], URLS))["data"]
    assert [c["id"] for c in data] == [BASE, V1, v2]
    assert [c["max_model_len"] for c in data] == [2048, None, None]
    assert [c["root"] for c in data] == ["/m", f"/lora/{V1}", f"/lora/{v2}"]
    assert [c["parent"] for c in data] == [None, BASE, BASE]


def test_a_live_adapter_that_no_answer_lists_still_has_a_card_of_vllms_shape():
    joined = joins.models({A: listing(4096)}, [adapter(V1)], URLS)
    first, second = body(joined)["data"]
    assert set(first) == set(second)
    assert second["parent"] == BASE


def test_different_base_models_are_an_error():
    joined = joins.models({A: listing(1, base="one"), B: listing(1, base="two")}, [], URLS)
    assert joined.error == "replicas_disagree"
    assert "one" in message(joined)
    assert "two" in message(joined)


@pytest.mark.parametrize("odd", [{"data": 1}, {"data": []}, {}, {"data": [1]}])
def test_a_list_of_models_that_is_none_is_an_error(odd: object):
    joined = joins.models({A: answer(odd)}, [], URLS)
    assert (joined.status, joined.error) == (502, "unexpected_answer")


def config(**changes: Any) -> dict[str, Any]:
    lora = {"max_loras": 6, "max_lora_rank": 16, "max_cpu_loras": 12, "lora_dtype": "auto"}
    values = {"model": BASE, "dtype": "torch.bfloat16", "length": 4096, "block": 16, "dp": 1}
    values |= {"lora": lora, "id": "x", "logprobs_mode": "processed_logprobs", **changes}
    return {
        "vllm_config": {
            "instance_id": values["id"],
            "model_config": {
                "model": values["model"],
                "dtype": values["dtype"],
                "max_model_len": values["length"],
                "logprobs_mode": values["logprobs_mode"],
                "seed": 0,
            },
            "cache_config": {"block_size": values["block"]},
            "parallel_config": {"data_parallel_size": values["dp"], "tensor_parallel_size": 1},
            "lora_config": values["lora"],
        },
        "vllm_env": {"VLLM_X": "1"},
        "system_env": {},
    }


def test_server_info_is_the_first_replicas_with_the_weakest_limits():
    """O-14: the trainer must never see A's answer for a fleet where B cannot do it."""
    answers = {
        A: answer(config(id="a")),
        B: answer(
            config(
                id="b",
                length=2048,
                lora={"max_loras": 5, "max_lora_rank": 32, "max_cpu_loras": None},
            )
        ),
    }
    joined = body(joins.server_info(answers, URLS))
    whole = joined["vllm_config"]
    assert whole["instance_id"] == "a"
    assert whole["lora_config"] == {
        "max_loras": 5,
        "max_lora_rank": 16,
        "max_cpu_loras": 12,
        "lora_dtype": "auto",
    }
    assert whole["model_config"] == {
        "model": BASE,
        "dtype": "torch.bfloat16",
        "max_model_len": 2048,
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
    }
    assert joined["vllm_env"] == {"VLLM_X": "1"}


def test_one_replica_without_lora_means_no_lora():
    for order in permutations([answer(config()), answer(config(lora=None)), answer(config())]):
        joined = joins.server_info(dict(zip((A, B, C), order, strict=True)), URLS)
        assert body(joined)["vllm_config"]["lora_config"] is None


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"model": "other"}, "model"),
        ({"dtype": "torch.float16"}, "dtype"),
        ({"block": 32}, "block_tokens"),
        ({"dp": 2}, "data_parallel_size"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode"),
    ],
)
def test_facts_without_a_weakest_value_are_an_error_naming_them(change: dict[str, Any], fact: str):
    answers = {A: answer(config()), B: answer(config(**change))}
    joined = joins.server_info(answers, URLS)
    assert (joined.status, joined.error) == (502, "replicas_disagree")
    for part in (fact, "r0", "r1", "http://b:8000", str(next(iter(change.values())))):
        assert part in message(joined)
    turned = joins.server_info({A: answers[B], B: answers[A]}, URLS)
    assert (turned.status, turned.error) == (joined.status, joined.error)


def test_the_text_form_is_passed_only_where_it_is_equal():
    one, two = answer({"vllm_config": "model=a"}), answer({"vllm_config": "model=b"})
    assert joins.server_info({A: one, B: one}, URLS).status == 200
    for other in (two, answer(config())):
        joined = joins.server_info({A: one, B: other}, URLS)
        assert (joined.error, "config_format=json" in message(joined)) == (
            "replicas_disagree",
            True,
        )


READS: list[Callable[[joins.Answers], joins.Joined]] = [
    lambda answers: joins.server_info(answers, URLS),
    lambda answers: joins.world_size(answers, URLS),
    lambda answers: joins.models(answers, [adapter(V1)], URLS),
    lambda answers: joins.is_sleeping(answers, URLS),
]
GOOD = [
    answer(config()),
    answer({"world_size": 1}),
    listing(4096),
    answer({"is_sleeping": False}),
]


@pytest.mark.parametrize(("read", "good"), [*zip(READS, GOOD, strict=True)])
def test_a_read_is_answered_by_those_that_live(
    read: Callable[[joins.Answers], joins.Joined], good: Answer
):
    """O-23: plain GETs went to the first worker, even the dead one."""
    assert read({A: LOST, B: good}) == read({B: good})
    assert read({B: good}).ok
    assert read({A: LOST, B: LOST}).status == 502
    assert read({}).status == 503
    refused = read({A: answer({"detail": "Not Found"}, 404), B: good})
    assert (refused.status, "http://a:8000" in message(refused)) == (404, True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["data", "vllm_config", "world_size", "is_sleeping", "results", "aborted", "id", "lora_config"]
)
BODIES = st.binary(max_size=40) | (JSON | st.dictionaries(KEYS, JSON)).map(
    lambda value: json.dumps(value).encode()
)


@given(
    bodies=st.lists(BODIES, min_size=1, max_size=3),
    read=st.sampled_from(
        [
            *READS,
            lambda answers: joins.reset_cache(answers, URLS),
            lambda answers: joins.abort_requests(answers, URLS),
            lambda answers: joins.collective_rpc(answers, URLS),
            lambda answers: joins.joined_success(answers, URLS, "/x"),
        ]
    ),
)
def test_whatever_replicas_answer_the_joined_answer_is_whole(
    bodies: list[bytes], read: Callable[[joins.Answers], joins.Joined]
):
    answers = {id: Answer(200, b, "application/json") for id, b in zip(URLS, bodies, strict=False)}
    joined = read(answers)
    assert joined.ok == (joined.status == 200)
    if not joined.ok:
        message(joined)


def test_half_a_surrogate_pair_stays_the_escape_that_it_came_as():
    raw = Answer(200, b'{"results":["\\ud800"]}', "application/json")
    assert joins.collective_rpc({A: raw, B: raw}, URLS).body == b'{"results":["\\ud800","\\ud800"]}'
