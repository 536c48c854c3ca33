"""Does the daemon stay whole with thousands in flight, with a large fleet, and over a million?

Run ``python -m benchmarks.overhead.soak``: on the cores and with the upstreams of
``benchmarks.overhead``. Read, and what is allowed:

- ``in-flight``: 9,000 generations at a time: none lost, wrong or answered twice, the daemon's
  memory below 1 GB, and ``/proxy/live`` answered within 50 ms (p99) throughout;
- ``first-byte``: 1,000 streams at a time, four events a second each, that began one after the
  other: the first byte is no more than 10 ms later (p99) than without the daemon;
- ``growth``: CPU per request with 64 replicas, of that with 2: 1.3;
- ``table``: a routing decision with the prefix table at its bound, of one with half of it: 1.1 at
  the 99th percentile, where 0.1 is what such a measurement varies by;
- ``mixed``: a million requests of which some fail, are reset, broken off or given up by their
  client: every one ends as it has to, nothing is in flight at the end, and memory is within 20 % of
  what it was after 50,000.

The exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks import decisions, origin
from benchmarks.daemon import environment
from benchmarks.overhead import mixed, proxies
from benchmarks.overhead.load import quantile
from benchmarks.overhead.measure import (
    WRONG,
    Load,
    Measured,
    load,
    measure,
    one_round,
    raise_file_limit,
    ratio,
    upstreams,
)
from benchmarks.overhead.process import cores, memory_mb, started
from benchmarks.overhead.rows import Row
from benchmarks.overhead.upstream import Answers
from routing import registry
from routing.router import RouteRequest, RouterSettings

ALLOWED_MB = 1_000
ALLOWED_LIVE_S = 0.05
ALLOWED_FIRST_BYTE_S = 0.01
ALLOWED_GROWTH = 1.3
ALLOWED_TABLE = 1.1
ALLOWED_MEMORY_GROWTH = 1.2
LEVEL_AFTER = 50_000
LOOK_S = 0.05  # between two looks at /proxy/live


@dataclass(frozen=True, slots=True)
class Verdict:
    """One soak: what was found, by name, and what of it was past its goal."""

    name: str
    found: dict[str, Any]
    missed: tuple[str, ...]


class Looks:
    """How long a GET of ``url`` takes, asked every 50 ms from a thread while the block lasts."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name=f"looks at {url}")
        self.seconds: list[float] = []
        self.failed = 0

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        host, port = self._url.hostname or "", self._url.port
        connection = http.client.HTTPConnection(host, port, timeout=30)
        while not self._ended.wait(LOOK_S):
            began_s = time.monotonic()
            try:
                connection.request("GET", self._url.path)
                answer = connection.getresponse()
                answer.read()
                self.failed += answer.status != 200
            except (OSError, http.client.HTTPException):
                self.failed += 1
                connection.close()
            self.seconds.append(time.monotonic() - began_s)
        connection.close()


@contextlib.contextmanager
def daemon(urls: Sequence[str], scratch: Path, name: str = "soak") -> Iterator[proxies.Proxy]:
    core, _ = cores()
    with proxies.run(
        "rollmux", urls, core=core, ca_file="", router=None, log=scratch / f"{name}.log"
    ) as proxy:
        yield proxy


def left_in_flight(url: str, within_s: float = 10.0) -> dict[str, float]:
    """What the daemon's status and metrics count as in flight or held, once it is at rest."""
    end_s = time.monotonic() + within_s
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        while True:
            status = client.get("/proxy/status").json()
            page = client.get("/metrics").text
            found = {
                "in flight by status": sum(r["inflight"] for r in status["replicas"]),
                "held": status["held"],
                "in flight by metrics": sum(
                    float(value)
                    for value in re.findall(r"^rollmux_replica_inflight\{.*\} (\S+)$", page, re.M)
                ),
            }
            if not any(found.values()) or time.monotonic() > end_s:
                return found
            time.sleep(0.1)


