"""What a trace could have from prefix caches at best, and which of its requests are a group.

The ideal: caches without bound, each prompt's own part computed once, each common prefix once per
replica. A prefix is common when paths part after it: it has to be on every replica that serves one
of them, and there are at most as many of those as paths. As in vLLM, a prompt's last token is
always computed, so a block that ends with the prompt is never taken from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.trace import Request

GROUP_GAP = 100


@dataclass(slots=True)
class _Block:
    before: _Block | None
    """An id stands for all that comes before it, so there is one."""
    visits: int = 0
    """By requests that may take it from the cache."""
    closing: int = 0
    """By requests that end with it, before the first visit: they compute it for the others."""
    children: int = 0
    ends: int = 0
    """Blocks that are not whole and follow it."""
    below: int = 0
    """Paths that part after it, those of its children."""


def cached_tokens(requests: Sequence[Request], block_tokens: int, replicas: int) -> int:
    """Prompt tokens that caches could serve of all these requests, in tokens."""
    blocks: dict[int, _Block] = {}
    ends: set[int] = set()
    for request in requests:
        whole = request.whole_blocks(block_tokens)
        cacheable = (request.prompt_tokens - 1) // block_tokens
        before: _Block | None = None
        for position in range(whole):
            number = request.ids[position]
            block = blocks.get(number)
            if block is None:
                block = blocks[number] = _Block(before)
                if before is not None:
                    before.children += 1
            if position < cacheable:
                block.visits += request.n
            elif not block.visits:
                block.closing += request.n
            before = block
        if before is not None and len(request.ids) > whole and request.ids[whole] not in ends:
            ends.add(request.ids[whole])
            before.ends += 1
    hits = 0
    # First seen after the one before it, so that the other way round children come first.
    for block in reversed(blocks.values()):
        # A block that is not whole may be the beginning of a child: a conversation that goes on.
        leaves = max(1, block.below + max(0, block.ends - block.children))
        if block.before is not None:
            block.before.below += leaves
        computed = max(1, min(replicas, leaves)) - block.closing
        hits += block.visits - min(block.visits, max(0, computed))
    return hits * block_tokens


def groups(requests: Sequence[Request]) -> list[int]:
    """For each request the number of its group, from 0.

    A group is equal prompts for the same model, each at most ``GROUP_GAP`` requests after the one
    before it: a trainer sends a group's rollouts at once, and a prompt that comes again much later
    is another's.
    """
    open_groups: dict[tuple[str, int, bytes], tuple[int, int]] = {}  # number, last position
    numbers, count = [], 0
    for position, request in enumerate(requests):
        key = (request.model, request.prompt_tokens, request.ids.tobytes())
        number, last = open_groups.get(key, (-1, -GROUP_GAP - 1))
        if position - last > GROUP_GAP:
            number, count = count, count + 1
        open_groups[key] = (number, position)
        numbers.append(number)
    return numbers
