"""The engine load: how many requests a replica runs and queues, from its own ``/metrics``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GAUGE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting)(?:\{.*\})? ([0-9.e+]+)\s*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests, summed over the engines of one server."""

    running: float
    waiting: float


def read(page: bytes) -> EngineLoad | None:
    """None for a page without the two gauges (vLLM 0.27.1, v1/metrics/loggers.py).

    A page has some hundred kilobytes; looking for two names in it takes a fraction of what parsing
    it would.
    """
    sums: dict[bytes, float] = {}
    for name, value in _GAUGE.findall(page):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            return None
    if len(sums) < 2:
        return None
    return EngineLoad(sums[b"num_requests_running"], sums[b"num_requests_waiting"])
