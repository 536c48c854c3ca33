"""Adapters received over a replica's own port: an ASGI middleware for a stock ``vllm serve``.

    export PYTHONPATH=<this folder> ROLLMUX_PUSH_KEY=<a secret>
    vllm serve ... --middleware rollmux_push.AdapterPush

One file, the standard library and ``blake3``, which vLLM brings; Python 3.10 or later. vLLM 0.27.1
adds the class as the outermost layer (``entrypoints/openai/api_server.py``, build_app), so its
``--api-key`` does not guard these paths: the key of their own does.

| setting | is |
|---|---|
| ``ROLLMUX_PUSH_KEY`` | what callers must show; without it every call is refused |
| ``ROLLMUX_PUSH_ROOT`` | the folder to keep adapters in (default ``/dev/shm/rollmux``) |
| ``ROLLMUX_PUSH_MAX_MB`` | how much may lie there (default 2048) |

| call | answers |
|---|---|
| ``GET /rollmux/push`` | 200: instance, root, room, and the adapters that are whole |
| ``POST /rollmux/push/{dir}``, a manifest | 200: where the whole adapter is; 202: what is missing |
| ``PUT /rollmux/push/{dir}/{file}``, its bytes | 204: it lies ready |
| ``PUT /rollmux/push/{dir}``, all at once | 200: where the whole adapter is |
| ``DELETE /rollmux/push/{dir}`` | 204: it is gone |

``{dir}`` is ``<name>-<digest>``, the digest of ``broadcast/adapter_dir.py``. A directory appears
whole, by one rename, once its bytes have that digest. What vLLM lists is never taken away.
All at once: the manifest on one line, then the bytes of its files in its order, 32 MiB at most.

A process keeps its files in a folder of its own, locked while it lives. The next process to start
removes the folders of dead ones. With several API servers (``--api-server-count``) a call may reach
any of them, and each holds its own files: start replicas with one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import fcntl
import hmac
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from blake3 import blake3

PROTOCOL = 1
VERSION = "0.1.0"
PREFIX = "/rollmux/push"
DEFAULT_ROOT = "/dev/shm/rollmux"
DEFAULT_MAX_MB = 2048

MAX_FILES = 64
"""In one adapter. PEFT writes three."""
MAX_MANIFEST_BYTES = 256 * 1024
"""64 entries with the longest names come to half of it."""
MAX_NAME_BYTES = 255
"""What Linux file systems take."""
MAX_WHOLE_BYTES = 32 << 20
"""Of an adapter sent at once: it is collected in memory. A larger one goes file by file."""
MAX_ADAPTERS = 1024
"""Bounds the bookkeeping where adapters are tiny; a run has a handful."""
CHUNK_BYTES = 1 << 20
"""Collected before a thread is asked to write it: the memory of one file on its way."""
BLOCK_BYTES = 4096
"""Files take whole blocks, a directory takes one."""
HEADROOM_BYTES = 64 << 20
"""Stays free, or a sixteenth of a smaller file system: vLLM's own shared memory lives there too,
and a process that touches shared memory which is full dies by SIGBUS."""
IDLE_S = 30.0
"""A client that has sent nothing for so long is gone."""
STALE_S = 600.0
"""A half-sent adapter that nobody went on with for so long is removed."""
THREADS = 4
"""For files. Our own: vLLM's tokenizer and the like must not queue behind them."""

