"""What the pages say of log lines and of words for states is what the source can say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from broadcast.fleet import ReplicaState

ROOT = Path(__file__).parents[2]
OPERATION = (ROOT / "docs/operation.md").read_text("utf-8")
ERRORS = (ROOT / "docs/errors.md").read_text("utf-8")
SOURCES = [
    path
    for folder in ("proxy", "broadcast", "trainer_entry", "routing")
    for path in (ROOT / folder).rglob("*.py")
]
STATES = {state.value for state in ReplicaState}


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text in the source, docstrings too; those of an f-string piece by piece."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


TREES = [ast.parse(path.read_text("utf-8")) for path in SOURCES]
SAID = [text for tree in TREES for text in texts(tree)]


def logged() -> list[tuple[str, str]]:
    """Level and format of each call of the log; the level is empty where it is worked out."""
    found = []
    for tree in TREES:
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "log"):
                continue
            level = {"exception": "error", "log": ""}.get(node.func.attr, node.func.attr)
            found += [(level, text) for argument in node.args for text in texts(argument)]
    return found


LOGGED = logged()


def rows(text: str, name: str) -> list[list[str]]:
    table = text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in table.splitlines()[2:]]
    assert cells, name
    return cells


LOG_ROWS = [(p, row[1]) for row in rows(OPERATION, "log") for p in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize(("phrase", "level"), LOG_ROWS)
def test_a_log_line_of_the_guide_is_one_of_the_daemons(phrase: str, level: str) -> None:
    if "->" in phrase:
        assert set(re.findall(r"\w+", phrase)) <= STATES
        return
    levels = {found for found, text in LOGGED if phrase in text}
    if not levels:  # handed to a function that logs it
        assert any(phrase in text for text in SAID), f"no line has {phrase!r}"
        return
    assert levels & {level, ""}, f"{phrase!r} is logged as {levels}, not as {level}"


RUN_ROWS = [p for row in rows(OPERATION, "run") for p in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize("phrase", RUN_ROWS)
def test_a_line_of_rollmux_run_in_the_guide_is_one_of_its(phrase: str) -> None:
    assert any(phrase in text for text in SAID)


WORDS = ERRORS.partition("## Words for a replica's state")[2]
FIRST_CELLS = [line.split(" | ")[0] for line in WORDS.splitlines() if line.startswith("| `")]
STATE_WORDS = [word for cell in FIRST_CELLS for word in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("word", STATE_WORDS)
def test_a_word_for_a_state_is_one_that_the_source_knows(word: str) -> None:
    if made := re.fullmatch(r"(edge|models|is_paused)_\d+", word):
        assert any(made[1] in text for text in SAID)
    elif made := re.fullmatch(r"(unload|load|resetcache|pause|resume)_failed", word):
        assert "_failed" in SAID  # after the name of the step, in broadcast/catchup.py
    else:
        assert word in SAID


def test_the_demos_table_in_the_readme_has_the_demos_rows() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = readme.partition("It ends with a table")[2].split("```")[1].splitlines()[1:]
    source = (ROOT / "benchmarks/demo.py").read_text("utf-8")
    labels = [re.split(r"  +", line)[0] for line in shown if line]
    assert labels[0] == "rollouts"
    assert [label for label in labels if f'"{label}"' not in source] == []
