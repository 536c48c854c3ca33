"""A small file that outlives the daemon: the ledger, the pause and the run's marker."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import orjson

from broadcast.ledger import Ledger
from broadcast.pause import Pause

log = logging.getLogger("rollmux")

FORMAT = 1


class Journal:
    """Written whole after each change, by rename; read once at the start."""

    def __init__(self, path: Path, ledger: Ledger, pause: Pause) -> None:
        self._path = path
        self._ledger = ledger
        self._pause = pause
        self._written = b""
        self._order = asyncio.Lock()

    async def save(self, run_id: str) -> None:
        """Before a control call is answered. A full disk is told, and stops nothing."""
        async with self._order:  # an older state must not land on a newer one
            state = orjson.dumps(
                {
                    "rollmux_journal": FORMAT,
                    "run_id": run_id,
                    "ledger": self._ledger.snapshot(),
                    "pause_query": self._pause.query,
                }
            )
            if state == self._written:
                return
            try:
                await asyncio.to_thread(_replace, self._path, state)
                self._written = state
            except OSError as exc:
                log.error("the journal %s is not written: %s", self._path, exc.strerror or exc)

    def read(self) -> tuple[str, dict[str, object]] | None:
        """The run's marker and the state of the ledger; None where there is nothing to go by."""
        try:
            data = orjson.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, orjson.JSONDecodeError) as exc:
            log.error("the journal %s cannot be read and is left out: %s", self._path, exc)
            return None
        run_id = data.get("run_id") if isinstance(data, dict) else None
        if not isinstance(run_id, str) or data.get("rollmux_journal") != FORMAT:
            log.error("the journal %s is of another kind and is left out", self._path)
            return None
        return run_id, data


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    os.replace(new, path)
