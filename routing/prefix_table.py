"""The prefix table: which replicas have served a block, and what came after it. Bounded.

Rules:

- A path is recorded whole, its end first and its root last, so a block is never younger than the
  one before it. The oldest goes out first, hence a known block's predecessors are known, and
  whoever owns a block owns all before it.
- Nothing is ever scanned. A forgotten adapter's blocks are told by their *epoch*, a forgotten
  replica's claims by its *bit*; both are void at once and go out when they are the oldest.

A block costs about 250 bytes (measured: 126 MB at the default bound of 500,000). Blocks are plain
tuples because the garbage collector does not track tuples of atoms: 500,000 small objects would
stall the event loop for tens of milliseconds at each full collection.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import chain

from routing.blocks import Path
from routing.ids import BlockHash, ReplicaId

_MAX_BITS = 1024
"""Bits given out to replicas, a new one each time a replica was forgotten. Past it (and twice the
replicas there are) the table starts afresh: bits of the past would make every block bigger."""

_SWEPT_PER_RECORD = 64
"""Void blocks dropped from the old end at each record, so that what is forgotten gives its memory
back soon: about 10 µs, and more than one prompt of a usual length brings."""

Block = tuple[int, int, BlockHash | None, BlockHash | None, bool]
"""Epoch; owners as a bit set; first block and first end seen after it; have two paths parted here,
that is, was a second block or a second end seen after it?"""


@dataclass(slots=True)
class _Epoch:
    """The time between two forgettings of one model's name."""

    number: int
    model: str
    blocks: int = 0


class PrefixTable:
    """At most ``max_blocks`` blocks, void ones included."""

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}: a prefix table needs room for 1 block")
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[BlockHash, Block] = OrderedDict()  # oldest first
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
            f"{len(self._blocks) - self._tracked} void, models {models}, "
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
        number, blocks, get = epoch.number, self._blocks, self._blocks.get
        whole = path.blocks if path.end is None else [*path.blocks, path.end]
        if whole and (deepest := get(whole[-1])) is not None and deepest[0] == number:
            return list(map(blocks.__getitem__, whole))  # then so are all before it
        known = []
        for block in whole:
            entry = get(block)
            if entry is None or entry[0] != number:
                break
            known.append(entry)
        return known

    def record(self, model: str, path: Path, replica: ReplicaId) -> None:
        """The replica serves this path from now on; every block of it is the youngest again."""
        if not path.blocks and path.end is None:
            return
        epoch = self._by_model.get(model) or self._begin(model)
        number, bit, living, end = epoch.number, self.bit(replica), self._living, path.end
        blocks, get, renew = self._blocks, self._blocks.get, self._blocks.move_to_end
        deepest = get(path.blocks[-1] if end is None else end)
        if deepest is not None and deepest[0] == number and deepest[1] & bit:
            # A prompt again, where it was: it is the replica's as a whole, and only younger now.
            if end is not None:
                renew(end)
            for block in reversed(path.blocks):
                renew(block)
            self._make_room()
            return
        added = 0
        next_block: BlockHash | None = None
        next_end: BlockHash | None = None
        for block in chain((end,) if end is not None else (), reversed(path.blocks)):
            old = get(block)
            if old is None or old[0] != number:
                blocks[block] = (number, bit, next_block, next_end, False)
                added += 1
            else:
                _, owners, first_block, first_end, parting = old
                if next_block is not None and next_block != first_block:
                    parting = parting or first_block is not None
                    first_block = first_block or next_block
                if next_end is not None and next_end != first_end:
                    parting = parting or first_end is not None
                    first_end = first_end or next_end
                new = (number, owners & living | bit, first_block, first_end, parting)
                if new != old:
                    blocks[block] = new
            if old is not None:  # else it is the youngest already
                renew(block)
            if block is end:
                next_end = end
            else:
                next_block, next_end = block, None
        epoch.blocks += added
        self._tracked += added
        self._make_room()

    def forget_adapter(self, model: str) -> None:
        epoch = self._by_model.pop(model, None)
        if epoch is not None:
            del self._by_number[epoch.number]
            self._tracked -= epoch.blocks

    def forget_replica(self, replica: ReplicaId) -> None:
        """Its claims are void. Blocks stay, without an owner: that paths part there is still so."""
        self._living &= ~self._bits.pop(replica, 0)
        if self._bits_given > max(_MAX_BITS, 2 * len(self._bits)):
            self.forget_all()

    def forget_all(self) -> None:
        self._by_model.clear()
        self._by_number.clear()
        self._tracked = 0
        self._bits.clear()
        self._bits_given = 0
        self._living = 0

    def _begin(self, model: str) -> _Epoch:
        self._epochs_begun += 1
        epoch = _Epoch(self._epochs_begun, model)
        self._by_model[model] = self._by_number[epoch.number] = epoch
        return epoch

    def _make_room(self) -> None:
        blocks = self._blocks
        over = len(blocks) - self._max_blocks
        if over > 0:
            oldest = blocks.popitem
            for number, gone in Counter([oldest(False)[1][0] for _ in range(over)]).items():
                epoch = self._by_number.get(number)
                if epoch is None:
                    continue
                self._tracked -= gone
                epoch.blocks -= gone
                if not epoch.blocks:
                    del self._by_number[number], self._by_model[epoch.model]
        for _ in range(_SWEPT_PER_RECORD):
            if not blocks or blocks[next(iter(blocks))][0] in self._by_number:
                break
            blocks.popitem(last=False)
