"""What a replica may do to a generation without the client noticing: it is asked of another one."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.adapter import write_adapter
from benchmarks.httpd import Arrival, Fault, Reply
from benchmarks.replica import SimulatedReplica
from proxy.settings import Secrets
from tests.proxy.scripted import OK, ScriptedReplica, error, hang, raw, until

PATH = "/v1/completions"
DEAD = error(
    500,
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "InternalServerError",
)


def asked(*replicas: ScriptedReplica) -> int:
    """How often a generation reached a replica's socket."""
    return sum(arrival.path == PATH for r in replicas for arrival in r.server.log)


def failovers(running) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["replica"], sample.labels["cause"]): sample.value
        for family in running.daemon.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "rollmux_failovers_total"
    }


FIRST_ANSWERS = {
    "reset": (Fault(reset=True), "suspect", "lost"),
    "closed without an answer": (Fault(drop=True), "suspect", "lost"),
    "cut body of known length": (Fault(cut=20), "suspect", "lost"),
    "dead engine": (Fault(status=500, body=DEAD.body), "down", "engine_dead"),
    "edge 404 in HTML": (Fault(status=404, body=b"<html>no", content_type="text/html"),
                         "suspect", "edge_404"),
    "edge 502 in HTML": (Fault(status=502, body=b"<html>bad", content_type="text/html"),
                         "suspect", "edge_502"),
    "edge 503 without a body": (Fault(status=503), "suspect", "edge_503"),
    "edge page as 200": (Fault(status=200, body=b" <!DOCTYPE html>", content_type="text/html"),
                         "suspect", "edge_200"),
    "edge JSON": (Fault(status=429, body=b'{"message":"slow down"}'), "suspect", "edge_429"),
    "401 in vLLM's words": (Fault(status=401, body=b'{"error":"Unauthorized"}'),
                            "suspect", "token_rejected"),
    "403": (Fault(status=403, body=b"<html>no", content_type="text/html"),
            "suspect", "token_rejected"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST_ANSWERS)
async def test_what_is_the_paths_fault_is_hidden_and_the_replica_leaves_rotation(start, name):
    fault, state, code = FIRST_ANSWERS[name]
    async with ScriptedReplica() as a, ScriptedReplica() as b:
        running = await start([a.url, b.url])
        moved = []
        running.daemon.replicas.on_transition.append(moved.append)
        first = await running.complete("tiny", [1])
        bad = {"r0": a, "r1": b}[first.headers["x-rollmux-replica"]]
        # A connection used before and lost at once is replaced, so the second loss is the first.
        losses = 2 if fault.reset or fault.drop else 1
        bad.faults.add(PATH, fault, times=losses)
        answer = await running.complete("tiny", [1])  # affinity: it goes there again
        assert answer.status_code == 200
        assert answer.content == OK
        assert answer.headers["x-rollmux-replica"] != first.headers["x-rollmux-replica"]
        assert asked(a, b) == 2 + losses
        assert (moved[0].replica, moved[0].new, moved[0].code) == (
            first.headers["x-rollmux-replica"], state, code,
        )  # fmt: skip
        assert sum(failovers(running).values()) == 1


async def test_a_chunked_body_without_its_end_is_asked_of_another(start):
    async def half():
        yield OK[:20]
        await asyncio.sleep(0)
        server = next(r for r in (a, b) if r.generations).server
        server.refuse()
        yield b""

    async def script(arrival: Arrival) -> Reply:
        if len(a.generations) + len(b.generations) == 1:
            return Reply(200, stream=half())
        return Reply(200, OK)

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 200
        assert answer.content == OK


async def test_a_body_that_only_its_connection_ends_has_to_be_whole_json(start):
    async def script(arrival: Arrival) -> Reply:
        first = len(a.generations) + len(b.generations) == 1
        mine = a if arrival in a.generations else b
        return await raw(mine, arrival, b"HTTP/1.1 200 OK\r\n\r\n" + (OK[:30] if first else OK))

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 200
        assert answer.content == OK
        assert len(a.generations) == len(b.generations) == 1


async def test_a_replica_that_refuses_costs_no_try(start):
    """Three refuse before the fourth is asked; a request that was never sent did no harm."""
    replicas = [ScriptedReplica() for _ in range(4)]
    for replica in replicas:
        await replica.__aenter__()
    # No probe in between: the daemon learns it from the traffic.
    running = await start([r.url for r in replicas], probe_s=30.0)
    for replica in replicas[:3]:
        replica.server.refuse()
    for _ in range(4):
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 200
        assert answer.headers["x-rollmux-replica"] == "r3"
    assert set(failovers(running)) <= {(f"r{i}", "refused") for i in range(3)}
    for replica in replicas:
        await replica.__aexit__()


async def test_at_most_two_replicas_are_asked(start):
    replicas = [ScriptedReplica() for _ in range(4)]
    for replica in replicas:
        await replica.__aenter__()
        replica.faults.add(PATH, reset=True)
    running = await start([r.url for r in replicas])
    answer = await running.complete("tiny", [1])
    assert answer.status_code == 502
    assert answer.headers["x-rollmux-error"] == "upstream_lost"
    assert answer.json()["error"]["code"] == 502
    assert asked(*replicas) == 2
    for replica in replicas:
        await replica.__aexit__()


async def test_a_lone_replica_that_is_well_again_is_asked_again(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        replica.faults.add(PATH, reset=True, times=1)
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 200
        assert asked(replica) == 2


async def test_a_whole_generation_is_never_200_with_an_abort(start):
    aborted = b'{"choices":[{"text":"ha","finish_reason":"abort"}]}'

    async def script(arrival: Arrival) -> Reply:
        first = len(a.generations) + len(b.generations) == 1
        return Reply(200, aborted if first else OK)

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url])
        assert (await running.complete("tiny", [1])).content == OK
        assert len(a.generations) == len(b.generations) == 1
        b.script = a.script = always(aborted)
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert all(r.state == "ready" for r in running.daemon.replicas.fleet)


