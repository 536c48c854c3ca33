"""Replicas that are Jobs of the Hub with a label."""

from __future__ import annotations

import pytest

from proxy import sources
from proxy.hub_jobs import HubJobs, HubUnanswered
from proxy.settings import Secrets, SettingsError, load
from tests.deploy.fake_hub import OWNER, TOKEN, FakeHub

SPEC = {
    "command": ["vllm"],
    "arguments": [],
    "environment": {},
    "flavor": "h200",
    "timeoutSeconds": 60,
    "dockerImage": "vllm",
    "expose": {"ports": [8000], "portsPublic": []},
}


@pytest.fixture
def hub():
    with FakeHub() as hub:
        yield hub


def replica_job(hub, url, **labels):
    job = hub.create(SPEC | {"labels": {"run": "r1", "role": "replica"} | labels})
    job.url = url
    return job


async def test_a_replacement_job_joins_by_itself_and_the_lost_one_leaves(
    start, pair, hub, monkeypatch
):
    monkeypatch.setattr(sources, "HUB_S", 0.05)
    first = replica_job(hub, pair[0].url)
    running = await start(
        [],
        ready=1,
        replicas_hf_label="run=r1",
        hub_endpoint=hub.url,
        secrets=Secrets(hub_token=TOKEN),
    )
    pair[0].refuse()
    hub.end(first, "ERROR", "lost")
    replica_job(hub, pair[1].url)
    await running.until(
        lambda: (
            [(r.url, r.state.value) for r in running.daemon.replicas.fleet]
            == [(pair[1].url, "ready")]
        )
    )
    assert (await running.complete("tiny", [1])).status_code == 200


async def test_a_hub_that_does_not_answer_changes_nothing(start, pair, hub, monkeypatch, caplog):
    monkeypatch.setattr(sources, "HUB_S", 0.05)
    replica_job(hub, pair[0].url)
    running = await start(
        [],
        ready=1,
        replicas_hf_label=f"{OWNER}/run=r1",
        hub_endpoint=hub.url,
        secrets=Secrets(hub_token=TOKEN),
    )
    hub.failures = 5
    await running.until(lambda: hub.failures == 0)
    assert "answered 503" in caplog.text
    assert TOKEN not in caplog.text
    assert len(running.daemon.replicas.fleet.routable()) == 1


async def jobs_of(hub, label="run=r1", token=TOKEN):
    jobs = HubJobs(label, endpoint=hub.url, token=token)
    try:
        return await jobs.urls()
    finally:
        await jobs.close()


async def test_live_jobs_with_the_label_and_a_port_count_on_every_page(hub):
    wanted = [replica_job(hub, f"http://127.0.0.1:{n}") for n in range(1, 6)]
    replica_job(hub, "http://127.0.0.1:9", run="r2")
    replica_job(hub, "http://127.0.0.1:10", role="trainer")
    replica_job(hub, None)
    hub.end(replica_job(hub, "http://127.0.0.1:11"), "COMPLETED")
    assert await jobs_of(hub) == [job.url for job in wanted]
    assert hub.calls[0] == "GET /api/whoami-v2"
    hub.calls.clear()
    assert await jobs_of(hub, f"{OWNER}/run=r1") == [job.url for job in wanted]
    assert "GET /api/whoami-v2" not in hub.calls


async def test_a_list_that_breaks_off_half_way_is_no_list(hub):
    for n in range(1, 4):
        replica_job(hub, f"http://127.0.0.1:{n}")
    pages = []

    def fail_second(call):
        pages.append(call)
        hub.failures = 1 if len(pages) == 2 else 0

    hub.on_call = fail_second
    with pytest.raises(HubUnanswered, match="answered 503"):
        await jobs_of(hub, f"{OWNER}/run=r1")


async def test_a_wrong_token_is_said_and_not_shown(hub):
    with pytest.raises(HubUnanswered, match="answered 401"):
        await jobs_of(hub, token="hf_wrong")


@pytest.mark.parametrize("text", ["r1", "run=", "=r1", "a/b/run=r1", "run=r 1", "run=r1,role=x"])
def test_a_label_that_the_hub_cannot_have_is_refused(text):
    with pytest.raises(SettingsError, match=r"--replicas-hf-label: .* is not a Job's label"):
        load({"replicas_hf_label": text}, {})
