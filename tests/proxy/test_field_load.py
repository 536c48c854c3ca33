"""Field reports K8: what is counted as load, and clients that go away."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from proxy.settings import Secrets
from tests.proxy.scripted import OK, ScriptedReplica, hang, until

PATH = "/v1/completions"
KEY = "the trainer's key"
PROMPTLY_S = 5.0
"""The contract says 1 s, of a machine that is not busy."""


def request(**fields: object) -> bytes:
    """One generation as it is on the wire."""
    body = json.dumps({"model": "tiny", "prompt": [1]} | fields).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
        b"content-length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )


async def connect(running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(running.url)
    return await asyncio.open_connection(url.host, url.port)


def nothing_is_left(running) -> bool:
    replicas = running.daemon.replicas
    return not (
        any(r.inflight for r in replicas.fleet)
        or replicas.fleet.inflight_names()
        or any(replicas._bodies.values())
        or replicas._reserved
    )


@pytest.mark.parametrize("at", ["in its own piece", "in one piece with the first", "with a body"])
async def test_who_leaves_after_a_pipelined_request_is_noticed_too(start, tmp_path, at):
    """O-34. With everything switched on, and the next request sent before the answer."""
    async with ScriptedReplica(hang) as replica:
        running = await start(
            [replica.url],
            secrets=Secrets(api_key=KEY),
            record=str(tmp_path / "trace.jsonl"),
        )
        _, writer = await connect(running)
        first, second = request(), request(prompt=[2] * (100_000 if "body" in at else 1))
        if "one piece" in at:
            writer.write(first + second)
        else:
            writer.write(first)
            await until(lambda: replica.generations)
            writer.write(second)
        await until(lambda: replica.generations)
        await asyncio.sleep(0.05)  # so that the second one is here; nothing shows it
        writer.transport.abort()
        arrival = replica.generations[0]
        await until(lambda: arrival.disconnected_s is not None, within_s=PROMPTLY_S)
        await until(lambda: nothing_is_left(running), within_s=PROMPTLY_S)
        assert len(replica.generations) == 1


async def test_what_is_sent_ahead_is_sent_again_by_its_client(start):
    """O-34. The first one's answer says so, and nothing of the second has run."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        reader, writer = await connect(running)
        writer.write(request() + request(prompt=[2]))
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head
        assert body == OK
        assert len(replica.generations) == 1
