"""The daemon's own copy of an adapter: ``<folder>/.rollmux/<name>-<digest>/``.

``<folder>`` is the parent of the trainer's directory, where replicas read it through the shared
mount, or a local one, from which it is pushed to them.

Its path names its bytes, so no mount can hold an older version of it, and the trainer cannot delete
it under an engine. A plain copy, never hard links: a FUSE bucket has none, and bytes that are ours
alone cannot change. A LoRA adapter has a few megabytes.

Blocking: the shell calls it in a thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from broadcast.adapter_dir import CHUNK_BYTES, digest, files

FOLDER = ".rollmux"
MAX_BYTES = 256 * 1024 * 1024
"""Above it a copy costs more than it saves: seconds of writing and of upload at each sync."""
STALE_S = 3600.0
"""A half-made copy so old has no maker any more."""
_TEMP = ".tmp-"
_NAMED = re.compile(r"/[^/]+-([0-9a-f]{64})/?$")


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """``made`` is False where the same bytes under the same name were there already."""

    path: Path
    digest: str
    made: bool


@dataclass(frozen=True, slots=True)
class NoCopy:
    """No copy could be made; replicas load from the given path. ``reason`` is for the warning."""

    reason: str


def make(
    path: Path,
    name: str,
    *,
    inside: Path | None = None,
    max_bytes: int = MAX_BYTES,
    lasting: bool = True,
) -> OwnCopy | NoCopy:
    """Copy the adapter's directory. What is under the final name is whole, or is not there.

    ``inside`` is the parent of the trainer's directory where it is not given. The digest is taken
    from the copy, not from the source: it names what replicas will read.

    ``lasting``: it is on the disk when this returns, which a mount may need to show it elsewhere;
    four waits of 10 ms each on a disk that others write to. Without, a machine that loses its power
    may find less than its name says.
    """
    folder = (path.parent if inside is None else inside) / FOLDER
    try:
        sources = files(path)
        total = sum(file.stat().st_size for file in sources)
    except OSError as exc:
        return NoCopy(f"{path} cannot be read from here: {exc.strerror or exc}")
    if not sources:
        return NoCopy(f"{path} has no files")
    if total > max_bytes:
        return NoCopy(f"{path} has {total >> 20} MB, more than {max_bytes >> 20} MB")
    temp = folder / f"{_TEMP}{uuid.uuid4().hex}"
    try:
        folder.mkdir(exist_ok=True)
        temp.mkdir()
        _sweep_temps(folder, temp.stat().st_mtime)
        for source in sources:
            _copy(source, temp / source.name, lasting)
        found = digest(temp)
        return _settle(temp, folder / f"{_safe(name)}-{found}", found, lasting)
    except OSError as exc:
        return NoCopy(f"{folder} cannot be written: {exc.strerror or exc}")
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def digest_in(path: str) -> str:
    """The digest that a path of a copy names, ours or one pushed to a replica; else empty."""
    found = _NAMED.search(path)
    return found.group(1) if found else ""


def remove(copy: Path) -> bool:
    """Delete a copy of ours; False if it was not there. Raises ValueError for anything else.

    The folder stays: a mount elsewhere would remember for a while that it is not there.
    """
    if copy.parent.name != FOLDER or copy.name in ("", ".", ".."):
        raise ValueError(f"{copy} is not a copy of ours")
    try:
        shutil.rmtree(copy)
    except FileNotFoundError:
        return False
    return True


def size(parent: Path) -> int:
    """Bytes of all copies in ``parent``."""
    copies = leftovers(parent, ())
    return sum(file.stat().st_size for copy in copies for file in files(copy))


def leftovers(parent: Path, keep: Collection[Path]) -> list[Path]:
    """Copies beside the adapters in ``parent`` that are not in ``keep``, for ``remove``."""
    try:
        found = sorted((parent / FOLDER).iterdir())
    except OSError:
        return []
    return [copy for copy in found if copy not in keep and not copy.name.startswith(_TEMP)]


def _settle(temp: Path, final: Path, found: str, lasting: bool) -> OwnCopy:
    if final.is_dir():
        if digest(final) == found:
            return OwnCopy(final, found, made=False)
        shutil.rmtree(final)  # somebody touched it: its name no longer tells its bytes
    os.rename(temp, final)
    if lasting:
        _sync(final.parent)
    return OwnCopy(final, found, made=True)


def _copy(source: Path, target: Path, lasting: bool) -> None:
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(CHUNK_BYTES):
            writer.write(chunk)
        writer.flush()
        if lasting:
            os.fsync(writer.fileno())


def _sync(folder: Path) -> None:
    """Make a rename last. Some mounts cannot sync a directory, and do not need it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sweep_temps(folder: Path, now_s: float) -> None:
    """Remove what a killed daemon left. ``now_s`` is by the file system's own clock."""
    for temp in folder.glob(f"{_TEMP}*"):
        with contextlib.suppress(OSError):
            if now_s - temp.stat().st_mtime > STALE_S:
                shutil.rmtree(temp, ignore_errors=True)


def _safe(name: str) -> str:
    """The name as one path component. One that had to be changed gets a mark of the original."""
    safe = re.sub(r"^\.|[^A-Za-z0-9._-]", "_", name)[:100]
    return safe if safe == name else f"{safe}-{blake3(name.encode()).hexdigest(length=8)}"
