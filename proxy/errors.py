"""The errors that the daemon answers with: whose fault each is, and how it looks on the wire.

A replica's own answer passes through untouched and is no error here. What is raised here becomes
vLLM's body shape, ``{"error": {"message", "type", "param", "code"}}`` (vLLM 0.27.1, ``code`` is the
status), with the header ``x-rollmux-error: <short code>``, by which the two can be told apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

MAX_MESSAGE_CHARS: Final = 8192
"""A client's own text may be in a message; 8 K is room for any replica's refusal."""


class ProxyError(Exception):
    """Base of all answers that the daemon makes itself. Raise a leaf.

    ``str(error)`` is the message; it names the thing, the state and the next step, and holds no
    secret.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field of the request that is at fault, as vLLM names it."""
        self.retry_after_s: float | None = None

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return TABLE[type(self)].status

    @property
    def code(self) -> str:
        """Short code for ``x-rollmux-error``, logs and metrics; one of a fixed set."""
        return TABLE[type(self)].code

    @property
    def type(self) -> str:
        """``error.type`` of the body."""
        return TABLE[type(self)].type


class BadRequest(ProxyError):
    """The caller's fault: the body or a parameter makes no sense. Mend it; a retry cannot help."""


class BodyTooSlow(ProxyError):
    """The caller's or its network's fault: the body did not arrive in time. Send it again."""

    def __init__(self, timeout_s: float, received_bytes: int) -> None:
        super().__init__(
            f"the request's body did not arrive within {timeout_s:g} s; "
            f"{received_bytes} bytes of it did"
        )


class BodyTooLarge(ProxyError):
    """The caller's fault: the body is over the limit. Send a smaller one."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request's body is larger than {limit_bytes} bytes")


class HeadersTooLarge(ProxyError):
    """The caller's fault: the headers are over the limit. Send fewer."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request's headers are larger than {limit_bytes} bytes together")


class Unauthorized(ProxyError):
    """The caller's fault: no API key, or a wrong one. Send ``Authorization: Bearer KEY``."""

    def __init__(self, message: str = "this needs the API key, as a bearer token") -> None:
        super().__init__(message)


class Forbidden(ProxyError):
    """The caller's fault: this call needs the admin key, or came from a web page."""


class UnknownModel(ProxyError):
    """The caller's fault: neither the base model nor a live adapter has this name."""

    def __init__(self, model: str) -> None:
        # Word for word vLLM's (0.27.1, models/serving.py), so that clients that look for it find it
        super().__init__(f"The model `{model}` does not exist.", param="model")


class UnknownRoute(ProxyError):
    """The caller's fault: the daemon does not know the path, and guesses nothing about it."""

    def __init__(self, method: str, path: str) -> None:
        super().__init__(
            f"{method} {path} is not served here: it is not known whether one replica or all of "
            "them should get it; ask a replica itself"
        )


class NotSupported(ProxyError):
    """Nobody's fault: several replicas cannot do together what is asked. The message says what."""


class RuntimeLoraDisabled(ProxyError):
    """The operator's fault: a replica cannot load adapters while it runs. Restart it as told."""


