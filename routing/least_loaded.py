"""The ``least-loaded`` policy: the replica with the fewest rollouts in flight."""

from __future__ import annotations

from collections.abc import Sequence

from routing.router import (
    Decision,
    NoReplica,
    Reason,
    ReplicaLoad,
    RouteRequest,
    RouterSettings,
    Stateless,
)


def allowed(request: RouteRequest, candidates: Sequence[ReplicaLoad]) -> Sequence[ReplicaLoad]:
    """The candidates that have not failed this request already."""
    if not request.exclude:
        return candidates
    return [candidate for candidate in candidates if candidate.id not in request.exclude]


class Rotation:
    """Takes turns among equals: the first of them that comes after the one picked last."""

    def __init__(self, start: int) -> None:
        self._turn = start

    def __repr__(self) -> str:
        return f"Rotation({self._turn})"

    def least(self, loads: list[int], low: int) -> int:
        """Index of a load that equals ``low``, which is the smallest of ``loads``."""
        start = self._turn % len(loads)
        try:
            index = loads.index(low, start)
        except ValueError:
            index = loads.index(low)
        self._turn = index + 1
        return index


class LeastLoaded(Stateless):
    """Fewest in flight, ties in rotation."""

    name = "least-loaded"

    def __init__(self, settings: RouterSettings) -> None:
        self._rotation = Rotation(settings.seed)

    def choose(
        self, request: RouteRequest, candidates: Sequence[ReplicaLoad], now_s: float
    ) -> Decision | NoReplica:
        candidates = allowed(request, candidates)
        if not candidates:
            return NoReplica()
        loads = [candidate.inflight for candidate in candidates]
        index = self._rotation.least(loads, min(loads))
        return Decision(candidates[index].id, Reason.UNMATCHED)


def create(settings: RouterSettings) -> LeastLoaded:
    return LeastLoaded(settings)
