"""Where a figure comes from: the fields that every result carries."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent


def origin(seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """To be taken at the start: ``load`` is what else the machine was doing then."""
    return {
        "commit": _commit(),
        "at": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "seed": seed,
        "settings": dict(settings),
    }


def line(came: Mapping[str, Any]) -> str:
    """The same for a reader."""
    settings = ", ".join(f"{name} {value}" for name, value in came["settings"].items())
    return (
        f"commit {came['commit']}, {came['at']}, {came['machine']}, Python {came['python']}, "
        f"load {came['load']} at the start, seed {came['seed']}, {settings}"
    )


def _commit() -> str:
    """With ``-dirty`` behind it where files differ from it; ``unknown`` outside a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.machine()
