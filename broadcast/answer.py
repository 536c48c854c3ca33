"""What came back, or did not, from one control call to one replica."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from routing.ids import ReplicaId


class Cause(StrEnum):
    """Why there is no answer."""

    REFUSED = "refused"
    """Nothing listens there: the call was never received."""
    RESET = "reset"
    """The connection broke after the call was sent: it may have been carried out."""
    TIMEOUT = "timeout"
    """No whole answer in time: it may have been, or may yet be, carried out."""
    UNREACHABLE = "unreachable"
    """Name not resolved, TLS refused, connect timed out: never received."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer. ``content_type`` is empty where the replica sent none."""

    status: int
    body: bytes = b""
    content_type: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200

    def text(self, limit: int = 2048) -> str:
        """The body as text, at most ``limit`` characters, whatever bytes came."""
        text = self.body[: 4 * limit].decode("utf-8", "replace")
        return text if len(text) <= limit else text[:limit] + "…"


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """No whole answer came. ``detail`` is one line without secrets."""

    cause: Cause
    detail: str = ""

    @property
    def never_received(self) -> bool:
        return self.cause in (Cause.REFUSED, Cause.UNREACHABLE)


class Call(Protocol):
    """Sends one control call to one replica. Never raises for what a network can do."""

    async def __call__(
        self,
        replica: ReplicaId,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        timeout_s: float,
    ) -> Answer | NoAnswer:
        """``target`` is path and query string, byte for byte as it shall arrive."""
        ...
