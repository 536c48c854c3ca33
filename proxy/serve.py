"""The daemon's life: start, serve, drain, stop. Each step is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import secrets as random_secrets
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import uvicorn
import uvloop

from broadcast.driver import Timeouts
from broadcast.fleet import Fleet
from broadcast.ledger import Ledger
from broadcast.pause import Pause
from broadcast.publication import Rules
from proxy.app import Daemon, rest
from proxy.calls import Calls
from proxy.control import Control
from proxy.fanout import Fanout
from proxy.generation import Generations
from proxy.metrics import Metrics
from proxy.probes import Probes
from proxy.publishing import Publishing
from proxy.rejoin import MARKER_PREFIX, Rejoin
from proxy.replicas import Replicas
from proxy.settings import Secrets, Settings, SettingsError
from proxy.status import Status
from proxy.tasks import Tasks
from proxy.tokens import Bearer
from proxy.version import version
from routing import registry
from routing.router import Router, RouterSettings

log = logging.getLogger("rollmux")

BACKLOG = 8192
"""Connects that queue while the daemon is busy or restarts; the kernel may hold it lower."""
CLIENT_IDLE_S = 75
"""Longer than aiohttp's 15 s, so that the client and never the server drops an idle connection."""
WANTED_FILES = 65_536
"""Descriptors: two for each generation in flight."""


def serve(settings: Settings, secrets: Secrets, notes: Sequence[str]) -> int:
    """Run the daemon until it is told to stop; its exit code. Raises ``SettingsError``."""
    _start_logging(settings)
    for note in notes:
        log.info("%s", note)
    listener = _listen(settings)
    _raise_file_limit()
    try:
        registry.factory(settings.router)
    except registry.RouterError as exc:
        raise SettingsError(f"--router: {exc}") from exc
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(settings, secrets, listener))


