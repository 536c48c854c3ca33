"""The daemon's life: start, serve, drain, stop. Each step is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import orjson
import uvloop

from proxy import descriptors
from proxy.daemon import BACKLOG, Daemon
from proxy.settings import Secrets, Settings, SettingsError
from proxy.upstream import IN_PLACE_MOST_BYTES
from proxy.version import version
from routing import registry

log = logging.getLogger("rollmux")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h
KEPT_FREE_BYTES = 64 * 1024 * 1024
"""Memory that may lie free: 32 replies of 2 MB."""
GARBAGE_OBJECTS = 50_000
"""New objects between two looks for cycles. At Python's own 700 the looks took 4.8 % of the CPU of
short generations (py-spy, 135 tokens and 2 kB), and found next to nothing."""


def serve(settings: Settings, secrets: Secrets, notes: Sequence[str]) -> int:
    """Run the daemon until it is told to stop; its exit code. Raises ``SettingsError``."""
    _start_logging(settings)
    for note in notes:
        log.info("%s", note)
    listener = _listen(settings)
    descriptors.raise_limit()
    try:
        registry.factory(settings.router)
    except registry.RouterError as exc:
        raise SettingsError(f"--router: {exc}") from exc
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(settings, secrets, listener))


async def _live(settings: Settings, secrets: Secrets, listener: socket.socket) -> int:
    """Start, serve until a signal, drain, stop."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    daemon = Daemon(settings, secrets)
    daemon.start(listener)
    host, port = listener.getsockname()[:2]
    log.info(
        "rollmux %s serves http://%s:%d for %d replicas, router %s",
        version(),
        f"[{host}]" if ":" in host else host,
        port,
        len(daemon.replicas.fleet),
        daemon.replicas.router.name,
    )
    gc.freeze()  # what is here now stays
    gc.set_threshold(GARBAGE_OBJECTS)
    keep_freed_memory()
    stopping = daemon.tasks.start(stop.wait(), "signals")
    try:
        await asyncio.wait((daemon.serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        failed = daemon.serving.done()
    finally:
        await daemon.stop()
    log.info("stopped")
    return 1 if failed else 0


def _listen(settings: Settings) -> socket.socket:
    """The listening socket: inherited, or bound now. Raises ``SettingsError``."""
    if settings.fd is not None:
        try:
            listener = socket.socket(fileno=settings.fd)
            listener.getsockname()
        except OSError as exc:
            raise SettingsError(f"--fd: {settings.fd} is not a socket: {exc.strerror}") from exc
        listener.setblocking(False)
        return listener
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        raise SettingsError(
            f"--port: cannot listen on {settings.host}:{settings.port}: {exc.strerror or exc}; "
            "end what listens there or give another --port"
        ) from exc
    listener.setblocking(False)
    return listener


def printable(text: str) -> str:
    """``text`` on one line, whatever a client or a replica put into it."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


class _Text(logging.Formatter):
    """Time, level and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)


def keep_freed_memory() -> None:
    """Let glibc keep what large replies took: its pages, once given back, fault in anew for the
    next one, 400 times for 2 MB, which can take as long as all else. Another C library has no such
    call, and is left as it is."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes  # not every Python has it

        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 2 * IN_PLACE_MOST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line["traceback"] = trace.encode("utf-8", "backslashreplace").decode()
        return orjson.dumps(line).decode()


def _start_logging(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if settings.log_format == "json" else _Text())
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(settings.log_level.upper())
    # uvicorn tells of broken streams and bad requests what our own lines tell already.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
