"""Does pushing a large adapter stop anybody's tokens, and what memory does it cost the daemon?

Run ``python -m benchmarks.large_adapter``: four servers, each a process with the push middleware
(``deploy/replica/rollmux_push.py``) on uvicorn, as in vLLM, that streams a token every 10 ms; the
real daemon before them; and one adapter of 200 MB, published while a stream of each is read. Read:
the longest gap between two tokens while nothing is pushed and while the adapter is, and the largest
resident memory of the daemon above what it had before. The exit code is 1 if a gap is more than 50
ms longer than without the push, or the memory more than one adapter and 64 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
import uvloop

from benchmarks import origin
from benchmarks.adapter import WEIGHTS, write_adapter
from benchmarks.daemon import HERE, DaemonGone, connect, daemon, end
from deploy.replica.rollmux_push import AdapterPush

KEY_VARIABLE = "LARGE_ADAPTER_PUSH_KEY"
KEY = "key-of-the-benchmark"
TOKEN_S = 0.01
ALLOWED_STALL_S = 0.05
ALLOWED_MB = 64
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Measured:
    """Gaps are the longest between two tokens of each server's stream."""

    megabytes: int
    publish_s: float
    quiet_gaps_s: tuple[float, ...]
    push_gaps_s: tuple[float, ...]
    daemon_before_mb: float
    daemon_peak_mb: float

    @property
    def stall_s(self) -> float:
        return max(self.push_gaps_s) - max(self.quiet_gaps_s)

    @property
    def grown_mb(self) -> float:
        return self.daemon_peak_mb - self.daemon_before_mb

    @property
    def met(self) -> bool:
        small = self.grown_mb <= self.megabytes + ALLOWED_MB
        return self.stall_s <= ALLOWED_STALL_S and small


# --- a server -----------------------------------------------------------------------------------


