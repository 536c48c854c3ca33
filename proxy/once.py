"""Warnings that say something the first time only."""

from __future__ import annotations

import logging

MOST = 1000
"""Lines remembered, some 100 kB; what comes after them is not said at all."""


class Once:
    """Called with a line, says it to ``log`` unless it did before."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[str] = set()

    def __repr__(self) -> str:
        return f"<Once: {len(self._said)} lines said>"

    def __call__(self, line: str) -> None:
        if line not in self._said and len(self._said) < MOST:
            self._said.add(line)
            self._log.warning("%s", line)
