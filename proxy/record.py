"""What is remembered of one generation: written once, at its end, and read by many sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.reply_tokens import ReplyTokens
from routing.blocks import Path

EventSink = Callable[..., None]
"""Called with ``publish``, ``unload``, ``pause`` or ``resume``, and what is to be known of it."""


def no_event(event: str, **fields: object) -> None:
    """Nobody records."""


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
    first_piece_s: float = 0.0
    """When the first piece of a stream was here; 0 for a reply that is held until it is whole."""
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
    prompt: Sequence[int] | bytes = ()
    path: Path | None = None
    """The prompt's chained hashes, where the policy has made them."""
    prompt_tokens: int = 0
    """As the replica counts them; 0 where it does not tell, and while no trace is written."""
    output_tokens: int = 0
    """As ``prompt_tokens``; of a stream that does not tell, the number of its events."""
    error: str = ""
    """The daemon's own error code, if it answered itself."""

    def count(self, tokens: ReplyTokens) -> None:
        """What the reply tells."""
        self.prompt_tokens, self.output_tokens = tokens.prompt, tokens.output
