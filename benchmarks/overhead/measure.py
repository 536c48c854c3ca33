"""One row measured: upstreams, load and all proxies started, then one proxy after the other."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.daemon import environment
from benchmarks.overhead import proxies
from benchmarks.overhead.process import cores, cpu_s, memory_mb, started
from benchmarks.overhead.rows import Row
from benchmarks.overhead.upstream import Answers
from proxy import descriptors

CALM_PART = 16
"""In the calm phase this part of the connections is busy: nothing waits behind others, and what is
added to a round trip is the proxy's work on it."""
DEADLINE_S = 120.0
"""Of a phase, besides the upstream's own time: a peer at its worst takes 20 ms for one request."""
IDLE_S = 3.0
WRONG = ("bad_status", "wrong_body", "lost", "doubled", "unanswered")


@dataclass(slots=True)
class Measured:
    """One proxy in one row; lists have one entry for each round."""

    name: str
    missing: str = ""
    """Why it was not measured."""
    cpu_us: list[float] = field(default_factory=list)
    """Of the proxy, for each request that was answered."""
    per_s: list[float] = field(default_factory=list)
    latency_p50_s: list[float] = field(default_factory=list)
    latency_p99_s: list[float] = field(default_factory=list)
    """Round trip without the time at the upstream; in the calm phase where there is one."""
    memory_mb: float = 0.0
    """At its peak."""
    idle_ms_per_s: float = 0.0
    """CPU time when nothing is asked of it: probes of its replicas, say. ``cpu_us`` has it too."""
    requests: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    first_bad: str = ""

    def add(self, took_cpu_s: float, busy: dict[str, Any], calm: dict[str, Any]) -> None:
        good = max(1, busy["good"])
        self.cpu_us.append(1e6 * took_cpu_s / good)
        self.per_s.append(busy["good"] / busy["seconds"])
        self.latency_p50_s.append((calm or busy)["added_p50_s"])
        self.latency_p99_s.append((calm or busy)["added_p99_s"])
        for result in filter(None, (busy, calm)):
            self.requests += result["sent"]
            self.first_bad = self.first_bad or result["first_bad"]
            for kind in WRONG:
                if result[kind]:
                    self.wrong[kind] = self.wrong.get(kind, 0) + result[kind]


def ratio(ours: Measured, theirs: Measured) -> float | None:
    """CPU per request of one, of the other's: the middle one of the rounds."""
    if not ours.cpu_us or not theirs.cpu_us or not all(theirs.cpu_us):
        return None
    return statistics.median(a / b for a, b in zip(ours.cpu_us, theirs.cpu_us, strict=True))


class Load:
    """The load generator's process; see ``load.session``."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def tell(self, what: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(what).encode() + b"\n")
        self._child.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the load generator ended; what it said is above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def upstreams(answers: Answers, count: int, core: int) -> Iterator[list[str]]:
    """``count`` of them in one process; yields their URLs."""
    with contextlib.ExitStack() as stack:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for sock in sockets:
            stack.enter_context(sock)
        scheme = "https" if answers.certificate else "http"
        urls = [f"{scheme}://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
        command = [sys.executable, "-m", "benchmarks.overhead.upstream", answers.as_json()]
        command += [str(sock.fileno()) for sock in sockets]
        child = stack.enter_context(
            started(command, core, environ=environment({}), stdout=subprocess.PIPE, sockets=sockets)
        )
        assert child.stdout is not None
        if child.stdout.readline() != b"ready\n":
            raise RuntimeError("the upstreams did not start; what they said is above")
        yield urls


@contextlib.contextmanager
def load(row: Row, core: int) -> Iterator[Load]:
    first = {
        "prompt_tokens": row.prompt_tokens, "reply_bytes": row.reply_bytes, "chunks": row.chunks,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.overhead.load", json.dumps(first)]
    with started(
        command, core, environ=environment({}), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        yield Load(child)


def raise_file_limit() -> None:
    """Children inherit it; 9,000 in flight take 18,000 in a proxy."""
    descriptors.raise_to(descriptors.WANTED)


def measure(
    row: Row,
    names: Sequence[str],
    rounds: int,
    *,
    router: Path | None,
    scratch: Path,
    progress: Callable[[str], None],
) -> list[Measured]:
    """All of ``names``, in the order given, round after round."""
    core, other = cores()
    found = {name: Measured(name) for name in names}
    chain, ca_file = proxies.certificate(scratch) if row.tls else ("", "")
    answers = Answers(row.reply_bytes, row.delay_s, row.chunks, row.interval_s, chain)
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(upstreams(answers, row.replicas, other))
        generator = stack.enter_context(load(row, other))
        running = []
        for name in names:
            log = scratch / f"{row.name.replace('/', '-')}-{name}.log"
            try:
                running.append(
                    stack.enter_context(
                        proxies.run(name, urls, core=core, ca_file=ca_file, router=router, log=log)
                    )
                )
            except proxies.NotInstalled as exc:
                found[name].missing = f"not installed: {exc}"
            except proxies.DidNotStart as exc:
                found[name].missing = f"did not start: {exc}"
        for number in range(min(rounds, row.rounds)):
            for proxy in running:
                one_round(row, number, proxy, generator, found[proxy.name])
                progress(f"{row.name}: round {number + 1}, {proxy.name}")
        pids = {proxy.name: proxy.pid for proxy in running if proxy.pid}
        before_s = {name: cpu_s(pid) for name, pid in pids.items()}
        time.sleep(IDLE_S)
        for name, pid in pids.items():
            found[name].idle_ms_per_s = 1e3 * (cpu_s(pid) - before_s[name]) / IDLE_S
    return list(found.values())


def one_round(row: Row, number: int, proxy: proxies.Proxy, generator: Load, into: Measured) -> None:
    stream_s = row.chunks * row.interval_s
    # A proxy that takes 10 ms a request is slower than any that was seen.
    deadline_s = DEADLINE_S + 0.01 * row.requests + 4 * (row.delay_s + stream_s)
    calm_in_flight = 0 if row.delay_s or row.chunks else max(1, row.in_flight // CALM_PART)
    generator.tell(
        {
            "urls": list(proxy.urls), "ca": proxy.ca_file, "seed": number,
            "in_flight": row.in_flight, "requests": row.requests, "deadline_s": deadline_s,
            "calm_in_flight": calm_in_flight, "spread_s": stream_s,
            "calm_requests": max(20, row.requests // 8) if calm_in_flight else 0,
        }
    )  # fmt: skip
    warm = generator.hear()
    into.first_bad = into.first_bad or warm["first_bad"]
    before_s = cpu_s(proxy.pid) if proxy.pid else 0.0
    generator.tell({})
    busy = generator.hear()
    took_s = cpu_s(proxy.pid) - before_s if proxy.pid else 0.0
    calm: dict[str, Any] = {}
    if calm_in_flight:
        generator.tell({})
        calm = generator.hear()
    into.add(took_s, busy, calm)
    if proxy.pid:
        into.memory_mb = memory_mb(proxy.pid, peak=True)