def in_flight(
    count: int,
    requests: int,
    scratch: Path,
    say: Callable[[str], None],
    *,
    delay_s: float = 20.0,
) -> Verdict:
    row = Row("in-flight", in_flight=count, requests=requests, delay_s=delay_s)
    _, other = cores()
    measured = Measured("rollmux")
    answers = Answers(row.reply_bytes, row.delay_s)
    with (
        upstreams(answers, row.replicas, other) as urls,
        daemon(urls, scratch) as proxy,
        load(row, other) as generator,
        Looks(f"{proxy.urls[0]}/proxy/live") as live,
        Looks(f"{urls[0]}/health") as beside,
    ):
        say(f"in-flight: {count} at a time, {count} and then {requests} requests")
        one_round(row, 0, proxy, generator, measured)
        left = left_in_flight(proxy.urls[0])
        seen = httpx.get(f"{urls[0]}/seen", trust_env=False).json()
    found = {
        "requests": measured.requests,
        "wrong": measured.wrong,
        "first wrong": measured.first_bad,
        "sent twice to an upstream": seen["again"],
        "memory MB": round(measured.memory_mb),
        "CPU µs per request": round(measured.cpu_us[0]),
        "live p50 ms": _ms(quantile(live.seconds, 0.5)),
        "live p99 ms": _ms(quantile(live.seconds, 0.99)),
        "live longest ms": _ms(max(live.seconds)),
        "live failed": live.failed,
        "an upstream's own p99 ms": _ms(quantile(beside.seconds, 0.99)),
        **left,
    }
    missed = [
        line
        for line, wrong in (
            (f"answers: {measured.wrong} {measured.first_bad}", bool(measured.wrong)),
            (
                f"while warming: {measured.first_bad}",
                bool(measured.first_bad and not measured.wrong),
            ),
            ("memory", measured.memory_mb > ALLOWED_MB),
            ("live", quantile(live.seconds, 0.99) > ALLOWED_LIVE_S or live.failed > 0),
            (f"left: {left}", any(left.values())),
        )
        if wrong
    ]
    return Verdict("in-flight", found, tuple(missed))


def first_byte(count: int, rounds: int, scratch: Path, say: Callable[[str], None]) -> Verdict:
    row = Row("first-byte", in_flight=count, requests=3 * count, chunks=20, interval_s=0.25)
    direct, ours = measure(
        row, ["direct", "rollmux"], rounds, router=None, scratch=scratch, progress=say
    )
    later_s = [ours.latency_p99_s[i] - direct.latency_p99_s[i] for i in range(len(ours.cpu_us))]
    found = {
        "streams": ours.requests,
        "wrong": ours.wrong,
        "direct p99 ms": [_ms(value) for value in direct.latency_p99_s],
        "rollmux p50 ms": [_ms(value) for value in ours.latency_p50_s],
        "rollmux p99 ms": [_ms(value) for value in ours.latency_p99_s],
        "later p99 ms": _ms(statistics.median(later_s)) if later_s else None,
        "CPU µs per event": [round(value / row.chunks, 1) for value in ours.cpu_us],
    }
    missed = []
    if not later_s or statistics.median(later_s) > ALLOWED_FIRST_BYTE_S:
        missed.append("first byte")
    if ours.wrong:
        missed.append(f"answers: {ours.wrong} {ours.first_bad}")
    return Verdict("first-byte", found, tuple(missed))


