"""The load generator of the mixed soak: clients that leave, and answers that are to be bad.

Told how many requests to make on its standard input, a line each; run by ``soak``, not by hand.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.overhead import wire
from benchmarks.overhead.load import Client, Load, Target, result, tell
from benchmarks.overhead.wire import Kind

PROMPTS = 4_000
"""Distinct ones, used again and again: all are in the prefix table after 32,000 requests, so that
its growth is not taken for a leak."""
PROMPT_TOKENS = 135
LEAVE_S = 0.002  # before any upstream answers: they take 5 ms and more


class MixedClient(Client):
    """Leaves where its request's number says so, and knows what else to expect."""

    def send(self, number: int, body: bytes) -> None:
        super().send(number, body)
        if wire.kind_of(number) is Kind.ABORTED:
            self.load.loop.call_later(LEAVE_S, self._leave, number)

    def data_received(self, data: bytes) -> None:
        number = self.number
        super().data_received(data)
        if number and wire.kind_of(number) is Kind.ABORTED_STREAM:
            self._leave(number)

    def _leave(self, number: int) -> None:
        if self.number != number or self.transport is None:
            return  # answered before
        self.load.count.ends["left"] += 1
        self.number = 0
        self.transport.abort()
        self.load.reopen(self)

    def judge(self, number: int, now_s: float) -> None:
        count, kind = self.load.count, wire.kind_of(number)
        if kind is Kind.FAILED and self.status == 500 and b"made to fail" in self.start:
            count.ends["failed"] += 1
        else:
            whole_bytes = wire.stream_bytes(CHUNKS) if kind.streams else REPLY_BYTES
            if self.whole(number, whole_bytes) is not None:
                count.good += 1

    def connection_lost(self, exc: Exception | None) -> None:
        if self.number and wire.kind_of(self.number) is Kind.CUT:
            self.number = 0
            self.transport = None
            self.load.count.ends["cut"] += 1
            self.load.reopen(self)
            return
        super().connection_lost(exc)


class MixedLoad(Load):
    client = MixedClient


REPLY_BYTES = 2_000
CHUNKS = 5


def work() -> Iterator[tuple[int, bytes]]:
    """Without an end."""
    whole = wire.bodies(PROMPTS, PROMPT_TOKENS, 0, stream=False)
    streams = wire.bodies(PROMPTS, PROMPT_TOKENS, 0, stream=True)
    number = wire.NUMBERS
    while True:
        for index in range(PROMPTS * wire.GROUP):
            number += 1
            bodies = streams if wire.kind_of(number).streams else whole
            yield number, bodies[index // wire.GROUP]


async def session(url: str, in_flight: int) -> None:
    """One phase for each line: a JSON object with ``requests`` and ``deadline_s``."""
    parts = urlsplit(url)
    load = MixedLoad(
        Target([(parts.hostname or "", parts.port or 0)], 0, None), in_flight, streams=False
    )
    all_work = work()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked: dict[str, Any] = json.loads(line)
        count, took_s = await load.run(islice(all_work, asked["requests"]), asked["deadline_s"])
        tell(result(count, took_s))
    load.close()


if __name__ == "__main__":
    uvloop.run(session(sys.argv[1], int(sys.argv[2])))
