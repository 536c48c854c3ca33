"""TRL's own trainer, through the daemon, to two real vLLM replicas."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trace import read
from proxy.body import Bodies
from tests.e2e import environment
from tests.e2e.conftest import RealParts, prometheus_running, prometheus_values
from tests.e2e.main_job import (
    COMPLETIONS,
    POLICY,
    UNLOAD,
    Run,
    judge,
    judge_serving,
    recipe,
    run_job,
)
from tests.e2e.processes import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STEPS, PUBLICATIONS = 12, 7
BLOCK = 16  # the replicas' --block-size
# Rollouts with other weights reached the trainer. Or the daemon saw it first and put the replica
# out of rotation, which then lists, or has served, less than the other.
RED = "served with other weights than their name says|they list|one replica served nothing"


@dataclass(frozen=True, slots=True)
class Scraped:
    affinity: list[float]  # one value per series, the last that was scraped
    load_retries: list[float]


def recording_of(directory: Path) -> Path:
    return directory / "trace.jsonl"


@pytest.fixture(scope="module")
def finished(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Scraped]:
    """The job, run to its end with Prometheus beside it."""
    directory = tmp_path_factory.mktemp("job")
    port = free_port()
    with prometheus_running(real_parts, f"127.0.0.1:{port}", directory) as prometheus:
        record = ("--record", str(recording_of(directory)))
        run = run_job(real_parts, replicas, directory, port=port, options=record)
        # The daemon is gone by now; the server still has what it scraped.
        affinity = 'rollmux_routing_decisions_total{decision="affinity"}[10m]'
        scraped = Scraped(
            prometheus_values(prometheus, f"max_over_time({affinity})"),
            prometheus_values(prometheus, "max_over_time(rollmux_adapter_load_retries_total[10m])"),
        )
    return run, scraped


def test_trainer_runs_to_its_end_and_every_rollout_has_its_policy(
    finished: tuple[Run, Scraped], replicas: tuple[str, str]
) -> None:
    run, _ = finished
    judge(run, replicas[0], steps=STEPS, publications=PUBLICATIONS)


def test_rollouts_of_a_group_are_one_body_to_the_daemon(finished: tuple[Run, Scraped]) -> None:
    """They differ in their seeds, where TRL writes them: each group is parsed and hashed once."""
    run, _ = finished
    bodies = Bodies()
    rollouts = [bodies.read(e.body) for e in run.exchanges if e.path == COMPLETIONS]
    seeds = {e.request["seed"] for e in run.exchanges if e.path == COMPLETIONS}
    assert len(seeds) == len(rollouts)
    assert len({id(rollout) for rollout in rollouts}) < len(rollouts) / 4


def test_prometheus_scrapes_affinity_and_load_retries(finished: tuple[Run, Scraped]) -> None:
    _, scraped = finished
    assert len(scraped.affinity) == 1
    assert scraped.affinity[0] > 0
    assert len(scraped.load_retries) == 2, "one series per replica"


def test_the_recording_has_every_rollout_and_every_publication(
    finished: tuple[Run, Scraped],
) -> None:
    run, _ = finished
    trace = read(recording_of(run.output_dir.parent))
    assert trace.faults == []
    # A trainer that ends leaves rollouts in flight, which are answered and recorded all the same.
    served = run.rollouts + [e for e in run.unseen if e.path == COMPLETIONS]
    prompts = Counter(len(rollout.request["prompt"]) for rollout in served)
    assert Counter(request.prompt_tokens for request in trace.requests) == prompts
    assert sum(request.output_tokens for request in trace.requests) == sum(
        rollout.reply["usage"]["completion_tokens"] for rollout in served
    )
    published = [event.model for event in trace.events if event.kind == "publish"]
    assert published == [publication.name for publication in run.publications]
    # One number for one beginning of a prompt, within a policy version.
    sent = sorted((r.request["model"], *r.request["prompt"][:BLOCK]) for r in served)
    assert len({request.ids[0] for request in trace.requests}) == len(set(sent))


def test_promtool_finds_nothing(finished: tuple[Run, Scraped], real_parts: RealParts) -> None:
    run, _ = finished
    _, promtool = environment.prometheus_of(real_parts.env)
    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=run.daemon_metrics,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert run.daemon_metrics
    assert (checked.returncode, checked.stdout) == (0, "")


def test_second_run_resumes_from_the_last_complete_checkpoint(
    finished: tuple[Run, Scraped],
    real_parts: RealParts,
    replicas: tuple[str, str],
    tmp_path: Path,
) -> None:
    """On the same replicas, with the policy's numbers going on where they were."""
    first, _ = finished
    out = tmp_path / "out"
    shutil.copytree(first.output_dir, out)
    shutil.copytree(out / "checkpoint-12", out / "checkpoint-13")
    (out / "checkpoint-13" / "optimizer.pt").write_bytes(b"")

    def longer(parts: RealParts, url: str, out: Path) -> list[str | Path]:
        return recipe(parts, url, out, "--max-steps", "14")

    run = run_job(real_parts, replicas, tmp_path, longer)
    assert run.exit_code == 0, run.output[-4000:]
    assert "not resuming from checkpoint-13: optimizer.pt is empty" in run.output
    assert f"resuming from {out / 'checkpoint-12'}" in run.output
    assert [entry["step"] for entry in run.logged_steps] == list(range(1, 15))
    assert [p.name for p in run.publications] == ["trl-policy-v8", "trl-policy-v9"]
    # It also unloads versions that the first run published and `rollmux run` has cleaned away. It
    # gets what a restarted vLLM would say, and ignores it (vllm_client.py, unload_lora_adapter).
    run.exchanges = [e for e in run.exchanges if (e.path, e.status) != (UNLOAD, 404)]
    judge_serving(run, replicas[0], publications=2)


def base_model_instead(base: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == COMPLETIONS and POLICY.fullmatch(str(body.get("model"))):
        return body | {"model": base}
    return body


def previous_version_instead(path: str, body: dict[str, Any]) -> dict[str, Any]:
    version = POLICY.fullmatch(str(body.get("model")))
    if path == COMPLETIONS and version and int(version[1]) > 1:
        return body | {"model": f"trl-policy-v{int(version[1]) - 1}"}
    return body


def test_goes_red_when_one_replica_serves_the_base_model(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    planted = partial(base_model_instead, str(real_parts.model))
    run = run_job(real_parts, replicas, tmp_path, planted=planted)
    with pytest.raises(AssertionError, match=RED):
        judge(run, replicas[0], steps=STEPS, publications=PUBLICATIONS)


def test_goes_red_when_one_replica_serves_the_previous_version(
    real_parts: RealParts, replicas: tuple[str, str], tmp_path: Path
) -> None:
    run = run_job(real_parts, replicas, tmp_path, planted=previous_version_instead)
    with pytest.raises(AssertionError, match=RED):
        judge(run, replicas[0], steps=STEPS, publications=PUBLICATIONS)
