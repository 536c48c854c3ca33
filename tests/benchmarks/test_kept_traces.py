"""The recordings that are kept beside the benchmarks: each replays, and its page is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replay import Options, replay
from benchmarks.trace import read

KEPT = Path(__file__).parents[2] / "benchmarks" / "traces"
FILES = sorted(KEPT.glob("*.jsonl"))


def test_there_is_one():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_kept_recording_replays(file):
    trace = read(file)
    assert trace.faults == []
    assert trace.replicas() == 2
    found = {
        router: replay(trace, router, Options(replicas=2, inflight=16))
        for router in ("prefix", "round-robin")
    }
    assert found["prefix"].requests == sum(request.ok for request in trace.requests)
    assert found["prefix"].group_s is not None
    assert found["prefix"].cached_share > found["round-robin"].cached_share


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_page_tells_what_is_in_a_kept_recording(file):
    trace = read(file)
    page = (KEPT / "README.md").read_text("utf-8")
    published = sum(event.kind == "publish" for event in trace.events)
    assert f"{len(trace.requests)} rollouts" in page
    assert f"{published} adapters" in page
    assert trace.digest in page
    assert sum(f.stat().st_size for f in KEPT.iterdir()) < 300_000
