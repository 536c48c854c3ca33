"""Calls that ask for many rollouts: a list of prompts, ``n`` above 1. Counted as what they are."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from benchmarks.httpd import Arrival, Reply
from tests.proxy.scripted import DONE, OK, ScriptedReplica, Tap, error, event, until

PATH = "/v1/completions"
PROMPTS = [[n] * 40 for n in (1, 2, 3)]
SIX = {"model": "tiny", "prompt": PROMPTS, "n": 2}
"""Three prompts, two rollouts of each."""


OKAY = Reply(200, OK)


class Held:
    """Two replicas that answer when they are let, and a daemon before them."""

    def __init__(self, reply: Reply = OKAY) -> None:
        self.gate = asyncio.Event()
        self.reply = reply
        self.a = ScriptedReplica(self._script)
        self.b = ScriptedReplica(self._script)

    async def _script(self, arrival: Arrival) -> Reply:
        await self.gate.wait()
        return self.reply

    async def __aenter__(self) -> Held:
        await self.a.__aenter__()
        await self.b.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.a.__aexit__()
        await self.b.__aexit__()

    @property
    def asked(self) -> int:
        return len(self.a.generations) + len(self.b.generations)


def loads(running) -> list[int]:
    return [r.inflight for r in running.daemon.replicas.fleet]


def sent(running, body: dict, path: str = PATH) -> asyncio.Task[httpx.Response]:
    work = running.client.post(path, json=body)
    return running.daemon.tasks.start(work, "client", awaited=True)


@pytest.mark.parametrize(
    ("path", "body", "weight"),
    [
        (PATH, {"prompt": [1, 2, 3]}, 1),
        (PATH, {"prompt": [1, 2, 3], "n": 8}, 8),
        (PATH, {"prompt": PROMPTS}, 3),
        (PATH, {"prompt": PROMPTS, "n": 2}, 6),
        (PATH, {"prompt": ["one", "two"], "n": 2}, 4),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 5}, 5),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, 1),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 4}}, 4),
    ],
)
async def test_a_call_is_in_flight_as_many_times_as_it_has_rollouts(start, path, body, weight):
    async with Held() as held:
        running = await start([held.a.url, held.b.url])
        work = sent(running, {"model": "tiny"} | body, path)
        await until(lambda: held.asked)
        assert sorted(loads(running)) == [0, weight]
        page = (await running.client.get("/metrics")).text
        assert page.count("rollmux_replica_inflight{") == 2
        assert f" {weight}.0" in page.partition("rollmux_replica_inflight{")[2][:90]
        held.gate.set()
        assert (await work).status_code == 200
        assert loads(running) == [0, 0]


async def test_a_list_goes_where_its_first_prompt_is(start):
    """And what follows goes there too; the other prompts of the list draw it nowhere."""
    async with Held() as held:
        held.gate.set()
        running = await start([held.a.url, held.b.url])

        async def where(prompt: object) -> tuple[str, str]:
            answer = await running.complete("tiny", prompt)
            return answer.headers["x-rollmux-replica"], answer.headers["x-rollmux-route"]

        one, _ = await where([1] * 40)
        other, _ = await where([2] * 40)
        assert one != other
        assert await where([[1] * 40, [2] * 40, [2] * 40]) == (one, "affinity")
        assert await where([[2] * 40, [1] * 40]) == (other, "affinity")
        first, route = await where([[7] * 40, [8] * 40])
        assert route == "unmatched"
        assert await where([7] * 40) == (first, "affinity")


async def test_new_prompts_go_elsewhere_until_the_loads_are_even(start):
    async with Held() as held:
        running = await start([held.a.url, held.b.url])
        work = [sent(running, SIX)]
        await until(lambda: held.asked == 1)
        for number in range(6):  # new ones, each to the least loaded
            work.append(sent(running, {"model": "tiny", "prompt": [100 + number] * 40}))
            await until(lambda n=number: held.asked == n + 2)
        assert loads(running) == [6, 6]
        assert {len(held.a.generations), len(held.b.generations)} == {1, 6}
        held.gate.set()
        assert {(await w).status_code for w in work} == {200}
        assert loads(running) == [0, 0]


async def test_a_list_that_puts_its_replica_past_the_threshold_spills_the_next(start):
    async with Held() as held:
        running = await start([held.a.url, held.b.url], spill_threshold=5)
        work = [sent(running, SIX)]
        await until(lambda: held.asked == 1)
        work.append(sent(running, SIX))
        await until(lambda: held.asked == 2)
        assert loads(running) == [6, 6]
        held.gate.set()
        routes = [(await w).headers["x-rollmux-route"] for w in work]
        assert routes == ["unmatched", "spilled"]
        assert loads(running) == [0, 0]


ENDINGS = {
    "ok": (OKAY, 200),
    "refused by vLLM": (error(400, "too long"), 400),
    "failed everywhere": (error(500, "no", "InternalServerError"), 500),
    "cut short everywhere": (Reply(200, b'{"choices":[{"finish_reason":"abort"}]}'), 503),
    "an edge's page everywhere": (Reply(502, b"<html>", "text/html"), 502),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_what_was_counted_is_given_back_at_every_ending(start, name):
    reply, status = ENDINGS[name]
    async with Held(reply) as held:
        running = await start([held.a.url, held.b.url], hold_s=0.5)
        work = sent(running, SIX)
        await until(lambda: held.asked)
        assert sorted(loads(running)) == [0, 6]
        held.gate.set()
        assert (await work).status_code == status
        assert loads(running) == [0, 0]
        assert not running.daemon.replicas.fleet.inflight_names()


async def test_a_client_that_leaves_gives_all_of_it_back(start):
    async with Held() as held:
        running = await start([held.a.url, held.b.url])
        work = sent(running, SIX)
        await until(lambda: held.asked)
        assert sorted(loads(running)) == [0, 6]
        work.cancel()
        await until(lambda: loads(running) == [0, 0])
        assert not running.daemon.replicas.fleet.inflight_names()


async def test_a_connection_that_is_reset_takes_the_whole_weight_to_the_other(start):
    async with Held() as held:
        running = await start([held.a.url, held.b.url])
        work = sent(running, SIX)
        await until(lambda: held.asked == 1)
        first = loads(running)
        next(r for r in (held.a, held.b) if r.generations).server.refuse()
        await until(lambda: held.asked == 2)
        assert loads(running) == first[::-1]
        held.gate.set()
        assert (await work).status_code == 200
        assert loads(running) == [0, 0]


async def test_a_replica_that_is_removed_or_comes_back_keeps_no_weight(start):
    async with Held() as held:
        running = await start([held.a.url, held.b.url])
        work = sent(running, SIX)
        await until(lambda: held.asked == 1)
        fleet = running.daemon.replicas.fleet
        gone = next(r for r in fleet if r.inflight)
        running.daemon.replicas.remove(gone.id)
        await until(lambda: held.asked == 2)
        assert gone.inflight == 0
        again = running.daemon.replicas.add(gone.url, named=True)
        assert (again.inflight, loads(running)) == (0, [6, 0])
        held.gate.set()
        assert (await work).status_code == 200
        assert loads(running) == [0, 0]


@pytest.mark.parametrize("ending", ["whole", "cut", "left"])
async def test_a_stream_of_many_is_counted_until_its_end(start, ending):
    tap = Tap()
    async with ScriptedReplica(tap.script) as replica:
        running = await start([replica.url])
        tap.put(event("one"))
        body = SIX | {"stream": True}
        async with running.client.stream("POST", PATH, json=body) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            assert loads(running) == [6]
            if ending == "whole":
                tap.put(DONE)
                tap.end()
                assert [p async for p in pieces] == [DONE]
            elif ending == "cut":
                replica.server.refuse()
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(pieces)
        await until(lambda: loads(running) == [0])
        assert not running.daemon.replicas.fleet.inflight_names()


async def test_the_bodies_of_many_prompts_pass_as_they_came(start, pair):
    """Through the simulated vLLM: as many choices, in the order and with the tokens of each."""
    running = await start([r.url for r in pair])
    body = SIX | {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = await running.client.post(PATH, json=body)
    choices = answer.json()["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert [c["token_ids"] for c in choices] == [
        pair[0].expected_tokens("tiny", prompt, 4) for prompt in PROMPTS for _ in range(2)
    ]
