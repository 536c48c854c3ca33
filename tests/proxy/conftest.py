"""A whole daemon on a loopback port, in the test's own event loop, before simulated replicas."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from benchmarks.replica import SimulatedReplica
from proxy.daemon import Daemon
from proxy.settings import Secrets, Settings

DEADLINE_S = 15.0
"""Of anything a test waits for."""


class Running:
    """A started daemon, its URL and a client for it."""

    def __init__(self, daemon: Daemon, url: str, client: httpx.AsyncClient) -> None:
        self.daemon = daemon
        self.url = url
        self.client = client

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a state of the daemon; it is looked at whenever something changes."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await self.daemon.replicas.changed(0.05)

    async def until_ready(self, count: int) -> None:
        await self.until(lambda: len(self.daemon.replicas.fleet.routable()) == count)

    async def status(self) -> dict[str, Any]:
        answer = await self.client.get("/proxy/status")
        data: dict[str, Any] = answer.json()
        return data

    async def complete(self, model: str, prompt: Any, **fields: Any) -> httpx.Response:
        """A rollout shaped like TRL's."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
        }
        return await self.client.post("/v1/completions", json=body | fields)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """``await start(urls, **settings)``: a daemon before these replicas; stopped after the test.

    With ``ready=N`` it waits until so many are ready (default: all).
    """
    async with AsyncExitStack() as stack:

        async def begin(
            urls: list[str],
            *,
            ready: int | None = None,
            secrets: Secrets | None = None,
            **settings: Any,
        ) -> Running:
            quick: dict[str, Any] = {
                "probe_s": 0.2,
                "drain_s": 1.0,
                "hold_s": 5.0,
                "load_retry_s": 0.05,
                "load_retry_max_s": 0.2,
                "own_copies": "never",
            }
            daemon = Daemon(
                Settings(replicas=tuple(urls), **(quick | settings)), secrets or Secrets()
            )
            # With its protocol named, as in the product: else asyncio leaves Nagle's delay on.
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.bind(("127.0.0.1", 0))
            listener.listen(2048)
            listener.setblocking(False)
            daemon.start(listener)
            stack.push_async_callback(daemon.stop)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=url,
                    timeout=DEADLINE_S,
                    trust_env=False,
                    limits=httpx.Limits(max_connections=None),
                )
            )
            running = Running(daemon, url, client)
            await running.until_ready(len(urls) if ready is None else ready)
            return running

        yield begin


@pytest.fixture
async def pair() -> AsyncIterator[tuple[SimulatedReplica, SimulatedReplica]]:
    """Two simulated replicas."""
    async with SimulatedReplica() as a, SimulatedReplica() as b:
        yield a, b
