"""The numbers an operator sees at ``/metrics``. Every label set is bounded.

Adapter names are never labels: a run makes thousands of them. The names are fixed by the contract.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from proxy.tallies import CounterTally, HistogramTally

CONTENT_TYPE = CONTENT_TYPE_LATEST

_GENERATION_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_OVERHEAD_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_PUBLISH_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 20, 40, 80, 160, 320)
MAX_WORDS = 16
"""Decision words kept apart; a plugin that makes up more of them is counted under ``other``."""


class Metrics:
    """All metrics of one daemon, on a registry of its own."""

    def __init__(self, version: str) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rollmux_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"rollmux_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"rollmux_{name}", text, labels, registry=registry, buckets=buckets)

        def hot_counter(name: str, text: str, *labels: str) -> CounterTally:
            return CounterTally(f"rollmux_{name}", text, labels, registry)

        def hot_histogram(
            name: str, text: str, bounds: tuple[float, ...], *labels: str
        ) -> HistogramTally:
            return HistogramTally(f"rollmux_{name}", text, bounds, labels, registry)

        self.requests = hot_counter("requests", "Answers to the trainer.", "route", "code")
        self.decisions = hot_counter("routing_decisions", "Choices by reason.", "decision")
        self.replica_inflight = gauge(
            "replica_inflight", "Rollouts sent and not yet answered.", "replica"
        )
        self.replica_state = gauge(
            "replica_state", "1 for the state a replica is in.", "replica", "state"
        )
        self.replica_info = gauge("replica_info", "Always 1: which URL an id is.", "replica", "url")
        self.failovers = counter(
            "failovers_total", "Generations moved off a replica.", "replica", "cause"
        )
        self.upstream_seconds = hot_histogram(
            "upstream_seconds", "From sending to the whole reply.", _GENERATION_S, "replica"
        )
        self.overhead_seconds = hot_histogram(
            "overhead_seconds", "From the whole request to its sending on.", _OVERHEAD_S
        )
        self.load_attempts = counter(
            "adapter_load_attempts_total", "Load calls by how they ended.", "replica", "result"
        )
        self.load_retries = counter(
            "adapter_load_retries_total", "Load calls after the first one.", "replica"
        )
        self.visible_seconds = histogram(
            "adapter_visible_seconds", "From publication to loaded.", _PUBLISH_S, "replica"
        )
        self.publish_seconds = histogram(
            "adapter_publish_seconds",
            "From the trainer's load call to its answer.",
            _PUBLISH_S,
            "outcome",
        )
        self.publications = counter(
            "adapter_publications_total", "Publications by how they ended.", "outcome"
        )
        self.pushed_bytes = counter(
            "pushed_bytes_total", "Adapter files sent to a replica.", "replica"
        )
        self.push_seconds = histogram(
            "push_seconds",
            "Pushing one adapter, or seeing that it is there.",
            _PUBLISH_S,
            "replica",
        )
        self.weight_proofs = counter(
            "weight_proofs_total", "Looks at what policy names stand for.", "outcome"
        )
        self.adapters_live = gauge("adapters_live", "Policies that rollouts may name.")
        self.policy_version = gauge("policy_version", "Number of the newest policy; -1 before it.")
        self.paused = gauge("paused", "1 while the trainer has paused generation.")
        self.pauses_elided = counter(
            "pauses_elided_total", "Pauses acknowledged without stopping a replica."
        )
        self.requests_held = gauge("requests_held", "Rollouts that wait for a ready replica.")
        self.bottleneck = gauge("bottleneck", "1 for what holds the run back.", "cause")
        self.prefix_blocks = gauge("prefix_blocks", "Blocks in the router's table.")
        self.disconnects = counter(
            "client_disconnects_total", "Clients that went away, by phase.", "phase"
        )
        self.gave_up_seconds = histogram(
            "client_gave_up_seconds",
            "Age of a generation whose client went away while a replica had it.",
            _GENERATION_S,
            "replica",
        )
        self.trace_lines = counter(
            "trace_lines_total", "Lines of the trace file, written or dropped.", "result"
        )
        self.loop_lag = gauge("event_loop_lag_seconds", "Lateness of a timer, worst in 10 s.")
        self.build_info = gauge("build_info", "Always 1: the version.", "version")
        self.build_info.labels(version).set(1)
        self.policy_version.set(-1)
        for outcome in ("committed", "rolled_back", "stranded"):
            self.publications.labels(outcome)
        for outcome in ("agree", "differ", "unclear"):
            self.weight_proofs.labels(outcome)
        for result in ("written", "dropped"):
            self.trace_lines.labels(result)
        for reason in ("affinity", "spilled", "unmatched"):
            self.decisions.counts[reason,] = 0
        self._words: set[str] = {"affinity", "spilled", "unmatched"}

    def answered(self, route: str, status: int) -> None:
        """One generation was answered; 499 for a client that did not wait for it."""
        self.requests.inc(route, str(status))

    def routed(self, reason: str, replica: str, upstream_s: float) -> None:
        """One generation has been on a replica, for so long."""
        self.decisions.inc(self.word(reason))
        self.upstream_seconds.observe(upstream_s, replica)

    def word(self, reason: str) -> str:
        """A decision's label: the policy's word, or ``other`` past ``MAX_WORDS`` of them."""
        if reason not in self._words:
            if len(self._words) >= MAX_WORDS:
                return "other"
            self._words.add(reason)
        return reason

    def forget_replica(self, replica: str, url: str, states: tuple[str, ...]) -> None:
        """Drop a removed replica's gauges; its counters stay, so that sums never go down."""
        for state in states:
            self.replica_state.remove(replica, state)
        self.replica_info.remove(replica, url)
        self.replica_inflight.remove(replica)

    def page(self) -> bytes:
        return generate_latest(self.registry)