_DIRECTORY = re.compile(r".+-([0-9a-f]{64})", re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INSTANCE = re.compile(r"[0-9a-f]{32}")
_STAGING, _UPLOADS, _TRASH, _LOCK = ".staging", ".uploads", ".trash", ".lock"
# A leading dot: no adapter's name has one.

_LOG = logging.getLogger("vllm.rollmux_push")  # below vLLM's logger, so that its handler shows it

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Listed = Callable[[], "Iterable[str] | None"]
"""The paths that vLLM has adapters loaded from; None where that cannot be told."""


class Refused(Exception):
    """A call that is answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class _HungUp(Exception):
    """The client went away before it had sent everything."""


@dataclass(frozen=True)
class File:
    """A line of a manifest. ``digest`` is blake3 in hex."""

    bytes: int
    digest: str

    @property
    def room(self) -> int:
        return max(1, -(-self.bytes // BLOCK_BYTES)) * BLOCK_BYTES


Manifest = Mapping[str, File]


@dataclass
class Held:
    """One adapter's directory, whole or on its way."""

    name: str
    files: Manifest
    path: str
    used_s: float
    """When it was last pushed to, or last seen listed."""
    whole: bool = False
    staged: set[str] = field(default_factory=set)
    uploads: Counter[str] = field(default_factory=Counter)

    @property
    def room(self) -> int:
        """Bytes it takes now or has reserved, with what is being uploaded a second time."""
        copies = {name: self.uploads[name] + (name in self.staged) for name in self.files}
        return BLOCK_BYTES + sum(f.room * max(1, copies[name]) for name, f in self.files.items())

    @property
    def busy(self) -> bool:
        return self.uploads.total() > 0


class Upload:
    """One file on its way: written beside the adapter, and checked as it comes."""

    def __init__(self, held: Held, name: str, path: str) -> None:
        self.held = held
        self.name = name
        self.file = held.files[name]
        self.path = path
        self.received = 0
        self.over = False
        self._hasher = blake3()
        self._lock = threading.Lock()  # a cancelled call closes while a thread still writes
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Raises Refused when there is more than the manifest says, and OSError."""
        with self._lock:
            if self._fd < 0:
                return
            self.received += len(data)
            if self.received > self.file.bytes:
                raise self._wrong_length()
            self._hasher.update(data)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def check(self) -> None:
        """Raises Refused unless all has come and is right."""
        if self.received != self.file.bytes:
            raise self._wrong_length()
        digest = self._hasher.hexdigest()
        if digest != self.file.digest:
            text = f"{self.name} has digest {digest}, the manifest says {self.file.digest}"
            raise Refused(400, "wrong_digest", text)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _wrong_length(self) -> Refused:
        more = "more than " if self.received > self.file.bytes else ""
        text = f"{self.name} has {more}{self.file.bytes} bytes by the manifest"
        return Refused(400, "wrong_length", f"{text}, {self.received} came")


class Store:
    """The directories of this process. Blocking, and safe in threads: one lock, one call at a time.

    Raises OSError where ``base`` cannot be had.
    """

    def __init__(
        self, base: str, max_bytes: int, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self.now = now
        self.instance = secrets.token_hex(16)
        self.root = os.path.join(os.path.abspath(base), self.instance)
        self._numbers = 0
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()
        self._lock_fd = _claim(os.path.abspath(base), self.instance)
        for folder in (_STAGING, _UPLOADS, _TRASH):
            os.mkdir(os.path.join(self.root, folder), 0o700)
        self._pid = os.getpid()
        atexit.register(self.remove)

    # Calls

    def describe(self, listed: Listed) -> dict[str, Any]:
        with self._lock:
            self._look(listed)
            return {
                "instance": self.instance,
                "root": self.root,
                "max_bytes": self.max_bytes,
                "used_bytes": self._used(),
                "adapters": [
                    {
                        "name": held.name,
                        "path": held.path,
                        "bytes": sum(file.bytes for file in held.files.values()),
                    }
                    for held in self._held.values()
                    if held.whole
                ],
            }

    def offer(self, name: str, files: Manifest, listed: Listed) -> tuple[str, list[str]]:
        """(the path, nothing) once it is whole; until then ("", the files that are missing)."""
        with self._lock:
            self._look(listed)
            held = self._held.get(name)
            if held is not None and not held.whole and held.files != files:
                if held.busy:
                    text = f"{name} is being pushed with another manifest"
                    raise Refused(409, "busy", text)
                self._drop(held)
                held = None
            if held is None:
                held = self._begin(name, files, listed)
            held.used_s = self.now()
            if held.whole:
                return held.path, []
            missing = [file for file in held.files if file not in held.staged]
            if not missing:
                self._publish(held)
            return ("", missing) if missing else (held.path, [])

    def take(self, name: str, files: Manifest, content: memoryview, listed: Listed) -> str:
        """The path of an adapter that came at once, ``content`` being its files in their order."""
        size = sum(file.bytes for file in files.values())
        if len(content) != size:
            text = f"the files have {size} bytes by the manifest, {len(content)} came"
            raise Refused(400, "wrong_length", text)
        path, missing = self.offer(name, files, listed)
        if not missing:
            return path
        try:
            begin = 0
            for file, about in files.items():
                end = begin + about.bytes
                if file in missing:
                    self._write(self.upload(name, file, about.bytes, listed), content[begin:end])
                begin = end
            path, missing = self.offer(name, files, listed)
        except (OSError, Refused):
            with self._lock:
                held = self._held.get(name)
                if held is not None and not held.whole and not held.busy:
                    self._drop(held)
            raise
        if missing:
            raise Refused(409, "busy", f"{name} was given up meanwhile: push it again")
        return path

    def _write(self, upload: Upload, data: memoryview) -> None:
        try:
            upload.write(data)
            self.finish(upload)
        finally:
            self.discard(upload)

    def upload(self, name: str, file: str, length: int, listed: Listed) -> Upload:
        """Whoever gets it must end it, with ``finish`` or ``discard``."""
        with self._lock:
            self._look(listed)
            held = self._held.get(name)
            if held is None or file not in held.files:
                raise _no_manifest(name, file)
            wanted = held.files[file].bytes
            if length != wanted:
                text = f"{file} has {wanted} bytes by the manifest, Content-Length says {length}"
                raise Refused(400, "wrong_length", text)
            if held.uploads[file] or file in held.staged:
                self._make_room(held.files[file].room, listed, keep=held)
            upload = Upload(held, file, self._new_path(_UPLOADS))
            held.uploads[file] += 1
            held.used_s = self.now()
            return upload

    def finish(self, upload: Upload) -> None:
        """Raises Refused unless the file is whole and right. Either way the upload is over."""
        held = upload.held
        try:
            upload.check()
            with self._lock:
                held.used_s = self.now()
                if self._held.get(held.name) is not held:
                    raise _no_manifest(held.name, upload.name)
                if not held.whole:
                    os.replace(upload.path, os.path.join(held.path, upload.name))
                    held.staged.add(upload.name)
        finally:
            self.discard(upload)

    def discard(self, upload: Upload) -> None:
        """The upload is over; what it wrote is gone, unless it is in its place already."""
        with self._lock:
            if upload.over:
                return
            upload.over = True
            upload.held.uploads[upload.name] -= 1
        upload.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(upload.path)

    def delete(self, name: str, listed: Listed) -> None:
        with self._lock:
            self._look(listed)
            held = self._held.get(name)
            if held is None:
                raise Refused(404, "unknown", f"{name} is not here")
            if held.busy:
                raise Refused(409, "busy", f"{name} is being pushed")
            if held.path in self._in_use(listed):
                raise Refused(409, "listed", f"vLLM has an adapter loaded from {held.path}")
            self._drop(held)

    def release(self) -> None:
        """Leave the files as a killed process does: the next to start removes them."""
        atexit.unregister(self.remove)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def remove(self) -> None:
        """The orderly end. A forked child has the handler too, but not the files."""
        if os.getpid() == self._pid and self._lock_fd >= 0:
            shutil.rmtree(self.root, ignore_errors=True)
            self.release()

    # Inside the lock

    def _look(self, listed: Listed) -> None:
        """Mark what is in use, and forget what is no more."""
        used = self._in_use(listed)
        now_s = self.now()
        for held in list(self._held.values()):
            if held.path in used:
                held.used_s = now_s
            elif not held.busy and (self._stale(held, now_s) or not os.path.isdir(held.path)):
                self._drop(held)

    def _in_use(self, listed: Listed) -> set[str]:
        """The paths of whole adapters that must stay."""
        paths = listed()
        whole = {held.path for held in self._held.values() if held.whole}
        if paths is None:
            return whole
        # Not realpath: a listed path may lie on a mount that hangs.
        normal = [os.path.normpath(path) for path in paths]
        return {own for own in whole if any(p == own or p.startswith(own + "/") for p in normal)}

    @staticmethod
    def _stale(held: Held, now_s: float) -> bool:
        return not held.whole and now_s - held.used_s > STALE_S

    def _begin(self, name: str, files: Manifest, listed: Listed) -> Held:
        held = Held(name, files, self._new_path(_STAGING), self.now())
        if held.room > self.max_bytes:
            text = f"{name} takes {held.room} bytes, this replica keeps {self.max_bytes} at most"
            raise Refused(413, "too_large", text)
        self._make_room(held.room, listed)
        os.mkdir(held.path, 0o700)
        self._held[name] = held
        return held

    def _make_room(self, need: int, listed: Listed, *, keep: Held | None = None) -> None:
        """Let the longest unused go until ``need`` bytes fit. Raises Refused if they cannot."""
        disk = os.statvfs(self.root)
        headroom = min(HEADROOM_BYTES, disk.f_blocks * disk.f_frsize // 16)
        # What is reserved but not yet written does not show in the free space.
        free = disk.f_bavail * disk.f_frsize - headroom - self._unwritten()
        lacking = max(self._used() + need - self.max_bytes, need - free)
        used = self._in_use(listed)
        now_s = self.now()
        victims = sorted(
            (
                held
                for held in self._held.values()
                if held is not keep
                and not held.busy
                and held.path not in used
                and (held.whole or now_s - held.used_s > IDLE_S)
            ),
            key=lambda held: held.used_s,
        )
        going: list[Held] = []
        while victims and (lacking > 0 or len(self._held) - len(going) >= MAX_ADAPTERS):
            going.append(victims.pop(0))
            lacking -= going[-1].room
        if lacking > 0 or len(self._held) - len(going) >= MAX_ADAPTERS:
            text = f"{need} bytes do not fit beside what is in use in {self.root}"
            raise Refused(507, "no_room", text)
        for held in going:
            self._drop(held)

    def _used(self) -> int:
        return sum(held.room for held in self._held.values())

    def _unwritten(self) -> int:
        return sum(
            file.room
            for held in self._held.values()
            if not held.whole
            for name, file in held.files.items()
            if name not in held.staged
        )

    def _publish(self, held: Held) -> None:
        digest = _digest(held.path, held.files)
        if not held.name.endswith(f"-{digest}"):
            self._drop(held)
            text = f"the files of {held.name} have digest {digest}, which is not in its name"
            raise Refused(400, "wrong_digest", text)
        path = os.path.join(self.root, held.name)
        os.rename(held.path, path)
        held.path = path
        held.whole = True

    def _drop(self, held: Held) -> None:
        """Gone at once by a rename, so that nobody finds half of it."""
        del self._held[held.name]
        trash = self._new_path(_TRASH)
        try:
            os.rename(held.path, trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)

    def _new_path(self, folder: str) -> str:
        self._numbers += 1
        return os.path.join(self.root, folder, str(self._numbers))


def _claim(base: str, instance: str) -> int:
    """Make ``base/instance`` and lock it, once what dead processes left in ``base`` is removed.

    Returns the lock's descriptor; whoever holds it is alive. ``flock`` and not ``lockf``: several
    stores may live in one process. Raises OSError.
    """
    os.makedirs(base, 0o700, exist_ok=True)
    base_fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(base_fd)
        open_to_others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or open_to_others:
            text = "belongs to another user, or others may rename what is in it"
            raise PermissionError(errno.EACCES, text, base)
        # Two that start at once take turns, so a folder without its lock is a dead one's.
        fcntl.flock(base_fd, fcntl.LOCK_EX)
        for name in os.listdir(base_fd):
            if _INSTANCE.fullmatch(name):
                _remove_if_dead(os.path.join(base, name))
        own = os.path.join(base, instance)
        os.mkdir(own, 0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        lock_fd = os.open(os.path.join(own, _LOCK), flags, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock_fd
    finally:
        os.close(base_fd)


def _remove_if_dead(path: str) -> None:
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return
        lock_fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        pass  # half removed
    except OSError:
        return  # another user's
    else:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # alive
        finally:
            os.close(lock_fd)
    shutil.rmtree(path, ignore_errors=True)


def _digest(path: str, files: Manifest) -> str:
    """As ``broadcast/adapter_dir.py``, digest: name, length and bytes of each file, by name."""
    hasher = blake3()
    for file in sorted(files):
        name = os.fsencode(file)
        fd = os.open(os.path.join(path, file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as stream:
            size = os.fstat(fd).st_size
            hasher.update(b"%d:%s%d:" % (len(name), name, size))
            while chunk := stream.read(CHUNK_BYTES):
                hasher.update(chunk)
    return hasher.hexdigest()


def _no_manifest(name: str, file: str) -> Refused:
    text = f"no manifest of {name} with {file} was posted, or it is given up: post it again"
    return Refused(409, "no_manifest", text)


# Names and manifests


def _check_name(name: object) -> str:
    """Raises Refused unless it is one plain component of a path."""
    try:
        fits = isinstance(name, str) and 0 < len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        fits = False
    if not fits or not isinstance(name, str) or name[0] == "." or "/" in name or "\0" in name:
        text = (
            f"{str(name)[:300]!r} is not a name: one plain component of a path, "
            f"{MAX_NAME_BYTES} bytes at most, no leading dot"
        )
        raise Refused(400, "bad_name", text)
    return name


def _digest_in(directory: str) -> str:
    match = _DIRECTORY.fullmatch(directory)
    if match is None:
        text = f"{directory!r} does not end in a hyphen and the digest, 64 hex digits"
        raise Refused(400, "bad_name", text)
    return match[1]


def parse_manifest(directory: str, body: bytes) -> Manifest:
    """What a POST says. Raises Refused."""
    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise _bad_manifest(f"not JSON ({exc})") from exc
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), list):
        raise _bad_manifest("not an object with a list of files")
    if manifest.get("digest") != _digest_in(directory):
        raise _bad_manifest("its digest is not the one in the directory's name")
    if len(manifest["files"]) > MAX_FILES:
        text = f"{len(manifest['files'])} files; an adapter has at most {MAX_FILES}"
        raise Refused(400, "too_many_files", text)
    files: dict[str, File] = {}
    for line in manifest["files"]:
        if not isinstance(line, dict):
            raise _bad_manifest("a file is not an object")
        name = _check_name(line.get("name"))
        size, digest = line.get("bytes"), line.get("digest")
        if name in files:
            raise _bad_manifest(f"{name} is in it twice")
        if type(size) is not int or size < 0:
            raise _bad_manifest(f"the bytes of {name} are not a whole number")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise _bad_manifest(f"the digest of {name} is not 64 hex digits")
        files[name] = File(size, digest)
    if not files:
        raise _bad_manifest("no files")
    return files


def _bad_manifest(what: str) -> Refused:
    return Refused(400, "bad_manifest", f"the manifest is wrong: {what}")


# HTTP


class AdapterPush:
    """The middleware. ``environ`` is for tests and simulations; vLLM gives the app alone."""

    def __init__(self, app: App, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.app = app
        self.store: Store | None = None
        self.trouble = ""
        """Why there is no store."""
        self._key = environ.get("ROLLMUX_PUSH_KEY", "").strip().encode()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rollmux-push")
        if not self._key:
            _LOG.warning("adapters cannot be pushed here: ROLLMUX_PUSH_KEY is not set")
            return
        base = environ.get("ROLLMUX_PUSH_ROOT") or DEFAULT_ROOT
        try:
            max_mb = int(environ.get("ROLLMUX_PUSH_MAX_MB") or DEFAULT_MAX_MB)
            self.store = Store(base, max_mb << 20)
        except (OSError, ValueError) as exc:
            # The replica is still good for everything else.
            self.trouble = f"adapters cannot be kept in {base}: {exc}"
            _LOG.warning("%s (ROLLMUX_PUSH_ROOT, ROLLMUX_PUSH_MAX_MB)", self.trouble)
        else:
            _LOG.info("adapters can be pushed to %s, %d MB at most", self.store.root, max_mb)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            path = scope["path"]
            if len(path) == len(PREFIX) or path[len(PREFIX)] == "/":
                await self._answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def close(self, *, keep_files: bool = False) -> None:
        """For whoever made one by hand. ``keep_files`` ends it as SIGKILL would."""
        self._threads.shutdown()
        if self.store is not None:
            self.store.release() if keep_files else self.store.remove()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            status, content = await self._call(scope, receive)
        except _HungUp:
            return
        except Refused as refused:
            status = refused.status
            content = {"error": {"message": refused.message, "code": refused.code}}
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            status, code = (507, "no_room") if full else (500, "io_error")
            content = {"error": {"message": str(exc), "code": code}}
            _LOG.warning("%s %r: %s", scope["method"], scope["path"], exc)
        headers = [(b"x-rollmux-push", b"%d" % PROTOCOL)]
        body = b""
        if content is not None:
            body = json.dumps(content).encode()
            headers.append((b"content-type", b"application/json"))
            headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _call(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any] | None]:
        """(status, what to say in JSON)."""
        self._admit(scope)
        store = self.store
        if store is None:
            raise Refused(503, "no_root", self.trouble)
        names = _names(scope)
        method = scope["method"]

        def listed() -> Iterable[str] | None:
            return _listed(scope)

        if not names and method == "GET":
            about = {"protocol": PROTOCOL, "version": VERSION}
            return 200, about | await self._in_thread(store.describe, listed)
        if len(names) == 1 and method == "POST":
            text = f"a manifest has at most {MAX_MANIFEST_BYTES} bytes"
            body = await self._body(receive, MAX_MANIFEST_BYTES, text)
            manifest = parse_manifest(names[0], bytes(body))
            path, missing = await self._in_thread(store.offer, names[0], manifest, listed)
            if missing:
                return 202, {"missing": missing}
            return 200, {"path": path, "published": True}
        if len(names) == 1 and method == "PUT":
            path = await self._put_whole(store, names[0], _length(scope), listed, receive)
            return 200, {"path": path, "published": True}
        if len(names) == 2 and method == "PUT":
            await self._put(store, names[0], names[1], _length(scope), listed, receive)
            return 204, None
        if len(names) == 1 and method == "DELETE":
            await self._in_thread(store.delete, names[0], listed)
            return 204, None
        if len(names) > 2:
            raise Refused(404, "not_found", "no such path")
        raise Refused(405, "bad_method", f"{method} is not for this path")

    def _admit(self, scope: Scope) -> None:
        if not self._key:
            text = "this replica takes no adapters: it was started without ROLLMUX_PUSH_KEY"
            raise Refused(403, "no_key", text)
        given = _header(scope, b"x-rollmux-push-key") or b""
        if not hmac.compare_digest(given, self._key):
            raise Refused(401, "wrong_key", "x-rollmux-push-key is missing or wrong")

    async def _put(
        self, store: Store, name: str, file: str, length: int, listed: Listed, receive: Receive
    ) -> None:
        upload = await self._in_thread(store.upload, name, file, length, listed)
        try:
            data, more = bytearray(), True
            while more:
                piece, more = await self._next(receive)
                data += piece
                if len(data) >= CHUNK_BYTES or not more:
                    await self._in_thread(upload.write, data)
                    data = bytearray()
            await self._in_thread(store.finish, upload)
        finally:
            if not upload.over:
                await self._in_thread(store.discard, upload)

    async def _put_whole(
        self, store: Store, name: str, length: int, listed: Listed, receive: Receive
    ) -> str:
        limit = MAX_MANIFEST_BYTES + MAX_WHOLE_BYTES
        text = f"an adapter sent at once has at most {MAX_WHOLE_BYTES} bytes; send it by files"
        if length > limit:
            raise Refused(413, "too_large", text)
        body = await self._body(receive, limit, text)
        end = body.find(b"\n")
        if not 0 <= end <= MAX_MANIFEST_BYTES:
            raise _bad_manifest(f"no line of at most {MAX_MANIFEST_BYTES} bytes")
        manifest = parse_manifest(name, bytes(body[:end]))
        content = memoryview(body)[end + 1 :]
        path: str = await self._in_thread(store.take, name, manifest, content, listed)
        return path

    async def _body(self, receive: Receive, limit: int, text: str) -> bytearray:
        """Raises Refused with ``text`` for more than ``limit`` bytes."""
        data, more = bytearray(), True
        while more:
            piece, more = await self._next(receive)
            data += piece
            if len(data) > limit:
                raise Refused(413, "too_large", text)
        return data

    @staticmethod
    async def _next(receive: Receive) -> tuple[bytes, bool]:
        """(the next piece of the body, whether more is to come)."""
        try:
            message = await asyncio.wait_for(receive(), IDLE_S)
        except asyncio.TimeoutError as exc:  # noqa: UP041 - not TimeoutError in Python 3.10
            raise Refused(408, "too_slow", f"nothing came for {IDLE_S:.0f} s") from exc
        if message["type"] == "http.disconnect":
            raise _HungUp
        return message.get("body", b""), message.get("more_body", False)

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _names(scope: Scope) -> list[str]:
    """The components after the prefix, each decoded by itself: ``%2F`` does not part them."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    prefix, rest = raw[: len(PREFIX)], raw.partition(b"?")[0][len(PREFIX) :]
    if prefix != PREFIX.encode():
        raise Refused(404, "not_found", "no such path")
    names = []
    for part in rest.split(b"/")[1:]:
        try:
            names.append(_check_name(unquote_to_bytes(part).decode()))
        except UnicodeDecodeError as exc:
            raise Refused(400, "bad_name", "a name is not UTF-8") from exc
    if names:
        _digest_in(names[0])
    return names


def _length(scope: Scope) -> int:
    given = _header(scope, b"content-length")
    if given is None or not given.isdigit() or len(given) > 20:
        raise Refused(411, "no_length", "Content-Length is missing")
    return int(given)


def _header(scope: Scope, name: bytes) -> bytes | None:
    value: bytes | None = next((v for key, v in scope["headers"] if key == name), None)
    return value


def _listed(scope: Scope) -> Iterable[str] | None:
    """vLLM 0.27.1, ``entrypoints/openai/models/serving.py``: the LoRARequest of each name."""
    try:
        requests = scope["app"].state.openai_serving_models.lora_requests
        return [request.lora_path for request in list(requests.values())]
    except (KeyError, AttributeError):
        return None  # another vLLM: take nothing away
