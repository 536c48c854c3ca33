"""Reading traces: ours, plain Mooncake ones, and damaged ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import hypothesis
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trace import TraceError, read

PLAIN = {"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
OURS = PLAIN | {
    "input_length": 40,
    "block_size": 16,
    "model": "trl-policy-v3",
    "replica": "r1",
    "decision": "affinity",
    "ttft_ms": None,
    "duration_ms": 1.5,
    "status": 200,
    "route": "/v1/completions",
}


def written(folder: Path, *lines: object, name: str = "t.jsonl") -> Path:
    file = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    data = "".join(f"{text}\n" for text in texts).encode()
    if name.endswith(".zst"):
        data = zstandard.ZstdCompressor().compress(data)
    file.write_bytes(data)
    return file


def test_a_plain_mooncake_line_has_blocks_of_512_tokens(tmp_path):
    trace = read(written(tmp_path, PLAIN))
    (request,) = trace.requests
    assert trace.block_tokens == 512
    assert (request.at_s, request.prompt_tokens, request.output_tokens) == (27.0, 1100, 52)
    assert list(request.ids) == [46, 47, 2353]
    assert request.whole_blocks(512) == 2
    assert trace.replicas() == 0


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_a_line_of_ours_brings_its_block_size_model_and_replica(tmp_path, name):
    failed = OURS | {"status": 503, "replica": "r0", "n": 4}
    trace = read(written(tmp_path, {"rollmux_trace": 1}, OURS, failed, name=name))
    first, second = trace.requests
    assert (trace.block_tokens, first.model, first.n, first.ok) == (16, "trl-policy-v3", 1, True)
    assert (second.n, second.ok) == (4, False)
    assert trace.replicas() == 2
    assert trace.faults == []


def test_the_order_is_that_of_times_and_not_of_lines(tmp_path):
    late, early = OURS | {"timestamp": 2000}, OURS | {"timestamp": 1000}
    events = [{"event": kind, "timestamp": at} for kind, at in (("resume", 9), ("pause", 3))]
    trace = read(written(tmp_path, late, *events, early))
    assert [request.at_s for request in trace.requests] == [1.0, 2.0]
    assert [event.kind for event in trace.events] == ["pause", "resume"]


def test_events_that_change_nothing_are_left_out(tmp_path):
    events = [
        {"event": "publish", "timestamp": 1, "model": "v1", "outcome": "rolled_back"},
        {"event": "publish", "timestamp": 2, "model": "v1", "outcome": "committed"},
        {"event": "comet", "timestamp": "?"},
    ]
    trace = read(written(tmp_path, *events, PLAIN))
    assert [(e.kind, e.at_s, e.model) for e in trace.events] == [("publish", 0.002, "v1")]
    assert trace.faults == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        (PLAIN | {"timestamp": "0"}, "timestamp is no number"),
        (PLAIN | {"timestamp": True}, "timestamp is no number"),
        (PLAIN | {"timestamp": -1}, "timestamp is -1, out of range"),
        (PLAIN | {"input_length": 1.5}, "input_length is no whole number"),
        (PLAIN | {"output_length": -3}, "output_length is -3, out of range"),
        ({k: v for k, v in PLAIN.items() if k != "input_length"}, "input_length is missing"),
        ({k: v for k, v in PLAIN.items() if k != "hash_ids"}, "hash_ids is no list"),
        (PLAIN | {"hash_ids": [1, "2"]}, "hash_ids holds what is no id"),
        (PLAIN | {"hash_ids": [1 << 70]}, "is no JSON|hash_ids holds what is no id"),
        (PLAIN | {"block_size": 0}, "block_size is 0, out of range"),
        (PLAIN | {"block_size": 16}, "block_size is 16, and 512 before it"),
        (PLAIN | {"model": 5}, "model or replica is no text"),
        ({"event": "pause"}, "timestamp is no number"),
        ({"event": "unload", "timestamp": 1, "model": None}, "model is no text"),
    ],
)
def test_a_damaged_line_is_told_by_number_and_the_rest_is_read(tmp_path, line, why):
    trace = read(written(tmp_path, PLAIN, "", line, PLAIN))
    assert len(trace.requests) == 2
    assert [fault.line for fault in trace.faults] == [3]
    assert trace.faults[0].why in why.split("|")


def test_ids_count_where_a_text_prompt_has_more_of_them_than_tokens(tmp_path):
    """Blocks of text are cut at bytes, lengths are counted in tokens."""
    line = OURS | {"input_length": 20, "hash_ids": [1, 2, 3]}
    (request,) = read(written(tmp_path, line)).requests
    assert (request.prompt_tokens, request.whole_blocks(16)) == (33, 2)


def test_a_prompt_longer_than_its_ids_is_kept(tmp_path):
    line = OURS | {"input_length": 100, "hash_ids": [1, 2, 3]}
    (request,) = read(written(tmp_path, line)).requests
    assert (request.prompt_tokens, request.whole_blocks(16)) == (100, 3)


@pytest.mark.parametrize("lines", [[], [{"rollmux_trace": 1}], ["no trace", "at all"]])
def test_a_file_without_a_request_is_refused(tmp_path, lines):
    with pytest.raises(TraceError, match="holds no request"):
        read(written(tmp_path, *lines))


def test_a_newer_format_is_refused(tmp_path):
    with pytest.raises(TraceError, match="format 2"):
        read(written(tmp_path, {"rollmux_trace": 2}, PLAIN))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read(tmp_path / "none")


def test_a_compressed_trace_is_read_up_to_its_damage(tmp_path):
    drawn = random.Random(1)
    # Past the megabyte that is unpacked at once: what comes before the damage is not lost.
    lines = [PLAIN | {"hash_ids": [drawn.getrandbits(40) for _ in range(200)]} for _ in range(2000)]
    whole = written(tmp_path, *lines, name="t.jsonl.zst").read_bytes()
    (tmp_path / "cut.zst").write_bytes(whole[: len(whole) // 2])
    damaged = bytearray(whole)
    damaged[len(whole) // 2 :] = bytes(len(whole) - len(whole) // 2)
    (tmp_path / "damaged.zst").write_bytes(damaged)
    for name in ("cut.zst", "damaged.zst"):
        trace = read(tmp_path / name)
        assert 0 < len(trace.requests) < 2000
        assert len(trace.faults) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
KEYS = st.sampled_from([*OURS, "n", "event", "outcome", "real", "rollmux"])


@hypothesis.settings(deadline=None)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=3), max_size=5))
def test_whatever_a_line_holds_it_is_read_or_told(tmp_path_factory, changes):
    lines = [OURS | change for change in changes]
    trace = read(written(tmp_path_factory.mktemp("t"), PLAIN | {"block_size": 16}, *lines))
    left_out = [change for change in changes if "event" in change]
    assert len(changes) + 1 >= len(trace.requests) + len(trace.faults)
    assert len(changes) + 1 - len(left_out) <= len(trace.requests) + len(trace.faults)
