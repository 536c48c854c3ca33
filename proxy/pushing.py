"""Pushes adapters over HTTP to the replicas that take them: ``deploy/replica/rollmux_push.py``.

A replica with that endpoint needs no mount, and sees an adapter as soon as it was sent. The others
read the shared path. Which is which is asked each time a replica joins.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
from blake3 import blake3

from broadcast import adapter_dir, own_copy
from broadcast.answer import Answer, NoAnswer
from broadcast.answers import words
from broadcast.transport import Undelivered
from proxy.calls import Calls
from proxy.metrics import Metrics
from proxy.once import Once
from routing.ids import ReplicaId

log = logging.getLogger("rollmux")

ENDPOINT = "/rollmux/push"
KEY_HEADER = "x-rollmux-push-key"
PROTOCOL = 1
LOOK_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 18
"""Read and sent at a time: small enough that generations are not held up by a large adapter."""
ROUNDS = 3
"""Manifests sent for one delivery: one to say what comes, one to publish it, and one to spare for
a replica that made room or restarted meanwhile."""
WHOLE_BYTES = 32 << 20
"""An adapter of at most so many bytes goes in one call, as the endpoint allows: each call has to
wait for its turn at a server that is busy with rollouts. A larger one goes file by file, so that
what has arrived need not be sent again."""
MAX_PARCELS = 64
"""Manifests kept; there are as many live adapters as the staleness in use, so a handful."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What one replica said of itself. ``instance`` is another one after each restart."""

    instance: str
    root: str


@dataclass(frozen=True, slots=True)
class Parcel:
    """One adapter as it is sent. ``manifest`` is the body that announces and publishes it."""

    copy: Path
    manifest: bytes
    sizes: dict[str, int]
    """Bytes of each file, by name, in the manifest's order."""
    sent_to: set[ReplicaId] = field(default_factory=set)
    """Who was sent it at once, and is asked what is missing if it has to be delivered again."""

    @property
    def content_bytes(self) -> int:
        return sum(self.sizes.values())


