"""What is said once is not said again, and memory for it is bounded."""

from __future__ import annotations

import logging

from proxy import once
from proxy.once import Once


def test_a_line_is_said_the_first_time_only(caplog):
    warn = Once(logging.getLogger("a"))
    for line in ("one %s", "other", "one %s"):
        warn(line)
    Once(logging.getLogger("b"))("other")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("a", "WARNING", "one %s"), ("a", "WARNING", "other"), ("b", "WARNING", "other"),
    ]  # fmt: skip


def test_after_so_many_lines_no_more_are_said(caplog, monkeypatch):
    monkeypatch.setattr(once, "MOST", 3)
    warn = Once(logging.getLogger("a"))
    for number in range(10):
        warn(f"line {number}")
    assert len(caplog.records) == 3
