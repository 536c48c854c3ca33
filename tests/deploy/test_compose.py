"""deploy/compose.yaml: replicas with what a run needs, and a daemon that finds them."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.deploy.launch import daemon_accepts, needs_of_a_replica

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
SERVICES = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))["services"]
ROLLMUX = SERVICES["rollmux"]
REPLICAS = {name: service for name, service in SERVICES.items() if name.startswith("replica-")}


def test_replicas_start_with_what_a_run_needs():
    options, environ = needs_of_a_replica(max_staleness=4, max_lora_rank=32, max_model_len=8192)
    for replica in REPLICAS.values():
        assert options <= {*replica["command"]}
        assert environ.items() <= replica["environment"].items()
        source, target, mode = replica["volumes"][0].split(":")
        assert (target, mode) == (replica["environment"]["PYTHONPATH"], "ro")
        assert (FOLDER / source / "rollmux_push.py").is_file()


def test_daemon_takes_its_options_and_knows_every_replica():
    assert daemon_accepts(ROLLMUX["command"], ROLLMUX_PUSH_KEY="key")
    named = {word for word in ROLLMUX["command"] if word.startswith("--replica=")}
    assert named == {f"--replica=http://{name}:8000" for name in REPLICAS}


def test_both_sides_share_the_push_key():
    keys = {s["environment"]["ROLLMUX_PUSH_KEY"] for s in SERVICES.values()}
    assert len(keys) == 1


def test_only_this_machine_reaches_rollmux_and_each_replica_has_a_gpu_of_its_own():
    assert all(port.startswith("127.0.0.1:") for port in ROLLMUX["ports"])
    assert not any("ports" in replica for replica in REPLICAS.values())
    gpus = [
        device_id
        for replica in REPLICAS.values()
        for device in replica["deploy"]["resources"]["reservations"]["devices"]
        for device_id in device["device_ids"]
    ]
    assert len(gpus) == len(set(gpus)) == len(REPLICAS)
