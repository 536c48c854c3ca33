"""Asks the Hub whether a bucket lists an adapter's files, before any replica looks for them.

A replica that looks too early makes its mount remember a miss (hf-mount: 1 s, before PR 226 30 s).
The Hub's own listing has no such memory: once it shows the files, the first look finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import httpx

from proxy.settings import is_loopback

log = logging.getLogger("rollmux")

POLL_S = 0.25
CALL_S = 10.0
PATIENCE_S = 10.0
"""A Hub that answers with errors for so long is left out: the gate only saves time."""
LISTED_S = 60.0
"""Longest wait for files to be listed: 2.5 s is usual after the close of the last one."""


BATCH = 1000
"""Paths in one question (huggingface_hub 2.4.0, hf_api.py, get_bucket_paths_info)."""
OWN_FOLDER = ".rollmux"
"""The daemon's own copies: removed when they are no longer needed, so nobody waits for them."""


@dataclass(frozen=True, slots=True)
class Flush:
    """How far a folder's files have come: ``missing`` are not listed, or with another size."""

    files: int
    missing: tuple[str, ...] = ()
    problem: str = ""
    """Why the Hub could not be asked; ``missing`` says nothing then."""


class BucketGate:
    """``bucket`` is ``namespace/name``, mounted at ``mount`` for the daemon and the replicas."""

    def __init__(self, bucket: str, mount: Path, *, endpoint: str, token: str | None) -> None:
        parts = urlsplit(endpoint)
        safe = parts.scheme == "https" or is_loopback(parts.hostname or "")
        self._url = f"{endpoint.rstrip('/')}/api/buckets/{bucket}/paths-info"
        self._mount = mount
        self._headers = {"authorization": f"Bearer {token}"} if token and safe else {}
        self._client = httpx.AsyncClient(timeout=CALL_S, follow_redirects=False)

    async def wait(self, folder: Path, names: Sequence[str]) -> bool:
        """Until the Hub lists every file of an adapter; False if the gate had to be left out."""
        try:
            inside = PurePosixPath(folder.relative_to(self._mount))
        except ValueError:
            return False  # not in the bucket
        wanted = {str(inside / name) for name in names}
        loop = asyncio.get_running_loop()
        started_s = good_s = loop.time()
        while True:
            missing = await self._missing(wanted)
            if missing == set():
                return True
            now_s = loop.time()
            if isinstance(missing, set):
                good_s = now_s
            if now_s - good_s >= PATIENCE_S or now_s - started_s >= LISTED_S:
                why = missing if isinstance(missing, str) else f"{sorted(missing)} not listed"
                log.warning("the bucket gate is left out for %s: %s", folder.name, why)
                return False
            await asyncio.sleep(POLL_S)

    async def flushed(self, folder: Path) -> Flush:
        """Which files below ``folder`` the Hub does not list as they are now. One look.

        A mount's ``close`` returns before anything is sent (hf-mount: 2 s later), and what is not
        sent when the machine ends is lost. Raises ValueError when ``folder`` is not in the bucket,
        and OSError when it cannot be read.
        """
        inside = PurePosixPath(folder.relative_to(self._mount))
        here = await asyncio.to_thread(lambda: dict(sorted(_sizes(folder))))
        sizes = {str(inside / name): size for name, size in here.items()}
        missing: list[str] = []
        for batch in _batches(sizes):
            listed = await self._listed(batch)
            if isinstance(listed, str):
                return Flush(len(sizes), problem=listed)
            missing += [path for path in batch if listed.get(path) != sizes[path]]
        return Flush(len(sizes), tuple(missing))

    async def close(self) -> None:
        await self._client.aclose()

    async def _missing(self, wanted: set[str]) -> set[str] | str:
        """Paths that the Hub does not list, or why it could not be asked."""
        listed = await self._listed(sorted(wanted))
        return listed if isinstance(listed, str) else wanted - listed.keys()

    async def _listed(self, wanted: Sequence[str]) -> dict[str, int | None] | str:
        """Path and size of what the Hub lists, or why it could not be asked.

        huggingface_hub 2.4.0, hf_api.py, get_bucket_paths_info: paths that do not exist are left
        out of the answer.
        """
        try:
            answer = await self._client.post(
                self._url, json={"paths": list(wanted)}, headers=self._headers
            )
            if answer.status_code != 200:
                return f"the Hub answered {answer.status_code}"
            return {str(entry["path"]): entry.get("size") for entry in answer.json()}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as exc:
            return f"the Hub did not answer ({type(exc).__name__})"


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Every file below ``folder``, by its path there. One that vanishes meanwhile is none."""
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if name != OWN_FOLDER]
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):
                yield str(path.relative_to(folder)), path.stat().st_size


def _raise(error: OSError) -> None:
    raise error


def _batches(paths: Iterable[str]) -> Iterator[list[str]]:
    rest = list(paths)
    while rest:
        yield rest[:BATCH]
        rest = rest[BATCH:]
