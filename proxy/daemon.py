"""The daemon as one object: every part of it, built from the settings and wired together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets as random_secrets
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import uvicorn

from broadcast.driver import Timeouts
from broadcast.fleet import Fleet
from broadcast.ledger import Ledger
from broadcast.pause import Pause
from broadcast.publication import Rules
from proxy.app import ROUTED, App, rest
from proxy.bucket_gate import BucketGate
from proxy.calls import Calls
from proxy.client_protocol import ClientProtocol
from proxy.control import Control
from proxy.descriptors import most_generations
from proxy.fanout import Fanout
from proxy.generation import Generations
from proxy.hints import Hints
from proxy.hub_jobs import HubJobs
from proxy.journal import Journal
from proxy.metrics import Metrics
from proxy.probes import Probes
from proxy.proving import Proving
from proxy.publishing import Publishing
from proxy.pushing import Pushing, default_cache
from proxy.record import RequestRecord
from proxy.recorder import Recorder
from proxy.rejoin import MARKER_PREFIX, Rejoin
from proxy.replicas import Replicas
from proxy.settings import Secrets, Settings
from proxy.sources import Sources
from proxy.status import Status
from proxy.tasks import Tasks
from proxy.tokens import Bearer
from proxy.turns import Turns
from proxy.version import version
from routing import registry
from routing.router import Router, RouterSettings

log = logging.getLogger("rollmux")

BACKLOG = 8192
"""Connects that queue while the daemon is busy or restarts; the kernel may hold it lower."""
CLIENT_IDLE_S = 75
"""Longer than aiohttp's 15 s, so that the client and never the server drops an idle connection."""
DEFAULT_BLOCK_TOKENS = 16
"""vLLM's own default (0.27.1), used while no replica has told its block size."""
LOOK_S = 1.0
"""What a stop may wait for looks at replicas that are under way."""
TRACE_S = 2.0
"""What a stop may spend on the end of the trace."""
RELEASE_S = 5.0
"""What a stop may spend on resuming replicas that are really paused."""


