"""What is remembered of one generation: written once, at its end, and read by many sinks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestRecord:
    """Filled in while the request passes its phases; times are monotonic seconds."""

    route: str
    started_s: float
    request_id: bytes = b""
    """The client's ``x-request-id``, echoed in the reply."""
    model: str = ""
    phase: str = "read"
    """read, hold, upstream, reply: where it ended."""
    received_s: float = 0.0
    """When the whole request was here."""
    sent_s: float = 0.0
    """When it was first sent on."""
    ended_s: float = 0.0
    replica: str = ""
    decision: str = ""
    status: int = 0
    """0 when the client went away before an answer."""
    attempts: int = 0
    weight: int = 1
    body_bytes: int = 0
    reply_bytes: int = 0
    failovers: tuple[tuple[str, str], ...] = ()
    """(replica, cause) of each attempt that was given up."""
    client_gone: bool = False
    error: str = ""
    """The daemon's own error code, if it answered itself."""
