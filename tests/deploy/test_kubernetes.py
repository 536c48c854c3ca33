"""The manifests in deploy/kubernetes: valid by Kubernetes' own schemas, and of one piece."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.launch import daemon_accepts, needs_of_a_replica

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OLDEST, NEWEST = "1.29", "1.37"
"""Native sidecars are on by default since the first."""

NAME = {"type": "string", "minLength": 1}
POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"matchLabels": {"type": "object"}},
                },
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["port"],
                        "properties": {
                            "port": NAME,
                            "path": {"type": "string", "pattern": "^/"},
                            "interval": {"type": "string", "pattern": "^[0-9]+(s|m)$"},
                            "relabelings": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {"targetLabel": NAME, "replacement": NAME},
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}
"""The part of the operator's definition that is used here; it is no part of Kubernetes."""


def manifests() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
    files = [(FOLDER / name).read_text("utf-8") for name in kustomization["resources"]]
    return [manifest for text in files for manifest in yaml.safe_load_all(text)]


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


ALL = {name_of(manifest): manifest for manifest in manifests()}
REPLICAS = ALL["StatefulSet/rollmux-replica"]["spec"]
REPLICA = REPLICAS["template"]["spec"]
TRAINER = ALL["Job/rollmux-trainer"]["spec"]["template"]["spec"]
(VLLM,) = REPLICA["containers"]
(SIDECAR,) = TRAINER["initContainers"]
TEMPLATES = [REPLICAS["template"], ALL["Job/rollmux-trainer"]["spec"]["template"]]
PODS = [REPLICA, TRAINER]


def test_every_manifest_is_listed():
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("PodMonitor")])
def test_manifest_fits_the_schema(name, version):
    kubernetes_validate.validate(ALL[name], version, strict=True)


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("PodMonitor")])
def test_pod_monitor_scrapes_a_port_that_its_pods_have(name):
    jsonschema.validate(ALL[name], POD_MONITOR)
    spec = ALL[name]["spec"]
    (template,) = [t for t in TEMPLATES if selects(spec["selector"], t)]
    for endpoint in spec["podMetricsEndpoints"]:
        assert endpoint["port"] in {port["name"] for port in ports(template["spec"])}


def test_the_daemon_is_scraped_under_the_job_that_the_alerts_look_for():
    alerts = (FOLDER.parent / "prometheus" / "alerts.yaml").read_text("utf-8")
    (job,) = set(re.findall(r'job="([^"]*)"', alerts))
    for name, jobs in (("rollmux-trainer", [job]), ("rollmux-replica", [])):
        (endpoint,) = ALL[f"PodMonitor/{name}"]["spec"]["podMetricsEndpoints"]
        labels = endpoint.get("relabelings", [])
        assert [each["replacement"] for each in labels if each["targetLabel"] == "job"] == jobs


def selects(selector: dict[str, Any], template: dict[str, Any]) -> bool:
    wanted = selector["matchLabels"].items()
    return bool(wanted) and wanted <= template["metadata"]["labels"].items()


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def ports(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [port for container in containers(pod) for port in container.get("ports", [])]


def secrets(container: dict[str, Any]) -> dict[str, Any]:
    return {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]
        for entry in container.get("env", [])
        if "valueFrom" in entry
    }


def test_replicas_start_with_what_a_run_needs():
    env = {entry["name"]: entry.get("value", "") for entry in VLLM["env"]}
    options, environ = needs_of_a_replica(max_staleness=4, max_lora_rank=32, max_model_len=8192)
    assert options <= {*VLLM["command"]}
    assert environ.items() <= env.items()
    assert "ROLLMUX_PUSH_KEY" in env
    (copier,) = REPLICA["initContainers"]
    (mount,) = copier["volumeMounts"]
    assert env["PYTHONPATH"] == mount["mountPath"] == copier["command"][-1].rstrip("/")
    # Where tests/image finds the file in the image.
    assert copier["command"][1] == "/opt/rollmux/replica/rollmux_push.py"


def test_daemon_takes_the_sidecars_options():
    assert daemon_accepts(SIDECAR["args"], ROLLMUX_PUSH_KEY="key")


def test_rollmux_finds_the_replicas_by_their_headless_service():
    service = ALL["Service/rollmux-replicas"]
    (port,) = service["spec"]["ports"]
    assert f"--replicas-dns={service['metadata']['name']}:{port['port']}" in SIDECAR["args"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= REPLICAS["template"]["metadata"]["labels"].items()
    assert REPLICAS["serviceName"] == service["metadata"]["name"]
    assert f"--port={port['port']}" in VLLM["command"]
    assert port["port"] in {p["containerPort"] for p in VLLM["ports"]}


def test_rollmux_is_a_native_sidecar_that_holds_the_trainer_back_until_the_fleet_is_ready():
    assert SIDECAR["restartPolicy"] == "Always"
    start = SIDECAR["startupProbe"]
    assert start["httpGet"]["path"] == "/proxy/ready"
    # Longer than the daemon's own --start-timeout-s, or it would be killed while it waits.
    assert start["periodSeconds"] * start["failureThreshold"] > 1800
    assert SIDECAR["livenessProbe"]["httpGet"]["path"] == "/proxy/live"
    assert TRAINER["terminationGracePeriodSeconds"] > 25


def test_trainer_and_sidecar_see_the_adapters_under_one_path():
    (trainer,) = TRAINER["containers"]
    (output,) = trainer["volumeMounts"]
    assert {**output, "readOnly": True} in SIDECAR["volumeMounts"]


def test_both_sides_share_the_push_key():
    assert secrets(SIDECAR)["ROLLMUX_PUSH_KEY"] == secrets(VLLM)["ROLLMUX_PUSH_KEY"]


@pytest.mark.parametrize("pod", PODS)
def test_pods_get_no_service_links_and_every_mount_has_its_volume(pod):
    assert pod["enableServiceLinks"] is False
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = [m["name"] for c in containers(pod) for m in c.get("volumeMounts", [])]
    assert set(mounts) == volumes


@pytest.mark.parametrize("pod", PODS)
def test_probes_ask_ports_that_are_declared(pod):
    probes = [
        container[kind]["httpGet"]["port"]
        for container in containers(pod)
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if kind in container
    ]
    assert probes
    assert set(probes) <= {port["name"] for port in ports(pod)}


def test_only_the_trainer_and_prometheus_may_reach_the_replicas():
    policy = ALL["NetworkPolicy/rollmux-replica"]["spec"]
    assert selects(policy["podSelector"], REPLICAS["template"])
    peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
    pods = [peer["podSelector"] for peer in peers if "podSelector" in peer]
    assert [selects(selector, TEMPLATES[1]) for selector in pods] == [True]
    assert all(rule["from"] and rule["ports"] for rule in policy["ingress"])
    assert selects(ALL["NetworkPolicy/rollmux-trainer"]["spec"]["podSelector"], TEMPLATES[1])


def images() -> Iterator[str]:
    for pod in PODS:
        for container in containers(pod):
            yield container["image"]


def test_kustomization_sets_every_image_and_its_tag():
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
    assert {entry["name"] for entry in kustomization["images"]} == set(images())
    assert all(entry["newTag"] for entry in kustomization["images"])
