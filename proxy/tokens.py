"""The bearer token for replicas: where it comes from, and which replica may see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import urlsplit

from proxy.settings import is_loopback, read_token_file

REREAD_S = 1.0
"""A token file is looked at no more often than this."""
HF_JOBS_SUFFIX = ".hf.jobs"


class TokenError(ValueError):
    """The token cannot be read; the message says where it was looked for, never what it is."""


class Bearer:
    """Hands out the ``authorization`` value for a replica, or nothing.

    ``hf_jobs_only`` is for a token that nobody named (``HF_TOKEN``): it goes to
    ``https://*.hf.jobs`` and nowhere else. A token never goes over plain ``http`` to a host that is
    not loopback, unless ``over_http``.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        path: Path | None = None,
        hf_jobs_only: bool = False,
        over_http: bool = False,
        hosts: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._hf_jobs_only = hf_jobs_only
        self._over_http = over_http
        self._hosts = set(hosts)
        self._clock = clock
        self._token = token
        self._stamp: tuple[int, int, int] | None = None
        self._looked_s = -REREAD_S
        if path is not None:
            self._reread()

    def __repr__(self) -> str:
        return f"<Bearer from {self._path or 'the environment' if self._token else 'nowhere'}>"

    def __bool__(self) -> bool:
        return self._token is not None

    def trust(self, url: str) -> None:
        """The user named this replica: its host may have the token."""
        self._hosts.add(urlsplit(url).hostname or "")

    def allowed(self, url: str) -> bool:
        """Whether a replica may see the token at all."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if self._hf_jobs_only:
            return parts.scheme == "https" and host.endswith(HF_JOBS_SUFFIX)
        if host not in self._hosts:
            return False
        return parts.scheme == "https" or self._over_http or is_loopback(host)

    def value(self) -> bytes:
        """``Bearer …`` as it stands now, or nothing."""
        if self._path is not None and self._clock() - self._looked_s >= REREAD_S:
            self._reread()
        return b"Bearer " + self._token.encode() if self._token else b""

    def rejected(self) -> None:
        """A replica refused the token: look at the file at once when it is next needed."""
        self._stamp = None
        self._looked_s = -REREAD_S

    def redact(self, text: str) -> str:
        """``text`` without the token, should a replica have echoed it."""
        return text.replace(self._token, "***") if self._token else text

    def redact_bytes(self, body: bytes) -> bytes:
        return body.replace(self._token.encode(), b"***") if self._token else body

    def _reread(self) -> None:
        assert self._path is not None
        self._looked_s = self._clock()
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp != self._stamp:
                self._token = read_token_file(str(self._path))
                self._stamp = stamp
        except (OSError, ValueError) as exc:
            if self._token is None:  # a file caught half-written keeps the old token in use
                why = getattr(exc, "strerror", None) or exc
                raise TokenError(f"cannot read the token file {self._path}: {why}") from exc
