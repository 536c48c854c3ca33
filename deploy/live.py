"""The container's health check: ``python -m deploy.live`` asks the daemon here whether it lives.

Exit code 0 if it answers, 1 if not. The image has no curl. The address is the daemon's as the
environment gives it (``ROLLMUX_HOST``, ``ROLLMUX_PORT``); give them there, not as options.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping
from typing import Final

TIMEOUT_S: Final = 3.0
WILDCARDS: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses one can listen on but should not connect to."""


def is_live(environ: Mapping[str, str]) -> bool:
    """Whether ``GET /proxy/live`` is answered 200. That needs no API key and no ready replica."""
    host = environ.get("ROLLMUX_HOST", "").strip().removeprefix("[").removesuffix("]")
    port = environ.get("ROLLMUX_PORT", "").strip()
    # A Service called rollmux makes Kubernetes set ROLLMUX_PORT=tcp://...; the daemon skips that.
    number = int(port) if port.isdecimal() else 8000
    connection = http.client.HTTPConnection(WILDCARDS.get(host, host), number, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/proxy/live")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_live(os.environ) else 1)
