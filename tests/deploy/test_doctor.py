"""The doctor on simulated fleets: each planted misconfiguration is found by its own check alone."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.adapter import write_adapter
from benchmarks.bucket import LaggingFolder
from benchmarks.replica import SimulatedReplica
from broadcast.answer import Answer, Cause, NoAnswer
from deploy import checkup, doctor, examination
from deploy.checkup import Report, Wanted
from deploy.doctor import CHECKS, Fleet, diagnose
from deploy.reading import Level
from deploy.symptoms import Asked, Looks, Sighting, Symptoms, TokenUse
from proxy.settings import Secrets, Settings
from routing.ids import ReplicaId
from tests.proxy import test_tls

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
LOAD = "/v1/load_lora_adapter"
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
TOKEN = 'hf_secret"token'  # with a character that JSON escapes
authority = test_tls.authority  # a fixture


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


@dataclass
class Ward:
    """A fleet of two good replicas, for a test to spoil, and how the doctor is called on it."""

    stack: AsyncExitStack
    folder: Path
    urls: list[str] = field(default_factory=list)
    replicas: list[SimulatedReplica] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    wanted: dict[str, Any] = field(default_factory=dict)
    authority: tuple[Path, Any] | None = None

    async def add(self, folder: LaggingFolder | None = None, **changes: Any) -> SimulatedReplica:
        return await self.take(SimulatedReplica(folder=folder, **changes))

    async def take(self, replica: SimulatedReplica) -> SimulatedReplica:
        await self.stack.enter_async_context(replica)
        self.replicas.append(replica)
        self.urls.append(replica.url)
        return replica

    async def replace(self, **changes: Any) -> SimulatedReplica:
        """The second replica, started in another way."""
        self.urls.pop()
        return await self.add(**changes)

    async def post(self, target: str, **body: Any) -> None:
        """A call to the second replica that has to succeed."""
        async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
            answer = await client.post(f"{self.urls[1]}{target}", json=body)
            assert answer.status_code == 200, answer.text

    async def tell(self, which: int, *, nth: int | None = None, **changes: Any) -> None:
        """Let a replica tell other settings than it has: ``part__key=value``."""
        replica = self.replicas[which]
        async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
            answer = await client.get(f"{replica.url}/server_info?config_format=json")
        info = answer.json()
        for name, value in changes.items():
            part, _, key = name.partition("__")
            inside = info["vllm_env"] if part == "env" else info["vllm_config"]
            (inside if part in ("env", "top") else inside[part])[key] = value
        replica.faults.add("/server_info", status=200, body=json.dumps(info).encode(), nth=nth)

    async def examine(self, say: Callable[[str], None] = lambda line: None) -> Report:
        settings = Settings(
            replicas=tuple(self.urls),
            **(
                {"load_retry_s": 0.02, "load_retry_max_s": 0.05, "load_timeout_s": 20.0}
                | self.settings
            ),
        )
        wanted = {"staleness": 4, "rank": None, "beacon": None, "hold_s": 0.0, "as_json": False}
        async with asyncio.timeout(DEADLINE_S):
            return await checkup.check(settings, self.secrets, Wanted(**wanted | self.wanted), say)


@pytest.fixture
async def ward(tmp_path: Path) -> AsyncIterator[Ward]:
    async with AsyncExitStack() as stack:
        made = Ward(stack, tmp_path)
        await made.add()
        await made.add()
        yield made


def ailing(report: Report) -> dict[str, Level]:
    return {f.check: f.level for f in report.findings if f.level in (Level.WARN, Level.FAIL)}


# --- a good fleet -------------------------------------------------------------------------------


async def test_a_good_fleet_has_no_finding_and_is_left_as_it_was(ward: Ward):
    ward.wanted = {"beacon": ward.folder, "hold_s": 0.2, "rank": 8}
    report = await ward.examine()
    assert ailing(report) == {}
    assert report.ok
    skipped = {f.check for f in report.findings if f.level is Level.SKIP}
    assert skipped == {"keep_alive"}, "a simulated replica does not tell it, and that is all"
    for replica in ward.replicas:
        assert (replica.names, replica.engine.paused.value) == ({}, "none")
        assert replica.weight_version == "default"
    assert list((ward.folder / ".rollmux").iterdir()) == []


async def test_unmeasured_is_said_and_is_no_fault(ward: Ward):
    report = await ward.examine()
    found = {f.check: f for f in report.findings}
    assert found["beacon"].level is found["hold"].level is Level.SKIP
    assert "--beacon" in found["beacon"].seen
    assert "--hold-reply-s" in found["hold"].seen
    assert report.ok


# --- planted misconfigurations ------------------------------------------------------------------

Plant = Callable[[Ward], Awaitable[None]]


@dataclass(frozen=True)
class Planted:
    """A misconfiguration, the one check that must find it, and words of its fix."""

    check: str
    fix: str
    plant: Plant
    level: Level = Level.FAIL
    seen: str = ""
    on: tuple[str, ...] = (R1,)


PLANTED: dict[str, Planted] = {}


def planted(check: str, fix: str, **more: Any) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = Planted(check, fix, plant, **more)
        return plant

    return register


BOTH = (R0, R1)


@planted("reachable", "start vLLM there", seen="connection refused")
async def nobody_listens(ward: Ward) -> None:
    ward.replicas[1].refuse()


@planted("tls", "write http://", seen="SSL")
async def https_to_a_plain_port(ward: Ward) -> None:
    ward.urls[1] = ward.urls[1].replace("http:", "https:")


@planted("tls", "--ca-file", seen="certificate verify failed")
async def a_private_certificate_authority(ward: Ward) -> None:
    await secure(ward)


@planted("tls", "write https://")
async def http_to_a_tls_port(ward: Ward) -> None:
    await secure(ward)
    ward.urls[1] = ward.urls[1].replace("https:", "http:")


async def secure(ward: Ward) -> None:
    assert ward.authority is not None
    replica = SimulatedReplica()
    replica._server.context = ward.authority[1]
    ward.urls.pop()
    await ward.take(replica)


@planted("token", "--token-env", seen="401 from an edge in front of it; no token was sent")
async def no_token_for_an_edge(ward: Ward) -> None:
    await ward.replace(bearer=TOKEN)


@planted("token", "another token", seen="sent and rejected")
async def a_token_that_an_edge_rejects(ward: Ward) -> None:
    await ward.replace(bearer=TOKEN)
    ward.secrets = Secrets(token="hf_other")


@planted("token", "give that key with --token-env", seen="vLLM's own --api-key")
async def no_key_for_vllm(ward: Ward) -> None:
    await ward.replace(api_key=TOKEN)


@planted("token", "the token is kept from this URL", seen="the token was not sent")
async def a_token_that_may_go_to_jobs_alone(ward: Ward) -> None:
    await ward.replace(bearer=TOKEN)
    ward.secrets = Secrets(hf_token=TOKEN)


@planted("vllm", "restart it", seen="its engine is dead")
async def an_engine_that_died(ward: Ward) -> None:
    replica = await ward.replace(exit_s=float("inf"), notice_s=0.0)
    replica.die()
    await until(lambda: replica.engine.dead)


@planted("vllm", "wait until vLLM has started")
async def an_edge_in_its_place(ward: Ward) -> None:
    page = b"<html><h1>502 Bad Gateway</h1></html>"
    ward.replicas[1].faults.add("*", status=502, body=page, content_type="text/html")


@planted("vllm", "give the URL of the vLLM server itself")
async def another_service(ward: Ward) -> None:
    ward.replicas[1].faults.add("*", status=404, body=b'{"detail":"Not Found"}')


@planted("distinct", "list each server once", seen="the same server as r0")
async def one_server_under_two_urls(ward: Ward) -> None:
    ward.urls[1] = ward.urls[0].replace("127.0.0.1", "localhost")


@planted("distinct", "--replicas-dns", seen="2 servers take turns")
async def a_balancer_before_two_servers(ward: Ward) -> None:
    await ward.tell(1, nth=2, top__instance_id="another")


@planted("dev_mode", "VLLM_SERVER_DEV_MODE=1")
async def no_development_endpoints(ward: Ward) -> None:
    await ward.replace(dev_mode=False)


@planted("runtime_lora", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
async def no_loading_while_it_runs(ward: Ward) -> None:
    await ward.replace(runtime_lora=False)


@planted("lora", "--enable-lora")
async def no_lora(ward: Ward) -> None:
    await ward.replace(lora=False)


@planted("version", "one image", seen="0.27.1 on r0; 0.26.0 on r1", on=BOTH)
async def versions_that_differ(ward: Ward) -> None:
    ward.replicas[1].faults.add("/version", status=200, body=b'{"version":"0.26.0"}')


@planted("version", "v0.27.1", level=Level.WARN, on=BOTH)
async def a_version_that_nobody_tried(ward: Ward) -> None:
    for replica in ward.replicas:
        replica.faults.add("/version", status=200, body=b'{"version":"0.99.0+cpu"}')


@planted("model", "the same model", seen="the names differ: tiny on r0; other on r1", on=BOTH)
async def another_model(ward: Ward) -> None:
    await ward.replace(model="other")


@planted("model", "the same model", seen="tiny on r0; /other on r1", on=BOTH)
async def another_model_under_the_same_name(ward: Ward) -> None:
    await ward.tell(1, model_config__model="/other")


@planted("dtype", "--dtype", seen="torch.float16 on r1", on=BOTH)
async def another_precision(ward: Ward) -> None:
    await ward.replace(dtype="torch.float16")


@planted("logprobs_mode", "processed_logprobs", seen="raw_logprobs on r1", on=BOTH)
async def another_meaning_of_logprobs(ward: Ward) -> None:
    await ward.tell(1, model_config__logprobs_mode="raw_logprobs")


@planted("logprobs_mode", "processed_logprobs", level=Level.WARN, on=BOTH)
async def logprobs_without_temperature(ward: Ward) -> None:
    for which in (0, 1):
        await ward.tell(which, model_config__logprobs_mode="raw_logprobs")


@planted("block_size", "--block-size", seen="32 on r1", on=BOTH)
async def another_block_size(ward: Ward) -> None:
    await ward.replace(block_tokens=32)


@planted("data_parallel_size", "--data-parallel-size", seen="2 on r1", on=BOTH)
async def another_data_parallel_size(ward: Ward) -> None:
    await ward.replace(data_parallel_size=2)


@planted("max_model_len", "the least", level=Level.WARN, seen="512 on r1", on=BOTH)
async def another_length(ward: Ward) -> None:
    await ward.replace(max_model_len=512)


@planted("generation_config", "--generation-config vllm", seen="auto on r1", on=BOTH)
async def other_sampling_defaults(ward: Ward) -> None:
    await ward.tell(1, model_config__generation_config="auto")


@planted("generation_config", "--generation-config vllm", level=Level.WARN, on=BOTH)
async def the_models_sampling_defaults(ward: Ward) -> None:
    for which in (0, 1):
        await ward.tell(which, model_config__generation_config="auto")


@planted("slots", "--max-loras 6", seen="max_loras 5, but staleness 4 needs 6")
async def a_slot_too_few(ward: Ward) -> None:
    await ward.replace(max_loras=5)


@planted("slots", "--max-loras 9", on=BOTH)
async def more_staleness_than_slots(ward: Ward) -> None:
    ward.wanted = {"staleness": 7}
    for which in (0, 1):
        await ward.tell(which, lora_config__max_cpu_loras=18)


@planted("cpu_slots", "--max-cpu-loras 24", level=Level.WARN)
async def no_spare_copies(ward: Ward) -> None:
    await ward.replace(max_cpu_loras=6)


@planted("rank", "--max-lora-rank 32", seen="max_lora_rank 8 is less than 17", on=BOTH)
async def a_rank_too_high(ward: Ward) -> None:
    ward.wanted = {"rank": 17}


@planted("rank", "train a lower rank: vLLM takes none above 512", on=BOTH)
async def a_rank_that_vllm_has_not(ward: Ward) -> None:
    ward.wanted = {"rank": 1024}


@planted("rank", "--rank N", level=Level.WARN, seen="8 on r0; 64 on r1", on=BOTH)
async def ranks_that_differ(ward: Ward) -> None:
    await ward.replace(max_lora_rank=64)


@planted("busy", "--take-over", seen="1 requests of someone else")
async def somebody_elses_requests(ward: Ward) -> None:
    replica = await ward.replace(step_s=0.05)
    group = await ward.stack.enter_async_context(asyncio.TaskGroup())
    body = {"model": "tiny", "prompt": [1], "max_tokens": 1000, "ignore_eos": True}

    async def generate() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            await client.post(f"{replica.url}/v1/completions", json=body)

    other = group.create_task(generate())
    ward.stack.callback(other.cancel)
    await until(lambda: replica.engine.gauges.running)


@planted("asleep", "/wake_up")
async def put_to_sleep(ward: Ward) -> None:
    await ward.post("/sleep?level=1")


@planted("paused", "rollmux resumes it", level=Level.WARN)
async def left_paused(ward: Ward) -> None:
    await ward.post("/pause?mode=keep")


@planted("marker", "that run is over", level=Level.WARN, seen="rollmux-0123")
async def another_runs_marker(ward: Ward) -> None:
    await ward.post("/update_weight_version", new_version="rollmux-0123")


@planted("names", "unload it", seen="an adapter called tiny hides the base model")
async def an_adapter_with_the_base_models_name(ward: Ward) -> None:
    path = write_adapter(ward.folder / "shadow")
    await ward.post(LOAD, lora_name="tiny", lora_path=str(path))


@planted("names", "VLLM_SKIP_MODEL_NAME_VALIDATION")
async def the_base_model_under_any_name(ward: Ward) -> None:
    await ward.tell(1, env__VLLM_SKIP_MODEL_NAME_VALIDATION=True)


@planted("adapters", "rollmux run", level=Level.WARN, seen="trl-policy-v3")
async def an_earlier_trainers_adapter(ward: Ward) -> None:
    path = write_adapter(ward.folder / "v3")
    await ward.post(LOAD, lora_name="trl-policy-v3", lora_path=str(path))


@planted("prefix_caching", "--no-enable-prefix-caching", level=Level.WARN)
async def no_prefix_caching(ward: Ward) -> None:
    await ward.tell(1, cache_config__enable_prefix_caching=False)


@planted("keep_alive", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", level=Level.WARN, seen="after 2 s")
async def connections_that_are_closed_early(ward: Ward) -> None:
    await ward.tell(1, env__VLLM_HTTP_TIMEOUT_KEEP_ALIVE=2)


@planted("push", "--middleware rollmux_push.AdapterPush", seen="no push endpoint", on=BOTH)
async def no_push_endpoint(ward: Ward) -> None:
    ward.settings = {"adapter_transport": "push"}
    ward.secrets = Secrets(push_key="key")


@planted("push", "--push-key-env", level=Level.WARN, seen="401")
async def another_push_key(ward: Ward) -> None:
    ward.secrets = Secrets(push_key="key")
    await ward.replace(push_key="another", push_root=ward.folder / "pushed")


@planted("push", "--push-key-env", level=Level.WARN, seen="there is no key here")
async def no_push_key(ward: Ward) -> None:
    await ward.replace(push_key="key", push_root=ward.folder / "pushed")


@planted("beacon", "mount the folder", seen="No adapter found")
async def a_folder_that_is_not_mounted(ward: Ward) -> None:
    await ward.replace(folder=LaggingFolder(ward.folder, 1e9, 0.0))
    ward.settings = {"load_timeout_s": 0.3}
    ward.wanted = {"beacon": ward.folder}


@planted("beacon", "the folder in which the trainer writes", on=())
async def a_folder_that_cannot_be_written(ward: Ward) -> None:
    (ward.folder / ".rollmux").write_text("a file in the place of a folder")
    ward.wanted = {"beacon": ward.folder}


@planted("hold", "proxy_read_timeout", seen="cut off after")
async def an_edge_that_hangs_up_on_long_replies(ward: Ward) -> None:
    ward.replicas[1].faults.add("/v1/completions", reset=True)
    ward.wanted = {"hold_s": 0.1}


@planted("hold", "proxy_read_timeout", seen="504")
async def an_edge_that_times_out(ward: Ward) -> None:
    page = b"<html>504 Gateway Time-out</html>"
    ward.replicas[1].faults.add("/v1/completions", delay_s=0.05, status=504, body=page)
    ward.wanted = {"hold_s": 0.3}


@pytest.mark.parametrize("name", PLANTED)
async def test_a_misconfiguration_is_found_by_its_own_check_with_the_fix(
    ward: Ward,
    authority: tuple[Path, Any],
    name: str,
):
    case = PLANTED[name]
    ward.authority = authority
    await case.plant(ward)
    report = await ward.examine()
    assert ailing(report) == {case.check: case.level}
    (found,) = [f for f in report.findings if f.check == case.check]
    assert case.fix in found.fix
    assert case.seen in found.seen
    assert found.replicas == case.on
    assert report.ok is (case.level is Level.WARN)


def test_every_check_has_a_misconfiguration_that_it_finds():
    assert {case.check for case in PLANTED.values()} == set(CHECKS)


# --- what only a network shows ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown", "check", "fix"),
    [
        ("http://x", "ConnectError: [Errno -2] Name or service not known", "reachable", "resolves"),
        ("http://x", "ConnectTimeout", "reachable", "firewall"),
        (
            "https://x",
            "ConnectError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname "
            "mismatch, certificate is not valid for 'x'.",
            "tls",
            "the name that the certificate is for",
        ),
    ],
)
def test_no_way_to_a_replica_is_told_apart(url: str, shown: str, check: str, fix: str):
    symptoms = Symptoms(R0, url, TokenUse.NONE, NoAnswer(Cause.UNREACHABLE, shown))
    found = {f.check: f for f in diagnose(Fleet([symptoms], Asked()))}
    assert found[check].level is Level.FAIL
    assert fix in found[check].fix
    others = {f.level for name, f in found.items() if name != check}
    assert Level.WARN not in others
    assert Level.FAIL not in others


def test_a_token_kept_from_a_plain_url_is_said():
    """Only a host that is not this machine shows it: a token goes to loopback in the clear."""
    shut = Answer(403, b"<html>forbidden</html>", "text/html")
    looks = Looks(shut, shut, shut, shut, shut, shut, (shut,))
    symptoms = Symptoms(R0, "http://gpu1:8000", TokenUse.HELD_BACK, shut, looks)
    found = {f.check: f for f in diagnose(Fleet([symptoms], Asked()))}
    assert "--token-over-http" in found["token"].fix
    assert "403" in found["token"].seen


def test_a_slow_mount_is_a_warning():
    gone = Symptoms(R0, "http://x", TokenUse.NONE, NoAnswer(Cause.REFUSED))
    asked = Asked(beacon={R0: Sighting(27.4, 20)})
    found = {f.check: f for f in diagnose(Fleet([gone], asked))}
    beacon = found["beacon"]
    assert (beacon.level, "27.40 s" in beacon.seen) == (Level.WARN, True)
    assert "--bucket-gate" in beacon.fix


def test_a_large_fleet_is_counted_and_not_listed():
    gone = NoAnswer(Cause.REFUSED, "connection refused")
    many = [Symptoms(ReplicaId(f"r{n}"), f"http://h{n}", TokenUse.NONE, gone) for n in range(100)]
    found = diagnose(Fleet(many, Asked()))[0]
    assert "and 96 more: connection refused" in found.seen
    assert len(found.replicas) == 100


# --- measurements -------------------------------------------------------------------------------


async def test_a_beacon_is_timed_on_the_replica_that_sees_it_late(ward: Ward):
    """The mount shows nothing until the third look."""

    def clock() -> float:
        loads = [a for r in ward.replicas[2:] for a in r.calls(LOAD)]
        return time.time() + (1e9 if len(loads) >= 3 else -1e9)

    await ward.replace(folder=LaggingFolder(ward.folder, 1.0, 0.0, clock=clock))
    ward.wanted = {"beacon": ward.folder}
    report = await ward.examine()
    beacon = report.asked.beacon
    assert isinstance(beacon, dict)
    assert (beacon[R0].looks, beacon[R1].looks) == (1, 3)
    assert beacon[R1].seconds >= 0.04  # two waits of 0.02 s and more
    assert ailing(report) == {}


async def test_a_beacon_is_pushed_where_adapters_will_be(ward: Ward):
    """The second replica never sees the folder, and does not need to."""
    await ward.replace(
        folder=LaggingFolder(ward.folder / "run", 1e9, 0.0),
        push_key="key",
        push_root=ward.folder / "pushed",
    )
    (ward.folder / "run").mkdir()
    ward.secrets = Secrets(push_key="key")
    ward.wanted = {"beacon": ward.folder / "run"}
    report = await ward.examine()
    assert ailing(report) == {}
    beacon = report.asked.beacon
    assert isinstance(beacon, dict)
    assert (beacon[R0].pushed, beacon[R1].pushed) == (False, True)
    (push,) = [f for f in report.findings if f.check == "push"]
    assert push.seen == "pushed to r1; by the shared path to r0"
    assert not list((ward.folder / "pushed").glob("**/*.safetensors"))


async def test_a_beacon_is_cleared_away_when_the_doctor_is_interrupted(ward: Ward):
    await ward.replace(folder=LaggingFolder(ward.folder, 1e9, 0.0))
    ward.wanted = {"beacon": ward.folder}
    async with asyncio.TaskGroup() as group:
        work = group.create_task(ward.examine())
        await until(lambda: ward.replicas[0].names)
        work.cancel()
    assert work.cancelled()
    assert ward.replicas[0].names == {}
    assert list((ward.folder / ".rollmux").iterdir()) == []


async def test_no_replica_is_left_paused_when_the_doctor_is_interrupted(ward: Ward):
    ward.wanted = {"hold_s": 600.0}
    async with asyncio.TaskGroup() as group:
        work = group.create_task(ward.examine())
        await until(lambda: all(replica.in_flight for replica in ward.replicas))
        assert {r.engine.paused.value for r in ward.replicas} != {"none"}
        work.cancel()
    assert work.cancelled()
    assert {r.engine.paused.value for r in ward.replicas} == {"none"}


async def test_a_replica_in_use_is_not_paused_for_a_measurement(ward: Ward):
    await somebody_elses_requests(ward)
    ward.wanted = {"hold_s": 0.1}
    report = await ward.examine()
    assert set(report.asked.held or {}) == {R0}
    assert not ward.replicas[-1].calls("/pause")


async def test_what_takes_long_says_how_far_it_is(ward: Ward, monkeypatch):
    monkeypatch.setattr(checkup, "SILENT_S", 0.05)
    monkeypatch.setattr(checkup, "REPEAT_S", 0.05)
    ward.replicas[1].faults.add("/v1/models", hang=True)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(ward.replicas[1].calls("/server_info")) == examination.INFOS:
            ward.replicas[1].refuse()  # hangs up on the call that nobody answers

    report = await ward.examine(say)
    assert ailing(report) == {"vllm": Level.FAIL}
    assert re.search(r"looked at \d of 2 replicas; waiting for .*r1", said[-1])


# --- where replicas come from -------------------------------------------------------------------


async def test_replicas_of_a_file_are_examined_too(ward: Ward):
    listed = ward.folder / "replicas"
    listed.write_text(f"# two\n{ward.urls[0]}\n{ward.urls.pop()}\n")
    ward.settings = {"replicas_file": str(listed)}
    report = await ward.examine()
    assert [s.url for s in report.symptoms] == [r.url for r in ward.replicas]
    assert report.ok


async def test_a_source_that_does_not_answer_is_a_failure_that_names_it(ward: Ward):
    port = ward.replicas[1].port
    ward.replicas[1].refuse()
    ward.settings = {
        "replicas_hf_label": "me/run=one",
        "hub_endpoint": f"http://127.0.0.1:{port}",
    }
    report = await ward.examine()
    (found,) = report.findings
    assert (found.check, found.level) == ("sources", Level.FAIL)
    assert "--replicas-hf-label me/run=one" in found.seen


async def test_no_replica_at_all_is_a_failure(ward: Ward):
    listed = ward.folder / "replicas"
    listed.write_text("# none yet\n")
    ward.urls, ward.settings = [], {"replicas_file": str(listed)}
    assert ailing(await ward.examine()) == {"reachable": Level.FAIL}


# --- the command --------------------------------------------------------------------------------


async def command(*args: str, **environ: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``rollmux doctor``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "doctor", *args),
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def each(urls: list[str]) -> list[str]:
    return [word for url in urls for word in ("--replica", url)]


async def test_one_line_a_check_and_exit_0_for_a_good_fleet(ward: Ward):
    code, out, _ = await command(*each(ward.urls))
    *found, last = out.splitlines()
    assert code == 0
    assert [line.split()[1] for line in found] == list(CHECKS)
    assert {line.split()[0] for line in found} <= {"OK", "SKIP"}
    assert last == "2 replicas, 0 failed, 0 warnings: a run can start"


async def test_exit_1_where_a_check_fails_and_its_line_has_the_fix(ward: Ward):
    await ward.replace(max_loras=3)
    code, out, _ = await command(*each(ward.urls), "--staleness", "3")
    (line,) = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert code == 1
    assert line.split()[1] == "slots"
    assert "; fix: start vLLM with --max-loras 5" in line


async def test_a_warning_alone_is_exit_0(ward: Ward):
    await left_paused(ward)
    code, out, _ = await command(*each(ward.urls))
    assert (code, "\nWARN  paused" in out) == (0, True)


async def test_a_bad_setting_is_exit_2_and_one_line():
    code, out, err = await command("--replica", "gpu1:8000")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "http://gpu1:8000" in err


async def test_json_has_the_documented_shape(ward: Ward):
    await ward.replace(dtype="torch.float16")
    code, out, _ = await command(
        *each(ward.urls), "--json", "--beacon", str(ward.folder), "--hold-reply-s", "0.1"
    )
    told = json.loads(out)
    assert code == 1
    assert set(told) == {"version", "ok", "failed", "warnings", "replicas", "checks"}
    assert (told["ok"], told["failed"], told["warnings"]) == (False, 1, 0)
    assert [c["check"] for c in told["checks"]] == list(CHECKS)
    for row in told["checks"]:
        assert set(row) == {"check", "level", "seen", "fix", "replicas"}
        assert row["level"] in ("OK", "WARN", "FAIL", "SKIP")
        assert bool(row["fix"]) is (row["level"] in ("WARN", "FAIL"))
    (dtype,) = [c for c in told["checks"] if c["level"] == "FAIL"]
    assert (dtype["check"], dtype["replicas"]) == ("dtype", ["r0", "r1"])
    for row in told["replicas"]:
        assert set(row) == {"id", "url", "beacon", "hold"}
        assert set(row["beacon"]) == {"seconds", "looks", "pushed", "trouble"}
        assert set(row["hold"]) == {"seconds", "trouble"}
        assert row["hold"]["seconds"] >= 0.1


@pytest.mark.parametrize("flag", [[], ["--json"]])
async def test_a_token_that_a_replica_echoes_is_not_shown(ward: Ward, flag: list[str]):
    ward.replicas[0].faults.add("*", status=404, body=f"no page for {TOKEN}".encode())
    version = json.dumps({"version": TOKEN}).encode()
    ward.replicas[1].faults.add("/version", status=200, body=version)
    code, out, err = await command(*each(ward.urls), "--token-env", "T", *flag, T=TOKEN)
    assert code == 1
    assert "no page for ***" in out
    assert "vLLM ***" in out
    assert TOKEN[:9] not in out + err
    seen = {arrival.header("authorization") for arrival in ward.replicas[0].log}
    assert seen == {f"Bearer {TOKEN}"}, "it was sent all the same"


# --- the page -----------------------------------------------------------------------------------


def test_the_page_has_every_check_as_the_source_has_it():
    page = (ROOT / "docs" / "doctor.md").read_text("utf-8")
    assert doctor.table() in page, f"put this into docs/doctor.md:\n{doctor.table()}"
