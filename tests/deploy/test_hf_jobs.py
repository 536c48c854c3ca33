"""``rollmux deploy hf`` against a Hub on a socket; the user's side in this process."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from deploy.hf_jobs import command
from deploy.hf_jobs.up import WATCHING
from proxy.__main__ import main
from tests.deploy.fake_hub import OWNER, TOKEN, FakeHub

START = f"POST /api/jobs/{OWNER}"
UP = ("up", "--run", "r1", "--model", "tiny", "--start-timeout-s", "60")
TRAIN = ("--", "python", "train.py")


@pytest.fixture
def hub(monkeypatch, capfd):
    """A Hub whose Jobs are no processes. Whatever is printed in a test must not hold the token."""

    def run_job(job):
        job.stage = "RUNNING"
        if job.role == "trainer":
            job.log.append(WATCHING)

    with FakeHub(run_job) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
    for job in hub.jobs:
        public = {k: v for k, v in job.spec.items() if k != "secrets"}
        assert TOKEN not in json.dumps(public)


@pytest.fixture
def rollmux(hub, capfd):
    """``rollmux(*words)``: exit code, output and progress of ``rollmux deploy hf``, made quick."""

    def run(*words, patience_s="30"):
        cut = words.index("--") if "--" in words else len(words)
        quick = ("--poll-s", "0.02", "--hub-patience-s", patience_s)
        capfd.readouterr()
        code = main(["deploy", "hf", *words[:cut], *quick, *words[cut:]])
        out, err = capfd.readouterr()
        assert TOKEN not in out + err
        return code, out, err

    return run


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


# --- up -----------------------------------------------------------------------------------------


def test_up_starts_bucket_replicas_and_trainer_with_what_the_run_needs(hub, rollmux):
    code, out, err = rollmux(*UP, "--replicas", "3", "--max-lora-rank", "20", *TRAIN)
    assert code == 0, err
    assert hub.buckets == {f"{OWNER}/rollmux-r1": {"private": True}}
    *replicas, trainer = hub.jobs
    assert [job.labels["replica"] for job in replicas] == ["0", "1", "2"]
    assert {job.labels["run"] for job in hub.jobs} == {"r1"}
    assert {job.labels["role"] for job in replicas} == {"replica"}
    assert trainer.labels["role"] == "trainer"
    for job in replicas:
        line = job.spec["command"][-1]
        for words in (
            "exec vllm serve tiny --host 0.0.0.0 --port 8000",
            "--enable-lora --max-loras 6 --max-cpu-loras 24 --max-lora-rank 32",
            "--logprobs-mode processed_logprobs --generation-config vllm",
            "--max-model-len 8192",
            "--middleware rollmux_push.AdapterPush",
        ):
            assert words in line
        env = job.spec["environment"]
        assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == env["VLLM_SERVER_DEV_MODE"] == "1"
        assert int(env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 5
        assert job.spec["expose"] == {"ports": [8000], "portsPublic": []}
        assert job.spec["volumes"][0]["readOnly"] is True
        assert job.spec["timeoutSeconds"] > trainer.spec["timeoutSeconds"] + 60
        assert set(job.spec["secrets"]) == {"ROLLMUX_PUSH_KEY"}
    assert trainer.spec["secrets"]["HF_TOKEN"] == TOKEN
    keys = {job.spec["secrets"]["ROLLMUX_PUSH_KEY"] for job in hub.jobs}
    assert len(keys) == 1
    assert len(keys.pop()) > 30
    assert not trainer.spec["volumes"][0].get("readOnly")
    assert trainer.spec["command"][-1].endswith("rollmux deploy hf trainer -- python train.py")
    assert "run r1 is up" in out
    assert "price $20.03 an hour" in err


def test_a_network_group_needs_no_port_and_no_token_of_replicas(hub, rollmux):
    code, _, err = rollmux(*UP, "--transport", "network-group", *TRAIN)
    assert code == 0, err
    *replicas, _ = hub.jobs
    (group,) = {job.spec["network"]["group"] for job in hub.jobs}
    assert {tuple(job.spec["network"]["aliases"]) for job in replicas} == {("vllm",)}
    assert not any("expose" in job.spec for job in hub.jobs)
    assert not any("HF_TOKEN" in job.spec["secrets"] for job in replicas)
    rollmux("down", "--run", "r1")
    rollmux(*UP, "--transport", "network-group", *TRAIN)
    assert hub.jobs[-1].spec["network"]["group"] != group, "an alias is held by its group"


def test_the_trainer_starts_only_when_every_replica_serves(hub, rollmux):
    seen = []

    def health(call):
        if call.startswith("GET") and len(hub.jobs) == 2:
            seen.append(call)
            hub.jobs[0].health = 200 if len(seen) > 5 else 503
            assert not hub.live("trainer")

    hub.on_call = health
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 0
    assert "replica 0: RUNNING, /health 503" in err
    assert len(seen) > 5


def test_a_replica_that_fails_to_start_ends_the_start_with_its_last_words(hub, rollmux):
    run_job = hub._run_job

    def fail_second(job):
        run_job(job)
        if job.labels["replica"] == "1":
            job.log += ["loading weights", "CUDA out of memory"]
            hub.end(job, "ERROR", "exit code 1")

    hub._run_job = fail_second
    code, out, err = rollmux(*UP, *TRAIN)
    assert code == 1
    assert "replica 1" in err
    assert "CUDA out of memory" in err
    assert not hub.live()
    assert not [job for job in hub.jobs if job.role == "trainer"], "it would have cost money"
    assert "is up" not in out


def test_a_trainer_job_that_dies_before_it_looks_after_the_replicas_ends_them(hub, rollmux):
    def run_job(job):
        job.stage = "RUNNING"
        if job.role == "trainer":
            job.log.append("installing")

    def on_call(call):
        if hub.live("trainer") and call.endswith("/logs"):
            hub.jobs[-1].log.append("No solution found when resolving rollmux")
            if len(hub.jobs[-1].log) == 4:
                hub.end(hub.jobs[-1], "ERROR")

    hub._run_job = run_job
    hub.on_call = on_call
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 1
    assert "No solution found" in err
    assert not hub.live()


def test_a_start_that_takes_too_long_ends_with_what_was_missing(hub, rollmux):
    hub._run_job = lambda job: None  # stays SCHEDULING
    code, _, err = rollmux(*UP, "--start-timeout-s", "1", *TRAIN)
    assert code == 1
    assert "not up after 1 s: replica 0: SCHEDULING; replica 1: SCHEDULING" in err
    assert not hub.live()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["while a Job is started", "while replicas load", "last"])
def test_nothing_bills_on_after_an_interrupt_half_way(hub, rollmux, number, when):
    def on_call(call):
        started = len(hub.jobs)
        if when == "while a Job is started":
            hit = call == START and started == 1
        elif when == "last":
            hit = call == START and started == 2
        else:
            hit = call.startswith("GET") and started == 2
        if hit:
            hub.on_call = lambda call: None
            interrupt(number)

    hub.on_call = on_call
    code, out, err = rollmux(*UP, *TRAIN)
    assert code == 128 + number
    assert hub.jobs
    assert not hub.live()
    assert "cancelled" in err
    assert "is up" not in out


def test_a_second_up_of_a_run_that_lives_changes_nothing(hub, rollmux):
    rollmux(*UP, *TRAIN)
    before = [(job.id, job.stage) for job in hub.jobs]
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 1
    assert "replica 0" in err
    assert "rollmux deploy hf down --run r1" in err
    assert [(job.id, job.stage) for job in hub.jobs] == before
    assert rollmux("down", "--run", "r1")[0] == 0
    assert rollmux(*UP, *TRAIN)[0] == 0, "its bucket is there already"


def test_of_two_starts_at_once_each_gives_way_and_ends_only_its_own(hub, rollmux):
    def on_call(call):
        if call == START and len(hub.jobs) == 1:
            hub.on_call = lambda call: None
            labels = hub.jobs[0].labels | {"launch": "another"}
            hub.create(hub.jobs[0].spec | {"labels": labels})

    hub.on_call = on_call
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 1
    assert "has Jobs that live" in err
    assert [job.labels["launch"] for job in hub.live()] == ["another"]


def test_a_public_bucket_is_refused_before_anything_is_started(hub, rollmux):
    hub.buckets[f"{OWNER}/rollmux-r1"] = {"private": False}
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 1
    assert "is public" in err
    assert not hub.jobs


# --- the Hub has a bad day ----------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 16))
def test_each_call_may_be_answered_503_for_a_while(hub, rollmux, nth):
    count = 0

    def on_call(call):
        nonlocal count
        count += 1
        if count == nth:
            hub.failures = 4

    hub.on_call = on_call
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 0, err
    assert [(j.role, j.labels.get("replica")) for j in hub.jobs] == [
        ("replica", "0"),
        ("replica", "1"),
        ("trainer", None),
    ]


@pytest.mark.parametrize("cut", [1, 3])
def test_a_start_whose_answer_is_lost_starts_no_second_job(hub, rollmux, cut):
    hub.cut_replies = [START] * cut
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 0, err
    assert len(hub.jobs) == 3


def test_a_start_without_an_answer_is_looked_for_before_all_is_said_to_be_ended(hub, rollmux):
    """The Job shows up in the Hub's list only after the interrupt's first look."""
    looks = []

    def run_job(job):
        job.stage = "RUNNING"
        job.listed = False

    def on_call(call):
        if call == START:
            interrupt()
        elif hub.jobs and call == f"GET /api/jobs/{OWNER}":
            looks.append(call)
            hub.jobs[0].listed = len(looks) > 2

    hub._run_job = run_job
    hub.cut_replies = [START]
    hub.on_call = on_call
    code, _, _ = rollmux(*UP, *TRAIN)
    assert code == 130
    assert not hub.live()


def test_a_hub_that_is_gone_for_good_is_said_with_what_to_do(hub, rollmux):
    def on_call(call):
        if len(hub.jobs) == 2:
            hub.failures = 1

    hub.on_call = on_call
    code, _, err = rollmux(*UP, *TRAIN, patience_s="0.3")
    assert code == 1
    assert "NOT everything was cancelled" in err
    assert "rollmux deploy hf down --run r1" in err
    hub.on_call = lambda call: None
    hub.failures = 0
    assert rollmux("down", "--run", "r1")[0] == 0
    assert not hub.live()


@pytest.mark.parametrize(("status", "hint"), [(403, "may not do that"), (402, "need credit")])
def test_what_the_hub_refuses_is_said_in_its_words_without_the_token(hub, rollmux, status, hint):
    hub.refusals[START] = (status, f"{TOKEN} cannot start Jobs here")
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 1
    assert "*** cannot start Jobs here" in err
    assert hint in err
    assert hub.calls.count(START) == 1
    assert hub.calls[-1] != START, "a list shows that nothing was started"
    assert len(hub.calls) - hub.calls.index(START) == 2


def test_a_token_that_is_refused_is_not_tried_again(hub, rollmux, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 1
    assert "401" in err
    assert "hf_wrong" not in err
    assert len(hub.calls) == 1


# --- wait, status, logs, down -------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "exit_code"), [("COMPLETED", 0), ("ERROR", 1)])
def test_wait_survives_hiccups_and_leaves_nothing(hub, rollmux, stage, exit_code):
    looks = 0

    def on_call(call):
        nonlocal looks
        if hub.live("trainer") and call == f"GET /api/jobs/{OWNER}/{hub.jobs[-1].id}":
            looks += 1
            hub.failures = 1 if looks in (3, 4, 5, 8) else 0
            if looks == 12:
                hub.end(hub.jobs[-1], stage, "that was it")

    hub.on_call = on_call
    code, _, err = rollmux(*UP, "--wait", *TRAIN)
    assert code == exit_code
    assert f"the trainer is {stage} (that was it)" in err
    assert not hub.live(), "replicas of a trainer that was killed"


def test_wait_outlives_a_hub_that_is_away_for_longer_than_its_patience(hub, rollmux):
    looks = 0

    def on_call(call):
        nonlocal looks
        if hub.live("trainer") and call == f"GET /api/jobs/{OWNER}/{hub.jobs[-1].id}":
            looks += 1
            hub.failures = 1 if 3 <= looks < 40 else 0
            if looks == 45:
                hub.end(hub.jobs[-1], "COMPLETED")

    hub.on_call = on_call
    code, _, err = rollmux(*UP, "--wait", *TRAIN, patience_s="0.2")
    assert code == 0, err
    assert "the run is not touched by that" in err


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_of_wait_leaves_the_run_and_a_second_one_ends_it(
    hub, rollmux, times, monkeypatch
):
    monkeypatch.setattr(command, "SECOND_SIGNAL_S", 0.2 if times == 1 else 60.0)
    looks = 0

    def on_call(call):
        nonlocal looks
        if hub.live("trainer") and call == f"GET /api/jobs/{OWNER}/{hub.jobs[-1].id}":
            looks += 1
            if looks == 4:
                interrupt()

    hub.on_call = on_call
    if times == 2:
        forget = command.Stop.forget

        def forget_and_again(self):
            forget(self)
            interrupt()

        monkeypatch.setattr(command.Stop, "forget", forget_and_again)
    code, _, err = rollmux(*UP, "--wait", *TRAIN)
    assert code == 130
    assert "the run goes on" in err
    assert len(hub.live()) == (3 if times == 1 else 0)


def test_status_shows_every_job_of_the_last_launch_and_the_price(hub, rollmux):
    rollmux(*UP, *TRAIN)
    code, out, _ = rollmux("status", "--run", "r1")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[:3]] == [
        ["replica", "0"],
        ["replica", "1"],
        ["trainer", "RUNNING"],
    ]
    assert "price now $15.02 an hour" in out  # 3 x $5, and two exposed ports
    rollmux("down", "--run", "r1")
    rollmux(*UP, "--replicas", "1", *TRAIN)
    code, out, _ = rollmux("status", "--run", "r1", "--json")
    told = json.loads(out)
    assert [row["name"] for row in told["jobs"]] == ["replica 0", "trainer"]
    assert told["usd_per_hour"] == pytest.approx(10.01, abs=0.01)
    assert len(json.loads(rollmux("status", "--run", "r1", "--json", "--all")[1])["jobs"]) == 5
    assert rollmux("status", "--run", "unknown")[0] == 1


def test_without_a_list_of_prices_a_run_starts_and_is_shown(hub, rollmux):
    hub.refusals["GET /api/jobs/hardware"] = (403, "no")
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 0
    assert "price unknown (asking for prices: " in err
    code, out, err = rollmux("status", "--run", "r1")
    assert code == 0
    assert "3 Jobs, price now unknown" in out
    assert "asking for prices: " in err
    assert json.loads(rollmux("status", "--run", "r1", "--json")[1])["usd_per_hour"] is None


def test_logs_are_those_of_the_trainer_or_of_one_replica(hub, rollmux):
    rollmux(*UP, *TRAIN)
    hub.jobs[1].log.append(f"Application startup complete, Bearer {TOKEN}")
    assert WATCHING in rollmux("logs", "--run", "r1")[1]
    assert "startup complete, Bearer ***" in rollmux("logs", "--run", "r1", "--replica", "1")[1]
    code, _, err = rollmux("logs", "--run", "r1", "--replica", "7")
    assert code == 1
    assert "no Job is the replica 7" in err


def test_followed_logs_end_with_the_job(hub, rollmux):
    rollmux(*UP, *TRAIN)
    trainer = hub.jobs[-1]
    looks = []

    def on_call(call):
        if call.endswith("/logs"):
            looks.append(call)
            trainer.log.append(f"step {len(looks)}")
            if len(looks) == 2:
                hub.end(trainer, "COMPLETED")

    hub.on_call = on_call
    code, out, _ = rollmux("logs", "--run", "r1", "--follow")
    assert code == 0
    assert out.splitlines() == [WATCHING, "step 1", "step 2"]


def test_down_goes_by_label_the_trainer_first(hub, rollmux):
    rollmux(*UP, *TRAIN)
    other = hub.create(hub.jobs[0].spec | {"labels": {"run": "r2"}})
    hub.calls.clear()
    code, out, _ = rollmux("down", "--run", "r1")
    assert code == 0
    assert "3 Jobs ended" in out
    assert hub.live() == [other]
    cancels = [call.split("/")[4] for call in hub.calls if call.endswith("/cancel")]
    assert cancels[0] == hub.jobs[2].id
    code, out, _ = rollmux("down", "--run", "r1")
    assert (code, "nothing lives" in out) == (0, True)


# --- dry run and usage --------------------------------------------------------------------------


def test_a_dry_run_shows_jobs_and_price_and_starts_nothing(hub, rollmux, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
    code, out, _ = rollmux(*UP, "--secret", "WANDB_API_KEY", "--timeout", "2h", "--dry-run", *TRAIN)
    assert code == 0
    assert "r1-trainer: h200, vllm/vllm-openai:v0.27.1, at most 2.0 h" in out
    assert "vllm serve tiny" in out
    assert "secret WANDB_API_KEY" in out
    assert "secret-of-mine" not in out
    assert "price $15.02 an hour" in out
    assert not hub.jobs
    assert not hub.buckets
    assert all(call.startswith("GET") for call in hub.calls)


def test_a_dry_run_without_the_hub_says_that_the_price_is_unknown(hub, rollmux, monkeypatch):
    monkeypatch.setattr(command, "DRY_PATIENCE_S", 0.1)
    hub.failures = 1000
    code, out, _ = rollmux(*UP, "--dry-run", *TRAIN)
    assert code == 0
    assert "price unknown (asking who we are: the Hub answered 503" in out
    assert "vllm serve tiny" in out


def test_without_huggingface_hub_one_line_says_how_to_get_it(hub, rollmux, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, _, err = rollmux(*UP, *TRAIN)
    assert code == 1
    assert err == (
        "rollmux deploy hf: huggingface_hub is missing or older than 2.4; install it beside "
        "rollmux: uv tool install 'rollmux[hf]'\n"
    )
    assert rollmux(*UP, "--dry-run", *TRAIN)[0] == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--max-lora-rank", "513"), "--max-lora-rank 513: vLLM takes 1 to 512"),
        (("--mount", "lora"), "--mount 'lora': give a folder such as /lora"),
        (("--bucket", "mine"), f"--bucket 'mine': write it like {OWNER}/NAME"),
        (("--secret", "NOT_SET"), "set NOT_SET"),
        (("--env", "A"), "--env: write it like NAME=VALUE"),
        (("--flush-path", "/tmp"), "--flush-path /tmp: it is not in the bucket"),
        (("--run", "R_1"), "--run 'R_1': give up to 38 lower-case letters"),
        (("--replicas", "0"), "0 is out of range"),
        (("--timeout", "5y"), "invalid"),
        (("--replica", "2"), "unknown option --replica; the nearest is --replicas"),
    ],
)
def test_bad_usage_is_one_line_before_anything_is_asked(hub, rollmux, capfd, words, line):
    try:
        code, _, err = rollmux(*UP, *words, *TRAIN)
    except SystemExit as stopped:
        code, err = stopped.code, capfd.readouterr().err
    assert code == 2
    assert line in err
    assert len(err.splitlines()) == 1
    assert not hub.calls


def test_up_wants_a_command(hub, rollmux):
    code, _, err = rollmux(*UP)
    assert code == 2
    assert "write it after --" in err
