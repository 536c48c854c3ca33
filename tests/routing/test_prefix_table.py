"""The prefix table against a naive one that scans, and its bounds."""

import gc
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from routing import prefix_table
from routing.blocks import Path, path
from routing.prefix_table import PrefixTable

MODELS = ["v1", "v2", "v3"]
REPLICAS = ["r0", "r1", "r2"]
LIVE, VOID = "live", "void"


@dataclass
class NaiveBlock:
    name: bytes
    model: str
    state: str = LIVE
    generation: int = 0
    owners: set = field(default_factory=set)
    after: set = field(default_factory=set)
    ends: set = field(default_factory=set)


class NaiveTable:
    """The same rules, written with lists and scans."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.blocks: list[NaiveBlock] = []

    @property
    def youngest(self) -> int:
        return max((block.generation for block in self.blocks), default=0)

    def living(self, name: bytes) -> NaiveBlock | None:
        found = [b for b in self.blocks if b.name == name and b.state == LIVE]
        assert len(found) <= 1
        return found[0] if found else None

    @property
    def span(self) -> int:
        return max(1, self.bound // prefix_table._GENERATIONS)

    def join(self) -> None:
        """Of the neighbours that fit into one span the smallest pair; of equals the youngest."""
        sizes = Counter(block.generation for block in self.blocks)
        pairs = list(pairwise(sorted(sizes, reverse=True)))
        if not pairs:
            return
        younger, elder = min(pairs, key=lambda pair: sizes[pair[0]] + sizes[pair[1]])
        if sizes[younger] + sizes[elder] > self.span:
            return
        again = {block.name for block in self.blocks if block.generation == younger}
        self.blocks = [b for b in self.blocks if b.generation != elder or b.name not in again]
        for block in self.blocks:
            if block.generation == elder:
                block.generation = younger

    def drop(self, generation: int) -> None:
        self.blocks = [block for block in self.blocks if block.generation != generation]

    def record(self, model: str, trail: Path, replica: str) -> None:
        whole = [*trail.blocks] + ([trail.end] if trail.end else [])
        whole = whole[: self.bound]
        if not whole:
            return
        last = self.living(whole[-1])
        if last and replica in last.owners and last.generation == self.youngest:
            return
        generation = self.youngest
        young = sum(block.generation == generation for block in self.blocks)
        if young and young + len(whole) > self.span:
            self.join()
            generation += 1
        for position, name in enumerate(whole):
            block = self.living(name)
            if block is None:
                block = NaiveBlock(name, model)
                self.blocks = [
                    b for b in self.blocks if (b.name, b.generation) != (name, generation)
                ]
                self.blocks.append(block)
            block.generation = generation
            block.owners.add(replica)
            if position + 1 < len(whole):
                kind = block.ends if whole[position + 1] == trail.end else block.after
                kind.add(whole[position + 1])
        while len(self.blocks) > self.bound:
            self.drop(min(block.generation for block in self.blocks))

    def forget(self, model: str | None = None) -> None:
        for block in self.blocks:
            if model in (None, block.model):
                block.state = VOID
        for generation in {block.generation for block in self.blocks}:
            if all(b.state == VOID for b in self.blocks if b.generation == generation):
                self.drop(generation)

    def forget_replica(self, replica: str) -> None:
        for block in self.blocks:
            block.owners.discard(replica)

    def look(self, trail: Path) -> list[NaiveBlock]:
        known = []
        for name in ([*trail.blocks] + ([trail.end] if trail.end else []))[: self.bound]:
            block = self.living(name)
            if block is None:
                break
            known.append(block)
        return known


prompts = st.lists(st.integers(0, 1), max_size=9)


class TableMachine(RuleBasedStateMachine):
    @initialize(bound=st.sampled_from([3, 12, 40, 120]))
    def begin(self, bound: int) -> None:
        self.bound = bound
        self.naive = NaiveTable(bound)
        self.table = PrefixTable(bound)

    @rule(model=st.sampled_from(MODELS), prompt=prompts, replica=st.sampled_from(REPLICAS))
    def record(self, model: str, prompt: list[int], replica: str) -> None:
        trail = path(model, prompt, 2, 12)
        self.table.record(model, trail, replica)
        self.naive.record(model, trail, replica)

    @rule(model=st.sampled_from(MODELS), prompt=prompts)
    def look(self, model: str, prompt: list[int]) -> None:
        trail = path(model, prompt, 2, 12)
        found, expected = self.table.look(model, trail), self.naive.look(trail)
        assert len(found) == len(expected)
        bits = {replica: self.table.bit(replica) for replica in REPLICAS}
        for (_, owners, first_block, first_end, parting), block in zip(
            found, expected, strict=True
        ):
            assert {replica for replica in REPLICAS if owners & bits[replica]} == block.owners
            assert (first_block is None) == (not block.after)
            assert (first_end is None) == (not block.ends)
            assert first_block is None or first_block in block.after
            assert first_end is None or first_end in block.ends
            assert parting == (len(block.after) > 1 or len(block.ends) > 1)

    @rule(model=st.sampled_from(MODELS))
    def forget_adapter(self, model: str) -> None:
        self.table.forget_adapter(model)
        self.naive.forget(model)

    @rule(replica=st.sampled_from(REPLICAS))
    def forget_replica(self, replica: str) -> None:
        self.table.forget_replica(replica)
        self.naive.forget_replica(replica)

    @precondition(lambda self: len(self.naive.blocks) > 8)
    @rule()
    def forget_all(self) -> None:
        self.table.forget_all()
        self.naive.forget()

    @invariant()
    def counts_what_is_live(self) -> None:
        live = sum(block.state == LIVE for block in self.naive.blocks)
        assert len(self.table) == live
        assert self.table._held() == len(self.naive.blocks) <= self.bound
        assert len(self.table._generations) <= 2 * (self.bound // self.naive.span) + 2
        assert len(self.table._by_model) == len(self.table._by_number) <= live


TestAgainstNaive = TableMachine.TestCase
TestAgainstNaive.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def prompt(number: int, length: int = 64) -> list[int]:
    return [number * 1000 + position for position in range(length)]


def test_the_prompt_that_was_longest_unused_goes_out_first() -> None:
    table = PrefixTable(10)
    trails = [path("m", prompt(number), 16, 10) for number in range(3)]  # 5 entries each
    table.record("m", trails[0], "r0")
    table.record("m", trails[1], "r0")
    table.record("m", trails[0], "r0")  # the younger one now
    table.record("m", trails[2], "r0")
    assert [len(table.look("m", trail)) for trail in trails] == [5, 0, 5]


def test_seven_eighths_of_the_bound_are_kept_whatever_comes() -> None:
    table = PrefixTable(800)
    for number in range(1000):
        table.record("m", path("m", prompt(number), 16, 10), "r0")
        kept = range(max(0, number - 140 + 1), number + 1)  # 140 prompts of 5 entries are 700
        assert len(table.look("m", path("m", prompt(kept[0]), 16, 10))) == 5
    assert 700 <= len(table) <= 800


@pytest.mark.parametrize("new", [0, 1])
def test_prompts_that_come_again_for_ever_leave_no_empty_generations_behind(new: int) -> None:
    table = PrefixTable(8000)
    for turn in range(100):
        for number in range(300):  # 1500 of 8000 entries, and each time some that are new
            table.record("m", path("m", prompt(number), 16, 10), "r0")
        for number in range(new):
            table.record("m", path("m", prompt(1000 + turn + number), 16, 10), "r0")
    assert len(table) == 1500 + 500 * new
    assert len(table._generations) <= 2 * prefix_table._GENERATIONS + 2
    assert not table._out


def test_what_is_forgotten_is_freed_little_by_little() -> None:
    table = PrefixTable(800)
    for number in range(150):
        table.record("m", path("m", prompt(number), 16, 10), "r0")
    table.forget_all()
    assert len(table) == table._held() == 0
    left = [len(table._out)]
    while table._out:
        table.record("m", path("m", prompt(1), 16, 10), "r0")
        left.append(len(table._out))
    assert left == list(range(left[0], -1, -1))
    assert left[0] >= 8
    for _ in range(100):
        table.forget_all()
        table.forget_all()
        table.record("m", path("m", prompt(1), 16, 10), "r0")
    assert len(table._out) <= 1


def test_a_prompt_longer_than_the_table_is_known_as_far_as_there_is_room() -> None:
    table = PrefixTable(4)
    trail = path("m", prompt(1), 16, 4)  # 5 entries
    for _ in range(2):
        table.record("m", trail, "r0")
        assert len(table.look("m", trail)) == len(table) == 4


def test_forgotten_blocks_leave_memory_at_once_where_nothing_else_is_beside_them() -> None:
    table = PrefixTable(8000)
    for number in range(1000):
        table.record("old", path("old", prompt(number), 16, 10), "r0")
    for number in range(10):
        table.record("new", path("new", prompt(number), 16, 10), "r0")
    table.forget_adapter("old")
    assert (len(table), table._held()) == (50, 50)


def test_a_name_that_comes_again_does_not_bring_its_old_blocks_back() -> None:
    table = PrefixTable(100)
    old, new = (path("m", prompt(number), 16, 10) for number in (1, 2))
    table.record("other", path("other", prompt(1), 16, 10), "r0")  # older: keeps void blocks in
    table.record("m", old, "r0")
    table.forget_adapter("m")
    table.record("m", new, "r0")
    assert (len(table.look("m", old)), len(table.look("m", new))) == (0, 5)


def test_a_replica_that_restarts_for_ever_costs_no_memory() -> None:
    table, trail = PrefixTable(100), path("m", prompt(1), 16, 10)
    table.record("m", trail, "r1")
    for _ in range(5000):
        table.record("m", trail, "r0")
        table.forget_replica("r0")
    assert table.bit("r0").bit_length() <= prefix_table._MAX_BITS + 2
    for _ in range(50):
        table.record("m", trail, "r0")
        assert all(block[1].bit_count() <= 2 for block in table.look("m", trail))
        table.forget_replica("r0")
    table.record("m", trail, "r0")
    assert all(block[1] & table.bit("r0") for block in table.look("m", trail))


def test_names_that_never_come_again_leave_nothing_behind() -> None:
    table = PrefixTable(100)
    for number in range(500):
        table.record(f"m{number}", path(f"m{number}", prompt(1), 16, 10), "r0")
    assert len(table._by_model) == len(table._by_number) == 20


def test_the_collector_does_not_track_blocks() -> None:
    """Else 500,000 of them would stall the event loop at every full collection."""
    table = PrefixTable(1000)
    for number in range(100):
        table.record("m", path("m", prompt(number), 16, 10), f"r{number % 3}")
    gc.collect()
    assert not any(gc.is_tracked(block) for g in table._generations for block in g.blocks.values())


def test_its_repr_shows_its_state() -> None:
    table = PrefixTable(100)
    table.record("v1", path("v1", prompt(1), 16, 10), "r0")
    table.record("v2", path("v2", prompt(1), 16, 10), "r1")
    table.forget_adapter("v1")
    assert repr(table) == (
        "PrefixTable(5 of 100 blocks, 5 void, models {'v2': 5}, replicas ['r0', 'r1'])"
    )


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 1 block"):
        PrefixTable(0)
