"""A replica that takes pushed adapters, on a loopback port, and a client written by hand."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import uvicorn
from blake3 import blake3
from starlette.responses import JSONResponse

from deploy.replica.rollmux_push import AdapterPush

KEY = "the key of the replica"
DEADLINE_S = 30.0


class Replica:
    """uvicorn in a thread. What vLLM lists is in ``loras``: name, and request with its path."""

    def __init__(self) -> None:
        self.loras: dict[str, SimpleNamespace] = {}
        self.push: Any = None
        state = SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests=self.loras))
        self.app = SimpleNamespace(state=state)
        self.port = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["app"] = self.app
            await self.push(scope, receive, send)

    def list_adapter(self, name: str, path: str) -> None:
        self.loras[name] = SimpleNamespace(lora_name=name, lora_path=path)

    @property
    def root(self) -> Path:
        return Path(self.push.store.root)

    def leftovers(self) -> list[str]:
        """What is on its way or on its way out."""
        folders = (".staging", ".uploads", ".trash")
        return [str(p) for folder in folders for p in (self.root / folder).iterdir()]

    def call(
        self,
        method: str,
        target: str = "",
        body: bytes | object = b"",
        *,
        key: str | None = KEY,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """(status, content) of a call below /rollmux/push; ``code`` stands for a whole error."""
        given = {"x-rollmux-push-key": key} if key is not None else {}
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            path = f"/rollmux/push{target}"
            connection.request(method, path, sent, given | dict(headers or {}))
            answer = connection.getresponse()
            content = answer.read()
            assert answer.headers["x-rollmux-push"] == "1"
            if not content:
                return answer.status, None
            told = json.loads(content)
            if answer.status < 400:
                return answer.status, told
            assert told["error"].keys() == {"message", "code"}
            assert told["error"]["message"]
            return answer.status, told["error"]["code"]

    def push_all(self, adapter: Adapter) -> str:
        """Push what is missing; the path."""
        status, told = self.call("POST", f"/{adapter.name}", adapter.manifest)
        if status == 202:
            for name in told["missing"]:
                target = f"/{adapter.name}/{quote(name)}"
                assert self.call("PUT", target, adapter.files[name]) == (204, None)
            status, told = self.call("POST", f"/{adapter.name}", adapter.manifest)
        assert (status, told["published"]) == (200, True)
        path: str = told["path"]
        return path

    def sends_a_part(self, target: str, length: int, part: bytes) -> socket.socket:
        """A PUT that is not finished; the connection is the caller's."""
        connection = socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)
        head = (
            f"PUT /rollmux/push{target} HTTP/1.1\r\nhost: x\r\nx-rollmux-push-key: {KEY}\r\n"
            f"content-length: {length}\r\n\r\n"
        )
        connection.sendall(head.encode() + part)
        return connection


class Adapter:
    """Files by name, and what they are called in a push."""

    def __init__(self, files: Mapping[str, bytes], stem: str = "policy-v1") -> None:
        self.files = dict(files)
        hasher = blake3()
        for name in sorted(self.files):
            encoded, data = name.encode(), self.files[name]
            hasher.update(b"%d:%s%d:" % (len(encoded), encoded, len(data)) + data)
        self.digest = hasher.hexdigest()
        self.name = f"{stem}-{self.digest}"

    def __repr__(self) -> str:
        return self.name[:20]

    @property
    def manifest(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "files": [
                {"name": name, "bytes": len(data), "digest": blake3(data).hexdigest()}
                for name, data in self.files.items()
            ],
        }

    def at_once(self) -> bytes:
        """The body of a push with one call."""
        return json.dumps(self.manifest).encode() + b"\n" + b"".join(self.files.values())


def of_bytes(size: int, stem: str) -> Adapter:
    """One file of this size, its content of its own."""
    return Adapter({"adapter_model.safetensors": stem.encode().ljust(size, b".")[:size]}, stem)


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "did not come to hold"
        time.sleep(0.005)


async def elsewhere(scope: Any, receive: Any, send: Any) -> None:
    """The app behind: tells what reached it."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    told = {"path": scope["path"], "method": scope["method"], "body": body.decode()}
    await JSONResponse(told)(scope, receive, send)


@contextlib.contextmanager
def serving(app: Any, http: str = "httptools") -> Iterator[int]:
    """uvicorn in a thread; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=http, log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn")
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()


def push_of(base: Path, **environ: str) -> AdapterPush:
    given = {"ROLLMUX_PUSH_KEY": KEY, "ROLLMUX_PUSH_ROOT": str(base)}
    return AdapterPush(elsewhere, given | environ)