class NoReadyReplica(ProxyError):
    """The fleet's fault: no ready replica held the adapter for ``--hold-s``. Try again later."""

    def __init__(self, message: str, retry_after_s: float = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManyAtOnce(ProxyError):
    """The operator's fault: no file descriptor is left for another one. Raise ``ulimit -n``."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; send fewer generations at once, or raise `ulimit -n`")
        self.retry_after_s = 1


class FleetOutage(ProxyError):
    """The fleet's fault: fewer than ``--min-replicas`` answered for ``--outage-s``. Look at it."""

    def __init__(self, message: str, retry_after_s: float = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class FleetBusy(ProxyError):
    """Somebody else's: a replica generates for others. Wait, or insist with ``--take-over``."""


class UpstreamLost(ProxyError):
    """The fleet's fault: every replica that was asked was lost before it answered. Try again."""


class SuspectRequest(ProxyError):
    """The request's fault, it seems: engines died with it in flight. Leave it out."""

    def __init__(self) -> None:
        super().__init__(
            "this request was in flight each time an engine died, so it is suspected of killing "
            "them and is not sent again; see the replicas' logs, and leave it out"
        )


class ReplicasDisagree(ProxyError):
    """The operator's fault: replicas that should be equal answer differently. Make them equal."""


class BroadcastFailed(ProxyError):
    """The fleet's fault: a call did not succeed on every replica. The message names them."""


class AdapterNotVisible(ProxyError):
    """The storage's fault: a replica could not see the adapter's files by the deadline."""


class AdapterStranded(ProxyError):
    """The fleet's fault: a failed publication could not be undone on the replicas it names."""


class AdapterRefused(ProxyError):
    """The adapter's fault: a replica refuses it, for good, with ``status`` and in its own words."""

    def __init__(self, message: str, *, status: int, type: str = "") -> None:
        super().__init__(message)
        # A load is never answered 404: TRL 1.16 reads that as "endpoint missing" (vllm_client.py).
        self._status = status if 400 <= status <= 599 and status != 404 else super().status
        self._type = type or super().type

    @property
    def status(self) -> int:
        return self._status

    @property
    def type(self) -> str:
        return self._type


@dataclass(frozen=True, slots=True)
class Row:
    """How one leaf looks from outside."""

    status: int
    """``AdapterRefused`` carries its own."""
    code: str
    """Value of ``x-rollmux-error``."""
    type: str
    """``error.type`` in the body; vLLM's word where it has one."""
    relies_on: str
    """The behaviour of a client that the status was chosen for."""


# TRL: facts read in TRL 1.16.0. A rollout is tried up to 90 times in about 8 minutes on any status
# but 200, then the run dies. A control call (load, pause, resume) is tried once; what is not 200
# ends the run with the message. OpenEnv tries 408, 409, 429, 500, 502, 503 and 504 three times and
# honours Retry-After up to 60 s.
TABLE: Final[Mapping[type[ProxyError], Row]] = {
    BadRequest: Row(
        400, "bad_request", "BadRequestError", "nobody retries it but TRL's rollouts, to no effect"
    ),
    Unauthorized: Row(401, "unauthorized", "AuthenticationError", "clients stop and ask for a key"),
    Forbidden: Row(403, "forbidden", "PermissionDeniedError", "clients stop"),
    UnknownModel: Row(
        404, "unknown_model", "NotFoundError", "vLLM's own answer; OpenEnv does not retry it"
    ),
    BodyTooSlow: Row(408, "body_timeout", "RequestTimeoutError", "OpenEnv and TRL send it again"),
    FleetBusy: Row(409, "fleet_busy", "ConflictError", "`rollmux run` exits with 2"),
    BodyTooLarge: Row(413, "body_too_large", "BadRequestError", "OpenEnv does not retry it"),
    HeadersTooLarge: Row(431, "headers_too_large", "BadRequestError", "OpenEnv does not retry it"),
    SuspectRequest: Row(
        500,
        "suspect_request",
        "InternalServerError",
        "at once, so TRL's up to 90 tries cost no more engines",
    ),
    AdapterStranded: Row(
        500, "adapter_stranded", "InternalServerError", "TRL ends the run with the message"
    ),
    UnknownRoute: Row(
        501,
        "unknown_route",
        "NotImplementedError",
        "not 404, which TRL reads as a missing endpoint of vLLM",
    ),
    NotSupported: Row(
        501, "not_supported", "NotImplementedError", "TRL ends the run with the message"
    ),
    RuntimeLoraDisabled: Row(
        501,
        "runtime_lora_disabled",
        "NotImplementedError",
        "not 404, for which TRL words its own guess; it ends the run with ours",
    ),
    UpstreamLost: Row(502, "upstream_lost", "InternalServerError", "TRL and OpenEnv try again"),
    ReplicasDisagree: Row(
        502, "replicas_disagree", "InternalServerError", "TRL ends the run at its start"
    ),
    BroadcastFailed: Row(
        502, "broadcast_failed", "InternalServerError", "TRL ends the run with the message"
    ),
    AdapterRefused: Row(
        502,
        "adapter_refused",
        "InternalServerError",
        "the replica's own status instead, never 404; TRL ends the run with the message",
    ),
    NoReadyReplica: Row(
        503,
        "no_ready_replica",
        "ServiceUnavailableError",
        "TRL tries again for minutes; OpenEnv honours Retry-After",
    ),
    TooManyAtOnce: Row(
        503,
        "too_many_at_once",
        "ServiceUnavailableError",
        "TRL tries again for minutes; OpenEnv honours Retry-After",
    ),
    FleetOutage: Row(
        503,
        "fleet_outage",
        "ServiceUnavailableError",
        "before TRL's own 1800 s are over, so that it ends the run with the message",
    ),
    AdapterNotVisible: Row(
        504, "adapter_not_visible", "GatewayTimeoutError", "not 404; TRL ends the run"
    ),
}


def error_body(error: ProxyError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of the answer, as ASGI wants them."""
    message = str(error)[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode("utf-8")
    body = orjson.dumps(
        {
            "error": {
                "message": message,
                "type": error.type,
                "param": error.param,
                "code": error.status,
            }
        }
    )
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-rollmux-error", error.code.encode("ascii")),
    ]
    if error.retry_after_s is not None:
        # A whole number is the form that every client understands; 0 would mean "at once".
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return error.status, headers, body


def bug_body() -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """The same for what no ``ProxyError`` tells of."""
    message = "rollmux failed inside; its log has the traceback"
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    body = orjson.dumps({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-rollmux-error", b"bug"),
    ]
    return 500, headers, body
