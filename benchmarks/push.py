"""The push endpoint of a simulated replica: the very middleware that a real one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.httpd import Arrival, Reply
from deploy.replica.rollmux_push import PREFIX, AdapterPush


@dataclass(frozen=True, slots=True)
class PushSettings:
    """What a replica's environment says. ``root`` is where all replicas of a host keep files."""

    key: str
    root: Path
    max_mb: int = 2048


class PushEndpoint:
    """One process's. ``listed`` tells the path of each adapter that the replica lists."""

    def __init__(self, settings: PushSettings, listed: Callable[[], Mapping[str, str]]) -> None:
        environ = {
            "ROLLMUX_PUSH_KEY": settings.key,
            "ROLLMUX_PUSH_ROOT": str(settings.root),
            "ROLLMUX_PUSH_MAX_MB": str(settings.max_mb),
        }
        self._push = AdapterPush(_nobody, environ)
        self._app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=_Models(listed)))

    @staticmethod
    def serves(path: str) -> bool:
        return path == PREFIX or path.startswith(PREFIX + "/")

    async def answer(self, arrival: Arrival) -> Reply:
        """A whole request's answer. The body came whole, so a client cannot hang up half-way."""
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": arrival.body}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": arrival.method,
            "path": arrival.path,
            "raw_path": arrival.target.partition("?")[0].encode("latin-1"),
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in arrival.headers],
            "app": self._app,
        }
        await self._push(scope, receive, send)
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in sent[0]["headers"]}
        headers.pop("content-length", None)  # the server writes its own
        kind = headers.pop("content-type", "")
        return Reply(sent[0]["status"], sent[1]["body"], kind, tuple(headers.items()))

    def close(self, *, keep_files: bool = False) -> None:
        """``keep_files``: as a process that is killed leaves them."""
        self._push.close(keep_files=keep_files)


@dataclass(frozen=True, slots=True)
class _Models:
    """What the middleware reads of vLLM's own object."""

    listed: Callable[[], Mapping[str, str]]

    @property
    def lora_requests(self) -> dict[str, SimpleNamespace]:
        return {name: SimpleNamespace(lora_path=path) for name, path in self.listed().items()}


async def _nobody(*_: Any) -> None:
    raise AssertionError("only push paths are handed over")
