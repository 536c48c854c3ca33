"""The maths reward, as far as it goes without math-verify (tests/e2e has the rest)."""

from __future__ import annotations

import pickle

import pytest

from trainer_entry.recipes.reward import LONGEST_ANSWER_CHARS, BoxedReward, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so it is \boxed{42}.", "42"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.} and", r"\left\{ x \right."),
        (r"\boxed{a \\ b}", r"a \\ b"),
        (r"\boxed{}", ""),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{\frac{1}{2}", None),
        ("\\boxed{1\\", None),
        ("the answer is 42", None),
        ("", None),
    ],
)
def test_last_box_with_its_braces_balanced(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def score(text: str, gold: str, tokens: int = 10, limit: int = 100) -> float:
    completion = [{"role": "assistant", "content": text}]
    (value,) = BoxedReward(limit)(
        completions=[completion], solution=[gold], completion_ids=[[0] * tokens], prompts=[None]
    )
    return value


@pytest.mark.parametrize(
    ("boxed", "gold"),
    [
        ("7", "7"),
        (" 7 ", "$7$"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 1,\,2\right)", "(1,2)"),
    ],
)
def test_alike_but_for_spacing_is_right(boxed: str, gold: str) -> None:
    assert score(f"\\boxed{{{boxed}}}", gold) == 1.0


def test_spacing_commands_are_not_cut_out_of_longer_ones() -> None:
    assert score(r"\boxed{\leftarrow}", r"\leftarrow") == 1.0


def test_no_box_or_an_endless_one_is_wrong() -> None:
    long = "7" * (LONGEST_ANSWER_CHARS + 1)
    assert [score("7", "7"), score(r"\boxed{}", "7"), score(f"\\boxed{{{long}}}", long)] == [
        0.0
    ] * 3


def test_completion_that_was_cut_off_is_wrong() -> None:
    assert score(r"\boxed{7} and so on", "7", tokens=100, limit=100) == 0.0
    assert score(r"\boxed{7} and so on", "7", tokens=99, limit=100) == 1.0


def test_goes_into_the_rollout_process() -> None:
    assert pickle.loads(pickle.dumps(BoxedReward(24))) == BoxedReward(24)
