"""Field reports K15: what grows with the run, and must not."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import string
import time
from collections import Counter

import httpx

from benchmarks.httpd import Arrival, Reply
from benchmarks.replica import SimulatedReplica
from broadcast.answer import Cause
from tests.proxy.scripted import DONE, OK, ScriptedReplica, Tap, error, event, hang, until
from tests.proxy.trainer import Trainer

PATH = "/v1/completions"


def series(page: str) -> set[str]:
    """Names with their labels, without the values."""
    return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}


async def test_no_name_path_or_method_of_a_clients_choice_becomes_a_label(start, tmp_path):
    """O-55. After one of each kind the page has all the lines that it will ever have."""
    rng = random.Random(55)

    def word() -> str:
        return "".join(rng.choices(string.ascii_letters, k=12))

    async def ask() -> None:
        client = running.client
        named = await running.complete(word(), [1])
        assert named.status_code == 404
        for path in (f"/{word()}", f"/v1/completions/{word()}", f"/v1/{word()}?{word()}={word()}"):
            assert (await client.post(path, json={"model": word()})).status_code == 501
        assert (await client.request(word().upper(), PATH)).status_code in (400, 405, 501)
        unload = {"lora_name": word()}
        assert (await client.post("/v1/unload_lora_adapter", json=unload)).status_code == 404
        assert (await running.complete("tiny", [1])).status_code == 200

    async with SimulatedReplica() as replica:
        running = await start([replica.url])
        trainer = Trainer(running, tmp_path, staleness=1)
        for _ in range(4):
            await trainer.sync()
        await ask()
        before = (await running.client.get("/metrics")).text
        for _ in range(5):
            await trainer.sync()
        for _ in range(15):
            await ask()
        after = (await running.client.get("/metrics")).text
        assert series(after) - series(before) == set()
        assert "trl-policy" not in after
        assert len(after) < 100_000
        assert "rollmux_policy_version 9.0" in after


async def test_nothing_of_a_request_is_kept_once_it_has_ended(start):
    """O-57. However it ended; what is kept of 74 is kept of 148."""

    async def script(arrival: Arrival) -> Reply:
        fate = json.loads(arrival.body)["user"]
        match fate:
            case "4xx":
                return error(400, "no")
            case "5xx":
                return error(500, "no", "InternalServerError")
            case "reset" if arrival.header("x-request-id") == "1":
                (lost,) = [
                    c
                    for r in (a, b)
                    for c in r.server.connections
                    if c.number == arrival.connection and arrival in r.generations
                ]
                lost.reset()
                return await hang(arrival)
            case "left":
                return await hang(arrival)
            case "stream":
                tap = Tap()
                for piece in (event("one"), DONE):
                    tap.put(piece)
                tap.end()
                return await tap.script(arrival)
        return Reply(200, OK)

    async def one(fate: str) -> None:
        body = {"model": "tiny", "prompt": [1] * 40, "user": fate, "stream": fate == "stream"}
        if fate == "left":
            url = httpx.URL(running.url)
            _, writer = await asyncio.open_connection(url.host, url.port)
            data = json.dumps(body).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                % (len(data), data)
            )
            seen = running.daemon.replicas.fleet.inflight()
            await until(lambda: running.daemon.replicas.fleet.inflight() != seen)
            writer.transport.abort()
            return
        # A second attempt has another id, and is answered.
        answer = await running.client.post(PATH, json=body, headers={"x-request-id": "1"})
        assert answer.status_code in (200, 400, 500, 502, 503)

    async def tasks_soon() -> int:
        await asyncio.sleep(0.02)
        return len(asyncio.all_tasks())

    async def round_of() -> Counter[str]:
        for fate in (*("ok", "4xx", "5xx", "left", "stream", "404") * 6, "reset"):
            if fate == "404":
                assert (await running.complete("nobody", [1])).status_code == 404
            else:
                await one(fate)
        replicas = running.daemon.replicas
        await until(lambda: not replicas.fleet.inflight() and len(running.daemon.tasks) <= tasks)
        assert not any(replicas._bodies.values())
        assert not replicas.fleet.inflight_names()
        assert not replicas._reserved
        for replica in replicas.fleet:
            replicas.upstream(replica.id).break_all(Cause.RESET, "to count what else is there")
        await until(lambda: not any(replicas.upstream(r.id).opened for r in replicas.fleet))
        gc.collect()
        ours = ("proxy.", "broadcast.", "routing.")
        found = Counter(
            kind.__qualname__
            for kind in map(type, gc.get_objects())
            if str(kind.__module__).startswith(ours)
        )
        # The fewest: a look at a replica has some of its own.
        found["tasks"] = min([await tasks_soon() for _ in range(20)])
        return found

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url], hold_s=3.0)
        tasks = len(running.daemon.tasks)
        await round_of()
        first = await round_of()
        await round_of()
        last = await round_of()
        bounded = {"_Fleet", "Sample"}  # by a number, and by the minutes they tell of
        grown = {
            name: n - first[name]
            for name, n in last.items()
            if n > first[name] + 2 and name not in bounded
        }
        assert grown == {}


async def test_a_loop_that_stood_still_is_seen_in_the_metrics(start):
    """K14. Whatever holds it up: a timer that is due meanwhile is as late as that."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        value = running.daemon.metrics.registry.get_sample_value
        time.sleep(2.0)  # noqa: ASYNC251
        # The timer runs every second, so it was due in the first of the two.
        await until(lambda: (value("rollmux_event_loop_lag_seconds") or 0) >= 0.9)
        assert "rollmux_event_loop_lag_seconds" in (await running.client.get("/metrics")).text
