"""Verdicts on replies, as a table."""

from __future__ import annotations

import pytest

from proxy.judge import Verdict, judge, judge_piece

VLLM = b'{"error":{"message":"%b","type":"T","param":null,"code":1}}'
DEAD = VLLM % b"EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (200, b'{"choices":[{"finish_reason":"stop"}]}', Verdict.PASS),
        (200, b'{"choices":[{"finish_reason":"length"},{"finish_reason":"abort"}]}',
         Verdict.ABORTED),
        (200, b'{"choices": [{"finish_reason":\n    "stop"}, {"finish_reason":\n      "abort"}]}',
         Verdict.ABORTED),
        (200, b'{"choices":[{"text":"\\"abort\\""}]}', Verdict.PASS),
        (200, b'{"choices":[{"text":"a","finish_reason":"stop"}],"x":"abort"}', Verdict.PASS),
        (200, b'{"choices":"abort"', Verdict.PASS),
        (200, b"\n <html>log in", Verdict.EDGE),
        (200, b"\x1f\x8b\x08", Verdict.PASS),
        (200, b"", Verdict.PASS),
        (400, VLLM % b"too long", Verdict.PASS),
        (404, VLLM % b"The model `v1` does not exist.", Verdict.ADAPTER_LOST),
        (404, b'{"detail":"Not Found"}', Verdict.PASS),
        (404, b"<html>", Verdict.EDGE),
        (422, b'{"detail":[]}', Verdict.PASS),
        (400, b'{"message":"edge"}', Verdict.EDGE),
        (400, b"Invalid HTTP request received.", Verdict.EDGE),
        (307, b"", Verdict.EDGE),
        (401, VLLM % b"no", Verdict.TOKEN_REJECTED),
        (403, b"<html>", Verdict.TOKEN_REJECTED),
        (500, VLLM % b"Out of range float values are not JSON compliant", Verdict.SERVER_ERROR),
        (500, DEAD, Verdict.ENGINE_DEAD),
        (500, b'{"error":"EngineCore encountered an issue."}', Verdict.ENGINE_DEAD),
        (400, DEAD, Verdict.PASS),
        (500, b"Internal Server Error", Verdict.EDGE),
        (502, b"", Verdict.EDGE),
        (503, VLLM % b"busy", Verdict.SERVER_ERROR),
        (500, b'{"error": cut', Verdict.EDGE),
    ],
)  # fmt: skip
def test_a_whole_reply(status, body, verdict):
    assert judge(status, body) is verdict


ENDS = b'"finish_reason": "%b", "token_ids": [1, 2]}'


@pytest.mark.parametrize(
    ("reasons", "verdict"),
    [
        ((b"abort", b"stop", b"length"), Verdict.ABORTED),
        ((b"stop", b"abort", b"length"), Verdict.ABORTED),
        ((b"stop", b"length", b"abort"), Verdict.ABORTED),
        ((b"stop", b"length", b"stop"), Verdict.PASS),
    ],
)
def test_each_choice_is_looked_at(reasons, verdict):
    choices = b", ".join(b'{"text": "x", ' + ENDS % reason for reason in reasons)
    body = b'{"choices": [%b], "usage": {"total_tokens": 2}}' % choices
    assert judge(200, body) is verdict


@pytest.mark.parametrize(
    "behind",
    [
        b'"tokens": ["finish_reason", "finish_reason"]',
        b'"top_logprobs": [{"finish_reason": 0.0}, {"finish_reason": -1.5}]',
    ],
)
@pytest.mark.parametrize("reason", [b"abort", b"stop"])
def test_a_token_of_the_key_s_name_hides_no_single_choice(behind, reason):
    choice = b'{"finish_reason": "%b", "logprobs": {%b}}' % (reason, behind)
    verdict = Verdict.ABORTED if reason == b"abort" else Verdict.PASS
    assert judge(200, b'{"choices": [%b]}' % choice, single=True) is verdict


@pytest.mark.parametrize(
    ("piece", "verdict"),
    [
        (b'data: {"choices":[]}\n\n', Verdict.PASS),
        (b"", Verdict.PASS),
        (b'data: {"error": {"message": "no such tool"}}\n\n', Verdict.PASS),
        (b"data: " + DEAD + b"\n\n", Verdict.ENGINE_DEAD),
        (b'data: {"choices":[]}\n\ndata: ' + DEAD + b"\n\n", Verdict.ENGINE_DEAD),
        (b'event: error\ndata: {"type":"error","error":' + DEAD + b"}\n\n", Verdict.ENGINE_DEAD),
        (b'data: {"choices":[{"text":"data: {\\"error\\" EngineCore encountered an issue"}]}\n\n',
         Verdict.PASS),
        (b"<!DOCTYPE html>", Verdict.EDGE),
    ],
)  # fmt: skip
def test_a_piece_of_a_stream(piece, verdict):
    assert judge_piece(piece) is verdict
