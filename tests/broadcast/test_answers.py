"""Each row of the table of what an answer to a load or an unload means, in vLLM's own words."""

from __future__ import annotations

import json

import pytest

from broadcast.answer import Answer, Cause, NoAnswer
from broadcast.answers import LoadOutcome as L
from broadcast.answers import (
    Models,
    classify_load,
    classify_reset,
    classify_unload,
    is_hopeless,
    read_list,
    read_models,
    words,
)
from broadcast.answers import ResetOutcome as R
from broadcast.answers import UnloadOutcome as U


def vllm(status: int, message: str, kind: str = "InternalServerError") -> Answer:
    """An error as vLLM 0.27.1 sends it."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return Answer(status, json.dumps(body).encode(), "application/json")


def worker(message: str) -> Answer:
    """A load that failed in the engine."""
    return vllm(
        500,
        f"Call to add_lora method failed: Worker failed with error '{message}', please check the "
        "stack trace above for the root cause",
    )


HTML = b"<!DOCTYPE html>\n<html><body>Sorry</body></html>"
DESERIALIZING = "Error while deserializing header: "

LOADS = [
    (Answer(200, b"Success: LoRA adapter 'a1' added successfully."), L.LOADED),
    (vllm(404, "Loading lora x failed: No adapter found for /l/x", "NotFoundError"), L.NOT_VISIBLE),
    (vllm(404, "Loading lora x failed: No adapter found for <path>"), L.NOT_VISIBLE),
    (vllm(404, f"Loading lora {'x' * 5000} failed: No adapter found for /l/x"), L.NOT_VISIBLE),
    (worker("/l/x doesn't contain tensors"), L.NOT_VISIBLE),
    (worker(DESERIALIZING + "header too small"), L.NOT_VISIBLE),
    (worker(DESERIALIZING + "incomplete metadata, file not fully covered"), L.NOT_VISIBLE),
    (worker("Expecting property name enclosed in double quotes: line 1"), L.NOT_VISIBLE),
    (worker("Expecting value: line 1 column 1 (char 0)"), L.NOT_VISIBLE),
    (worker("Expecting ',' delimiter: line 3 column 1 (char 40)"), L.NOT_VISIBLE),
    (worker("Expecting ':' delimiter: line 3 column 1 (char 40)"), L.NOT_VISIBLE),
    (worker("Unterminated string starting at: line 1 column 6 (char 5)"), L.NOT_VISIBLE),
    (worker("Missing required configuration fields: {'r'}"), L.NOT_VISIBLE),
    (worker("[Errno 5] Input/output error: '<path>'"), L.NOT_VISIBLE),
    (worker("[Errno 116] Stale file handle: '<path>'"), L.NOT_VISIBLE),
    (worker("[Errno 107] Transport endpoint is not connected"), L.NOT_VISIBLE),
    (
        vllm(400, "The lora adapter 'a1' has already been loaded. If …", "InvalidUserInput"),
        L.ALREADY,
    ),
    (worker("LoRA rank 16 is greater than max_lora_rank 8."), L.REFUSED),
    (worker("vLLM does not yet support DoRA."), L.REFUSED),
    (worker("vLLM only supports modules_to_save being None."), L.REFUSED),
    (worker("[Errno 51] Something else"), L.REFUSED),
    (vllm(400, "1 validation error: …", "Bad Request"), L.REFUSED),
    (vllm(400, "Error while deserializing the request"), L.REFUSED),
    (Answer(500, b"Traceback (most recent call last):\n  boom\n", "text/plain"), L.REFUSED),
    (Answer(404, b'{"detail":"Not Found"}', "application/json"), L.ENDPOINT_MISSING),
    (vllm(500, "EngineCore encountered an issue. See stack trace above"), L.ENGINE_DEAD),
    (Answer(503), L.ENGINE_DEAD),
    (Answer(401, b'{"error":"Unauthorized"}', "application/json"), L.NOT_VLLM),
    (Answer(403, b"", ""), L.NOT_VLLM),
    (Answer(404, HTML, "text/html; charset=utf-8"), L.NOT_VLLM),
    (Answer(404, HTML), L.NOT_VLLM),
    (Answer(200, HTML, "text/html"), L.NOT_VLLM),
    (Answer(307, b"", ""), L.NOT_VLLM),
    (Answer(500, HTML, "text/html"), L.NOT_VLLM),
    (Answer(502, HTML, "text/html"), L.UNKNOWN),
    (Answer(504, b"upstream request timeout", "text/plain"), L.UNKNOWN),
    (Answer(503, b"no healthy upstream", "text/plain"), L.UNKNOWN),
    (NoAnswer(Cause.RESET), L.UNKNOWN),
    (NoAnswer(Cause.TIMEOUT), L.UNKNOWN),
    (NoAnswer(Cause.REFUSED), L.NEVER_RECEIVED),
    (NoAnswer(Cause.UNREACHABLE), L.NEVER_RECEIVED),
]


@pytest.mark.parametrize(("answer", "outcome"), LOADS)
def test_load_answer_means(answer: Answer | NoAnswer, outcome: L) -> None:
    assert classify_load(answer) is outcome


UNLOADS = [
    (Answer(200, b"Success: LoRA adapter 'x' removed successfully."), U.GONE),
    (vllm(404, "The lora adapter 'x' cannot be found.", "NotFoundError"), U.GONE),
    (Answer(404, b'{"detail":"Not Found"}', "application/json"), U.ENDPOINT_MISSING),
    (vllm(400, "'lora_name' needs to be provided"), U.REFUSED),
    (vllm(500, "EngineCore encountered an issue."), U.ENGINE_DEAD),
    (Answer(503), U.ENGINE_DEAD),
    (Answer(401, b""), U.NOT_VLLM),
    (Answer(404, HTML, "text/html"), U.NOT_VLLM),
    (Answer(502, HTML, "text/html"), U.UNKNOWN),
    (NoAnswer(Cause.RESET), U.UNKNOWN),
    (NoAnswer(Cause.TIMEOUT), U.UNKNOWN),
    (NoAnswer(Cause.REFUSED), U.NEVER_RECEIVED),
]


@pytest.mark.parametrize(("answer", "outcome"), UNLOADS)
def test_unload_answer_means(answer: Answer | NoAnswer, outcome: U) -> None:
    assert classify_unload(answer) is outcome


RESETS = [
    (Answer(200, b'{"success":true}', "application/json"), R.CLEARED),
    (Answer(200, b'{ "success" : true }'), R.CLEARED),
    (Answer(200, b'{"success":false}', "application/json"), R.HELD),
    (Answer(200, b'{"success": false}'), R.HELD),
    (Answer(200, b"{}"), R.HELD),
    (Answer(200), R.HELD),  # a success that was not said is none
    (Answer(200, HTML, "text/html"), R.FAILED),
    (Answer(404, b'{"detail":"Not Found"}', "application/json"), R.ENDPOINT_MISSING),
    (Answer(404, HTML), R.FAILED),
    (Answer(401, b'{"error":"Unauthorized"}'), R.FAILED),
    (vllm(500, "EngineCore encountered an issue."), R.FAILED),
    (Answer(503), R.FAILED),
    (Answer(502, HTML, "text/html"), R.UNKNOWN),
    (NoAnswer(Cause.TIMEOUT), R.UNKNOWN),
    (NoAnswer(Cause.REFUSED), R.UNKNOWN),
]


@pytest.mark.parametrize(("answer", "outcome"), RESETS)
def test_reset_answer_means(answer: Answer | NoAnswer, outcome: R) -> None:
    assert classify_reset(answer) is outcome


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"m","type":"t"}}', "m"),
        (b'{"error":"Failed to pause generation"}', "Failed to pause generation"),
        (b'{"object":"error","message":"old"}', "old"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[1]}', '{"detail":[1]}'),
        (b"{cut", "{cut"),
        (b"\xff plain", "� plain"),
        (b'{"error":{"message":"' + b"x" * 5000 + b'"}}', "x" * 2048 + "…"),
    ],
)
def test_words_are_the_message_and_bounded(body: bytes, text: str) -> None:
    assert words(Answer(500, body)) == text


@pytest.mark.parametrize(
    ("answer", "hopeless"),
    [
        (Answer(401, b'{"error":"Unauthorized"}'), True),
        (Answer(404, b'{"detail":"Not Found"}'), True),
        (Answer(503), True),
        (Answer(200, HTML, "text/html"), True),
        (Answer(502, HTML, "text/html"), False),
        (vllm(500, "something else"), False),
        (Answer(200, b'{"success":false}'), False),
        (NoAnswer(Cause.REFUSED), False),
        (NoAnswer(Cause.TIMEOUT), False),
    ],
)
def test_hopeless_is_what_asking_again_cannot_change(
    answer: Answer | NoAnswer, hopeless: bool
) -> None:
    assert is_hopeless(answer) is hopeless


def test_list_of_adapters_leaves_the_base_model_out() -> None:
    cards = [
        {"id": "tiny", "root": "/m", "parent": None, "max_model_len": 128},
        {"id": "v1", "root": "/l/v1", "parent": "tiny", "max_model_len": None},
    ]
    answer = Answer(200, json.dumps({"object": "list", "data": cards}).encode())
    assert read_models(answer) == Models(("tiny",), {"v1": "/l/v1"})
    assert read_list(answer) == {"v1": "/l/v1"}


@pytest.mark.parametrize(
    "answer",
    [
        NoAnswer(Cause.TIMEOUT),
        Answer(500, b'{"data":[]}'),
        Answer(200, b'{"data":'),
        Answer(200, b"[]"),
        Answer(200, b'{"data":[1]}'),
        Answer(200, b'{"data":[{"root":"/m"}]}'),
        Answer(200, HTML, "text/html"),
    ],
)
def test_what_is_no_list_is_not_read_as_an_empty_one(answer: Answer | NoAnswer) -> None:
    assert read_list(answer) is None
