"""A client that goes away: what it asked for is given up, everywhere, within a second."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest
from uvicorn.protocols.http.flow_control import FlowControl

import proxy.client
from benchmarks.httpd import Arrival, Reply
from benchmarks.replica import SimulatedReplica
from tests.proxy.scripted import OK, ScriptedReplica, Tap, event, hang, until

PROMPT_S = 5.0  # the contract says 1 s, of a machine that is not busy
"""The contract's bound from the client's close to the upstream's."""


class Client:
    """A bare connection to the daemon that has sent one generation."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def sends(cls, url: str, **fields: object) -> Client:
        host, port = httpx.URL(url).host, httpx.URL(url).port
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps({"model": "tiny", "prompt": "x"} | fields).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        return cls(reader, writer)

    def close(self) -> None:
        self.writer.transport.abort()


def disconnects(running, phase: str) -> float:
    sample = running.daemon.metrics.registry.get_sample_value
    return sample("rollmux_client_disconnects_total", {"phase": phase}) or 0.0


async def idle(running) -> None:
    """Within the bound nothing is in flight, and nothing remembers the request."""
    replicas = running.daemon.replicas
    await until(
        lambda: not replicas.fleet.inflight() and not any(replicas._bodies.values()),
        within_s=PROMPT_S,
    )


async def arrived(replica: ScriptedReplica) -> None:
    await until(lambda: replica.generations)


async def closed(arrival: Arrival) -> None:
    await until(lambda: arrival.disconnected_s is not None, within_s=PROMPT_S)


async def test_while_it_waits_for_a_whole_reply_the_upstream_is_closed(start):
    async with ScriptedReplica(hang) as replica:
        running = await start([replica.url])
        client = await Client.sends(running.url)
        await arrived(replica)
        assert running.daemon.replicas.fleet.inflight() == 1
        client.close()
        await closed(replica.generations[0])
        await idle(running)
        assert disconnects(running, "upstream") == 1


async def test_while_a_stream_has_begun_but_has_no_piece_the_upstream_is_closed(start):
    """The status line of a stream comes long before its first token."""
    tap = Tap()
    async with ScriptedReplica(tap.script) as replica:
        running = await start([replica.url])
        client = await Client.sends(running.url, stream=True)
        await arrived(replica)
        await asyncio.sleep(0.05)  # the head is on its way; nothing tells when it is here
        client.close()
        await closed(replica.generations[0])
        await idle(running)
        assert disconnects(running, "upstream") == 1


async def test_while_it_streams_the_upstream_is_closed(start):
    tap = Tap()
    async with ScriptedReplica(tap.script) as replica:
        running = await start([replica.url])
        client = await Client.sends(running.url, stream=True)
        tap.put(event("one"))
        await client.reader.readuntil(b"one")
        client.close()
        await closed(replica.generations[0])
        await idle(running)
        assert disconnects(running, "reply") == 1


async def test_while_it_is_held_nothing_is_sent_later(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], hold_s=30.0)
        replica.server.refuse()
        await running.until_ready(0)
        client = await Client.sends(running.url)
        await until(lambda: running.daemon.status.held() == 1)
        client.close()
        await until(lambda: disconnects(running, "hold"), within_s=PROMPT_S)
        assert not replica.generations


async def test_while_its_body_arrives_nothing_is_sent(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        url = httpx.URL(running.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        await writer.drain()
        await until(lambda: running.daemon._server.server_state.tasks)  # it waits for the rest
        writer.transport.abort()
        await until(lambda: disconnects(running, "read"), within_s=PROMPT_S)
        assert not replica.generations


async def test_a_client_that_sends_its_end_early_gets_no_answer_and_costs_no_tokens(start):
    """A half-closed client is gone to uvicorn, as it is to vLLM."""
    async with ScriptedReplica(hang) as replica:
        running = await start([replica.url])
        client = await Client.sends(running.url)
        await arrived(replica)
        client.writer.write_eof()
        await closed(replica.generations[0])
        await idle(running)
        client.close()


async def test_a_connection_given_up_is_not_used_again(start):
    async with ScriptedReplica(hang) as replica:
        running = await start([replica.url])
        client = await Client.sends(running.url)
        await arrived(replica)
        client.close()
        await closed(replica.generations[0])

        async def ok(arrival: Arrival) -> Reply:
            return Reply(200, OK)

        replica.script = ok
        answer = await running.complete("tiny", [1])
        assert answer.status_code == 200
        assert replica.generations[1].connection != replica.generations[0].connection


async def test_a_running_engine_frees_what_the_client_gave_up(start):
    """Through the simulated vLLM: its sequences end, not only its socket."""
    async with SimulatedReplica(step_s=0.05) as replica:
        running = await start([replica.url])
        client = await Client.sends(running.url, prompt=[1, 2, 3], max_tokens=900, ignore_eos=True)
        await until(lambda: replica.in_flight)
        client.close()
        await until(lambda: not replica.in_flight, within_s=PROMPT_S)
        await idle(running)


@pytest.mark.parametrize("seed", [1, 2])
async def test_cancels_at_random_moments_leave_nothing_in_flight(start, seed):
    """300 clients: whole replies and streams, some answered, some cut, most given up somewhere."""
    rng = random.Random(seed)

    async def script(arrival: Arrival) -> Reply:
        await asyncio.sleep(rng.random() * 0.02)
        fate = rng.random()
        if fate < 0.05:
            return Reply(404, b"<html>", "text/html")
        if fate < 0.1:
            return Reply(500, b'{"error":{"message":"no"}}')
        if b"true" not in arrival.body:
            return Reply(200, OK)
        tap = Tap()
        for _ in range(3):
            tap.put(event("x"))
        tap.end()
        return await tap.script(arrival)

    async def client(number: int) -> None:
        request = await Client.sends(running.url, number=number, stream=bool(number % 2))
        await asyncio.sleep(rng.random() * 0.03)
        request.close()

    async with ScriptedReplica(script) as a, ScriptedReplica(script) as b:
        running = await start([a.url, b.url], hold_s=0.2)
        for replica in (a, b):
            replica.faults.add("/v1/completions", reset=True, nth=10)
            replica.faults.add("/v1/completions", cut=20, nth=20)
        tasks = len(running.daemon.tasks)
        for first in range(0, 300, 50):
            async with asyncio.TaskGroup() as group:
                for number in range(first, first + 50):
                    group.create_task(client(number))
        replicas = running.daemon.replicas
        await until(lambda: len(running.daemon.tasks) <= tasks and not replicas.fleet.inflight())
        assert all(r.inflight == 0 for r in replicas.fleet)
        assert not any(replicas._bodies.values())
        assert not replicas._reserved
        assert not replicas.fleet.inflight_names()
        page = (await running.client.get("/metrics")).text
        assert 'rollmux_replica_inflight{replica="r0"} 0.0' in page
        await running.until_ready(2)
        answer = await running.complete("tiny", [1])
        assert answer.status_code in (200, 404, 500)


class Sent(asyncio.Transport):
    """Where an answer is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelled_in_any_turn_of_the_loop_it_leaves_nothing(start, stream):
    """From before its first await to after its last: once for each turn that a generation takes."""
    body_bytes = json.dumps({"model": "tiny", "prompt": "x", "stream": stream}).encode()

    async def script(arrival: Arrival) -> Reply:
        if not stream:
            return Reply(200, OK)
        tap = Tap()
        for _ in range(3):
            tap.put(event("x"))
        tap.end()
        return await tap.script(arrival)

    async def generation(sent: Sent) -> None:
        client = proxy.client.Client(
            sent, FlowControl(sent), "/v1/completions", b"/v1/completions", []
        )

        async def body() -> None:
            await asyncio.sleep(0)
            client.on_body(body_bytes)
            await asyncio.sleep(0)
            client.on_whole()

        async with asyncio.TaskGroup() as group:
            group.create_task(body())
            await running.daemon.app.generation(client)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url], probe_s=30.0)
        tasks = len(running.daemon.tasks)
        turns, whole = 0, 0
        while whole < 3:  # the last few were too late to hit anything
            sent = Sent()
            work = running.daemon.tasks.start(generation(sent), "generation")
            for _ in range(turns):
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.wait((work,))
            await until(lambda: len(running.daemon.tasks) <= tasks)
            replicas = running.daemon.replicas
            assert replicas.fleet.inflight() == 0
            assert not replicas.fleet.inflight_names()
            assert not any(replicas._bodies.values())
            whole = whole + 1 if not work.cancelled() else 0
            turns += 1
            assert turns < 500
        assert sent.data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert 10 < turns > len(replica.generations) > 3
        await until(lambda: len(replicas.upstream("r0").opened) <= 1)
