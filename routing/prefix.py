"""The ``prefix`` policy: a prompt goes where the part of it that is its own has been served.

- A block is *common* when every candidate has served it, or when paths part after it (the template
  of a run, a system prompt). What lies after the last common block identifies the prompt.
- The replicas that own the deepest known block of that part hold the most of the prompt: the least
  loaded of them is the favourite.
- No favourite, or one more than the spill threshold ahead of the least loaded replica: the least
  loaded, ties in rotation. It owns the path from now on, so a prompt stays where it spilled to.
- Equal loads are not equal shares: where replies happen to be long, fewer are sent. A new prompt
  evens that out: it goes to a replica that was sent a group less, if that one is hardly busier.
- With fewer than two candidates the rule of the owners is off: all would be common.
- A replica that owns the prompt to its end is an affinity, however it was found. After one spill
  between two replicas every block of the prompt is common, and both hold it.

The request asked about counts when looking for where paths part. Else the second prompt of a run
would follow the first to its replica, for the template's sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

from routing.blocks import Path, Paths
from routing.ids import ReplicaId
from routing.least_loaded import Rotation, allowed
from routing.prefix_table import Block, PrefixTable
from routing.router import (
    Decision,
    NoReplica,
    Reason,
    ReplicaLoad,
    RouteRequest,
    RouterSettings,
)

_MAX_PATH_BLOCKS = 8192
"""131,072 tokens at 16 a block, the context of today's long models: 4 ms to hash. Prompts that
agree so far are one prompt to us."""

_MAX_FLEETS = 16
"""Tuples of candidates remembered, one per live adapter: a trainer has few. About 100 bytes a
candidate each."""

_GROUP = 8
"""Rollouts that a replica may be behind before new prompts make up for it: TRL's num_generations.
docs/routing.md has its figures, and those of other values."""

_AFFINITY, _SPILLED, _UNMATCHED = Reason.AFFINITY, Reason.SPILLED, Reason.UNMATCHED

_HARDLY = 1
"""Rollouts that a replica may be busier than the least loaded one, to be sent what it is behind. Of
many replicas the least loaded one is far below the mean: with 2, groups placed so soon spill."""


class Prefix:
    """Affinity to the prefix that identifies a prompt, bounded by load."""

    name = "prefix"

    def __init__(self, settings: RouterSettings) -> None:
        if settings.block_tokens < 1:
            raise ValueError(f"block_tokens is {settings.block_tokens}: it must be at least 1")
        self._spill_threshold = settings.spill_threshold
        self._block_tokens = settings.block_tokens
        max_path_blocks = min(_MAX_PATH_BLOCKS, settings.max_tracked_blocks)
        self._paths = Paths(settings.block_tokens, max_path_blocks)
        self._table = PrefixTable(settings.max_tracked_blocks)
        self._rotation = Rotation(settings.seed)
        self._fleets: dict[int, _Fleet] = {}

    def __repr__(self) -> str:
        return f"Prefix({self._table!r}, {self._rotation!r})"

    @property
    def tracked_blocks(self) -> int:
        return len(self._table)

    def choose(
        self, request: RouteRequest, candidates: Sequence[ReplicaLoad], now_s: float
    ) -> Decision | NoReplica:
        fleet = self._fleet_of(candidates)
        everyone = fleet.all_bits if len(candidates) > 1 else 0
        if request.exclude:
            fleet = _Fleet(allowed(request, candidates), self._table)
        if not fleet.candidates:
            return NoReplica()
        trail = request.path
        if trail is None or trail.block_tokens != self._block_tokens:
            trail = self._paths.of(request.model, request.prompt)
        known = self._table.look(request.model, trail)
        owners = _owners_of_own_part(known, trail, everyone) & fleet.all_bits
        loads = [candidate.inflight for candidate in fleet.candidates]
        low = min(loads)
        reason = _UNMATCHED
        if owners:
            index = min(fleet.indices(owners), key=loads.__getitem__)
            ahead = loads[index] - low
            reason = _AFFINITY if ahead <= self._spill_threshold else _SPILLED
        if reason is not _AFFINITY:
            index = self._rotation.least(loads, low)
        if reason is _UNMATCHED:
            index = fleet.evened_out(index, loads, low + min(_HARDLY, self._spill_threshold))
        fleet.sent[index] += request.weight
        picked, bit = fleet.candidates[index].id, fleet.bits[index]
        depth = len(known)
        while depth and not known[depth - 1][1] & bit:
            depth -= 1
        if depth and depth == len(trail.blocks) + (trail.end is not None):
            reason = _AFFINITY
        self._table.record(request.model, trail, picked, known)
        total = len(trail.blocks)
        return Decision(picked, reason, min(depth, total), total, trail)

    def forget_adapter(self, model: str) -> None:
        self._table.forget_adapter(model)

    def forget_replica(self, replica: ReplicaId) -> None:
        self._table.forget_replica(replica)
        self._fleets.clear()

    def forget_all(self) -> None:
        self._table.forget_all()
        self._fleets.clear()

    def _fleet_of(self, candidates: Sequence[ReplicaLoad]) -> _Fleet:
        """A tuple that comes again is the same fleet, and spares a look at every candidate."""
        fleet = self._fleets.get(id(candidates))
        if fleet is None:
            fleet = _Fleet(candidates, self._table)
            if type(candidates) is tuple:
                if len(self._fleets) >= _MAX_FLEETS:
                    self._fleets.clear()
                self._fleets[id(candidates)] = fleet  # holds the tuple, so its id stays its own
        return fleet


class _Fleet:
    """Candidates with their bits in the table; good until the table forgets a replica."""

    def __init__(self, candidates: Sequence[ReplicaLoad], table: PrefixTable) -> None:
        self.candidates = candidates
        self.bits = [table.bit(candidate.id) for candidate in candidates]
        self.all_bits = reduce(or_, self.bits, 0)
        self._index = {bit: index for index, bit in enumerate(self.bits)}
        self.sent = [0] * len(self.bits)
        """Rollouts, since this fleet is known."""

    def evened_out(self, index: int, loads: list[int], high: int) -> int:
        """``index``, or a replica with a load of at most ``high`` that was sent a group less."""
        sent = self.sent
        enough = sent[index] - _GROUP
        if min(sent) >= enough:
            return index
        near = [other for other, load in enumerate(loads) if load <= high]
        fewest = min(near, key=sent.__getitem__)
        return fewest if sent[fewest] < enough else index

    def indices(self, owners: int) -> list[int]:
        """Positions of the candidates whose bits are set; there must be no other bits."""
        found = []
        while owners:
            bit = owners & -owners
            found.append(self._index[bit])
            owners ^= bit
        return found


def _owners_of_own_part(known: list[Block], trail: Path, everyone: int) -> int:
    """Owners of the deepest block known that lies after the last common one; 0 if none does.

    ``everyone``: bits of all candidates, or 0 for "the rule of the owners is off".
    """
    depth = len(known)
    for _, owners, first_block, first_end, parting in reversed(known):
        # This path can part from what the table has seen only after the last block it knows.
        if depth == len(known):
            if depth < len(trail.blocks):
                parting = parting or first_block not in (None, trail.blocks[depth])
            elif depth == len(trail.blocks):
                parting = parting or first_end not in (None, trail.end)
        depth -= 1
        if parting or (everyone and owners & everyone == everyone):
            return 0
        if owners:
            return owners
    return 0


def create(settings: RouterSettings) -> Prefix:
    return Prefix(settings)
