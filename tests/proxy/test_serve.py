"""The daemon's log lines as JSON, for those who collect them."""

from __future__ import annotations

import json
import logging
import sys

from proxy.serve import _Json


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
