"""The publication benchmark on two real vLLM replicas, each behind a real mount of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.publication import ALLOWED_S
from tests.e2e.conftest import START_S, RealParts, replica_running
from tests.e2e.lagging_mount import lagging_mount, missing_for_mounts, seen_at
from tests.e2e.processes import ROOT, environment_with, wait_for_health

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_for_mounts()), reason=missing_for_mounts()),
]
LAG_S, NEGATIVE_TTL_S = 2.5, 1.0  # hf-mount's, since its PR 226
COUNT = 7
ATTEMPTS = 2 * 1.5  # of two replicas for a publication: now and then the daemon looks early


@pytest.fixture(scope="module")
def late(
    real_parts: RealParts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[str], Path]]:
    """URLs, and the folder of which the replicas, and nobody else, see what was there before."""
    directory = tmp_path_factory.mktemp("late")
    folder = directory / "bucket"
    folder.mkdir()
    with ExitStack() as stack:
        started = []
        for number in range(2):
            mount = stack.enter_context(lagging_mount(folder, LAG_S, NEGATIVE_TTL_S))
            log = directory / f"{number}.log"
            before = seen_at(mount, folder)
            started.append(stack.enter_context(replica_running(real_parts, log, before=before)))
        for url, process in started:
            wait_for_health(process, f"{url}/health", START_S)
        yield [url for url, _ in started], folder


def benchmark(urls: list[str], folder: Path, lag_s: float) -> dict[str, Any]:
    """The row of the benchmark's result. Its own verdict is for an idle machine: `make bench`."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.publication", "--json"),
            *("--url", urls[0], "--url", urls[1], "--folder", folder),
            *("--lag-s", str(lag_s), "--count", str(COUNT)),
        ],
        cwd=ROOT,
        env=environment_with(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    (row,) = json.loads(done.stdout)["mounts"]
    print(f"lag {lag_s} s: {row}")
    return row


def test_load_call_takes_half_a_second_more_than_the_lag_at_most(
    late: tuple[list[str], Path], tmp_path: Path
) -> None:
    """And what it takes without a lag, which on a busy machine may be a second."""
    urls, folder = late
    at_once = benchmark(urls, tmp_path, 0.0)  # not behind the mounts
    through = benchmark(urls, folder, LAG_S)
    assert at_once["attempts"] == [len(urls)] * len(at_once["attempts"])
    # Times of files come from a coarser clock.
    assert min(through["loads_s"]) >= LAG_S - 0.05, "the mount did not lag"
    assert through["p50_s"] <= LAG_S + ALLOWED_S + at_once["p50_s"], through
    assert sum(through["attempts"][-COUNT:]) / COUNT <= ATTEMPTS, through
