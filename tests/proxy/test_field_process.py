"""Field reports K14: one process, its descriptors, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from benchmarks.engine import Pause
from benchmarks.httpd import Arrival, Reply
from benchmarks.replica import SimulatedReplica
from broadcast.answer import Cause
from proxy import daemon
from proxy.descriptors import most_generations
from tests.proxy.scripted import OK, ScriptedReplica, hang, ok, until

PATH = "/v1/completions"
ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def serving(
    urls: list[str], log: Path, *options: str, files: int = 4096, environ: dict | None = None
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """``rollmux serve`` as an operator starts it, with so many descriptors; ready."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-m", "proxy", "serve", "--fd", str(listener.fileno())]
    for replica in urls:
        command += ["--replica", replica]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLMUX_", "PROXY_"))}
    with listener, log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            *command,
            *options,
            stdout=output,
            stderr=output,
            pass_fds=(listener.fileno(),),
            preexec_fn=limit,
            env=clean | {"PYTHONPATH": str(ROOT)} | (environ or {}),
        )
        listener.close()
        try:
            async with asyncio.timeout(40), client(url) as http:
                while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield url, child
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=120,
        trust_env=False,
        verify=False,
        limits=httpx.Limits(max_connections=None),
    )


async def test_more_generations_than_descriptors_are_told_so_and_nobody_else_is_harmed(tmp_path):
    """O-53. 160 at once on 128 descriptors, of which each takes two."""
    gate = asyncio.Event()

    async def script(arrival: Arrival) -> Reply:
        await gate.wait()
        return Reply(200, OK)

    async def complete(http: httpx.AsyncClient, number: int) -> str:
        try:
            answer = await http.post(PATH, json={"model": "tiny", "prompt": [number] * 32})
        except httpx.TransportError:
            return "lost"
        return answer.headers.get("x-rollmux-error") or str(answer.status_code)

    most = (128 - 64) // 2
    log = tmp_path / "log"
    async with (
        ScriptedReplica(script) as a,
        ScriptedReplica(script) as b,
        serving([a.url, b.url], log, files=128) as (url, _),
        client(url) as http,
    ):
        assert f"at most {most} generations at once" in log.read_text()
        work = [asyncio.ensure_future(complete(http, n)) for n in range(160)]
        await until(lambda: sum(t.done() for t in work) >= 160 - most, within_s=30)
        async with client(url) as other:
            for path in ("/metrics", "/health", "/proxy/live"):
                assert (await other.get(path)).status_code == 200
        gate.set()
        told = Counter(await asyncio.gather(*work))
        assert told["200"] == len(a.generations) + len(b.generations)
        # Of a burst some find no descriptor, before the first are refused and give back theirs:
        # their connection was taken by the kernel, and the loop can but close it.
        assert told["200"] + told["too_many_at_once"] + told["lost"] == 160
        assert 16 <= told["200"] <= most
        assert told["too_many_at_once"] >= 16
        page = (await http.get("/metrics")).text
        refused = f'requests_total{{code="503",route="{PATH}"}} {told["too_many_at_once"]}.0'
        assert refused in page
        for replica in ("r0", "r1"):
            assert f'replica_inflight{{replica="{replica}"}} 0.0' in page
        assert {await complete(http, n) for n in range(20)} == {"200"}
        assert "suspect" not in log.read_text()


async def test_who_is_one_too_many_is_refused_with_its_connection(start, monkeypatch):
    """O-53. Else refused clients would keep the descriptors that the others need."""
    monkeypatch.setattr(daemon, "most_generations", lambda: 1)
    async with ScriptedReplica(hang) as replica:
        running = await start([replica.url])
        first = running.daemon.tasks.start(running.complete("tiny", [1]), "client", awaited=True)
        await until(lambda: replica.generations)
        url = httpx.URL(running.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to its end
        writer.close()
        assert head.startswith(b"HTTP/1.1 503")
        assert head.count(b"connection: close") == 1
        assert b"1 generations are under way" in body
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: not running.daemon.replicas.fleet.inflight())
        replica.script = ok
        assert (await running.complete("tiny", [1])).status_code == 200


