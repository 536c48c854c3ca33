"""A base image without a registry: minimal Debian with Python, from this machine's own mirror."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = "python3-venv,ca-certificates"
SOURCES = Path("/etc/apt")


@dataclass(frozen=True, slots=True)
class Mirror:
    """Where apt takes Debian itself from, and which release."""

    uri: str
    suite: str


def mirror(sources: Path = SOURCES) -> Mirror:
    """The first entry of apt's sources that is Debian itself. LookupError if there is none."""
    for found in (*_deb822(sources), *_one_line(sources)):
        if found.uri.rstrip("/").endswith("/debian"):
            return found
    raise LookupError(f"no mirror of Debian in {sources}")


def _deb822(sources: Path) -> Iterator[Mirror]:
    for file in sorted(sources.glob("sources.list.d/*.sources")):
        for stanza in re.split(r"\n\s*\n", file.read_text()):
            fields = dict(re.findall(r"^([\w-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
            if fields.get("URIs") and fields.get("Suites"):
                yield Mirror(fields["URIs"].split()[0], fields["Suites"].split()[0])


def _one_line(sources: Path) -> Iterator[Mirror]:
    for file in [sources / "sources.list", *sorted(sources.glob("sources.list.d/*.list"))]:
        if file.exists():
            for uri, suite in re.findall(
                r"^deb\s+(?:\[.*?\]\s+)?(\S+)\s+(\S+)", file.read_text(), re.MULTILINE
            ):
                yield Mirror(uri, suite)


def root_tar() -> Path:
    """The base's files as a tar archive; made once, kept in the user's cache. Takes minutes."""
    source = mirror()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollmux"
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / f"image-base-slim-{source.suite}.tar"
    with (cache / f"{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with tempfile.TemporaryDirectory(prefix="rollmux-base-") as folder:
                _debootstrap(source, Path(folder) / "root", made)
    return made


def _debootstrap(source: Mirror, root: Path, made: Path) -> None:
    options = ["--variant=minbase", f"--include={PACKAGES}"]
    _run(["debootstrap", *options, source.suite, str(root), source.uri])
    # As slim images from a registry are: without what apt fetched, manuals and translations.
    for rest in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / rest)
    for rest in ("doc", "info", "locale", "man"):
        shutil.rmtree(root / "usr/share" / rest, ignore_errors=True)
    half = made.with_suffix(".half")
    _run(["tar", "--create", "--file", str(half), "--directory", str(root), "."])
    half.rename(made)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
