"""TRL's own trainer, through the daemon, to two real vLLM replicas."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import environment
from tests.e2e.conftest import RealParts, prometheus_running, prometheus_values
from tests.e2e.main_job import COMPLETIONS, POLICY, judge, run_job
from tests.e2e.processes import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STEPS, PUBLICATIONS = 12, 7


def test_trainer_runs_to_its_end_and_every_rollout_has_its_policy(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    port = free_port()
    with prometheus_running(real_parts, f"127.0.0.1:{port}", tmp_path) as prometheus:
        run = run_job(real_parts, replicas, tmp_path, port=port)
        judge(run, replicas[0], steps=STEPS, publications=PUBLICATIONS)

        # The daemon is gone by now; the server still has what it scraped.
        affinity = prometheus_values(
            prometheus,
            'max_over_time(rollmux_routing_decisions_total{decision="affinity"}[10m])',
        )
        assert affinity, "Prometheus has no affinity counter"
        assert affinity[0] > 0
        retries = prometheus_values(
            prometheus, "max_over_time(rollmux_adapter_load_retries_total[10m])"
        )
        assert len(retries) == 2, f"a load-retry counter per replica, not {retries}"
    _, promtool = environment.prometheus_of(real_parts.env)
    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=run.daemon_metrics,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def base_model_instead(base: str) -> Any:
    def rewrite(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == COMPLETIONS and POLICY.fullmatch(body["model"]):
            return body | {"model": base}
        return body

    return rewrite


def previous_version_instead(path: str, body: dict[str, Any]) -> dict[str, Any]:
    version = POLICY.fullmatch(str(body.get("model")))
    if path == COMPLETIONS and version and int(version[1]) > 1:
        return body | {"model": f"trl-policy-v{int(version[1]) - 1}"}
    return body


def test_goes_red_when_one_replica_serves_the_base_model(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    planted = base_model_instead(str(real_parts.model))
    run = run_job(real_parts, replicas, tmp_path, planted=planted)
    with pytest.raises(AssertionError, match="served with other weights than their name says"):
        judge(run, replicas[0], steps=STEPS, publications=PUBLICATIONS)


def test_goes_red_when_one_replica_serves_the_previous_version(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    run = run_job(real_parts, replicas, tmp_path, planted=previous_version_instead)
    with pytest.raises(AssertionError, match="served with other weights than their name says"):
        judge(run, replicas[0], steps=STEPS, publications=PUBLICATIONS)
