"""Block hashes: equal exactly where prefixes under one adapter are equal."""

import os
import subprocess
import sys
from itertools import takewhile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from routing import blocks
from routing.blocks import (
    DIGEST_BYTES,
    TEXT_BYTES_PER_TOKEN,
    Paths,
    chain,
    path,
    prompt_digest,
)

SEEDS = ["m", "", "m ", "M", "é", "e\u0301", "trl-policy-v1", "trl-policy-v11", "\ud800"]
block_sizes = st.integers(1, 20)
tokens = st.one_of(st.integers(0, 3), st.integers(-(2**70), 2**70))
json_values = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
prompts = st.lists(tokens, max_size=80)
texts = st.binary(max_size=200)
edge = [2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, 2**64, 10**5000]


def shared(left: list, right: list) -> int:
    """How many items the two have in common from the start."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(common=prompts, left=prompts, right=prompts, size=block_sizes)
@example(common=[], left=[2**31] * 4, right=[2**31 - 1] * 4, size=2)
@example(common=[1] * 32, left=[2**40], right=[], size=16)
@example(common=edge, left=[1], right=[2], size=1)
def test_chains_agree_exactly_as_far_as_whole_blocks_do(
    common: list[int], left: list[int], right: list[int], size: int
) -> None:
    left, right = common + left, common + right
    one, other = chain("m", left, size), chain("m", right, size)
    assert len(one) == len(left) // size
    assert len(other) == len(right) // size
    assert shared(one, other) == shared(left, right) // size
    assert len(set(one + other)) == len(one) + len(other) - shared(one, other)


@given(common=texts, left=texts, right=texts, size=block_sizes)
def test_chains_of_text_agree_exactly_as_far_as_whole_blocks_do(
    common: bytes, left: bytes, right: bytes, size: int
) -> None:
    left, right = common + left, common + right
    one, other, width = chain("m", left, size), chain("m", right, size), TEXT_BYTES_PER_TOKEN * size
    assert len(one) == len(left) // width
    assert shared(one, other) == shared(list(left), list(right)) // width


@given(prompt=st.lists(json_values, max_size=40) | texts, size=block_sizes)
@example(prompt=[float("nan"), "\ud800", None, {}, [[[]]], *edge], size=1)
def test_whatever_json_can_carry_has_a_chain_and_always_the_same(
    prompt: list | bytes, size: int
) -> None:
    width = size * (TEXT_BYTES_PER_TOKEN if isinstance(prompt, bytes) else 1)
    hashes = chain("m", prompt, size)
    assert hashes == chain("m", prompt[:], size)
    assert len(hashes) == len(prompt) // width
    assert all(len(each) == DIGEST_BYTES for each in hashes)


@given(prompt=prompts | texts, size=block_sizes, left=st.sampled_from(SEEDS) | st.text())
def test_no_two_names_share_a_block(prompt: list[int] | bytes, size: int, left: str) -> None:
    """Trailing space, case and the form of a letter make another name."""
    for right in SEEDS:
        one, other = chain(left, prompt, size), chain(right, prompt, size)
        assert (left == right) or not set(one) & set(other)


def test_the_end_of_a_name_cannot_pass_for_the_start_of_a_prompt() -> None:
    assert chain("ma", b"bcde", 1) != chain("m", b"abcd", 1)
    assert chain("m", b"textabcd", 1)[1] != chain("mtext", b"abcd", 1)[0]
    assert chain("m", b"ints", 1) != chain("m", [0x73746E69], 1)
    assert chain("m", b"\x01\0\0\0", 1) != chain("m", [1], 1)


@pytest.mark.parametrize("odd", [None, 1.5, 2**31, [1], "1", {}])
def test_one_odd_item_changes_its_own_block_and_those_after_it(odd: object) -> None:
    plain = chain("m", list(range(64)), 16)
    mixed = chain("m", [*range(20), odd, *range(21, 64)], 16)
    assert mixed[0] == plain[0]
    assert not set(mixed[1:]) & set(plain)


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, object(), set()])
def test_what_is_no_prompt_is_an_empty_one(prompt: object) -> None:
    assert chain("m", prompt, 16) == []
    assert path("m", prompt, 16, 10).end is None


def test_nesting_past_any_limit_has_a_chain() -> None:
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert len(chain("m", deep, 1)) == 1


def test_a_chain_is_the_same_in_another_process() -> None:
    """Nothing of this process is in it: a restarted daemon writes the same trace."""
    code = (
        "from routing.blocks import chain\n"
        "print(*(h.hex() for h in chain('v', [*range(40), 's', None], 8) + chain('v', b'x'*99, 8)))"
    )
    expected = chain("v", [*range(40), "s", None], 8) + chain("v", b"x" * 99, 8)
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stdout.split() == [each.hex() for each in expected]


@given(prompt=prompts | texts, size=block_sizes, limit=st.integers(0, 6))
def test_a_path_is_the_start_of_the_chain_and_has_an_end_if_that_is_all(
    prompt: list[int] | bytes, size: int, limit: int
) -> None:
    whole = chain("m", prompt, size)
    trail = path("m", prompt, size, limit)
    assert trail.blocks == whole[:limit]
    assert (trail.end is not None) == (len(prompt) > 0 and len(whole) <= limit)
    assert trail.end not in whole


@given(common=prompts, left=prompts, right=prompts, size=block_sizes)
def test_ends_are_equal_exactly_when_prompts_are(
    common: list[int], left: list[int], right: list[int], size: int
) -> None:
    left, right = common + left, common + right
    if left and right:
        ends = [path("m", prompt, size, 1000).end for prompt in (left, right)]
        assert (ends[0] == ends[1]) == (left == right)


@given(left=prompts | texts, right=prompts | texts)
@example(left=[], right=b"")
def test_prompt_digests_are_equal_exactly_when_prompts_are(
    left: list[int] | bytes, right: list[int] | bytes
) -> None:
    same = type(left) is type(right) and left == right
    assert (prompt_digest("m", left) == prompt_digest("m", right)) == same
    assert prompt_digest("m", left) != prompt_digest("n", left)


def test_kept_paths_are_those_of_the_prompts(monkeypatch) -> None:
    monkeypatch.setattr(blocks, "KEPT_BLOCKS", 20)
    paths = Paths(16, 4)
    prompts: list = [list(range(n, n + n % 90)) for n in range(200)]
    prompts += [[], b"", b"text" * 40, [1, "two"], list(range(20)), tuple(range(20))]
    for model in ("m", "n"):
        for prompt in [*prompts, *reversed(prompts)]:
            expected = path(model, prompt, 16, 4)
            for _ in range(2):
                assert paths.of(model, prompt) == expected
            assert paths._kept_blocks <= 20
    first = paths.of("m", prompts[40])
    assert paths.of("m", prompts[40]) is first
    assert sum(len(p.blocks) + 1 for p in paths._kept.values()) == paths._kept_blocks