def growth(
    sizes: Sequence[int], requests: int, rounds: int, scratch: Path, say: Callable[[str], None]
) -> Verdict:
    """Two fleets side by side, each with its daemon, measured in turn."""
    fleets = [Row(f"{n}-replicas", requests=requests, replicas=n) for n in sizes]
    _, other = cores()
    found = [Measured(row.name) for row in fleets]
    with contextlib.ExitStack() as stack:
        sides: list[tuple[Row, proxies.Proxy, Load, Measured]] = []
        for row, measured in zip(fleets, found, strict=True):
            urls = stack.enter_context(upstreams(Answers(), row.replicas, other))
            proxy = stack.enter_context(daemon(urls, scratch, row.name))
            sides.append((row, proxy, stack.enter_context(load(row, other)), measured))
        for number in range(rounds):
            for row, proxy, generator, measured in sides:
                one_round(row, number, proxy, generator, measured)
                say(f"growth: round {number + 1}, {row.name}")
    few, many = found
    grown = ratio(many, few)
    missed = [f"answers: {m.name} {m.wrong}" for m in found if m.wrong]
    if grown is None or grown > ALLOWED_GROWTH:
        missed.append("growth")
    facts = {
        **{f"CPU µs of {m.name}": [round(value) for value in m.cpu_us] for m in found},
        "the larger fleet's, of the smaller's": round(grown, 2) if grown is not None else None,
    }
    return Verdict("growth", facts, tuple(missed))


def table(bound: int, count: int, say: Callable[[str], None]) -> Verdict:
    """Decisions on two tables in turn, for new prompts of 1,024 tokens on two replicas."""
    fleet = decisions.fleet_of(2)
    routers = []
    for share in (0.5, 1.0):
        settings = RouterSettings(max_tracked_blocks=bound, spill_threshold=8)
        router = registry.load("prefix", settings)
        say(f"table: filling {share:.0%} of {bound} blocks")
        # Half full means half-way through the measurement, which adds 64 blocks a prompt.
        half = 32 * count if share < 1.0 else 0
        decisions.fill(router, int(share * bound) - half)
        routers.append(router)
    tracked = [router.tracked_blocks for router in routers]
    gc.collect()
    gc.disable()  # a look for cycles falls on the one or the other
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(count):
        request = RouteRequest("v1", decisions.prompt(number, 1_024))
        for side in (0, 1) if number % 2 else (1, 0):
            began_s = time.thread_time()  # of the processor: others' turns do not count
            routers[side].choose(request, fleet, 0.0)
            seconds[side].append(time.thread_time() - began_s)
    gc.enable()
    half_s, full_s = (quantile(values, 0.99) for values in seconds)
    found = {
        "blocks at the start": tracked,
        "half full p50 µs": _us(quantile(seconds[0], 0.5)),
        "at the bound p50 µs": _us(quantile(seconds[1], 0.5)),
        "half full p99 µs": _us(half_s),
        "at the bound p99 µs": _us(full_s),
        "half full longest µs": _us(max(seconds[0])),
        "at the bound longest µs": _us(max(seconds[1])),
        "bound of half": round(full_s / half_s, 2),
    }
    return Verdict("table", found, ("table",) if full_s > ALLOWED_TABLE * half_s else ())