class Pushing:
    """Knows which replicas take pushes, and brings files to them.

    ``transport`` is the setting ``adapter_transport``. Without a key nothing is pushed. ``cache``
    is where copies lie that no replica reads through a mount.
    """

    def __init__(
        self,
        calls: Calls,
        metrics: Metrics,
        *,
        key: str | None,
        transport: str,
        cache: Path,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        self.cache = cache
        self.max_bytes = max_bytes
        self.required = transport == "push"
        self._calls = calls
        self._metrics = metrics
        self._key = key if transport != "path" else None
        self._timeout_s = timeout_s
        self._endpoints: dict[ReplicaId, Endpoint] = {}
        self._parcels: OrderedDict[Path, Parcel] = OrderedDict()
        self._making = asyncio.Lock()
        self._warn = Once(log)

    def __contains__(self, replica: ReplicaId) -> bool:
        return replica in self._endpoints

    def takes_all(self, replicas: Collection[ReplicaId]) -> bool:
        """Whether every one of them takes pushes, so that nobody reads a shared path."""
        return bool(replicas) and all(r in self._endpoints for r in replicas)

    def kept(self, name: str) -> str:
        """The copy of that name in the cache, left there by an earlier daemon; empty without."""
        copy = self.cache / own_copy.FOLDER / name
        return str(copy) if copy.is_dir() else ""

    async def find(self, replica: ReplicaId, label: str) -> str:
        """Ask a replica that joins for its endpoint; empty, or why it cannot be pushed to."""
        if self._key is None:
            return ""
        answer = await self._call(replica, "GET", ENDPOINT, timeout_s=LOOK_TIMEOUT_S)
        found = _endpoint(answer)
        before = self._endpoints.get(replica)
        if found is not None:
            self._endpoints[replica] = found
            if before is None:
                log.info("%s takes pushed adapters", label)
            elif before.instance != found.instance:  # it has nothing of what was sent to it
                for parcel in self._parcels.values():
                    parcel.sent_to.discard(replica)
            return ""
        self._endpoints.pop(replica, None)
        if isinstance(answer, NoAnswer):
            why = f"{ENDPOINT}: {answer.detail}"
        elif answer.status == 404:
            why = "has no push endpoint; start vLLM with --middleware rollmux_push.AdapterPush"
        else:
            why = f"{ENDPOINT}: {answer.status} {words(answer, 300)}"
        if not self.required and not (isinstance(answer, Answer) and answer.status == 404):
            self._warn(f"{label} gets adapters by the shared path: {why}")
        return why

    async def deliver(self, replica: ReplicaId, copy: str, path: str) -> str | Undelivered:
        """The path to load: where the copy was pushed to, or ``path`` on a replica without pushes.

        A replica that refuses the files gets ``path`` too, unless pushing is required.
        """
        if replica not in self._endpoints:
            if self.required:
                return Undelivered("it has no push endpoint")
            return path
        if not copy:
            if self.required:
                return Undelivered("the adapter's files cannot be read by the daemon")
            return path
        try:
            return await self._push(replica, Path(copy))
        except _Refused as exc:
            why = str(exc)
        except OSError as exc:
            why = f"{copy} cannot be read: {exc.strerror or exc}"
        if self.required:
            return Undelivered(f"the files could not be pushed: {why}")
        self._warn(f"{replica} does not take a pushed adapter, the shared path is used: {why}")
        return path

    async def drop(self, replicas: Collection[ReplicaId], copy: Path) -> None:
        """Tell replicas that hold the files that nobody needs them. Best effort: a replica that is
        not told makes room by itself."""
        self._parcels.pop(copy, None)
        target = f"{ENDPOINT}/{quote(copy.name, safe='')}"
        await asyncio.gather(
            *(
                self._call(r, "DELETE", target, timeout_s=LOOK_TIMEOUT_S)
                for r in replicas
                if r in self._endpoints
            )
        )

    async def _push(self, replica: ReplicaId, copy: Path) -> str | Undelivered:
        """Where the files are now; Undelivered if no answer came. Raises _Refused, or OSError."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        parcel = await self._parcel(copy)
        target = f"{ENDPOINT}/{quote(copy.name, safe='')}"
        at_once = parcel.content_bytes <= WHOLE_BYTES and replica not in parcel.sent_to
        for _ in range(ROUNDS + at_once):
            if at_once:
                at_once = False
                answer = await self._send_whole(replica, target, parcel)
                if isinstance(answer, Answer) and answer.status != 200:
                    continue  # it may still take it file by file, and else says why
            else:
                answer = await self._call(
                    replica, "POST", target, parcel.manifest, timeout_s=self._timeout_s
                )
            if isinstance(answer, NoAnswer):
                return Undelivered(f"{target}: {answer.cause}: {answer.detail}")
            told = _object(answer)
            if answer.status == 200 and isinstance(path := told.get("path"), str):
                self._metrics.push_seconds.labels(replica).observe(loop.time() - began_s)
                return path
            missing = told.get("missing")
            if answer.status != 202 or not isinstance(missing, list):
                raise _Refused(f"{answer.status} {words(answer, 300)}")
            for name in missing:
                if name not in parcel.sizes:
                    raise _Refused(f"it asks for {str(name)[:100]!r}, no file of the adapter")
                if lost := await self._send(replica, target, parcel, name):
                    return lost
        raise _Refused(f"it still asks for files after {ROUNDS} rounds")

    async def _send_whole(
        self, replica: ReplicaId, target: str, parcel: Parcel
    ) -> Answer | NoAnswer:
        parcel.sent_to.add(replica)
        answer = await self._call(
            replica,
            "PUT",
            target,
            _whole(parcel),
            timeout_s=self._timeout_s,
            length=len(parcel.manifest) + 1 + parcel.content_bytes,
        )
        if isinstance(answer, Answer) and answer.status == 200:
            self._metrics.pushed_bytes.labels(replica).inc(parcel.content_bytes)
        return answer

    async def _send(
        self, replica: ReplicaId, target: str, parcel: Parcel, name: str
    ) -> Undelivered | None:
        answer = await self._call(
            replica,
            "PUT",
            f"{target}/{quote(name, safe='')}",
            _pieces(parcel.copy / name),
            timeout_s=self._timeout_s,
            length=parcel.sizes[name],
        )
        if isinstance(answer, NoAnswer):
            return Undelivered(f"{name}: {answer.cause}: {answer.detail}")
        if answer.status != 204:
            raise _Refused(f"{name}: {answer.status} {words(answer, 300)}")
        self._metrics.pushed_bytes.labels(replica).inc(parcel.sizes[name])
        return None

    async def _parcel(self, copy: Path) -> Parcel:
        """Read once, however many replicas it goes to."""
        async with self._making:
            parcel = self._parcels.get(copy)
            if parcel is None:
                parcel = self._parcels[copy] = await asyncio.to_thread(_wrap, copy)
                while len(self._parcels) > MAX_PARCELS:
                    self._parcels.popitem(last=False)
            return parcel

    async def _call(
        self,
        replica: ReplicaId,
        method: str,
        target: str,
        body: bytes | AsyncIterator[bytes] | None = None,
        *,
        timeout_s: float,
        length: int | None = None,
    ) -> Answer | NoAnswer:
        headers = {KEY_HEADER: self._key or ""}
        if length is not None:
            headers |= {"content-length": str(length), "content-type": "application/octet-stream"}
        return await self._calls(
            replica, method, target, body, timeout_s=timeout_s, headers=headers
        )


class _Refused(Exception):
    """The replica answered, and will not have the files. The message says why."""


def default_cache(port: int) -> Path:
    """A folder of one daemon alone, the same after its restart."""
    return Path(tempfile.gettempdir()) / f"rollmux-push-{port}"


def _wrap(copy: Path) -> Parcel:
    files: list[dict[str, Any]] = [
        {
            "name": file.name,
            "bytes": file.stat().st_size,
            "digest": blake3().update_mmap(file).hexdigest(),
        }
        for file in adapter_dir.files(copy)
    ]
    manifest = {"digest": own_copy.digest_in(str(copy)), "files": files}
    return Parcel(copy, orjson.dumps(manifest), {f["name"]: f["bytes"] for f in files})


async def _whole(parcel: Parcel) -> AsyncIterator[bytes]:
    yield parcel.manifest + b"\n"  # orjson writes one line
    for name in parcel.sizes:
        async for piece in _pieces(parcel.copy / name):
            yield piece


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    reader = await asyncio.to_thread(file.open, "rb")
    try:
        while piece := await asyncio.to_thread(reader.read, CHUNK_BYTES):
            yield piece
    finally:
        reader.close()


def _endpoint(answer: Answer | NoAnswer) -> Endpoint | None:
    if isinstance(answer, NoAnswer) or not answer.ok:
        return None
    told = _object(answer)
    instance, root = told.get("instance"), told.get("root")
    if told.get("protocol") != PROTOCOL or not isinstance(instance, str):
        return None
    return Endpoint(instance, root) if isinstance(root, str) else None


def _object(answer: Answer) -> dict[str, object]:
    try:
        data = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}
