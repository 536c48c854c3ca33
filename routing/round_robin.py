"""The ``round-robin`` policy: each replica in turn, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence

from routing.least_loaded import allowed
from routing.router import (
    Decision,
    NoReplica,
    ReplicaLoad,
    RouteRequest,
    RouterSettings,
    Stateless,
)

ROTATED = "rotated"
"""This policy's only reason."""


class RoundRobin(Stateless):
    """One after the other. A replica that is excluded loses its turn to the next one."""

    name = "round-robin"

    def __init__(self, settings: RouterSettings) -> None:
        self._turn = settings.seed

    def choose(
        self, request: RouteRequest, candidates: Sequence[ReplicaLoad], now_s: float
    ) -> Decision | NoReplica:
        candidates = allowed(request, candidates)
        if not candidates:
            return NoReplica()
        index = self._turn % len(candidates)
        self._turn = index + 1
        return Decision(candidates[index].id, ROTATED)


def create(settings: RouterSettings) -> RoundRobin:
    return RoundRobin(settings)