def million(
    requests: int, level_after: int, concurrent: int, scratch: Path, say: Callable[[str], None]
) -> Verdict:
    _, other = cores()
    answers = Answers(mixed.REPLY_BYTES, 0.01, mixed.CHUNKS, 0.002, mixed=True)
    command = [sys.executable, "-m", "benchmarks.overhead.mixed"]
    phases: list[dict[str, Any]] = []
    memory: list[float] = []
    with upstreams(answers, 16, other) as urls, daemon(urls, scratch) as proxy:
        assert proxy.pid is not None
        with started(
            [*command, proxy.urls[0], str(concurrent)],
            other,
            environ=environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            generator = Load(child)
            left = requests
            while left:
                part = min(left, level_after)
                # A daemon that takes 20 ms a request is slower than any that was seen.
                generator.tell({"requests": part, "deadline_s": 120 + 0.02 * part})
                phases.append(generator.hear())
                left -= part
                memory.append(memory_mb(proxy.pid))
                bad = sum(phases[-1][kind] for kind in WRONG)
                say(f"mixed: {requests - left} of {requests}, {memory[-1]:.0f} MB, {bad} wrong")
        at_rest = left_in_flight(proxy.urls[0])
        page = httpx.get(f"{proxy.urls[0]}/metrics", trust_env=False, timeout=30).text
    counted = re.findall(r"^rollmux_requests_total\{.*\} (\S+)$", page, re.M)
    ends: dict[str, int] = {}
    wrong: dict[str, int] = {}
    for phase in phases:
        for kind in ("sent", "good", *WRONG):
            into = wrong if kind in WRONG else ends
            into[kind] = into.get(kind, 0) + phase[kind]
        for kind, number in phase["ends"].items():
            ends[kind] = ends.get(kind, 0) + number
    wrong = {kind: number for kind, number in wrong.items() if number}
    first_bad = next((p["first_bad"] for p in phases if p["first_bad"]), "")
    grown = memory[-1] / memory[0]
    # Who is gone before its head was read is counted by nobody; the one more is the start's own.
    found = {
        **ends,
        "wrong": wrong,
        "first wrong": first_bad,
        "requests counted by the daemon": round(sum(map(float, counted))) - 1,
        **at_rest,
        "memory MB": [round(value) for value in memory],
        "memory grown to": round(grown, 3),
        "seconds": round(sum(phase["seconds"] for phase in phases)),
    }
    missed = []
    if any(at_rest.values()):
        missed.append(f"in flight at the end: {at_rest}")
    if wrong:
        missed.append(f"answers: {wrong} {first_bad}")
    if not 2 - ALLOWED_MEMORY_GROWTH <= grown <= ALLOWED_MEMORY_GROWTH:
        missed.append("memory")
    return Verdict("mixed", found, tuple(missed))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)


NAMES = ("in-flight", "first-byte", "growth", "table", "mixed")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", help=f"comma-separated, of: {', '.join(NAMES)} (default all)")
    add("--requests", type=int, default=1_000_000, help="of mixed (default 1000000)")
    add("--level-after", type=int, default=LEVEL_AFTER, help="requests (default 50000)")
    add("--concurrent", type=int, default=128, help="of mixed, at a time (default 128)")
    add("--in-flight", type=int, default=9_000, help="of in-flight (default 9000)")
    add("--streams", type=int, default=1_000, help="of first-byte, at a time (default 1000)")
    add("--rounds", type=int, default=3, help="of first-byte and growth (default 3)")
    add("--json", action="store_true", help="the result as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    wanted = [word.strip() for word in args.only.split(",")] if args.only else list(NAMES)
    if unknown := [word for word in wanted if word not in NAMES]:
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(NAMES)}")
    counts = (args.requests, args.level_after, args.concurrent, args.in_flight, args.streams)
    if min(*counts, args.rounds) < 1:
        parser.error("counts are at least 1")
    core, other = cores()
    came = origin.origin(0, {"soaks": " ".join(wanted), "proxy core": core, "other core": other})
    raise_file_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    verdicts = []
    with tempfile.TemporaryDirectory(prefix="rollmux-soak-") as folder:
        scratch = Path(folder)
        soaks: dict[str, Callable[[], Verdict]] = {
            "in-flight": lambda: in_flight(args.in_flight, 2 * args.in_flight, scratch, say),
            "first-byte": lambda: first_byte(args.streams, args.rounds, scratch, say),
            "growth": lambda: growth((2, 64), 12_000, args.rounds, scratch, say),
            "table": lambda: table(decisions.BOUND, 2_000, say),
            "mixed": lambda: million(
                args.requests, args.level_after, args.concurrent, scratch, say
            ),
        }
        for name in wanted:
            verdicts.append(soaks[name]())
            if not args.json:
                print(text(verdicts[-1]), flush=True)
    if args.json:
        print(json.dumps({"origin": came, "soaks": [asdict(v) for v in verdicts]}))
    else:
        print(origin.line(came))
    return 1 if any(verdict.missed for verdict in verdicts) else 0


def text(verdict: Verdict) -> str:
    head = f"{verdict.name}: {'MISSED ' + '; '.join(verdict.missed) if verdict.missed else 'met'}"
    return "\n".join([head, *(f"  {name}: {value}" for name, value in verdict.found.items())])


if __name__ == "__main__":
    sys.exit(main())
