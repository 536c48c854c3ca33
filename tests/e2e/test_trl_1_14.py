"""The older TRL's client and rollout loop, through the daemon, to two real vLLM replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import environment
from tests.e2e.conftest import RealParts
from tests.e2e.main_job import judge_serving, run_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
LOOP = Path(__file__).with_name("trl_1_14_loop.py")


def trl_1_14(parts: RealParts, url: str, out: Path) -> list[str | Path]:
    path = f"PYTHONPATH={environment.older_trl_of(parts.env)}"
    return ["env", path, parts.python, LOOP, url, out, parts.model, parts.problems]


def test_client_and_rollout_loop_of_trl_1_14(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    run = run_job(real_parts, replicas, tmp_path, trl_1_14)
    assert run.exit_code == 0, run.output[-4000:]
    judge_serving(run, replicas[0], publications=8)
