"""Tokens are counted as the reply itself tells them, on every path and whatever is around them."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy.reply_tokens import ReplyTokens, StreamTokens, of_whole

CHAT = [{"role": "user", "content": 'say "usage":{"completion_tokens":99}'}]
PATHS = {
    "/v1/completions": {"prompt": list(range(40)), "return_token_ids": True, "logprobs": 0},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": CHAT},
    "/inference/v1/generate": {
        "token_ids": list(range(40)),
        "sampling_params": {"max_tokens": 6, "temperature": 0},
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_every_generation_path_is_counted(start, pair, tmp_path, path, stream):
    file = tmp_path / "trace.jsonl"
    running = await start([r.url for r in pair], record=str(file))
    body = {"model": "tiny", "max_tokens": 6, "stream": stream} | PATHS[path]
    answer = await running.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    await asyncio.to_thread(running.daemon.recorder.close, 30.0)
    line = json.loads(file.read_bytes().splitlines()[1])
    assert line["route"] == path
    if stream:
        assert 5 <= line["output_length"] <= 8  # its events, where it tells no usage
    else:
        assert line["output_length"] == 6
    assert line["input_length"] > 0


def test_the_last_usage_counts():
    said = json.dumps({"text": '"usage":{"completion_tokens":99}'})
    data = f'{{"choices":[{said}],"usage":{{"prompt_tokens":3,"completion_tokens": 12}}}}'.encode()
    assert of_whole(data) == ReplyTokens(3, 12)


def test_what_is_quoted_in_a_reply_does_not_count():
    data = json.dumps({"choices": [{"text": '"usage":{"completion_tokens":99}'}]}).encode()
    assert of_whole(data) == ReplyTokens()


def test_without_usage_lists_of_token_ids_are_counted():
    data = json.dumps(
        {"choices": [{"token_ids": [1, 2, 3]}, {"token_ids": []}, {"token_ids": [4]}],
         "prompt_token_ids": [7] * 50}
    ).encode()  # fmt: skip
    assert of_whole(data) == ReplyTokens(0, 4)


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_a_usage_that_is_cut_by_pieces_is_found(size):
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    last = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":40}}\n\n'
    data = event * 50 + last + b"data: [DONE]\n\n"
    counted = StreamTokens()
    for start in range(0, len(data), size):
        counted.feed(data[start : start + size])
    assert counted.result() == ReplyTokens(5, 40)


def test_a_stream_without_usage_has_as_many_tokens_as_events():
    events = [b'data: {"choices":[{"text":"a"}]}\n\n'] * 50 + [b"data: [DONE]\n\n"]
    counted = StreamTokens()
    for event in events:
        counted.feed(event)
    assert counted.result() == ReplyTokens(0, 50)
    assert of_whole(b"".join(events)) == ReplyTokens(0, 50)  # it may come in one piece
