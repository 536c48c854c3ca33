"""The version: of the checkout this runs from, or of the installed distribution."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """For example ``0.1.0``; ``unknown`` where the files were only copied."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    try:
        return str(tomllib.loads(project.read_text("utf-8"))["project"]["version"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        pass
    try:
        return metadata.version("rollmux")
    except metadata.PackageNotFoundError:
        return "unknown"