class Daemon:
    """Build it inside a running event loop, ``start`` it on a listening socket, ``stop`` it."""

    def __init__(self, settings: Settings, secrets: Secrets) -> None:
        self._settings = settings
        self.metrics = Metrics(version())
        self.recorder = self._recorder()  # first: it may refuse, and nothing is to be closed yet
        self._seed = random_secrets.randbits(32)
        self.tasks = Tasks("daemon")
        self.bearer = bearer_of(settings, secrets)
        context = ssl.create_default_context(cafile=settings.ca_file)
        fleet = Fleet(
            min_replicas=settings.min_replicas,
            start_timeout_s=settings.start_timeout_s,
            stall_s=settings.stall_s,
            now_s=monotonic(),
        )
        self.replicas = Replicas(
            fleet,
            Ledger(retire_grace_s=settings.retire_grace_s),
            self._make_router,
            bearer=self.bearer,
            metrics=self.metrics,
            context=context,
        )
        self.calls = Calls(
            lambda id: found.url if (found := fleet.get(id)) else None,
            self.bearer,
            context=context,
            trust_env=settings.trust_env,
        )
        pause = Pause("eager" if settings.pause == "eager" else "lazy")
        self.status = Status(self.replicas, pause, self.metrics, version())
        self.fanout = Fanout(self.replicas, self.calls, outage_s=settings.outage_s)
        journal = (
            Journal(Path(settings.state_file), self.replicas.ledger, pause)
            if settings.state_file
            else None
        )
        self.pushing = Pushing(
            self.calls,
            self.metrics,
            key=secrets.push_key,
            transport=settings.adapter_transport,
            cache=(
                Path(settings.push_cache).resolve()
                if settings.push_cache
                else default_cache(settings.port)
            ),
            max_bytes=settings.push_cache_mb << 20,
            timeout_s=settings.attempt_timeout_s,
        )
        self.rejoin = Rejoin(
            self.replicas,
            self.calls,
            pause,
            self.pushing,
            run_id=f"{MARKER_PREFIX}{random_secrets.token_hex(6)}",
            journal=journal,
            load_timeout_s=settings.load_timeout_s,
            load_retry_s=settings.load_retry_s,
            load_retry_max_s=settings.load_retry_max_s,
            attempt_timeout_s=settings.attempt_timeout_s,
            control_timeout_s=settings.control_timeout_s,
        )
        self._gate = _gate(settings, secrets)
        self.publishing = Publishing(
            self.replicas,
            self.calls,
            self.fanout,
            self.status,
            self.metrics,
            rules=Rules(
                load_timeout_s=settings.load_timeout_s,
                load_retry_s=settings.load_retry_s,
                load_retry_max_s=settings.load_retry_max_s,
                min_replicas=None if settings.min_replicas == "all" else settings.min_replicas,
            ),
            timeouts=Timeouts(settings.attempt_timeout_s, settings.control_timeout_s),
            own_copies=settings.own_copies == "auto",
            pushing=self.pushing,
            gate=self._gate,
            limits=self.rejoin.weakest_lora,
        )
        self.probes = Probes(
            self.replicas,
            self.calls,
            probe_s=settings.probe_s,
            catch_up=self.rejoin.catch_up,
            tasks=self.tasks,
        )
        self.control = Control(
            self.replicas,
            self.calls,
            self.fanout,
            pause,
            self.publishing,
            Proving(
                self.replicas,
                self.fanout,
                pause,
                self.metrics,
                timeout_s=settings.control_timeout_s,
            ),
            self.rejoin,
            self.metrics,
            self.bearer,
            self.tasks,
            hold_s=settings.hold_s,
            outage_s=settings.outage_s,
            control_timeout_s=settings.control_timeout_s,
            admin_key=secrets.admin_key,
            token_hosts=settings.token_hosts,
            watch=self.probes.watch,
            journal=journal,
        )
        self.sources = Sources(self.replicas, self.probes.watch)
        if self.recorder is not None:
            self.status.on_event = self.control.on_event = self.recorder.on_event
        self._hub_jobs = _hub_jobs(settings, secrets)
        generations = Generations(
            self.replicas,
            hold_s=settings.hold_s,
            body_timeout_s=settings.body_timeout_s,
            most=most_generations(),
            # A client's own credentials go on to a replica only where we have none to guard.
            keep_authorization=secrets.api_key is None and not self.bearer,
            on_record=self._on_record,
            count_tokens=self.recorder is not None,
        )
        self.status.held = lambda: generations.held
        self.hints = Hints(
            self.replicas, self.calls, pause, self.status, self.metrics, probe_s=settings.probe_s
        )
        self.app = App(
            generations,
            rest(self.control, self.status, self._gate, body_timeout_s=settings.body_timeout_s),
            secrets.api_key,
        )
        self._server = _Server(
            uvicorn.Config(
                self.app,
                http=cast(
                    type[ClientProtocol],  # uvicorn calls it, and does nothing else with it
                    partial(
                        ClientProtocol,
                        routed={path.encode(): path for path in ROUTED},
                        carry=self.app.generation,
                        turns=Turns(),
                    ),
                ),
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
                workers=1,  # else uvicorn reads WEB_CONCURRENCY, and dies of what is no number
                timeout_graceful_shutdown=max(1, int(settings.drain_s)),
            )
        )
        self.serving: asyncio.Task[None]

    def start(self, listener: socket.socket) -> None:
        """Begin to serve and to look at the replicas."""
        for url in self._settings.replicas:
            self.probes.watch(self.replicas.add(url))
        if self._settings.replicas_file:
            follow = self.sources.follow_file(Path(self._settings.replicas_file))
            self.tasks.start(follow, "replicas file")
        if self._settings.replicas_dns:
            host, _, port = self._settings.replicas_dns.rpartition(":")
            self.tasks.start(self.sources.follow_dns(host, int(port)), "replicas dns")
        if self._hub_jobs is not None:
            follow = self.sources.follow_hub(self._hub_jobs, self.bearer)
            self.tasks.start(follow, "replicas of the Hub")
        self.probes.watch_fleet()
        self.tasks.start(self.hints.watch(), "hints")
        self.tasks.start(self.hints.read_engines(), "engine loads")
        self.tasks.start(self.publishing.sweep(), "retired adapters")
        self.serving = self.tasks.start(self._server.serve(sockets=[listener]), "server")

    async def stop(self) -> None:
        """Drain what is in flight, resume what is paused, close. Bounded by ``drain_s`` + 14 s."""
        drain_s = self._settings.drain_s
        if not self.serving.done():
            log.info(
                "stopping: %d rollouts in flight, drained for up to %g s",
                self.replicas.fleet.inflight(),
                drain_s,
            )
            self._server.should_exit = True
            await asyncio.wait((self.serving,), timeout=drain_s + 2)
        try:
            async with asyncio.timeout(RELEASE_S):
                await self.control.release()
        except TimeoutError:
            log.error("replicas may be left paused: they did not answer a resume in time")
        await self.probes.close(LOOK_S)
        await self.hints.close(LOOK_S)
        await self.tasks.close()
        self.replicas.close()
        await self.calls.close()
        if self._gate is not None:
            await self._gate.close()
        if self._hub_jobs is not None:
            await self._hub_jobs.close()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close, TRACE_S)
        # A transport closes its socket in the loop's next turn, which must still come.
        await asyncio.sleep(0)

    def _recorder(self) -> Recorder | None:
        """:raises SettingsError: the trace cannot be written."""
        settings = self._settings
        if settings.record is None:
            return None
        return Recorder(
            Path(settings.record),
            now_s=monotonic,
            router=settings.router,
            max_tracked_blocks=settings.max_tracked_blocks,
            metrics=self.metrics,
        )

    def _on_record(self, record: RequestRecord) -> None:
        self.status.on_record(record)
        if self.recorder is not None:
            self.recorder.on_record(record)

    def _make_router(self, told_tokens: int | None) -> Router:
        settings = self._settings
        block_tokens = settings.block_size or told_tokens or DEFAULT_BLOCK_TOKENS
        if self.recorder is not None:
            self.recorder.block_tokens = block_tokens
        return registry.load(
            settings.router,
            RouterSettings(
                block_tokens=block_tokens,
                spill_threshold=settings.spill_threshold,
                max_tracked_blocks=settings.max_tracked_blocks,
                seed=self._seed,
            ),
        )


class _Server(uvicorn.Server):
    """uvicorn, but signals are ours: a handler only records that one came."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bearer_of(settings: Settings, secrets: Secrets) -> Bearer:
    """The token for replicas, and who may see it, as the settings have it."""
    return Bearer(
        token=secrets.token or secrets.hf_token,
        path=Path(settings.token_file) if settings.token_file else None,
        hf_jobs_only=secrets.token is None and secrets.hf_token is not None,
        over_http=settings.token_over_http,
        hosts={urlsplit(url).hostname or "" for url in settings.replicas},
    )


def _hub_jobs(settings: Settings, secrets: Secrets) -> HubJobs | None:
    if settings.replicas_hf_label is None:
        return None
    return HubJobs(
        settings.replicas_hf_label, endpoint=settings.hub_endpoint, token=secrets.hub_token
    )


def _gate(settings: Settings, secrets: Secrets) -> BucketGate | None:
    if settings.bucket_gate is None:
        return None
    bucket, _, mount = settings.bucket_gate.partition("=")
    return BucketGate(bucket, Path(mount), endpoint=settings.hub_endpoint, token=secrets.hub_token)
