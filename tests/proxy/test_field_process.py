"""Field reports K14: one process, its descriptors, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from benchmarks.httpd import Arrival, Reply
from broadcast.answer import Cause
from proxy.descriptors import most_generations
from tests.proxy.scripted import OK, ScriptedReplica, until

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
        timeout=30,
        trust_env=False,
        verify=False,
        limits=httpx.Limits(max_connections=None),
    )


async def test_more_generations_than_descriptors_are_told_so_and_nobody_else_is_harmed(tmp_path):
    """O-53. 300 at once on 256 descriptors, of which each takes two."""
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

    most = (256 - 64) // 2
    log = tmp_path / "log"
    async with (
        ScriptedReplica(script) as a,
        ScriptedReplica(script) as b,
        serving([a.url, b.url], log, files=256) as (url, _),
        client(url) as http,
    ):
        assert f"at most {most} generations at once" in log.read_text()
        work = [asyncio.ensure_future(complete(http, n)) for n in range(300)]
        await until(lambda: sum(t.done() for t in work) >= 300 - most, within_s=30)
        async with client(url) as other:
            for path in ("/metrics", "/health", "/proxy/live"):
                assert (await other.get(path)).status_code == 200
        gate.set()
        told = Counter(await asyncio.gather(*work))
        assert told["200"] == len(a.generations) + len(b.generations)
        # Of a burst some find no descriptor at all, before the first are refused and give back
        # theirs: the kernel has taken their connection, and the loop can but close it.
        assert told["200"] + told["too_many_at_once"] + told["lost"] == 300
        assert 48 <= told["200"] <= most
        assert told["too_many_at_once"] >= 48
        page = (await http.get("/metrics")).text
        refused = f'requests_total{{code="503",route="{PATH}"}} {told["too_many_at_once"]}.0'
        assert refused in page
        for replica in ("r0", "r1"):
            assert f'replica_inflight{{replica="{replica}"}} 0.0' in page
        assert {await complete(http, n) for n in range(50)} == {"200"}
        assert "suspect" not in log.read_text()


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
