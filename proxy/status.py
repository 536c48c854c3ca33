"""What the daemon tells of itself: ``/proxy/status``, the same as text, and ``/metrics``."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from broadcast.answers import LoadOutcome
from broadcast.pause import Pause
from broadcast.publication import PublicationResult
from proxy.bottleneck import UNKNOWN, Hint
from proxy.engine_load import EngineLoad
from proxy.metrics import Metrics
from proxy.record import EventSink, RequestRecord, no_event
from proxy.replicas import Replicas
from routing.ids import ReplicaId

log = logging.getLogger("rollmux")

KEPT_PUBLICATIONS = 20
PATIENCE_S = 300.0
"""A client that leaves after so long did not stop its run: its own timeout has struck, TRL's
``request_timeout`` of 600 s, and it will send the same again."""
HINT_EVERY_S = 60.0
"""Between two hints: a whole batch may give up at once."""


@dataclass(slots=True)
class Underway:
    """A publication that has not ended, for people to look at."""

    name: str
    started_s: float
    phase: str = "checking the files"
    attempts: Counter[ReplicaId] = field(default_factory=Counter)
    loaded: list[ReplicaId] = field(default_factory=list)

    def attempted(self, replica: ReplicaId, outcome: LoadOutcome) -> None:
        self.attempts[replica] += 1
        if outcome is LoadOutcome.LOADED and replica not in self.loaded:
            self.loaded.append(replica)


class Status:
    """Reads the daemon's state and keeps the few counts that nothing else keeps."""

    hint: Hint = UNKNOWN
    """Kept up to date by ``hints.Hints``, as are the queues of ready replicas that tell them."""

    def __init__(self, replicas: Replicas, pause: Pause, metrics: Metrics, version: str) -> None:
        self._replicas = replicas
        self._pause = pause
        self._metrics = metrics
        self._version = version
        self._started_s = time.monotonic()
        self._routed: Counter[str] = Counter()
        self._hinted_s = -HINT_EVERY_S
        self._publications: deque[dict[str, Any]] = deque(maxlen=KEPT_PUBLICATIONS)
        self._underway: list[Underway] = []
        self.engine_loads: dict[ReplicaId, EngineLoad] = {}
        self.held: Callable[[], int] = lambda: 0
        """How many rollouts wait for a replica; the data plane knows."""
        self.on_event: EventSink = no_event

    # Sinks

    def on_record(self, record: RequestRecord) -> None:
        """One generation has ended."""
        metrics = self._metrics
        metrics.answered(record.route, record.status or 499)
        for replica, cause in record.failovers:
            metrics.failovers.labels(replica, cause).inc()
        if record.client_gone:
            metrics.disconnects.labels(record.phase).inc()
            if record.phase in ("upstream", "reply"):
                self._gave_up(record)
        if record.decision:
            self._routed[record.decision] += 1
            metrics.routed(record.decision, record.replica, record.ended_s - record.sent_s)
            if record.attempts == 1:
                metrics.overhead_seconds.observe(record.sent_s - record.received_s)

    def _gave_up(self, record: RequestRecord) -> None:
        """The client left while a replica was at work for it."""
        age_s = record.ended_s - record.started_s
        self._metrics.gave_up_seconds.labels(record.replica).observe(age_s)
        if age_s >= PATIENCE_S and record.ended_s - self._hinted_s >= HINT_EVERY_S:
            self._hinted_s = record.ended_s
            log.warning(
                "a client gave up a generation on %s after %.0f s, and what it had cost is lost. "
                "Where this goes on, raise the trainer's request_timeout or lower the load",
                self._replicas.label(record.replica),
                age_s,
            )

    @contextmanager
    def publishing(self, name: str) -> Iterator[Underway]:
        """Around one publication; its phase is for the caller to keep up to date."""
        underway = Underway(name, time.monotonic())
        self._underway.append(underway)
        try:
            yield underway
        finally:
            self._underway.remove(underway)

    def on_publication(self, result: PublicationResult) -> None:
        """One publication has ended."""
        self._publications.append(
            {
                "name": result.name,
                "outcome": result.outcome,
                "seconds": round(result.seconds, 3),
                "ended_s": self._uptime_s(),
                "visible_s": {r: round(s, 3) for r, s in result.visible_s.items()},
                "attempts": dict(result.attempts),
                "dropped": list(result.dropped),
                "message": result.message,
            }
        )
        self.on_event(
            "publish", model=result.name, outcome=result.outcome, seconds=round(result.seconds, 3)
        )
        self._metrics.publications.labels(result.outcome).inc()
        self._metrics.publish_seconds.labels(result.outcome).observe(result.seconds)

    # Readers

    def is_publishing(self) -> bool:
        return bool(self._underway)

    def routed(self) -> tuple[int, int | None]:
        """Rollouts routed so far, and of them by affinity; None where the policy has no such word.

        A policy of its own words may use none of ours.
        """
        known = any(self._routed[word] for word in _WORDS)
        return self._routed.total(), self._routed["affinity"] if known else None

    def _uptime_s(self) -> float:
        return round(time.monotonic() - self._started_s, 1)

    def metrics_page(self) -> bytes:
        metrics, ledger = self._metrics, self._replicas.ledger
        metrics.adapters_live.set(len(ledger.live))
        metrics.paused.set(self._pause.paused)
        metrics.requests_held.set(self.held())
        for replica in self._replicas.fleet:
            # 0 from the start: a rate needs a first value, and an alert waits for this one's.
            metrics.gave_up_seconds.labels(replica.id)
        metrics.prefix_blocks.set(self._replicas.router.tracked_blocks)
        if ledger.latest is not None:
            metrics.policy_version.set(ledger.policy_version)
        return metrics.page()

    def as_dict(self) -> dict[str, Any]:
        """The contract's ``/proxy/status``; keys are only ever added."""
        replicas = self._replicas
        ledger = replicas.ledger
        routed = self._routed
        return {
            "version": self._version,
            "uptime_s": self._uptime_s(),
            "healthy": replicas.fleet.healthy(replicas.now_s()),
            "rebuilding": replicas.rebuilding,
            "paused": self._pause.paused,
            "stopped": self._pause.real,
            "held": self.held(),
            "hint": {
                "code": self.hint.code,
                "text": self.hint.text,
                "remarks": [{"code": r.code, "text": r.text} for r in self.hint.remarks],
            },
            "policy": {
                "latest": ledger.latest.name if ledger.latest else None,
                "live": list(ledger.live_names()),
                "retired": list(ledger.retired_names()),
            },
            "router": {
                "name": replicas.router.name,
                "routed": sum(routed.values()),
                "affinity": routed["affinity"],
                "spilled": routed["spilled"],
                "unmatched": routed["unmatched"],
                "tracked_blocks": replicas.router.tracked_blocks,
                **{word: n for word, n in routed.items() if word not in _WORDS},
            },
            "replicas": [
                {
                    "id": r.id,
                    "url": r.url,
                    "state": r.state.value,
                    "inflight": r.inflight,
                    "routed": r.routed,
                    "running": load.running if (load := self.engine_loads.get(r.id)) else None,
                    "waiting": load.waiting if load else None,
                    "adapters": list(r.adapters),
                    "base_models": list(r.base_models),
                    "paused": r.paused,
                    "last_error": r.excluded_reason or r.last_error,
                    "error_code": r.error_code,
                }
                for r in replicas.fleet
            ],
            "missing": list(replicas.fleet.missing()),
            "publishing": [
                {
                    "name": u.name,
                    "phase": u.phase,
                    "seconds": round(time.monotonic() - u.started_s, 3),
                    "attempts": dict(u.attempts),
                    "loaded": list(u.loaded),
                }
                for u in self._underway
            ],
            "publications": list(self._publications),
        }

    def as_text(self) -> str:
        """The status for people, on one screen."""
        data = self.as_dict()
        router = data["router"]
        lines = [
            f"rollmux {data['version']}, up {data['uptime_s']:.0f} s, "
            f"{'healthy' if data['healthy'] else 'not healthy'}"
            f"{', paused' if data['paused'] else ''}",
            f"policy {data['policy']['latest'] or 'none yet'}; "
            f"live: {', '.join(data['policy']['live']) or 'none'}",
            f"router {router['name']}: {router['routed']} routed, {router['affinity']} affinity, "
            f"{router['spilled']} spilled, {router['unmatched']} unmatched",
            *(r["text"] for r in (data["hint"], *data["hint"]["remarks"])),
            "",
        ]
        lines += [
            f"{r['id']:4} {r['state']:9} in flight {r['inflight']:5}  routed {r['routed']:8}  "
            f"{r['url']}  {r['last_error']}".rstrip()
            for r in data["replicas"]
        ]
        lines += [""] + [
            f"{p['name']}: {p['outcome']} in {p['seconds']} s, attempts {p['attempts']}"
            for p in reversed(data["publications"])
        ]
        return "\n".join(lines) + "\n"


_WORDS = frozenset(("affinity", "spilled", "unmatched"))
