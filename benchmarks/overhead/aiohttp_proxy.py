"""A proxy of the usual design, to compare with: aiohttp on both sides, bodies read whole.

It does what the job needs at the least: parse a body, hash its prompt's blocks in a chain, follow
the longest known prefix unless that replica is ahead of the least loaded, forward. No fleet, no
failover, no metrics. Run by the benchmark, not by hand.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from blake3 import blake3

BLOCK_TOKENS = 16
MAX_BLOCKS = 500_000
SPILL = 8
"""The daemon's own defaults of these three (``--block-size``, ``--max-tracked-blocks``,
``--spill-threshold``)."""
PASSED = ("content-type", "authorization", "accept")


class Proxy:
    """The prefix table, the load of each upstream, and a client."""

    def __init__(self, upstreams: Sequence[str], ca_file: str) -> None:
        self.upstreams = list(upstreams)
        self.in_flight = dict.fromkeys(self.upstreams, 0)
        self._table: OrderedDict[bytes, str] = OrderedDict()
        self._context = ssl.create_default_context(cafile=ca_file) if ca_file else None
        self._client: aiohttp.ClientSession

    async def life(self, _: web.Application) -> AsyncIterator[None]:
        connector = (
            aiohttp.TCPConnector(limit=0, ssl=self._context)
            if self._context
            else aiohttp.TCPConnector(limit=0)
        )
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._client:
            yield

    def choose(self, model: str, prompt: Any) -> str:
        """The upstream for this prompt; all its blocks are written down for it."""
        least = min(self.upstreams, key=self.in_flight.__getitem__)
        if not isinstance(prompt, list):
            return least
        chain, found = model.encode(), ""
        blocks = []
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = array("I", prompt[start : start + BLOCK_TOKENS])
            chain = blake3(chain + block.tobytes()).digest(16)
            blocks.append(chain)
            found = self._table.get(chain, found)
        chosen = found
        if not found or self.in_flight[found] > self.in_flight[least] + SPILL:
            chosen = least
        for chain in blocks:
            self._table[chain] = chosen
            self._table.move_to_end(chain)
        while len(self._table) > MAX_BLOCKS:
            self._table.popitem(last=False)
        return chosen

    async def generation(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        data = json.loads(body)
        upstream = self.choose(data.get("model", ""), data.get("prompt"))
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        self.in_flight[upstream] += 1
        try:
            url = upstream + request.path_qs
            async with self._client.post(url, data=body, headers=headers) as answer:
                kind = answer.headers.get("content-type", "")
                if not kind.startswith("text/event-stream"):
                    return web.Response(
                        status=answer.status,
                        body=await answer.read(),
                        headers={"content-type": kind},
                    )
                stream = web.StreamResponse(status=answer.status, headers={"content-type": kind})
                await stream.prepare(request)
                async for piece in answer.content.iter_any():
                    await stream.write(piece)
                await stream.write_eof()
                return stream
        finally:
            self.in_flight[upstream] -= 1

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()


def main() -> None:
    port, ca_file, *upstreams = sys.argv[1:]
    proxy = Proxy(upstreams, ca_file)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.cleanup_ctx.append(proxy.life)
    app.router.add_post("/v1/completions", proxy.generation)
    app.router.add_get("/health", proxy.health)
    web.run_app(
        app, host="127.0.0.1", port=int(port), backlog=8192, access_log=None, print=None,
        loop=asyncio.new_event_loop(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