async def _live(settings: Settings, secrets: Secrets, listener: socket.socket) -> int:
    """Build everything, serve until a signal, drain, stop."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)

    tasks = Tasks("daemon")
    metrics = Metrics(version())
    bearer = _bearer(settings, secrets)
    context = _tls(settings)
    seed = random_secrets.randbits(32)

    def make_router(block_tokens: int | None) -> Router:
        return registry.load(
            settings.router,
            RouterSettings(
                block_tokens=settings.block_size or block_tokens or 16,
                spill_threshold=settings.spill_threshold,
                max_tracked_blocks=settings.max_tracked_blocks,
                seed=seed,
            ),
        )

    fleet = Fleet(
        min_replicas=settings.min_replicas,
        start_timeout_s=settings.start_timeout_s,
        stall_s=settings.stall_s,
        now_s=loop.time(),
    )
    replicas = Replicas(
        fleet,
        Ledger(retire_grace_s=settings.retire_grace_s),
        make_router,
        bearer=bearer,
        metrics=metrics,
        context=context,
    )
    calls = Calls(
        lambda id: found.url if (found := fleet.get(id)) else None,
        bearer,
        context=context,
        trust_env=settings.trust_env,
    )
    status = Status(replicas, metrics, version())
    fanout = Fanout(replicas, calls, outage_s=settings.outage_s)
    pause = Pause("eager" if settings.pause == "eager" else "lazy")
    rejoin = Rejoin(
        replicas,
        calls,
        fanout,
        pause,
        run_id=f"{MARKER_PREFIX}{random_secrets.token_hex(6)}",
        load_timeout_s=settings.load_timeout_s,
        load_retry_s=settings.load_retry_s,
        load_retry_max_s=settings.load_retry_max_s,
        attempt_timeout_s=settings.attempt_timeout_s,
        control_timeout_s=settings.control_timeout_s,
    )
    publishing = Publishing(
        replicas,
        calls,
        fanout,
        status,
        metrics,
        rules=Rules(
            load_timeout_s=settings.load_timeout_s,
            load_retry_s=settings.load_retry_s,
            load_retry_max_s=settings.load_retry_max_s,
            min_replicas=None if settings.min_replicas == "all" else settings.min_replicas,
        ),
        timeouts=Timeouts(settings.attempt_timeout_s, settings.control_timeout_s),
        own_copies=settings.own_copies == "auto",
        max_lora_rank=rejoin.max_lora_rank,
    )
    probes = Probes(
        replicas, calls, probe_s=settings.probe_s, catch_up=rejoin.catch_up, tasks=tasks
    )
    control = Control(
        replicas,
        calls,
        fanout,
        pause,
        publishing,
        rejoin,
        status,
        metrics,
        bearer,
        tasks,
        hold_s=settings.hold_s,
        control_timeout_s=settings.control_timeout_s,
        admin_key=secrets.admin_key,
        token_hosts=settings.token_hosts,
        watch=probes.watch,
    )
    generations = Generations(
        replicas,
        hold_s=settings.hold_s,
        body_timeout_s=settings.body_timeout_s,
        keep_authorization=secrets.api_key is None and not bearer,
        on_record=status.on_record,
        tasks=tasks,
    )
    daemon = Daemon(
        generations,
        rest(control, status, body_timeout_s=settings.body_timeout_s),
        secrets.api_key,
    )
    server = _Server(
        uvicorn.Config(
            daemon,
            http="httptools",
            ws="none",
            loop="none",
            lifespan="off",
            backlog=BACKLOG,
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=CLIENT_IDLE_S,
            timeout_graceful_shutdown=max(1, int(settings.drain_s)),
        )
    )
    for url in settings.replicas:
        probes.watch(replicas.add(url))
    probes.watch_fleet()
    tasks.start(publishing.sweep(), "retired adapters")
    serving = tasks.start(server.serve(sockets=[listener]), "server")
    stopping = tasks.start(stop.wait(), "signals")
    host, port = listener.getsockname()[:2]
    log.info(
        "rollmux %s serves http://%s:%d for %d replicas, router %s",
        version(),
        f"[{host}]" if ":" in host else host,
        port,
        len(fleet),
        replicas.router.name,
    )
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        failed = serving.done()
        if not failed:
            log.info(
                "stopping: %d rollouts in flight, drained for up to %g s",
                fleet.inflight(),
                settings.drain_s,
            )
            server.should_exit = True
            await asyncio.wait((serving,), timeout=settings.drain_s + 2)
        try:
            async with asyncio.timeout(5):
                await control.release()
        except TimeoutError:
            log.error("replicas may be left paused: they did not answer a resume in time")
    finally:
        await tasks.close()
        replicas.close()
        await calls.close()
    log.info("stopped")
    return 1 if failed else 0


class _Server(uvicorn.Server):
    """uvicorn, but signals are ours: a handler only records that one came."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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


def _raise_file_limit() -> None:
    """As many descriptors as we may have: each generation in flight takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, WANTED_FILES) if hard != resource.RLIM_INFINITY else WANTED_FILES
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        log.warning(
            "only %d file descriptors: at most %d rollouts at once; raise `ulimit -n`",
            soft,
            max(1, soft // 2 - 32),
        )


def _bearer(settings: Settings, secrets: Secrets) -> Bearer:
    return Bearer(
        token=secrets.token or secrets.hf_token,
        path=Path(settings.token_file) if settings.token_file else None,
        hf_jobs_only=secrets.token is None and secrets.hf_token is not None,
        over_http=settings.token_over_http,
        hosts={urlsplit(url).hostname or "" for url in settings.replicas},
    )


def _tls(settings: Settings) -> ssl.SSLContext:
    """Verification with the system's authorities, or with the private one."""
    return ssl.create_default_context(cafile=settings.ca_file)


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return orjson.dumps(
            {
                "time": self.formatTime(record),
                "level": record.levelname.lower(),
                "message": record.getMessage(),
            }
        ).decode()


def _start_logging(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json()
        if settings.log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
    )
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(settings.log_level.upper())
    # uvicorn tells of broken streams and bad requests what our own lines tell already.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