def always(body: bytes):
    async def script(arrival: Arrival) -> Reply:
        return Reply(200, body)

    return script


async def test_a_text_with_the_word_abort_passes(start):
    body = b'{"choices":[{"text":"\\"abort\\"","finish_reason":"stop"}],"a":"abort"}'
    async with ScriptedReplica(always(body)) as replica:
        running = await start([replica.url])
        assert (await running.complete("tiny", [1])).content == body


async def test_a_generation_that_vllm_was_told_to_abort_is_not_seen_as_success(start):
    """The simulated vLLM cuts running generations short with 200, as the real one does."""
    async with (
        SimulatedReplica(step_s=0.05) as replica,
        httpx.AsyncClient(base_url=replica.url, trust_env=False) as direct,
    ):
        running = await start([replica.url])
        work = running.daemon.tasks.start(running.complete("tiny", [1], max_tokens=500), "client")
        for tries in (1, 2):
            await until(lambda n=tries: len(replica.calls(PATH)) == n and replica.in_flight)
            assert (await direct.post("/abort_requests", json={})).status_code == 200
        assert (await work).status_code == 503


async def test_a_replica_that_lost_a_live_adapter_rejoins_and_the_client_sees_200(
    start, pair, adapter
):
    running = await start([r.url for r in pair])
    load = {"lora_name": "v1", "lora_path": adapter}
    assert (await running.client.post("/v1/load_lora_adapter", json=load)).status_code == 200
    await running.until_ready(2)
    moved = []
    running.daemon.replicas.on_transition.append(moved.append)
    del pair[0].names["v1"]
    for prompt in range(4):
        answer = await running.complete("v1", [prompt])
        assert answer.status_code == 200
    assert ("r0", "joining", "lost_adapter") in [(t.replica, t.new, t.code) for t in moved]
    await running.until_ready(2)
    assert "v1" in pair[0].names


@pytest.fixture
def adapter(tmp_path):
    write_adapter(tmp_path / "v1")
    return str(tmp_path / "v1")


