"""The contract that every routing policy meets: a request and its candidates in, a decision out.

Nothing here or in a policy awaits, reads a clock or does IO. The shell filters (only replicas that
are ready and hold the request's adapter are candidates); a policy scores and picks, and records
what it picked, in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from routing.blocks import Path
from routing.ids import ReplicaId


class Reason(StrEnum):
    """Why a replica was picked. A policy of your own may use other words (lower case, no space)."""

    AFFINITY = "affinity"
    """The replica already holds the prefix that identifies this prompt."""
    SPILLED = "spilled"
    """A replica holds the prefix, but is too far ahead of the least loaded one."""
    UNMATCHED = "unmatched"
    """No replica is known to hold the identifying prefix; chosen by load."""


class ReplicaLoad(Protocol):
    """What a policy may know of a replica. The objects live as long as their replica."""

    @property
    def id(self) -> ReplicaId: ...

    @property
    def inflight(self) -> int:
        """Rollouts chosen for this replica and not yet released, in prompts."""
        ...


@dataclass(slots=True)  # one a request: frozen, it takes a microsecond more
class RouteRequest:
    """One generation, as far as routing cares.

    ``prompt`` is a list of token ids, or the UTF-8 bytes of a prompt that comes as text (a string,
    or the messages of a chat). It is whatever a client sent: a policy must not raise on it.
    """

    model: str
    prompt: Sequence[int] | bytes
    weight: int = 1
    """How many prompts the call carries (``n`` times the length of a list of prompts)."""
    exclude: frozenset[ReplicaId] = frozenset()
    """Replicas that failed this request already."""
    path: Path | None = field(default=None, compare=False, repr=False)
    """What a policy gave as ``Decision.path`` for the same model and prompt, if that is known; of
    another block size, perhaps."""


@dataclass(slots=True)  # as RouteRequest
class Decision:
    """The pick and its explanation. ``matched_blocks`` of ``total_blocks`` are on ``replica``."""

    replica: ReplicaId
    reason: str
    matched_blocks: int = 0
    total_blocks: int = 0
    path: Path | None = field(default=None, compare=False, repr=False)
    """The prompt's, from ``routing.blocks.path`` at the settings' block size, where the policy has
    made it: whoever records the request need not hash it again."""


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No candidate is left."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What a policy's factory is given."""

    block_tokens: int = 16
    """Tokens per hash block; the replicas' own block size."""
    spill_threshold: int = 8
    """How many rollouts ahead of the least loaded replica the favourite may be."""
    max_tracked_blocks: int = 500_000
    """Bound of the prefix table, in blocks."""
    seed: int = 0
    """Seed of whatever a policy draws at random, and of where its rotation starts."""


@runtime_checkable
class Router(Protocol):
    """A routing policy. ``choose`` is the only call on the hot path."""

    @property
    def name(self) -> str: ...

    @property
    def tracked_blocks(self) -> int:
        """Blocks in the policy's table now; 0 for a policy that keeps none."""
        ...

    def choose(
        self, request: RouteRequest, candidates: Sequence[ReplicaLoad], now_s: float
    ) -> Decision | NoReplica:
        """Pick one of ``candidates`` that is not in ``request.exclude``, and record the pick.

        ``candidates`` are all replicas that are ready and hold ``request.model``, in a stable
        order; the same sequence object may come again. ``now_s`` is a monotonic time in seconds.
        """
        ...

    def forget_adapter(self, model: str) -> None:
        """The name was unloaded, or stands for other weights now."""
        ...

    def forget_replica(self, replica: ReplicaId) -> None:
        """The replica restarted, left, or its prefix cache was cleared."""
        ...

    def forget_all(self) -> None:
        """The weights changed in place: no cached block is worth anything."""
        ...


class Stateless:
    """Base for policies that keep no table: nothing to forget."""

    @property
    def tracked_blocks(self) -> int:
        return 0

    def forget_adapter(self, model: str) -> None:
        return None

    def forget_replica(self, replica: ReplicaId) -> None:
        return None

    def forget_all(self) -> None:
        return None
