"""``rollmux doctor`` on two real vLLM servers: nothing to mend, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import ROOT, environment_with

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
HELD_S = 3.0
LEFT_BY_OTHER_TESTS = {"adapters", "marker"}
"""What they may find on the session's replicas, as warnings."""


def test_two_real_replicas_are_fine_and_left_as_they_were(
    replicas: tuple[str, str], tmp_path: Path
) -> None:
    before = [adapters(url) for url in replicas]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "proxy", "doctor", "--json", "--rank", "8"),
            *(word for url in replicas for word in ("--replica", url)),
            *("--beacon", tmp_path, "--hold-reply-s", str(HELD_S)),
        ],
        cwd=ROOT,
        env=environment_with(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    told = json.loads(done.stdout)
    levels = {row["check"]: row["level"] for row in told["checks"]}
    assert {c for c, level in levels.items() if level == "WARN"} <= LEFT_BY_OTHER_TESTS
    assert set(levels.values()) <= {"OK", "WARN"}, "real replicas tell everything"
    for row in told["replicas"]:
        assert not row["beacon"]["trouble"]
        assert row["hold"]["seconds"] >= HELD_S
        assert not row["hold"]["trouble"]
    assert [adapters(url) for url in replicas] == before
    for url in replicas:
        assert httpx.get(f"{url}/is_paused", trust_env=False, timeout=30).json() == {
            "is_paused": False
        }
    assert list((tmp_path / ".rollmux").iterdir()) == []


def adapters(url: str) -> list[str]:
    cards = httpx.get(f"{url}/v1/models", trust_env=False, timeout=30).json()["data"]
    return [card["id"] for card in cards]
