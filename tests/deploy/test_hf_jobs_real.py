"""Runs on Hugging Face Jobs whose commands are really run: as processes, before a fake Hub."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from benchmarks.adapter import write_adapter
from proxy.__main__ import main
from tests.deploy.fake_hub import OWNER, TOKEN, FakeHub, log_of

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
"""Of anything a test waits for: several Pythons start, on a machine that may be busy."""

VLLM = f"""#!{sys.executable}
import json, os, sys
import rollmux_push  # what the replica's command has put on the path
assert rollmux_push.AdapterPush and "PUSH_MODULE" not in os.environ
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(json.dumps({{"argv": sys.argv[1:], "job": os.environ["JOB_ID"]}}) + "\\n")
key = os.environ["ROLLMUX_PUSH_KEY"]
push = ["--push-key", key, "--push-root", os.environ["FAKE_ROOT"]]
given = sys.argv[1:]
slots = [w for f in ("--max-loras", "--max-cpu-loras", "--max-lora-rank")
         for w in (f, given[given.index(f) + 1])]
command = [sys.executable, "-u", "-m", "benchmarks.replica", "--port", "0", *slots, *push]
os.execv(sys.executable, command)
"""

TRAIN = """
import json, os, pathlib, sys, time, urllib.request
url, folder = os.environ["ROLLMUX_URL"], pathlib.Path(sys.argv[1])

def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, kind), timeout=60) as got:
        return got.read()

def rollout(model):
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True,
            "logprobs": 0}
    assert json.loads(call("/v1/completions", body))["choices"][0]["token_ids"]

def until(holds):
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.1)

assert "RUN_PLAN" not in os.environ
call("/v1/load_lora_adapter", {"lora_name": "trl-policy-v1", "lora_path": sys.argv[2]})
rollout("trl-policy-v1")
urls = lambda: {r["url"] for r in json.loads(call("/proxy/status"))["replicas"]
                if r["state"] == "ready"}
first = urls()
assert len(first) == 2
(folder / "training").touch()
until(lambda: len(urls()) == 2 and urls() != first)
for _ in range(20):
    rollout("trl-policy-v1")
