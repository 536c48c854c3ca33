"""The commands of the pages: what stands in their fenced blocks, cut into simple commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = frozenset(("bash", "sh", "shell", "console"))
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
OPERATORS = frozenset(("&&", "||", ";", "|", "&", "(", ")", ";;"))
REDIRECTIONS = frozenset((">", ">>", "<", "2>", ">&", "&>"))
HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command of a page."""

    page: str
    line: int
    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. ``line`` is that of its first line of content."""

    page: str
    line: int
    language: str
    text: str


def pages() -> list[Path]:
    """README, changelog, and every page of docs/ and deploy/."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")]
    return sorted(found)


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, indented ones too."""
    indent, language, start, lines = "", "", 0, None
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if not (fence := re.match(r"(\s*)```(\w*)", line)):
            if lines is not None:
                lines.append(line.removeprefix(indent))
        elif lines is None:
            indent, language = fence.groups()
            start, lines = number + 1, []
        else:
            yield Block(str(page.relative_to(ROOT)), start, language, "\n".join(lines))
            lines = None
    assert lines is None, f"{page}: a fenced block has no end"


def commands(block: Block) -> Iterator[Command]:
    """The simple commands of a block of shell."""
    if block.language == "console":
        lines = [line[2:] if line.startswith("$ ") else "" for line in block.text.splitlines()]
    else:
        lines = block.text.splitlines()
    number = 0
    while number < len(lines):
        first, text = number, lines[number]
        number += 1
        while text.rstrip().endswith("\\") and number < len(lines):
            text = f"{text.rstrip()[:-1]} {lines[number].strip()}"
            number += 1
        while (words := _words(text)) is None:  # a quotation goes on
            assert number < len(lines), f"{block.page}:{block.line + first}: no end of a quotation"
            text = f"{text}\n{lines[number]}"
            number += 1
        if document := HERE_DOCUMENT.search(text):
            while number < len(lines) and lines[number].strip() != document[1]:
                number += 1
            number += 1
            words = _words(text[: document.start()]) or []
        for simple in _split(words):
            environ = {}
            while simple and (found := ASSIGNMENT.fullmatch(simple[0])):
                environ[found[1]] = found[2]
                simple = simple[1:]
            if simple or environ:
                words_of = tuple(simple) or ("export",)
                yield Command(block.page, block.line + first, words_of, environ)


def _words(text: str) -> list[str] | None:
    """None while a quotation is open."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def _split(words: list[str]) -> Iterator[list[str]]:
    simple: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in OPERATORS:
            yield simple
            simple = []
        elif word in REDIRECTIONS:
            next(rest, None)  # its file
        else:
            simple.append(word)
    yield simple
