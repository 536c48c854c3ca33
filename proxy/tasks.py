"""The one place that starts background tasks: each has a name and an owner that ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger("rollmux")

T = TypeVar("T")


class Tasks:
    """Tasks that live until they end or their owner closes. A task that dies is reported."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, work: Coroutine[Any, Any, T], name: str, *, awaited: bool = False
    ) -> asyncio.Task[T]:
        """``awaited``: somebody waits for the task and is told of its error."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard if awaited else self._ended)
        return task

    async def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs and wait for it, bounded."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task %s failed: %s: %s", task.get_name(), type(error).__name__, error)
            log.debug("its traceback", exc_info=error)
