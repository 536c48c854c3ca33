"""What a trace could have from prefix caches at best, and which of its requests are a group.

The ideal: caches without bound, each prompt's own part computed once, each common prefix once per
replica. A prefix is common when paths part after it: it has to be on every replica that serves one
of them, and there are at most as many of those as paths. As in vLLM, a prompt's last token is
always computed, so a block that ends with the prompt is never taken from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.trace import Request

GROUP_GAP = 100


@dataclass(slots=True)
class _Block:
    visits: int = 0
    """By requests that may take it from the cache."""
    closing: int = 0
    """By requests that end with it, before the first visit: they compute it for the others."""
    children: set[int] = field(default_factory=set)
    ends: set[int] = field(default_factory=set)
    """Ids of blocks that are not whole and follow it."""
    leaves: int = 0


def cached_tokens(requests: Sequence[Request], block_tokens: int, replicas: int) -> int:
    """Prompt tokens that caches could serve of all these requests, in tokens."""
    blocks: dict[int, _Block] = {}
    for request in requests:
        whole = request.whole_blocks(block_tokens)
        cacheable = (request.prompt_tokens - 1) // block_tokens
        before: _Block | None = None
        for position in range(whole):
            number = request.ids[position]
            block = blocks.get(number)
            if block is None:
                block = blocks[number] = _Block()
            if before is not None:
                before.children.add(number)
            if position < cacheable:
                block.visits += request.n
            elif not block.visits:
                block.closing += request.n
            before = block
        if before is not None and len(request.ids) > whole:
            before.ends.add(request.ids[whole])
    # First seen after the one before it, so that the other way round children come first.
    for block in reversed(blocks.values()):
        below = sum(blocks[child].leaves for child in block.children)
        # A block that is not whole may be the beginning of a child: a conversation that goes on.
        block.leaves = max(1, below + max(0, len(block.ends) - len(block.children)))
    hits = 0
    for block in blocks.values():
        computed = max(1, min(replicas, block.leaves)) - block.closing
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
