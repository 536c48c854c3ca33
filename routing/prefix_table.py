"""The prefix table: which replicas have served a block, and what came after it. Bounded.

Rules:

- Blocks are kept in *generations*, one for each span of time. A path is recorded whole into the
  youngest, and what an older one has of it moves there. So the blocks before a block are in its own
  generation or in a younger one, and whoever owns a block owns all before it.
- The oldest generation goes out first and as a whole: a block that is used stays as long as seven
  eighths of the bound are recorded after it (less the longest path, where that is more than an
  eighth). That costs 40 ns a block; to keep all blocks in one order and drop the oldest alone took
  fifteen times as long, most of it waiting for memory.
- Neighbours that moves have made so small that they fit into one span are joined, one pair for each
  new generation: so there are never many.
- Nothing is ever scanned. A forgotten adapter's blocks are told by their *epoch*, a forgotten
  replica's claims by its *bit*; both are void at once. A generation of nothing else goes out too.
- What went out is freed one generation for each path recorded, 4 ms at the default bound, so that
  forgetting all of a full table stalls nobody for tens of milliseconds.

A block costs about 200 bytes (measured: 94 MB for 486,000). Blocks are plain tuples
because the garbage collector does not track tuples of atoms: 500,000 small objects would stall the
event loop for tens of milliseconds at each full collection.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

from routing.blocks import Path
from routing.ids import BlockHash, ReplicaId

_MAX_BITS = 1024
"""Bits given out to replicas, a new one each time a replica was forgotten. Past it (and twice the
replicas there are) the table starts afresh: bits of the past would make every block bigger."""

_GENERATIONS = 8
"""Spans of time in a full table. More are more places to look for a block; fewer are longer steps
when one goes: at the default bound 4 ms after 60,000 new blocks, as long as a dictionary takes to
grow so far. To join two takes up to twice that."""

Block = tuple[int, int, BlockHash | None, BlockHash | None, bool]
"""Epoch; owners as a bit set; first block and first end seen after it; have two paths parted here,
that is, was a second block or a second end seen after it?"""


@dataclass(slots=True)
class _Epoch:
    """The time between two forgettings of one model's name."""

    number: int
    model: str
    blocks: int = 0


@dataclass(slots=True)
class _Generation:
    """What was recorded in one span of time."""

    blocks: dict[BlockHash, Block] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    """Of each epoch that is not over: its blocks here."""