print("replaced and trained on", flush=True)
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A Hub whose Jobs run here, with a stand-in for ``vllm`` and the real ``rollmux``."""
    bin = tmp_path / "bin"
    bin.mkdir()
    executable(bin / "vllm", VLLM)
    executable(bin / "rollmux", f'#!/bin/sh\nexec {sys.executable} -m proxy "$@"\n')
    executable(bin / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    env = {
        "PATH": f"{bin}:{os.defpath}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "FAKE_LOG": str(tmp_path / "vllm.log"),
        "FAKE_ROOT": str(tmp_path / "pushed"),
    }
    with FakeHub(lambda job: hub.run_for_real(job, env)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.folder = tmp_path / "lora"
        hub.folder.mkdir()
        yield hub
    for job in hub.jobs:
        assert TOKEN not in "\n".join(job.log)


def up(hub, *words, replicas=2):
    """``rollmux deploy hf up`` for Jobs on this machine."""
    cut = words.index("--")
    quick = ["--poll-s", "0.2", "--install", "none", "--run-arg=--port=0", "--run-arg=--drain-s=1"]
    quick += ["--start-timeout-s", str(int(LIMIT_S)), "--mount", str(hub.folder)]
    shape = ["--run", "r1", "--model", "tiny", "--replicas", str(replicas)]
    return main(["deploy", "hf", "up", *shape, *quick, *words[:cut], *words[cut:]])


@pytest.mark.timeout(300)
def test_up_a_replica_replaced_mid_run_the_trainer_finishes_nothing_left(machine, tmp_path, capfd):
    hub = machine
    (tmp_path / "train.py").write_text(TRAIN)
    adapter = write_adapter(hub.folder / "trl-policy-v1", hidden=16, layers=1)
    arguments = [str(tmp_path), str(adapter)]
    flush = ["--flush-path", str(hub.folder)]
    code = up(hub, *flush, "--", "python", str(tmp_path / "train.py"), *arguments)
    assert code == 0, hub.told()
    assert [(j.role, j.stage) for j in hub.jobs] == [
        ("replica", "RUNNING"),
        ("replica", "RUNNING"),
        ("trainer", "RUNNING"),
    ]
    trainer = hub.jobs[2]
    assert main(["deploy", "hf", "status", "--run", "r1"]) == 0
    assert "price now $15.02 an hour" in capfd.readouterr().out

    hub.until((tmp_path / "training").exists, LIMIT_S)
    pushed = {path.name[:13] for path in (tmp_path / "pushed").glob("*/*-*")}
    assert pushed == {"trl-policy-v1"}, "by the endpoint that the replica's command set up"
    lost = hub.jobs[0]
    os.killpg(lost.process.pid, signal.SIGKILL)
    hub.until(lambda: not trainer.live, 2 * LIMIT_S)
    assert trainer.stage == "COMPLETED", hub.told()
    assert "replaced and trained on" in trainer.log
    assert f"rollmux run: the bucket lists all 2 files of {hub.folder}" in trainer.log
    assert lost.stage == "ERROR"
    replaced = hub.jobs[3]
    assert replaced.labels == lost.labels
    assert not hub.live(), "the trainer's Job ends the replicas itself"
    assert {job.stage for job in hub.jobs} == {"ERROR", "COMPLETED", "CANCELED"}

    assert main(["deploy", "hf", "logs", "--run", "r1"]) == 0
    assert "replica 0 was lost" in capfd.readouterr().out
    assert main(["deploy", "hf", "down", "--run", "r1"]) == 0
    out, err = capfd.readouterr()
    assert "nothing lives" in out
    assert TOKEN not in out + err
    served = log_of(tmp_path / "vllm.log")
    assert {row["job"] for row in served} == {hub.jobs[i].id for i in (0, 1, 3)}
    assert served[0]["argv"] == served[1]["argv"] == served[2]["argv"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["fails", "cancelled", "keeps"])
def test_the_replicas_end_with_the_trainer_however_it_ends(machine, tmp_path, how):
    hub = machine
    script = "echo training; exec sleep 600" if how == "cancelled" else "exit 7"
    options = ["--keep-replicas"] if how == "keeps" else []
    code = up(hub, *options, "--", "sh", "-c", script, replicas=1)
    assert code == 0 or how != "cancelled", hub.told()
    trainer = hub.jobs[1]
    if how == "cancelled":
        hub.until(lambda: "training" in trainer.log, LIMIT_S)
        hub.cancel(trainer)  # the Job's own timeout looks the same from inside
        trainer.process.wait(LIMIT_S)
        hub.until(lambda: not hub.live(), LIMIT_S)
        return
    hub.until(lambda: not trainer.live, LIMIT_S)
    assert (trainer.stage, trainer.message) == ("ERROR", "exit code 7"), hub.told()
    assert len(hub.live()) == (1 if how == "keeps" else 0)


@pytest.mark.timeout(300)
def test_rollmux_is_installed_apart_before_the_trainer_is_started(machine, tmp_path):
    hub = machine
    bin = tmp_path / "bin"
    executable(
        bin / "uv",
        f'#!/bin/sh\n[ "$*" = "tool dir --bin" ] && echo {tmp_path}/tools && exit\n'
        f'echo "uv $*"\nmkdir -p {tmp_path}/tools\nmv {bin}/rollmux {tmp_path}/tools/\n',
    )
    code = up(hub, "--install", "rollmux[hf] @ file:///wheel", "--", "true", replicas=1)
    trainer = hub.jobs[1]
    hub.until(lambda: not trainer.live, LIMIT_S)
    assert (code, trainer.stage) == (0, "COMPLETED"), hub.told()
    assert trainer.log[0] == "uv tool install --quiet rollmux[hf] @ file:///wheel"
    assert OWNER in trainer.spec["environment"]["RUN_PLAN"]
