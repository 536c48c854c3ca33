"""Dashboard and alerts in a real Prometheus: every query finds data in a run, every alert fires.

The run is one of simulated replicas: what is looked at here is the daemon's own metrics.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from benchmarks.bucket import LaggingFolder
from benchmarks.daemon import connect, daemon
from benchmarks.demo import REPLICA, Tally, Trainer
from benchmarks.httpd import Fault
from benchmarks.replica import SimulatedReplica
from tests.e2e import environment
from tests.e2e.conftest import RealParts, prometheus_running, prometheus_values
from tests.e2e.processes import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
DASHBOARD = ROOT / "deploy" / "grafana" / "rollmux.json"
RULES = ROOT / "deploy" / "prometheus"
DATA_S = 180.0  # data for every query was there after 6 s
IN_FLIGHT = 24


def promtool(parts: RealParts, *arguments: str | Path) -> str:
    """Its output; an AssertionError with that if it finds anything."""
    _, tool = environment.prometheus_of(parts.env)
    done = subprocess.run(
        [tool, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [q.replace("$__rate_interval", "30s").replace("$job", ".+") for q in found]


def has_data(prometheus: str, query: str) -> bool:
    return any(math.isfinite(value) for value in prometheus_values(prometheus, query))


async def test_every_query_of_the_dashboard_finds_data(
    real_parts: RealParts, tmp_path: Path
) -> None:
    policies = tmp_path / "bucket" / "run"
    policies.mkdir(parents=True)
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                SimulatedReplica(REPLICA, folder=LaggingFolder(tmp_path / "bucket", 0.5, 0.2))
            )
            for _ in range(2)
        ]
        log = tmp_path / "daemon.log"
        url = await stack.enter_async_context(daemon([r.url for r in replicas], log))
        server = prometheus_running(real_parts, url.removeprefix("http://"), tmp_path)
        prometheus = await asyncio.to_thread(server.__enter__)
        stack.push_async_callback(asyncio.to_thread, server.__exit__, None, None, None)
        client = await stack.enter_async_context(connect(url))
        trainer = Trainer(client, policies, Tally())
        await trainer.sync()
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(trainer.roll_out()) for _ in range(IN_FLIGHT)]
            work.append(group.create_task(trainer.train()))
            # Rollouts moved to the other replica, and some that their client gives up: each time
            # one, for on a busy machine it may leave before a replica has it.
            replicas[0].faults.add("/v1/completions", Fault(status=502, body=b"<html></html>"))
            missing = queries()
            deadline_s = time.monotonic() + DATA_S
            while missing and time.monotonic() < deadline_s:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await trainer.roll_out()
                missing = [
                    q for q in missing if not await asyncio.to_thread(has_data, prometheus, q)
                ]
            replicas[0].faults.clear()
            for task in work:
                task.cancel()
    assert missing == []


def test_rules_and_the_example_are_valid(real_parts: RealParts) -> None:
    assert "14 rules found" in promtool(real_parts, "check", "rules", RULES / "alerts.yaml")
    promtool(real_parts, "check", "config", RULES / "prometheus.yaml")


AT = 'job="rollmux",instance="a"'


def replica(name: str, **values: str) -> dict[str, str]:
    """The series of one replica: its in-flight, and whether it is ready."""
    states = {
        "ready": values.get("ready", "1x120"),
        "down": values.get("down", "0x120"),
    }
    found = {
        f'rollmux_replica_state{{{AT},replica="{name}",state="{state}"}}': v
        for state, v in states.items()
    }
    found[f'rollmux_replica_inflight{{{AT},replica="{name}"}}'] = values.get("inflight", "9x120")
    return found


def buckets(metric: str, labels: str, counts: dict[str, str]) -> dict[str, str]:
    series = {f'rollmux_{metric}_bucket{{{AT},{labels},le="{le}"}}': v for le, v in counts.items()}
    series[f"rollmux_{metric}_count{{{AT},{labels}}}"] = counts["+Inf"]
    return series


# Values at each half minute, by alert: a run in which it fires at the end of the hour, and the
# nearest ones in which it does not.
CASES: dict[str, tuple[dict[str, str], ...]] = {
    "RollmuxGone": ({f"up{{{AT}}}": "1x50 0x70"}, {f"up{{{AT}}}": "1x119 0x1"}),
    "RollmuxNoReplicaReady": (
        replica("r0", ready="0x120") | replica("r1", ready="0x120"),
        replica("r0", ready="0x120") | replica("r1", ready="1x120"),
    ),
    "RollmuxReplicaOut": (replica("r0", down="1x120"), replica("r0", down="0x110 1x9")),
    "RollmuxReplicaFlaps": (
        replica("r0", ready="1x100 " + "0 1 " * 9),
        replica("r0", ready="1x100 0 1x18"),
    ),
    "RollmuxRolloutsHeld": (
        {f"rollmux_requests_held{{{AT}}}": "3x120"},
        {f"rollmux_requests_held{{{AT}}}": "3x117 0x3"},
    ),
    "RollmuxPublicationFailed": (
        {f'rollmux_adapter_publications_total{{{AT},outcome="rolled_back"}}': "0x112 1x8"},
        {f'rollmux_adapter_publications_total{{{AT},outcome="committed"}}': "0+1x120"},
    ),
    "RollmuxPublicationsSlow": (
        buckets("adapter_publish_seconds", 'outcome="committed"',
                {"20.0": "0x120", "80.0": "0+1x120", "+Inf": "0+1x120"}),
        buckets("adapter_publish_seconds", 'outcome="committed"',
                {"20.0": "0+1x120", "80.0": "0+1x120", "+Inf": "0+1x120"}),
    ),
    "RollmuxWeightsDiffer": (
        {f'rollmux_weight_proofs_total{{{AT},outcome="differ"}}': "0x100 1x20"},
        {f'rollmux_weight_proofs_total{{{AT},outcome="agree"}}': "0x100 1x20"},
    ),
    "RollmuxPausedLong": (
        {f"rollmux_paused{{{AT}}}": "0x90 1x30"},
        {f"rollmux_paused{{{AT}}}": "0x90 1x20 0 1x9"},
        {f"rollmux_paused{{{AT}}}": "_x110 1x10"},  # the daemon is 5 minutes old
    ),
    "RollmuxNothingInFlight": (
        replica("r0", inflight="9x70 0x50"),
        replica("r0", inflight="9x70 0x40 1 0x9"),
        replica("r0", ready="_x90 1x30", inflight="_x90 0x30"),  # the trainer still starts
    ),
    "RollmuxAnswersFail": (
        {f'rollmux_requests_total{{{AT},code="200"}}': "0+90x120",
         f'rollmux_requests_total{{{AT},code="503"}}': "0+10x120"},
        {f'rollmux_requests_total{{{AT},code="200"}}': "0+90x120",
         f'rollmux_requests_total{{{AT},code="503"}}': "0+1x120",
         f'rollmux_requests_total{{{AT},code="400"}}': "0+10x120"},
    ),
    "RollmuxClientsGiveUp": (
        buckets("client_gave_up_seconds", 'replica="r0"',
                {"320.0": "0x120", "+Inf": "0x105 3x15"}),
        buckets("client_gave_up_seconds", 'replica="r0"',
                {"320.0": "0x105 3x15", "+Inf": "0x105 3x15"}),
    ),
    "RollmuxUnevenLoad": (
        replica("r0", inflight="90x120") | replica("r1", inflight="5x120")
        | replica("r2", inflight="5x120"),
        replica("r0", inflight="50x120") | replica("r1", inflight="30x120")
        | replica("r2", inflight="30x120"),
    ),
    "RollmuxLoopLags": (
        {f"rollmux_event_loop_lag_seconds{{{AT}}}": "0.9x120"},
        {f"rollmux_event_loop_lag_seconds{{{AT}}}": "0.9x110 0.01x10"},
    ),
}  # fmt: skip


def test_each_alert_fires_when_it_should_and_not_otherwise(
    real_parts: RealParts, tmp_path: Path
) -> None:
    tests = [
        {
            "name": f"{alert} {'fires' if fires else 'stays quiet'}",
            "interval": "30s",
            "input_series": [{"series": s, "values": v} for s, v in case.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                    "eval_time": "1h",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        for alert, (first, *others) in CASES.items()
        for fires, case in ((True, first), *((False, other) for other in others))
    ]
    alerts = (RULES / "alerts.yaml").read_text("utf-8")
    assert [line.split(": ")[1] for line in alerts.splitlines() if "- alert:" in line] == list(
        CASES
    )
    # JSON is YAML too.
    file = tmp_path / "tests.json"
    rules = {"rule_files": [str(RULES / "alerts.yaml")], "evaluation_interval": "30s"}
    file.write_text(json.dumps(rules | {"tests": tests}))
    promtool(real_parts, "test", "rules", file)