class PrefixTable:
    """At most ``max_blocks`` blocks, void ones included."""

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}: a prefix table needs room for 1 block")
        self._max_blocks = max_blocks
        self._span = max(1, max_blocks // _GENERATIONS)
        self._generations = [_Generation()]  # youngest first
        self._out: deque[_Generation] = deque()  # yet to be freed
        # One epoch for each model that has a block here, so never more than there are blocks.
        self._by_model: dict[str, _Epoch] = {}
        self._by_number: dict[int, _Epoch] = {}
        self._epochs_begun = 0
        self._tracked = 0
        self._bits: dict[ReplicaId, int] = {}
        self._bits_given = 0
        self._living = 0

    def __len__(self) -> int:
        """Blocks that count: without those of forgotten adapters."""
        return self._tracked

    def __repr__(self) -> str:
        models = {epoch.model: epoch.blocks for epoch in self._by_model.values()}
        return (
            f"PrefixTable({self._tracked} of {self._max_blocks} blocks, "
            f"{self._held() - self._tracked} void, models {models}, "
            f"replicas {list(self._bits)})"
        )

    def bit(self, replica: ReplicaId) -> int:
        """The replica's bit in a set of owners, until one of the ``forget_`` methods is called."""
        bit = self._bits.get(replica)
        if bit is None:
            bit = self._bits[replica] = 1 << self._bits_given
            self._bits_given += 1
            self._living |= bit
        return bit

    def look(self, model: str, path: Path) -> list[Block]:
        """The known blocks of the path, from its root; the end, if all of it is known, is last.
        Owners may include bits of replicas forgotten since: mask with bits that are in use."""
        epoch = self._by_model.get(model)
        if epoch is None:
            return []
        number, whole = epoch.number, self._whole(path)
        youngest = self._generations[0].blocks
        if whole and (deepest := youngest.get(whole[-1])) is not None and deepest[0] == number:
            return list(map(youngest.__getitem__, whole))  # then so are all before it
        known: list[Block] = []
        generations = iter(self._generations)
        get = next(generations).blocks.get
        for block in whole:
            while (entry := get(block)) is None or entry[0] != number:
                older = next(generations, None)
                if older is None:
                    return known
                get = older.blocks.get
            known.append(entry)
        return known

    def record(
        self, model: str, path: Path, replica: ReplicaId, known: list[Block] | None = None
    ) -> None:
        """The replica serves this path from now on; every block of it is among the youngest again.

        ``known`` is what ``look`` has just said of the path, to spare a second look.
        """
        if self._out:
            self._out.popleft()
        whole = self._whole(path)
        if not whole:
            return
        if known is None:
            known = self.look(model, path)
        bit, young = self.bit(replica), self._generations[0]
        unknown = whole[len(known) :]
        if not unknown and known[-1][1] & bit and whole[-1] in young.blocks:
            return  # a prompt again, where it was: it is the replica's as a whole
        if young.blocks and len(young.blocks) + len(whole) > self._span:
            young = self._begin_span()
        epoch = self._by_model.get(model) or self._begin(model)
        number, living, blocks, end = epoch.number, self._living, young.blocks, path.end
        added, moved = len(unknown), 0
        next_block: BlockHash | None = None
        next_end: BlockHash | None = None
        if unknown and unknown[-1] is end:
            blocks[unknown.pop()] = (number, bit, None, None, False)
            next_end = end
        for block in reversed(unknown):
            blocks[block] = (number, bit, next_block, next_end, False)
            next_block, next_end = block, None
        for block, old in zip(reversed(whole[: len(known)]), reversed(known), strict=True):
            _, owners, first_block, first_end, parting = old
            if next_block is not None and next_block != first_block:
                parting = parting or first_block is not None
                first_block = first_block or next_block
            if next_end is not None and next_end != first_end:
                parting = parting or first_end is not None
                first_end = first_end or next_end
            new = (number, owners & living | bit, first_block, first_end, parting)
            if block not in blocks:
                self._take(block, number)
                moved += 1
                blocks[block] = new
            elif new != old:
                blocks[block] = new
            else:
                break  # all before it are here too, and this replica's
            if block is end:
                next_end = end
            else:
                next_block, next_end = block, None
        young.counts[number] += added + moved
        epoch.blocks += added
        self._tracked += added
        if added:
            self._make_room()

    def forget_adapter(self, model: str) -> None:
        epoch = self._by_model.pop(model, None)
        if epoch is not None:
            del self._by_number[epoch.number]
            self._tracked -= epoch.blocks
            for generation in self._generations:
                del generation.counts[epoch.number]
            self._out += [generation for generation in self._generations if not generation.counts]
            living = [generation for generation in self._generations if generation.counts]
            self._generations = living or [_Generation()]

    def forget_replica(self, replica: ReplicaId) -> None:
        """Its claims are void. Blocks stay, without an owner: that paths part there is still so."""
        self._living &= ~self._bits.pop(replica, 0)
        if self._bits_given > max(_MAX_BITS, 2 * len(self._bits)):
            self.forget_all()

    def forget_all(self) -> None:
        self._by_model.clear()
        self._by_number.clear()
        self._out += [generation for generation in self._generations if generation.blocks]
        self._generations = [_Generation()]
        self._tracked = 0
        self._bits.clear()
        self._bits_given = 0
        self._living = 0

    def _begin(self, model: str) -> _Epoch:
        self._epochs_begun += 1
        epoch = _Epoch(self._epochs_begun, model)
        self._by_model[model] = self._by_number[epoch.number] = epoch
        return epoch

    def _begin_span(self) -> _Generation:
        older = [generation for generation in self._generations if generation.blocks]
        sizes = [len(a.blocks) + len(b.blocks) for a, b in pairwise(older)]
        if sizes and (least := min(sizes)) <= self._span:
            younger = older.pop(sizes.index(least))
            elder = older[sizes.index(least)]
            elder.blocks.update(younger.blocks)  # in this order: the elder may have void copies
            elder.counts.update(younger.counts)
        self._generations = [_Generation(), *older]
        return self._generations[0]

    def _whole(self, path: Path) -> list[BlockHash]:
        """Blocks and end, as far as there is room for them."""
        whole = path.blocks if path.end is None else [*path.blocks, path.end]
        return whole if len(whole) <= self._max_blocks else whole[: self._max_blocks]

    def _held(self) -> int:
        """Blocks, void ones included."""
        return sum(len(generation.blocks) for generation in self._generations)

    def _take(self, block: BlockHash, number: int) -> None:
        """Out of the older generation that has it."""
        for generation in self._generations[1:]:
            if generation.blocks.pop(block, None) is not None:
                generation.counts[number] -= 1
                if not generation.counts[number]:
                    del generation.counts[number]
                return

    def _make_room(self) -> None:
        over = self._held() - self._max_blocks
        while over > 0:
            oldest = self._generations.pop()
            self._out.append(oldest)
            over -= len(oldest.blocks)
            for number, gone in oldest.counts.items():
                epoch = self._by_number[number]
                self._tracked -= gone
                epoch.blocks -= gone
                if not epoch.blocks:
                    del self._by_number[number], self._by_model[epoch.model]
