"""The trace file: what a line holds, what it costs, and what happens when it cannot be written."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.adapter import write_adapter
from benchmarks.replay import Options, replay
from benchmarks.trace import read
from proxy import recorder
from proxy.metrics import Metrics
from proxy.record import RequestRecord
from proxy.recorder import HashIds, Recorder
from proxy.settings import SettingsError
from routing.blocks import chain, path

WAIT_S = 30.0


def opened(file: Path, **settings) -> Recorder:
    given = {"now_s": lambda: 0.0, "router": "prefix", "max_tracked_blocks": 100_000}
    return Recorder(file, metrics=Metrics("0"), **(given | settings))


def record(prompt, **fields) -> RequestRecord:
    usual = {"model": "v1", "replica": "r0", "decision": "affinity", "status": 200, "ended_s": 2.0}
    return RequestRecord("/v1/completions", 1.0, prompt=prompt, **(usual | fields))


def lines(file: Path) -> list[dict]:
    """Without the header."""
    data = file.read_bytes()
    if file.suffix == ".zst":
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
            data = reader.readall()
    assert data.endswith(b"\n")
    found = [json.loads(line) for line in data.splitlines()]
    assert found[0]["rollmux_trace"] == 1
    return found[1:]


def counted(trace: Recorder, result: str) -> float:
    value = trace._metrics.registry.get_sample_value(
        "rollmux_trace_lines_total", {"result": result}
    )
    assert value is not None
    return value


def until(trace: Recorder, result: str, count: int) -> None:
    """Until so many lines, the header among them, are written or dropped."""
    by_s = time.monotonic() + WAIT_S
    while counted(trace, result) < count:
        assert time.monotonic() < by_s, f"not {count} lines {result}"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def _prompt(monkeypatch):
    """Nothing waits for more lines."""
    monkeypatch.setattr(recorder, "LINGER_S", 0.0)


# --- through the daemon ---------------------------------------------------------------------------


async def recorded(running, file: Path) -> list[dict]:
    await asyncio.to_thread(running.daemon.recorder.close, WAIT_S)
    return lines(file)


async def test_a_line_tells_of_a_rollout_what_the_contract_names(start, pair, tmp_path):
    file = tmp_path / "trace.jsonl"
    running = await start([r.url for r in pair], record=str(file))
    answer = await running.complete("tiny", list(range(40)))
    await running.complete("tiny", [*range(32), 7, 7])
    first, second = await recorded(running, file)
    assert first | {"timestamp": 0, "duration_ms": 0} == {
        "timestamp": 0,
        "input_length": 40,
        "output_length": answer.json()["usage"]["completion_tokens"],
        "hash_ids": [0, 1, 2],
        "block_size": 16,
        "model": "tiny",
        "replica": answer.headers["x-rollmux-replica"],
        "decision": "unmatched",
        "ttft_ms": None,
        "duration_ms": 0,
        "status": 200,
        "route": "/v1/completions",
    }
    assert second["hash_ids"] == [0, 1, 3]
    assert second["timestamp"] >= first["timestamp"] >= 0
    assert first["duration_ms"] > 0


@pytest.mark.parametrize("router", ["prefix", "round-robin"])
async def test_ids_are_the_same_whoever_has_hashed_the_prompt(start, pair, tmp_path, router):
    file = tmp_path / "trace.jsonl"
    running = await start([r.url for r in pair], record=str(file), router=router)
    prompts = [list(range(40)), list(range(32)), [*range(16), 5], list(range(3)), []]
    for prompt in prompts:
        await running.complete("tiny", prompt)
    found = [line["hash_ids"] for line in await recorded(running, file)]
    assert found[:4] == [[0, 1, 2], [0, 1], [0, 3], [4]]


async def test_a_text_prompt_counts_as_the_replica_counts_it(start, pair, tmp_path):
    file = tmp_path / "trace.jsonl"
    running = await start([r.url for r in pair], record=str(file))
    answer = await running.complete("tiny", "a secret question? " * 7)
    (line,) = await recorded(running, file)
    assert line["input_length"] == answer.json()["usage"]["prompt_tokens"]
    assert line["hash_ids"] == [0, 1, 2]  # 133 bytes, 64 of them a block
    assert b"secret" not in file.read_bytes()


async def test_a_stream_has_the_time_of_its_first_piece(start, pair, tmp_path):
    file = tmp_path / "trace.jsonl"
    running = await start([r.url for r in pair], record=str(file))
    await running.complete("tiny", list(range(40)), stream=True, max_tokens=5)
    usage = {"include_usage": True}
    await running.complete("tiny", list(range(40)), stream=True, max_tokens=6, stream_options=usage)
    plain, told = await recorded(running, file)
    assert 0 < plain["ttft_ms"] <= plain["duration_ms"]
    assert 4 <= plain["output_length"] <= 7  # its events: near, and no more is known
    assert told["output_length"] == 6


async def test_syncs_are_events(start, pair, tmp_path):
    file = tmp_path / "trace.jsonl"
    running = await start([r.url for r in pair], record=str(file), retire_grace_s=0.0)
    adapter = str(write_adapter(tmp_path / "v1", seed=1))
    await running.client.post("/pause?mode=keep")
    body = {"lora_name": "trl-policy-v1", "lora_path": adapter}
    assert (await running.client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    await running.client.post("/resume")
    await running.client.post("/pause?mode=wait")
    await running.client.post("/resume")
    await running.client.post("/v1/unload_lora_adapter", json={"lora_name": "trl-policy-v1"})
    await running.daemon.publishing.sweep_once()
    events = await recorded(running, file)
    assert all(event.pop("timestamp") >= 0 for event in events)
    assert events[1].pop("seconds") > 0
    assert events == [
        {"event": "pause", "real": False},
        {"event": "publish", "model": "trl-policy-v1", "outcome": "committed"},
        {"event": "resume", "real": False},
        {"event": "pause", "real": True, "clear_cache": True},
        {"event": "resume", "real": True},
        {"event": "unload", "model": "trl-policy-v1"},
    ]


async def test_a_replay_of_the_trace_decides_as_the_daemon_did(start, pair, tmp_path):
    """One rollout at a time, so that the loads are the same: none."""
    file = tmp_path / "trace.jsonl"
    running = await start([r.url for r in pair], record=str(file))
    drawn = random.Random(1)
    for _ in range(20):
        prompt = [*range(20), *([drawn.randrange(4)] * drawn.randrange(1, 60))]
        await running.complete("tiny", prompt, max_tokens=1)
    decisions = Counter(line["decision"] for line in await recorded(running, file))
    trace = read(file)
    assert trace.faults == []
    assert trace.block_tokens == 16
    found = replay(trace, "prefix", Options(replicas=2, inflight=1))
    assert found.decisions == decisions
    assert len(decisions) > 1


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "limit"), [("t.jsonl", 3000), ("t.jsonl.zst", 1000)])
def test_a_request_of_4000_tokens_is_small(tmp_path, name, limit):
    """New prompts only, which is the worst case, and one at a time, which is worst for zstd."""
    trace = opened(tmp_path / name)
    trace._ids._next = 2_000_000  # ids of a long run have seven digits
    drawn = random.Random(1)
    for number in range(20):
        prompt = [drawn.randrange(150_000) for _ in range(4000)]
        trace.on_record(record(prompt, model=f"trl-policy-v{number}", output_tokens=1234))
        until(trace, "written", 2 + number)
    trace.close(WAIT_S)
    assert len(lines(tmp_path / name)[-1]["hash_ids"]) == 250
    assert (tmp_path / name).stat().st_size / 20 < limit


def test_a_compressed_trace_can_be_read_before_it_is_closed(tmp_path):
    file = tmp_path / "t.jsonl.zst"
    trace = opened(file)
    trace.on_event("pause", real=False)
    until(trace, "written", 2)
    assert lines(file)[0]["event"] == "pause"
    trace.close(WAIT_S)


def test_a_second_daemon_is_told_and_the_first_goes_on(tmp_path):
    file = tmp_path / "t.jsonl"
    trace = opened(file)
    trace.on_event("pause")
    until(trace, "written", 2)
    with pytest.raises(SettingsError, match="--record: another daemon writes"):
        opened(file)
    trace.on_event("resume")
    trace.close(WAIT_S)
    assert [line["event"] for line in lines(file)] == ["pause", "resume"]


def test_an_earlier_recording_is_kept(tmp_path):
    file = tmp_path / "t.jsonl.zst"
    for event in ("pause", "resume", "unload"):
        trace = opened(file)
        trace.on_event(event)
        trace.close(WAIT_S)
    kept = [tmp_path / "t.1.jsonl.zst", tmp_path / "t.2.jsonl.zst", file]
    assert [lines(each)[0]["event"] for each in kept] == ["pause", "resume", "unload"]


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path / "no" / "folder"):
        with pytest.raises(SettingsError, match="--record: "):
            opened(place)


def test_zstd_that_is_not_installed_is_told_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(SettingsError, match=r"install rollmux\[zstd\]"):
        opened(tmp_path / "t.zst")
    assert not (tmp_path / "t.zst").exists()


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_a_full_disk_costs_whole_lines_and_nothing_else(tmp_path, monkeypatch, caplog, name):
    trace = opened(tmp_path / name)
    trace.on_event("pause")
    until(trace, "written", 2)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if fd != trace._fd:
            return real(fd, data)
        if len(data) <= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:5])

    monkeypatch.setattr(os, "write", full)
    for number in range(2):
        trace.on_event("lost")
        until(trace, "dropped", 1 + number)
    assert [line["event"] for line in lines(tmp_path / name)] == ["pause"]
    monkeypatch.setattr(os, "write", real)
    trace.on_event("resume")
    trace.close(WAIT_S)
    assert [line["event"] for line in lines(tmp_path / name)] == ["pause", "resume"]
    assert counted(trace, "dropped") == 2
    assert len([r for r in caplog.records if "No space left" in r.message]) == 1


def test_a_queue_that_is_full_drops_and_counts_and_tells_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "QUEUE_BYTES", 100_000)
    held, go_on = threading.Event(), threading.Event()
    write = Recorder._write

    def slow(self: Recorder, data: bytes) -> None:
        held.set()
        assert go_on.wait(WAIT_S)
        write(self, data)

    monkeypatch.setattr(Recorder, "_write", slow)
    trace = opened(tmp_path / "t.jsonl")
    assert held.wait(WAIT_S)
    for _ in range(1000):
        trace.on_record(record(list(range(100))))
    go_on.set()
    trace.close(WAIT_S)
    written = len(lines(tmp_path / "t.jsonl"))
    assert 0 < written < 30  # 100 tokens, to be hashed yet, count 4,100 bytes
    assert counted(trace, "dropped") == 1000 - written
    assert len([r for r in caplog.records if "does not keep up" in r.message]) == 1


def test_what_was_never_placed_leaves_no_line(tmp_path):
    trace = opened(tmp_path / "t.jsonl")
    trace.on_record(record([1, 2], decision="", status=503))
    trace.close(WAIT_S)
    assert lines(tmp_path / "t.jsonl") == []


# --- ids ------------------------------------------------------------------------------------------

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=40)


@hypothesis.settings(deadline=None)
@given(PROMPTS, st.integers(1, 12))
def test_ids_are_equal_exactly_where_the_chained_prefix_is(prompts, bound):
    """However few are remembered: what went out gets new numbers, never another's."""
    ids = HashIds(bound)
    means: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        found = ids.number(chain("v1", prompt, 1))
        assert len(found) == len(prompt)
        for position, number in enumerate(found):
            assert means.setdefault(number, tuple(prompt[: position + 1])) == tuple(
                prompt[: position + 1]
            )
        assert len(ids) <= bound


@hypothesis.settings(deadline=None)
@given(PROMPTS)
def test_ids_are_numbered_in_order_of_first_sight(prompts):
    ids = HashIds(10_000)
    seen: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        for position, number in enumerate(ids.number(chain("v1", prompt, 1))):
            assert number == seen.setdefault(tuple(prompt[: position + 1]), len(seen))


def test_a_beginning_that_is_remembered_keeps_its_ids():
    ids = HashIds(3)
    assert ids.number(path("v1", [1, 2, 3, 4, 5], 1, 100).blocks) == [0, 1, 2, 3, 4]
    assert ids.number(path("v1", [1, 2, 3, 4], 1, 100).blocks) == [0, 1, 2, 5]
