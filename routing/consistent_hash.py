"""The ``consistent-hash`` policy: the same prompt always to the same replica, without a table.

Rendezvous hashing over the whole prompt and its model: each replica draws a number for the prompt,
the highest wins. When a replica leaves, only its prompts move. With bounded load: a replica more
than the spill threshold ahead of the least loaded one does not take part.

A conversation that grows by a turn is another prompt here; ``prefix`` keeps those together.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from routing.blocks import prompt_digest
from routing.ids import ReplicaId
from routing.least_loaded import allowed
from routing.router import (
    Decision,
    NoReplica,
    Reason,
    ReplicaLoad,
    RouteRequest,
    RouterSettings,
    Stateless,
)

HASHED = "hashed"
"""The prompt's own replica was picked."""

_PRIME = (1 << 61) - 1
"""A key times a replica's own random factor, modulo a prime: as good as independent draws, at a
tenth of the cost of hashing key and replica together."""

_MAX_FACTORS = 4096
"""Replica ids whose factor is kept; 150 bytes each. Past it all are computed again."""


class ConsistentHash(Stateless):
    """Rendezvous hashing with bounded load."""

    name = "consistent-hash"

    def __init__(self, settings: RouterSettings) -> None:
        self._spill_threshold = settings.spill_threshold
        self._factors: dict[ReplicaId, int] = {}

    def choose(
        self, request: RouteRequest, candidates: Sequence[ReplicaLoad], now_s: float
    ) -> Decision | NoReplica:
        candidates = allowed(request, candidates)
        if not candidates:
            return NoReplica()
        key = int.from_bytes(prompt_digest(request.model, request.prompt)[:8], "little")
        draws = [key * self._factor(candidate.id) % _PRIME for candidate in candidates]
        own = draws.index(max(draws))
        loads = [candidate.inflight for candidate in candidates]
        limit = min(loads) + self._spill_threshold
        if loads[own] <= limit:
            return Decision(candidates[own].id, HASHED)
        picked = max((draw, index) for index, draw in enumerate(draws) if loads[index] <= limit)[1]
        return Decision(candidates[picked].id, Reason.SPILLED)

    def _factor(self, replica: ReplicaId) -> int:
        factor = self._factors.get(replica)
        if factor is None:
            if len(self._factors) >= _MAX_FACTORS:
                self._factors.clear()
            digest = blake3(replica.encode("utf-8", "surrogatepass")).digest(8)
            factor = self._factors[replica] = int.from_bytes(digest, "little") % _PRIME
        return factor


def create(settings: RouterSettings) -> ConsistentHash:
    return ConsistentHash(settings)
