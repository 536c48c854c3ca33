"""What does the daemon cost a generation, beside its peers?

Run ``python -m benchmarks.overhead``. For each row of traffic it starts fixed-answer upstreams and
a load generator on one core and, on the other, one after the other: nothing (``direct``), a minimal
proxy of aiohttp on both sides, vllm-router, and the daemon. Read: the proxy's CPU per request, and
the ratios of the daemon's to that of its peers in the same round, of which the middle one counts.
What a proxy spends when idle is a part of it, the larger the fewer requests a second there are, so
that a machine with other work makes it look larger. A row's requests/s are those of the busy phase,
bounded by the slower of the two cores; latency is that of a calm phase with a 16th of the
connections, or of the busy one where the upstream takes its time, as the round trip without the
upstream's own time; what is shown as added is the difference of its quantiles to those of
``direct``. Of a stream it is that of the first byte. Every answer is checked: status, length, and
the number of the request it is for. The exit code is 1 if an answer of the daemon's was wrong, lost
or doubled, or a ratio is past its goal.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import origin
from benchmarks.overhead import proxies
from benchmarks.overhead.measure import Measured, measure, raise_file_limit, ratio
from benchmarks.overhead.process import cores
from benchmarks.overhead.rows import ALLOWED_OF_AIOHTTP, ROWS, Row

OURS = "rollmux"


@dataclass(frozen=True, slots=True)
class Result:
    """A row with what each proxy needed for it."""

    row: Row
    measured: list[Measured]

    def ratio_to(self, peer: str) -> float | None:
        named = {found.name: found for found in self.measured}
        if OURS not in named or peer not in named:
            return None
        return ratio(named[OURS], named[peer])

    def goals(self) -> list[tuple[str, float | None, float]]:
        """Peer, ratio (None: not measured), and what is allowed."""
        goals = [("aiohttp", self.ratio_to("aiohttp"), ALLOWED_OF_AIOHTTP)]
        if self.row.allowed_of_router is not None:
            goals.append(("vllm-router", self.ratio_to("vllm-router"), self.row.allowed_of_router))
        return goals

    def missed(self) -> list[str]:
        """What is not as it has to be, a line each."""
        lines = [
            f"{self.row.name}: {value:.2f} of {peer}'s CPU, allowed {allowed:.2f}"
            for peer, value, allowed in self.goals()
            if value is not None and value > allowed
        ]
        for found in self.measured:
            if found.name == OURS and (found.wrong or found.missing):
                what = found.missing or f"{found.wrong} of {found.requests}: {found.first_bad}"
                lines.append(f"{self.row.name}: {OURS} {what}")
        return lines


def table(results: Sequence[Result]) -> str:
    lines = [
        " row              proxy        req/s   added p50 ms   p99 ms   CPU µs/req  idle ms/s"
        "     MB  wrong  rollmux/it"
    ]
    for result in results:
        direct = next((m for m in result.measured if m.name == "direct" and m.per_s), None)
        for found in result.measured:
            lead = f" {result.row.name:<16} {found.name:<12}"
            if found.missing:
                lines.append(f"{lead} {found.missing}")
                continue
            p50, p99 = _added(found, direct)
            of = result.ratio_to(found.name) if found.name not in ("direct", OURS) else None
            cpu = (
                f"{statistics.median(found.cpu_us):>12.0f}" if found.name != "direct" else " " * 12
            )
            idle = f"{found.idle_ms_per_s:>10.1f}" if found.name != "direct" else " " * 10
            memory = f"{found.memory_mb:>6.0f}" if found.name != "direct" else " " * 6
            lines.append(
                f"{lead}{statistics.median(found.per_s):>7.0f} {p50:>14} {p99:>8} {cpu} {idle} "
                f"{memory} {sum(found.wrong.values()):>6}  "
                f"{'' if of is None else f'{of:>10.2f}'}".rstrip()
            )
    return "\n".join(lines)


def _added(found: Measured, direct: Measured | None) -> tuple[str, str]:
    """Over ``direct``, in ms; of that itself, what it has."""
    own = (statistics.median(found.latency_p50_s), statistics.median(found.latency_p99_s))
    if found.name == "direct" or direct is None:
        return f"({1e3 * own[0]:.2f})", f"({1e3 * own[1]:.2f})"
    base = (statistics.median(direct.latency_p50_s), statistics.median(direct.latency_p99_s))
    return f"{1e3 * (own[0] - base[0]):.2f}", f"{1e3 * (own[1] - base[1]):.2f}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = ", ".join(row.name for row in ROWS)
    add("--rows", help=f"comma-separated, of: {names} (default all)")
    add("--proxies", help=f"comma-separated, of: {', '.join(proxies.NAMES)} (default all)")
    add("--rounds", type=int, default=3, help="of each row, alternating (default 3)")
    add("--quick", action="store_true", help="one round of a tenth of the requests: a first look")
    add("--requests", type=int, help="in each round, instead of the row's own number")
    add("--in-flight", type=int, help="instead of the row's own number")
    add("--router", type=Path, metavar="PATH", help="the vllm-router command, if it is elsewhere")
    add("--json", action="store_true", help="the result as JSON")
    return parser


def chosen(text: str | None, names: Sequence[str], option: str) -> list[str]:
    """The names in ``text``, in the order of ``names``. Raises ValueError."""
    if text is None:
        return list(names)
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in names]
    if unknown or not wanted:
        raise ValueError(f"{option}: unknown {', '.join(unknown)}; known: {', '.join(names)}")
    return [name for name in names if name in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    try:
        wanted = chosen(args.rows, [row.name for row in ROWS], "--rows")
        names = chosen(args.proxies, proxies.NAMES, "--proxies")
    except ValueError as exc:
        parser.error(str(exc))
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    rounds = 1 if args.quick else args.rounds
    rows = [row.shortened(10) if args.quick else row for row in ROWS if row.name in wanted]
    rows = [row.of(args.requests, args.in_flight) for row in rows]
    core, other = cores()
    settings = {"rounds": rounds, "quick": args.quick, "proxy core": core, "other core": other}
    came = origin.origin(0, settings)
    if core == other:
        print("only one core: the proxy shares it with the load", file=sys.stderr)
    raise_file_limit()
    # Children are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    router = proxies.find_router(args.router) if "vllm-router" in names else None

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    results = []
    with tempfile.TemporaryDirectory(prefix="rollmux-overhead-") as scratch:
        for row in rows:
            measured = measure(
                row, names, rounds, router=router, scratch=Path(scratch), progress=progress
            )
            results.append(Result(row, measured))
    missed = [line for result in results for line in result.missed()]
    if args.json:
        found = [
            {
                "row": asdict(result.row),
                "proxies": [asdict(one) for one in result.measured],
                "ratios": {peer: value for peer, value, _ in result.goals()},
            }
            for result in results
        ]
        print(json.dumps({"origin": came, "rows": found, "missed": missed}))
    else:
        print(origin.line(came))
        print(table(results))
        print("\n".join(f"MISSED {line}" for line in missed) or "all goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
