"""Generations begun: some in each turn of the event loop, the rest in the next ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from proxy.client import Client

MOST = 16
"""Begun in one turn: about 1 ms of short prompts, and 25 ms of prompts of 32,000 tokens."""


class Turns:
    """Lets what came with thousands of generations, a look at ``/proxy/live``, say, pass them.

    Without it all that arrived at once would be parsed, hashed and sent on in one turn, and whoever
    came behind the last of them would wait for that. The order of generations stays. One whose body
    comes in several reads begins at its head, and goes on as they come.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: deque[tuple[Callable[[Client], None], Client]] = deque()

    def begin(self, start: Callable[[Client], None], generation: Client) -> None:
        """Call ``start(generation)`` now or in one of the next turns."""
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        elif self._begun >= MOST:
            self._waiting.append((start, generation))
            return
        self._begun += 1
        start(generation)

    def _next(self) -> None:
        self._begun = 0
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        while self._waiting and self._begun < MOST:
            self._begun += 1
            start, generation = self._waiting.popleft()
            start(generation)