async def test_a_connect_that_never_left_this_machine_says_nothing_about_the_replica(start):
    """O-53. No descriptor is left for it; with one there it goes on as if nothing had been."""
    async with ScriptedReplica() as replica:
        running = await start([replica.url], probe_s=30.0)
        await running.complete("tiny", [1])
        moved = []
        running.daemon.replicas.on_transition.append(moved.append)
        running.daemon.replicas.upstream("r0").break_all(Cause.RESET, "none is to be left")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            answer = await running.complete("tiny", [1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-rollmux-error"] == "too_many_at_once"
        assert "ulimit -n" in answer.json()["error"]["message"]
        assert (await running.complete("tiny", [1])).status_code == 200
        assert moved == []
        assert running.daemon.replicas.fleet.inflight() == 0


@pytest.mark.parametrize(
    ("soft", "most"), [(20, 1), (256, 96), (1024, 480), (20_000, 9375), (65_536, 30_720)]
)
def test_some_descriptors_are_kept_for_all_the_rest(monkeypatch, soft, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert most_generations() == most


async def test_a_stop_waits_for_what_ends_in_time_and_for_nothing_else(tmp_path):
    """O-52. 40 in flight that would take for ever, one that ends; the engines are let go."""
    gate = asyncio.Event()

    async def script(arrival: Arrival) -> Reply:
        if b'"ends"' not in arrival.body:
            return await hang(arrival)
        await gate.wait()
        return Reply(200, OK)

    async with (
        ScriptedReplica(script) as a,
        ScriptedReplica(script) as b,
        serving([a.url, b.url], tmp_path / "log", "--drain-s", "2") as (url, child),
        client(url) as http,
    ):
        work = [
            asyncio.ensure_future(http.post(PATH, json={"model": "tiny", "prompt": [n] * 20}))
            for n in range(40)
        ]
        ends = asyncio.ensure_future(http.post(PATH, json={"model": "tiny", "prompt": "ends"}))
        await until(lambda: len(a.generations) + len(b.generations) == 41, within_s=30)
        child.send_signal(signal.SIGTERM)
        await until(lambda: "drained for up to" in (tmp_path / "log").read_text(), within_s=30)
        gate.set()
        assert (await ends).status_code == 200
        async with asyncio.timeout(40):
            assert await child.wait() == 0
        told = await asyncio.gather(*work, return_exceptions=True)
        assert all(isinstance(t, httpx.TransportError) for t in told)  # none is 200 with less
        assert all(
            r.disconnected_s for r in (*a.generations, *b.generations) if b'"ends"' not in r.body
        )


async def test_a_stop_leaves_no_replica_paused(tmp_path):
    """O-52. With a rollout frozen by the pause, which cannot end in time."""
    async with (
        SimulatedReplica() as replica,
        serving([replica.url], tmp_path / "log", "--drain-s", "1") as (url, child),
        client(url) as http,
    ):
        assert (await http.post("/pause?mode=keep&clear_cache=true")).status_code == 200
        assert replica.engine.paused is not Pause.NONE
        body = {"model": "tiny", "prompt": [1] * 20, "max_tokens": 8}
        frozen = asyncio.ensure_future(http.post(PATH, json=body))
        await until(lambda: replica.in_flight, within_s=30)
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(40):
            assert await child.wait() == 0
        assert replica.engine.paused is Pause.NONE
        await asyncio.gather(frozen, return_exceptions=True)


@pytest.mark.parametrize("workers", ["4", "auto"])
async def test_one_process_serves_whatever_the_environment_says(tmp_path, workers):
    """O-56. Routing state and counters of several would each be a part of the truth."""
    environ = {"WEB_CONCURRENCY": workers, "UVICORN_WORKERS": workers}
    async with (
        ScriptedReplica() as replica,
        serving([replica.url], tmp_path / "log", environ=environ) as (url, child),
        client(url) as http,
    ):
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        assert not children.read_text()  # noqa: ASYNC240
        for number in range(1, 6):
            await http.post(PATH, json={"model": "tiny", "prompt": [1]})
            async with client(url) as other:
                page = (await other.get("/metrics")).text
            assert f'requests_total{{code="200",route="{PATH}"}} {number}.0' in page
