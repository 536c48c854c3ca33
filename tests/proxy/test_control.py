"""Broadcasts, joined reads and what is refused: N replicas look like one server."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.adapter import write_adapter
from benchmarks.replica import SimulatedReplica
from proxy.settings import Secrets

INFO = "/server_info?config_format=json"


async def test_server_info_shows_the_weakest_limits_of_all(start):
    async with (
        SimulatedReplica(max_lora_rank=16, max_model_len=2048, max_loras=6, max_cpu_loras=24) as a,
        SimulatedReplica(max_lora_rank=8, max_model_len=1024, max_loras=5, max_cpu_loras=12) as b,
    ):
        running = await start([a.url, b.url])
        config = (await running.client.get(INFO)).json()["vllm_config"]
        assert config["lora_config"]["max_loras"] == 5
        assert config["lora_config"]["max_lora_rank"] == 8
        assert config["model_config"]["max_model_len"] == 1024
        models = (await running.client.get("/v1/models")).json()["data"]
        assert models[0]["max_model_len"] == 1024
        assert all(INFO in [c.target for c in r.calls("/server_info")] for r in (a, b))


async def test_replicas_that_differ_in_what_must_agree_are_an_error_naming_both(start):
    async with SimulatedReplica() as a, SimulatedReplica(dtype="torch.float32") as b:
        running = await start([a.url, b.url])
        answer = await running.client.get(INFO)
        assert answer.status_code == 502
        assert answer.headers["x-rollmux-error"] == "replicas_disagree"
        message = answer.json()["error"]["message"]
        assert "torch.float32" in message
        assert "r1" in message


async def test_a_replica_without_lora_hides_it_for_the_fleet(start):
    """TRL then falls back to merged weights at its start, instead of dying at the first sync."""
    async with SimulatedReplica() as a, SimulatedReplica(lora=False) as b:
        running = await start([a.url, b.url])
        config = (await running.client.get(INFO)).json()["vllm_config"]
        assert config["lora_config"] is None


async def test_models_lists_the_base_first_and_only_live_adapters(start, pair, tmp_path):
    running = await start([r.url for r in pair])
    pair[0].names.clear()
    path = write_adapter(tmp_path / "a", seed=1)
    await running.client.post(
        "/v1/load_lora_adapter", json={"lora_name": "trl-policy-v1", "lora_path": str(path)}
    )
    cards = (await running.client.get("/v1/models")).json()["data"]
    assert [c["id"] for c in cards] == ["tiny", "trl-policy-v1"]
    assert cards[0]["max_model_len"] == 1024
    assert cards[1]["parent"] == "tiny"
    assert cards[1]["max_model_len"] is None


async def test_world_size_is_the_sum(start, pair):
    running = await start([r.url for r in pair])
    assert (await running.client.get("/get_world_size")).json() == {"world_size": 2}


async def test_reads_are_answered_by_the_living(start, pair):
    running = await start([r.url for r in pair])
    pair[0].refuse()
    for path in ("/v1/models", INFO, "/get_world_size", "/version", "/is_sleeping"):
        answer = await running.client.get(path)
        assert answer.status_code == 200, path


async def test_health_says_who_is_missing_and_never_asks_a_replica(start, pair):
    pair[1].refuse()
    running = await start([r.url for r in pair], ready=1)
    answer = await running.client.get("/health")
    assert answer.status_code == 503
    assert pair[1].url in answer.json()["error"]["message"]
    assert not pair[0].calls("/health")
    await pair[1].listen()
    await running.until_ready(2)
    assert (await running.client.get("/health")).status_code == 200
    assert (await running.client.get("/ping")).status_code == 200
    assert (await running.client.post("/ping")).status_code == 200


async def test_a_cache_reset_reaches_every_replica_and_success_is_of_all(start, pair):
    running = await start([r.url for r in pair])
    before = [len(r.calls("/reset_prefix_cache")) for r in pair]
    answer = await running.client.post("/reset_prefix_cache?reset_running_requests=true")
    assert answer.json() == {"success": True}
    assert [len(r.calls("/reset_prefix_cache")) for r in pair] == [n + 1 for n in before]
    pair[1].faults.add("/reset_prefix_cache", status=200, body=b'{"success":false}')
    answer = await running.client.post("/reset_prefix_cache")
    assert answer.json() == {"success": False}


@pytest.mark.parametrize(
    "path", ["/sleep?level=1", "/wake_up?tags=weights", "/reset_mm_cache", "/abort_requests"]
)
async def test_a_broadcast_reaches_every_replica_as_it_came(start, pair, path):
    running = await start([r.url for r in pair])
    answer = await running.client.post(path, json={"request_ids": []})
    assert answer.status_code == 200
    for replica in pair:
        assert [c.target for c in replica.log if c.target == path] == [path]
        assert [c.body for c in replica.log if c.target == path] == [b'{"request_ids":[]}']


async def test_a_broadcast_that_one_replica_refuses_names_it(start, pair):
    pair[1].faults.add("/wake_up", status=500, body=b'{"error":"cannot wake"}')
    running = await start([r.url for r in pair])
    answer = await running.client.post("/wake_up")
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert pair[1].url in message
    assert "cannot wake" in message


async def test_sleeping_on_a_part_of_the_fleet_is_an_error(start, pair):
    running = await start([r.url for r in pair])
    pair[1].sleeping = True
    answer = await running.client.get("/is_sleeping")
    assert answer.status_code == 502
    assert answer.headers["x-rollmux-error"] == "replicas_disagree"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/responses", "/v1/chat/completions"),
        ("GET", "/v1/responses/resp_1", "/v1/chat/completions"),
        ("POST", "/init_weight_transfer_engine", "merged"),
        ("POST", "/v1/embeddings", "/v1/embeddings"),
        ("POST", "/adapters", "/adapters"),
        ("DELETE", "/adapters/x", "/adapters/x"),
        ("POST", "/update_weight_version", "/update_weight_version"),
        ("GET", "/nothing", "/nothing"),
    ],
)
async def test_what_could_change_one_replica_alone_is_refused(start, pair, method, path, words):
    running = await start([r.url for r in pair])
    seen = [len(r.calls(path)) for r in pair]
    answer = await running.client.request(method, path)
    assert answer.status_code == 501
    assert words in answer.json()["error"]["message"]
    assert answer.headers["x-rollmux-error"]
    assert [len(r.calls(path)) for r in pair] == seen


async def test_forwarded_reads_pass_any_replicas_answer(start, pair):
    running = await start([r.url for r in pair])
    assert (await running.client.get("/version")).json() == {"version": "0.27.1"}
    answer = await running.client.post("/tokenize", json={"model": "tiny", "prompt": "hello"})
    assert answer.status_code == 200
    assert answer.json()["count"] > 0


async def test_a_generation_path_with_the_wrong_method_is_vllms_405(start, pair):
    running = await start([r.url for r in pair])
    answer = await running.client.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json() == {"detail": "Method Not Allowed"}


async def test_a_control_call_waits_while_too_few_replicas_answer(start, pair):
    for replica in pair:
        replica.refuse()
    running = await start([r.url for r in pair], ready=0)
    call = asyncio.ensure_future(running.client.post("/reset_prefix_cache"))
    await asyncio.wait([call], timeout=0.3)
    assert not call.done()
    await pair[0].listen()
    assert (await call).json() == {"success": True}


async def test_a_control_call_gives_up_after_the_outage_time_and_says_who_is_missing(start, pair):
    for replica in pair:
        replica.refuse()
    running = await start([r.url for r in pair], ready=0, outage_s=0.3)
    answer = await running.client.post("/reset_prefix_cache")
    assert answer.status_code == 503
    assert answer.headers["x-rollmux-error"] == "fleet_outage"
    assert "retry-after" in answer.headers
    assert pair[0].url in answer.json()["error"]["message"]


async def test_clients_must_send_the_api_key_where_one_is_set(start, pair):
    running = await start([r.url for r in pair], secrets=Secrets(api_key="sesame"))
    assert (await running.client.get("/health")).status_code == 401
    assert (await running.complete("tiny", [1])).status_code == 401
    assert (await running.client.get("/proxy/live")).status_code == 200
    key = {"authorization": "Bearer sesame"}
    assert (await running.client.get("/health", headers=key)).status_code == 200
    answer = await running.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": [1], "max_tokens": 2}, headers=key
    )
    assert answer.status_code == 200
    sent = [c.header("authorization") for r in pair for c in r.calls("/v1/completions")]
    assert sent == [None]


# Membership


async def test_replicas_come_and_go_with_the_admin_key_only(start, pair):
    running = await start([pair[0].url], secrets=Secrets(admin_key="root"))
    body = {"url": pair[1].url}
    assert (await running.client.post("/proxy/replicas", json=body)).status_code == 403
    key = {"x-rollmux-admin-key": "root"}
    page = key | {"origin": "http://evil.example"}
    assert (
        await running.client.post("/proxy/replicas", json=body, headers=page)
    ).status_code == 403
    answer = await running.client.post("/proxy/replicas", json=body, headers=key)
    assert (answer.status_code, answer.json()["id"]) == (200, "r1")
    await running.until_ready(2)
    again = await running.client.post("/proxy/replicas", json=body, headers=key)
    assert again.status_code == 400
    bad = await running.client.post("/proxy/replicas", json={"url": "ftp://x"}, headers=key)
    assert bad.status_code == 400
    gone = await running.client.delete("/proxy/replicas/r0?drain=true", headers=key)
    assert gone.status_code == 200
    await running.until(lambda: "r0" not in running.daemon.replicas.fleet)
    assert [r["id"] for r in (await running.status())["replicas"]] == ["r1"]
    assert (await running.complete("tiny", [1])).headers["x-rollmux-replica"] == "r1"
    page = (await running.client.get("/metrics")).text
    for gauge in ("replica_info", "replica_state", "replica_inflight"):
        assert f'rollmux_{gauge}{{replica="r1"' in page
        assert f'rollmux_{gauge}{{replica="r0"' not in page


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_replica_added_on_another_host_gets_the_token_only_where_that_was_said(
    start, pair, trusted
):
    running = await start(
        [pair[0].url],
        secrets=Secrets(admin_key="root", token="secret"),
        token_hosts=("localhost",) if trusted else ("*.example.org",),
    )
    url = pair[1].url.replace("127.0.0.1", "localhost")
    key = {"x-rollmux-admin-key": "root"}
    answer = await running.client.post("/proxy/replicas", json={"url": url}, headers=key)
    assert answer.status_code == 200
    await running.until_ready(2)
    sent = [{c.header("authorization") for c in r.log} for r in pair]
    assert sent == [{"Bearer secret"}, {"Bearer secret"} if trusted else {None}]


async def test_without_an_admin_key_nobody_changes_the_fleet(start, pair):
    running = await start([pair[0].url])
    answer = await running.client.post("/proxy/replicas", json={"url": pair[1].url})
    assert answer.status_code == 403
    assert "--admin-key-env" in answer.json()["error"]["message"]


# The trainer entry's calls


async def test_clean_unloads_what_a_trainer_left_and_marks_the_replicas(start, pair, tmp_path):
    running = await start([r.url for r in pair])
    path = write_adapter(tmp_path / "a", seed=1)
    await running.client.post(
        "/v1/load_lora_adapter", json={"lora_name": "trl-policy-v1", "lora_path": str(path)}
    )
    answer = await running.client.post("/proxy/clean", json={"run_id": "abc"})
    assert answer.status_code == 200
    assert answer.json() == {"unloaded": ["trl-policy-v1"]}
    assert [list(r.names) for r in pair] == [[], []]
    assert [r.weight_version for r in pair] == ["rollmux-abc"] * 2
    assert (await running.complete("trl-policy-v1", [1])).status_code == 404


async def test_clean_refuses_while_a_replica_generates_for_someone_else(start):
    async with SimulatedReplica() as a, SimulatedReplica(step_s=0.02) as b:
        await clean_refused_while_busy(await start([a.url, b.url]), b)


async def clean_refused_while_busy(running, busy):
    async with asyncio.TaskGroup() as group:
        other = group.create_task(
            running.client.post(
                f"{busy.url}/v1/completions",
                json={"model": "tiny", "prompt": [1], "max_tokens": 900, "ignore_eos": True},
            )
        )
        await running.until(lambda: busy.in_flight == 1)
        await asyncio.sleep(0.05)  # until a step of the engine has counted it
        answer = await running.client.post("/proxy/clean", json={"run_id": "abc"})
        assert answer.status_code == 409
        assert answer.headers["x-rollmux-error"] == "fleet_busy"
        assert "r1" in answer.json()["error"]["message"]
        forced = await running.client.post(
            "/proxy/clean", json={"run_id": "abc", "take_over": True}
        )
        assert forced.status_code == 200
        other.cancel()


async def test_clean_makes_a_replica_that_was_away_rejoin(start, pair):
    """It is neither clean nor marked, and a probe alone would take it back as it is."""
    running = await start([r.url for r in pair])
    replicas = running.daemon.replicas
    pair[1].faults.add("/is_paused", hang=True)
    replicas.apply(replicas.fleet.connection_lost("r1", "for a moment", replicas.now_s()))
    assert (await running.client.post("/proxy/clean", json={"run_id": "abc"})).status_code == 200
    assert [r.weight_version == "rollmux-abc" for r in pair] == [True, False]
    assert (replicas.fleet["r1"].state, replicas.fleet["r1"].missed_change) == ("suspect", True)


async def test_clean_forgets_the_tensor_shapes_of_the_run_before(start, pair, tmp_path):
    running = await start([r.url for r in pair])
    for rank in (4, 8):
        path = write_adapter(tmp_path / str(rank), seed=rank, rank=rank)
        body = {"lora_name": "trl-policy-v1", "lora_path": str(path)}
        answer = await running.client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        await running.client.post("/proxy/clean", json={"run_id": f"of-rank-{rank}"})


async def test_clean_refuses_a_body_that_is_not_json(start, pair):
    running = await start([r.url for r in pair])
    answer = await running.client.post("/proxy/clean", content=b"{nope")
    assert answer.status_code == 400
    assert answer.headers["x-rollmux-error"] == "bad_request"


async def test_a_read_that_is_not_answered_in_time_takes_no_replica_out(start):
    """A busy server answers late; whether it is well is for the probes to say."""
    async with SimulatedReplica() as a:
        running = await start([a.url], control_timeout_s=0.2)
        states: list[str] = []
        running.daemon.replicas.on_transition.append(lambda moved: states.append(moved.new))
        a.faults.add("/get_world_size", hang=True)
        assert (await running.client.get("/get_world_size")).status_code == 502
        assert states == []


async def test_release_leaves_nothing_paused(start, pair):
    running = await start([r.url for r in pair], pause="eager")
    await running.client.post("/pause?mode=keep")
    assert (await running.client.post("/proxy/release")).status_code == 200
    assert (await running.client.get("/is_paused")).json() == {"is_paused": False}
    assert (await running.complete("tiny", [1])).status_code == 200


async def test_a_weight_version_of_the_trainers_own_is_no_restart(start):
    """It is written over the run's marker; after weights changed, a restart would be for good."""
    async with (
        SimulatedReplica(weight_transfer=True) as a,
        SimulatedReplica(weight_transfer=True) as b,
    ):
        running = await start([a.url, b.url])
        markers = [r.weight_version for r in (a, b)]
        assert (await running.client.post("/start_weight_update")).status_code == 200
        version = {"weight_version": "v7"}
        answer = await running.client.post("/finish_weight_update", json=version)
        assert answer.status_code == 200
        assert [r.weight_version for r in (a, b)] == markers
        probed = [len(r.calls("/weight_info")) for r in (a, b)]
        await running.until(
            lambda: all(
                len(r.calls("/weight_info")) > n + 1 for r, n in zip((a, b), probed, strict=True)
            )
        )
        assert [r.state for r in running.daemon.replicas.fleet] == ["ready", "ready"]
        await b.restart()
        await running.until(lambda: running.daemon.replicas.fleet["r1"].excluded_reason != "")


async def test_a_prompt_is_new_to_replicas_whose_cache_was_cleared(start, pair):
    running = await start([r.url for r in pair])
    prompt = list(range(64))
    for route in ("unmatched", "affinity"):
        answer = await running.complete("tiny", prompt)
        assert answer.headers["x-rollmux-route"] == route
    assert (await running.client.post("/reset_prefix_cache")).json() == {"success": True}
    answer = await running.complete("tiny", prompt)
    assert answer.headers["x-rollmux-route"] == "unmatched"
    replicas = running.daemon.replicas
    assert {r.cache_clears for r in replicas.fleet} == {replicas.ledger.cache_clears}


async def test_a_replica_that_did_not_answer_a_broadcast_rejoins(start, pair):
    """It may have missed what the others have done."""
    running = await start([r.url for r in pair])
    replica = running.daemon.replicas.fleet["r1"]
    epoch = replica.epoch
    pair[1].faults.add("/reset_mm_cache", reset=True, times=1)
    assert (await running.client.post("/reset_mm_cache")).status_code == 200
    await running.until_ready(2)
    assert replica.epoch > epoch