class Server:
    """As much of vLLM as the daemon needs for a publication, and a stream of tokens."""

    def __init__(self) -> None:
        self.names: dict[str, SimpleNamespace] = {}
        self.state = SimpleNamespace(
            openai_serving_models=SimpleNamespace(lora_requests=self.names)
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path, body = scope["path"], b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if path == "/stream":
            await self._stream(send)
            return
        data = json.loads(body) if body[:1] == b"{" else {}
        answer: Any = {}
        if path == "/v1/load_lora_adapter":
            weights = Path(data["lora_path"], WEIGHTS)
            await asyncio.to_thread(weights.stat)
            self.names[data["lora_name"]] = SimpleNamespace(lora_path=data["lora_path"])
        elif path == "/v1/unload_lora_adapter":
            self.names.pop(str(data.get("lora_name")), None)
        elif path == "/v1/models":
            cards = [{"id": MODEL, "root": MODEL, "parent": None}]
            cards += [
                {"id": name, "root": held.lora_path, "parent": MODEL}
                for name, held in self.names.items()
            ]
            answer = {"object": "list", "data": cards}
        elif path == "/is_paused":
            answer = {"is_paused": False}
        elif path == "/reset_prefix_cache":
            answer = {"success": True}
        await _answer(send, json.dumps(answer).encode())

    async def _stream(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(OSError):
            while True:
                await send({"type": "http.response.body", "body": b"t", "more_body": True})
                await asyncio.sleep(TOKEN_S)


async def _answer(send: Any, body: bytes) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(fd: int, root: str) -> None:
    """One server, until SIGTERM."""
    inner = Server()
    environ = {"ROLLMUX_PUSH_KEY": KEY, "ROLLMUX_PUSH_ROOT": root}
    pushed = AdapterPush(inner, environ)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = inner
        await pushed(scope, receive, send)

    config = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


@contextlib.asynccontextmanager
async def servers(count: int, root: Path) -> AsyncIterator[list[str]]:
    """Processes of their own; yields their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for _ in range(count):
            listener = socket.create_server(("127.0.0.1", 0))
            urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
            command = [sys.executable, "-m", __spec__.name, "--serve", str(listener.fileno())]
            child = await asyncio.create_subprocess_exec(
                *(*command, str(root)), pass_fds=(listener.fileno(),), cwd=HERE
            )
            listener.close()
            stack.push_async_callback(end, child)
        yield urls


# --- measuring ----------------------------------------------------------------------------------


class Stream:
    """Reads one server's tokens, and keeps the longest gap since it was last asked."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._longest_s = 0.0

    async def read(self, url: str) -> None:
        async with connect(url) as client, client.stream("GET", "/stream") as answer:
            async for _ in answer.aiter_raw():
                now_s = time.monotonic()
                if self._last_s:
                    self._longest_s = max(self._longest_s, now_s - self._last_s)
                self._last_s = now_s

    def longest(self) -> float:
        found, self._longest_s = self._longest_s, 0.0
        return found


class Memory:
    """Resident memory of a process, looked at every 10 ms."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.peak_mb = 0.0

    def now_mb(self) -> float:
        for line in self._status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0

    async def watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self.now_mb())
            await asyncio.sleep(0.01)


def write_large(folder: Path, megabytes: int) -> Path:
    """A whole adapter whose weights are one tensor of random bytes."""
    path = write_adapter(folder / "large", 1)
    size = megabytes << 20
    tensor = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    header = json.dumps(tensor).encode()
    with (path / WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(megabytes):
            file.write(os.urandom(1 << 20))
    return path


async def measure(urls: Sequence[str], scratch: Path, megabytes: int) -> Measured:
    large = await asyncio.to_thread(write_large, scratch, megabytes)
    os.environ[KEY_VARIABLE] = KEY
    options = ["--adapter-transport", "push", "--push-key-env", KEY_VARIABLE]
    options += ["--push-cache", str(scratch / "cache")]
    streams = [Stream() for _ in urls]
    async with (
        daemon(urls, scratch / "daemon.log", options) as url,
        connect(url) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [
            group.create_task(stream.read(server), name=server)
            for stream, server in zip(streams, urls, strict=True)
        ]
        memory = Memory(_pid_of(url))
        before_mb = memory.now_mb()
        await asyncio.sleep(1.0)
        for stream in streams:  # they have begun
            stream.longest()
        await asyncio.sleep(2.0)
        quiet = tuple(stream.longest() for stream in streams)
        tasks.append(group.create_task(memory.watch(), name="memory"))
        took_s = await publish(client, "large", large)
        pushed = tuple(stream.longest() for stream in streams)
        for task in tasks:
            task.cancel()
    return Measured(megabytes, took_s, quiet, pushed, before_mb, memory.peak_mb)


async def publish(client: httpx.AsyncClient, name: str, path: Path) -> float:
    began_s = time.monotonic()
    body = {"lora_name": name, "lora_path": str(path)}
    answer = await client.post("/v1/load_lora_adapter", json=body)
    if answer.status_code != 200:
        raise DaemonGone(f"refused {name}: {answer.text[:500]}", path.parent / "daemon.log")
    return time.monotonic() - began_s


def _pid_of(url: str) -> int:
    """The daemon, by its listening port."""
    port = int(url.rpartition(":")[2])
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
            inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir()):
                    return int(process.name)
    raise LookupError(f"nobody listens at {url}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--replicas", type=int, default=4, help="servers (default 4)")
    add("--megabytes", type=int, default=200, help="size of the adapter (default 200)")
    add("--json", action="store_true", help="the result as JSON")
    add("--serve", nargs=2, metavar=("FD", "ROOT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(int(args.serve[0]), args.serve[1])
        return 0
    came = origin.origin(0, {"replicas": args.replicas, "megabytes": args.megabytes})
    with tempfile.TemporaryDirectory(prefix="rollmux-large-") as scratch:
        try:
            found = uvloop.run(_run(args, Path(scratch)))
        except (DaemonGone, httpx.TransportError) as error:
            print(f"benchmarks.large_adapter: {error}", file=sys.stderr)
            return 1
    if args.json:
        print(json.dumps({"origin": came, "measured": asdict(found) | {"met": found.met}}))
    else:
        print(origin.line(came))
        print(
            f"{found.megabytes} MB to {args.replicas} servers in {found.publish_s:.2f} s; longest "
            f"gap between tokens {1000 * max(found.quiet_gaps_s):.0f} ms without the push, "
            f"{1000 * max(found.push_gaps_s):.0f} ms with it; daemon {found.daemon_before_mb:.0f} "
            f"MB before, {found.daemon_peak_mb:.0f} MB at most: {'met' if found.met else 'MISSED'}"
        )
    return 0 if found.met else 1


async def _run(args: argparse.Namespace, scratch: Path) -> Measured:
    # In memory, as on a replica: /dev/shm is what the middleware takes without a setting.
    with tempfile.TemporaryDirectory(prefix="rollmux-large-", dir="/dev/shm") as root:
        async with servers(args.replicas, Path(root)) as urls:
            return await measure(urls, scratch, args.megabytes)


if __name__ == "__main__":
    sys.exit(main())