async def test_a_rejected_token_is_reported_once_and_its_new_file_heals_it(start, tmp_path, caplog):
    token = tmp_path / "token"
    token.write_text("first\n")
    async with SimulatedReplica(bearer="first") as replica:
        running = await start([replica.url], token_file=str(token), hold_s=0.2)
        assert (await running.complete("tiny", [1])).status_code == 200
        object.__setattr__(replica.config, "bearer", "second")
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 503
        assert "token_rejected" in answer.json()["error"]["message"]
        (shown,) = (await running.status())["replicas"]
        assert shown["error_code"] == "token_rejected"
        token.write_text("second\n")
        await running.until_ready(1)
        assert (await running.complete("tiny", [1])).status_code == 200
        assert len([m for m in caplog.messages if "ready -> suspect" in m]) == 1


async def test_a_connection_closed_while_idle_costs_no_error(start):
    """The server closes idle connections just as they are used again; 20 rounds hit the moment."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        replica.server.keep_alive_s = 0.02  # not before: control calls would meet it too
        for number in range(20):
            answer = await running.complete("tiny", [1])
            assert answer.status_code == 200
            await asyncio.sleep(0.0185 + number % 7 * 0.0005)
        assert not failovers(running)
        assert running.daemon.replicas.fleet["r0"].state == "ready"


async def test_a_connection_reset_while_idle_is_replaced_within_the_same_try(start):
    """A lost race, made certain: the server hangs up on the second request of a connection."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        await running.complete("tiny", [1])
        replica.faults.add(PATH, drop=True, times=1)
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 200
        assert not failovers(running)
        assert running.daemon.replicas.fleet["r0"].state == "ready"


async def test_requests_in_flight_leave_a_replica_that_stalls(start):
    """It accepts and never answers, generations and probes alike."""
    async with ScriptedReplica() as a, ScriptedReplica() as b:
        running = await start([a.url, b.url], stall_s=1.0)
        first = await running.complete("tiny", [1])
        bad = {"r0": a, "r1": b}[first.headers["x-rollmux-replica"]]
        bad.faults.add("*", hang=True)
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 200
        assert answer.headers["x-rollmux-replica"] != first.headers["x-rollmux-replica"]
        state = running.daemon.replicas.fleet[first.headers["x-rollmux-replica"]]
        assert state.error_code == "stalled"


async def test_a_hanging_replica_slows_no_other(start):
    async def script(arrival: Arrival) -> Reply:
        return await hang(arrival) if arrival in bad.generations else Reply(200, OK)

    async with ScriptedReplica(script) as bad, ScriptedReplica(script) as good:
        running = await start([bad.url, good.url], spill_threshold=1000)
        stuck = [
            running.daemon.tasks.start(running.complete("tiny", [n]), "client") for n in range(40)
        ]
        await until(lambda: len(bad.generations) >= 15)
        await until(lambda: sum(t.done() for t in stuck) >= 15)
        for n in range(30):
            if (await asyncio.wait_for(running.complete("tiny", [9, n]), 10)).status_code == 200:
                break
        assert (await running.client.get("/health")).status_code == 200
        for task in stuck:
            task.cancel()
        await asyncio.wait(stuck)


async def test_a_removed_replicas_generations_move_to_another(start):
    async def script(arrival: Arrival) -> Reply:
        if len(a.generations) + len(b.generations) == 1:
            await hang(arrival)
        return Reply(200, OK)

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url], secrets=Secrets())
        work = running.daemon.tasks.start(running.complete("tiny", [1]), "client")
        await until(lambda: a.generations or b.generations)
        running.daemon.replicas.remove("r0" if a.generations else "r1")
        assert (await work).status_code == 200


async def test_the_status_says_why_a_replica_is_out(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], hold_s=0.05)
        page = Fault(status=404, body=b"<html>no such app", content_type="text/html")
        replica.faults.add("*", page)
        answer = await running.complete("tiny", [1])
        message = json.loads(answer.content)["error"]["message"]
        assert answer.status_code == 503
        assert replica.url in message
        assert "edge_404" in message
