"""The daemon's log lines as JSON, for those who collect them."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys

import pytest

from proxy.serve import _Json, _Text


def test_a_json_line_is_one_object_and_keeps_the_traceback():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("rollmux", logging.ERROR, __file__, 1, "%s", ("broke",), None)
        record.exc_info = sys.exc_info()
    text = _Json().format(record)
    line = json.loads(text)
    assert "\n" not in text
    assert (line["level"], line["message"]) == ("error", "broke")
    assert line["traceback"].endswith("ValueError: two\nlines")
    record.exc_info = None
    assert set(json.loads(_Json().format(record))) == {"time", "level", "message"}


@pytest.mark.parametrize("formatter", [_Json(), _Text()], ids=["json", "text"])
def test_what_a_client_sent_stays_within_its_line(formatter):
    model = "x\n2026-01-01 00:00:00 ERROR   forged\r\x1b[31m\ud800 für"
    record = logging.LogRecord("rollmux", logging.WARNING, __file__, 1, "no %s", (model,), None)
    text = formatter.format(record)
    assert text.isprintable()
    assert "für" in text
    text.encode()
    try:
        raise ValueError(model)
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError" in formatter.format(record)


FAULTS = """
import resource, sys
from proxy.serve import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    replies = [bytearray(2_000_000) for _ in range(16)]
    del replies
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 16)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no mallopt")
def test_large_replies_use_the_memory_of_those_before_them():
    def faults(word: str) -> float:
        """Page faults of one reply of 2 MB, which has 489 pages."""
        run = subprocess.run(
            [sys.executable, "-c", FAULTS, word], capture_output=True, text=True, check=True
        )
        return float(run.stdout)

    if faults("not kept") < 100:
        pytest.skip("nothing faults here in any case: huge pages?")
    assert faults("kept") < 10
