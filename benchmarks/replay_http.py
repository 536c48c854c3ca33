"""`rollmux replay --url`: a recorded trace sent to a server, and what was seen of it from outside.

The server is rollmux, one vLLM or anything that looks like one: each request of the trace is a
POST of token ids to ``/v1/completions`` that asks for as many tokens as were recorded, with
``ignore_eos``. Timing is that of the trace, or as fast as so many in flight allow. Which replica
answered and why is in rollmux's headers; what came from prefix caches is in the replicas' own
``/metrics``, read before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import ssl
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import httpx
import orjson

from benchmarks import ideal, report_page
from benchmarks.curves import Curves, Timeline
from benchmarks.prompts import Prompts
from benchmarks.replay import (
    PERCENTILES,
    Percentiles,
    about,
    give,
    opened,
    percentiles,
)
from benchmarks.trace import Request, Trace
from proxy import descriptors
from proxy.settings import SettingsError, replica_url
from proxy.upstream import Upstream, UpstreamBroken

ASK_S = 10.0
"""For one call beside the replay: models, status, metrics."""
MAX_OPEN = 20_000
"""In flight at most, whatever the trace says: one address has 28,000 ports for connections to
another (Linux, ip_local_port_range)."""
STOP_AFTER = 200
"""So many failures with no answer between them: the rest would fail too."""
TOLD_ERRORS = 5
FOREIGN = 0.02
"""From this difference between tokens sent and tokens that replicas were asked for, it is told."""
LEAST_VOCABULARY = 100
BAR = 30


class Unusable(Exception):
    """There is nothing to replay to. One line, which names the server and what to do."""


VOCABULARY = 32_000
"""Token ids of made-up prompts are below it: no model of today knows fewer."""


@dataclass(frozen=True, slots=True)
class Options:
    """How it is sent."""

    url: str
    inflight: int | None = None
    """Rollouts in flight, at most, sent as fast as that goes; None: as recorded."""
    speed: float = 1.0
    """So many times as fast as recorded."""
    model: str | None = None
    """For all requests; None: as recorded, and the server's first where nothing was."""
    vocab_size: int = VOCABULARY
    replica_metrics: tuple[str, ...] = ()
    """URLs of the replicas; without any, those that rollmux tells."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Counters:
    """Of one replica, since its start, by its ``/metrics`` (vLLM 0.27.1, v1/metrics/loggers.py)."""

    queried_tokens: float
    """Of prompts, looked up in the prefix cache."""
    hit_tokens: float
    """Those that were found."""
    requests: float

    def since(self, then: Counters) -> Counters:
        return Counters(
            self.queried_tokens - then.queried_tokens,
            self.hit_tokens - then.hit_tokens,
            self.requests - then.requests,
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is behind the server, as far as it is known."""

    router: str = ""
    """The policy, if the server is rollmux."""
    metrics_urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a replay. Shares are None where nobody told."""

    server: str
    router: str
    sent: int
    requests: int
    """Answered with 200."""
    failures: dict[str, int]
    """Others: by status, or what became of the connection."""
    unanswered: int
    """Given up, by Ctrl-C."""
    decisions: dict[str, int]
    per_replica: list[int]
    """Answers of each; of a server that does not tell them apart, requests by its metrics."""
    cached_share: float | None
    ideal_share: float | None
    prompt_tokens: int
    """Of the answered requests."""
    queried_tokens: int | None
    """What the replicas were asked for meanwhile, by whomever."""
    seconds: float
    """From the first request to the last answer."""
    tokens_per_second: float
    request_s: Percentiles | None
    group_s: Percentiles | None
    late_s: Percentiles | None
    """How much later than recorded requests went out; None with ``inflight``."""
    curves: Curves | None = None

    @property
    def spread(self) -> float | None:
        """The most requests of a replica less the fewest, as a share of their mean."""
        total = sum(self.per_replica)
        if not total:
            return None
        return (max(self.per_replica) - min(self.per_replica)) * len(self.per_replica) / total


@dataclass(slots=True)
class _Tally:
    """What has been seen so far; all arrays go by the request's place in the trace."""

    began_s: array[float]
    """-1 before it was sent."""
    ended_s: array[float]
    """-1 before it was answered with 200."""
    late_s: array[float] = field(default_factory=lambda: array("d"))
    output_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    failures: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    replicas: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    answered: int = 0
    failures_in_a_row: int = 0


class HttpReplay:
    """One run. What it saw stays in ``tally``, also when it was cancelled."""

    def __init__(
        self,
        requests: Sequence[Request],
        models: Sequence[str],
        prompts: Prompts,
        options: Options,
        *,
        key: str = "",
        context: ssl.SSLContext | None = None,
    ) -> None:
        """``models``: the name to ask for, of each request. ``key``: the server's, or none."""
        self._requests = requests
        self._models = models
        self._prompts = prompts
        self._options = options
        self._key = key
        self._context = context
        self.tally = _Tally(array("d", [-1.0]) * len(requests), array("d", [-1.0]) * len(requests))
        self.sent = 0
        self.inflight = 0
        """Rollouts; a request of ``n`` is so many."""
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Send all of it, and wait for the answers. Stops early where nothing is answered."""
        loop, limit = asyncio.get_running_loop(), self._options.inflight
        upstream = Upstream(self._options.url, context=self._context)
        first_s, began_s = self._requests[0].at_s, loop.time()
        try:
            async with asyncio.TaskGroup() as group:
                for number, request in enumerate(self._requests):
                    if limit is None:
                        due_s = began_s + (request.at_s - first_s) / self._options.speed
                        await asyncio.sleep(due_s - loop.time())
                        await self._until_room(request.n, MAX_OPEN)
                        self.tally.late_s.append(max(0.0, loop.time() - due_s))
                    else:
                        await self._until_room(request.n, min(limit, MAX_OPEN))
                    if self.tally.failures_in_a_row >= STOP_AFTER:
                        break
                    self.sent += 1
                    self.inflight += request.n
                    group.create_task(self._ask(upstream, number), name=f"request {number}")
        finally:
            upstream.close()

    async def _until_room(self, weight: int, limit: int) -> None:
        while self.inflight and self.inflight + weight > limit:
            self._room.clear()
            await self._room.wait()

    async def _ask(self, upstream: Upstream, number: int) -> None:
        loop, tally, request = asyncio.get_running_loop(), self.tally, self._requests[number]
        body = self._body(number)
        try:
            tally.began_s[number] = loop.time()
            tally.timeline.inflight(tally.began_s[number], request.n)
            reply = await upstream.ask(self._head(upstream, len(body)), body, whole=True)
            text = await reply.whole()
            if text is None:
                reply.abort()
                self._failed("reply over 64 MB", "")
            elif reply.status != 200:
                self._failed(str(reply.status), text[:300].decode("utf-8", "replace"))
            else:
                tally.ended_s[number] = loop.time()
                self._answered(number, dict(reply.headers), text)
        except UpstreamBroken as broken:
            self._failed(broken.cause.value, broken.detail)
        finally:
            tally.timeline.inflight(loop.time(), -request.n)
            self.inflight -= request.n
            self._room.set()

    def _head(self, upstream: Upstream, length: int) -> bytes:
        return b"".join(
            (
                b"POST %b/v1/completions HTTP/1.1\r\n" % upstream.base_path,
                b"host: %b\r\n" % upstream.host_header,
                b"content-type: application/json\r\n",
                b"authorization: Bearer %b\r\n" % self._key.encode() if self._key else b"",
                b"content-length: %d\r\n\r\n" % length,
            )
        )

    def _body(self, number: int) -> bytes:
        request = self._requests[number]
        fields = {
            "model": self._models[number],
            # Of each reply; those of one request had as many on average.
            "max_tokens": max(1, round(request.output_tokens / request.n)),
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": self._options.seed + number,
            **({"n": request.n} if request.n > 1 else {}),
        }
        prompt = self._prompts.of(number, request)
        return b'%b,"prompt":%b}' % (orjson.dumps(fields)[:-1], prompt)

    def _answered(
        self, number: int, headers: Mapping[bytes, bytes], text: bytes | bytearray
    ) -> None:
        tally = self.tally
        tally.answered += 1
        tally.failures_in_a_row = 0
        try:
            tokens = int(orjson.loads(text)["usage"]["completion_tokens"])
        except (ValueError, TypeError, KeyError):
            tokens = self._requests[number].output_tokens  # a server that does not tell it
        tally.output_tokens += tokens
        tally.timeline.tokens(tally.began_s[number], tally.ended_s[number], tokens)
        if word := headers.get(b"x-rollmux-route"):
            tally.decisions[word.decode("latin-1")] += 1
        if replica := headers.get(b"x-rollmux-replica"):
            tally.replicas[replica.decode("latin-1")] += 1

    def _failed(self, what: str, detail: str) -> None:
        tally = self.tally
        tally.failures[what] += 1
        tally.failures_in_a_row += 1
        error = f"{what}: {' '.join(detail.split())}"
        if len(tally.errors) < TOLD_ERRORS and error not in tally.errors:
            tally.errors.append(error)


# --- what is asked beside it ----------------------------------------------------------------------


class Server:
    """The calls before and after, one at a time."""

    def __init__(self, options: Options, key: str, context: ssl.SSLContext) -> None:
        self._options = options
        self._key = key
        self._context = context

    def models(self) -> list[str]:
        """What it serves, the base model first. Raises ``Unusable``."""
        url = self._options.url
        try:
            answer = self._get(f"{url}/v1/models", self._key)
        except httpx.ConnectError as exc:
            raise Unusable(f"{url}: cannot connect ({exc}); is the server up?") from exc
        except httpx.HTTPError as exc:
            raise Unusable(f"{url}: no answer ({type(exc).__name__}: {exc})") from exc
        if answer.status_code in (401, 403):
            why = "refuses this key" if self._key else "wants a key"
            raise Unusable(
                f"{url}: {why} ({answer.status_code}); put it into a variable and give "
                "--api-key-env NAME"
            )
        try:
            return [str(card["id"]) for card in answer.raise_for_status().json()["data"]]
        except (httpx.HTTPStatusError, ValueError, TypeError, KeyError) as exc:
            if self._options.model is not None:
                return []  # not asked for: who answers generations only is fine
            raise Unusable(
                f"{url}: /v1/models answers {answer.status_code}, not as vLLM does; give the "
                "address that --replica or a trainer would get, without /v1, or --model NAME"
            ) from exc

    def fleet(self) -> Fleet:
        """The replicas given, or those that rollmux tells of itself."""
        given = self._options.replica_metrics
        try:
            answer = self._get(f"{self._options.url}/proxy/status", self._key).raise_for_status()
            status = answer.json()
            router = str(status["router"]["name"])
            told = tuple(str(replica["url"]) for replica in status["replicas"])
        except (httpx.HTTPError, ValueError, TypeError, KeyError):
            return Fleet("", given)
        return Fleet(router, given or told)

    def counters(self, fleet: Fleet) -> list[Counters] | None:
        """Of each replica; None without replicas, or where one does not tell."""
        found = []
        for url in fleet.metrics_urls:
            try:
                # Without the key: it is the server's, and these are other servers.
                page = self._get(f"{url.rstrip('/')}/metrics", "").raise_for_status().text
                found.append(read_counters(page))
            except (httpx.HTTPError, ValueError) as exc:
                print(f"{url}/metrics: cannot be used ({exc})", file=sys.stderr)
                return None
        return found or None

    def _get(self, url: str, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.get(url, headers=headers, timeout=ASK_S, verify=self._context, trust_env=False)


def read_counters(page: str) -> Counters:
    """Raises ValueError where they are missing. Summed over the engines of one server."""

    def total(name: str) -> float:
        values = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        if not values:
            raise ValueError(f"has no vllm:{name}")
        return sum(map(float, values))

    return Counters(
        total("prefix_cache_queries_total"),
        total("prefix_cache_hits_total"),
        total("request_success_total"),
    )


def names(requests: Sequence[Request], served: Sequence[str], options: Options) -> list[str]:
    """The model to ask for, of each request. Raises ``Unusable`` where the server has it not."""
    if options.model is not None:
        if served and options.model not in served:
            raise Unusable(
                f"{options.url}: has no model {options.model!r}; --model can be one of "
                f"{_some(served)}"
            )
        return [options.model] * len(requests)
    recorded = list(dict.fromkeys(request.model for request in requests if request.model))
    missing = [name for name in recorded if name not in served]
    if missing:
        raise Unusable(
            f"{options.url}: has no {_some(missing)}, which the trace names; load them, or give "
            f"--model NAME for all requests (it has {_some(served)})"
        )
    if not served:
        raise Unusable(f"{options.url}: lists no model; give --model NAME")
    return [request.model or served[0] for request in requests]


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more


# --- the result -----------------------------------------------------------------------------------


def seen(
    trace: Trace,
    replay: HttpReplay,
    requests: Sequence[Request],
    options: Options,
    fleet: Fleet,
    before: Sequence[Counters] | None,
    after: Sequence[Counters] | None,
) -> Seen:
    """Of a run that has ended, or was given up."""
    tally = replay.tally
    done = [number for number, ended_s in enumerate(tally.ended_s) if ended_s >= 0]
    answered = [requests[number] for number in done]
    prompt = sum(request.prompt_tokens * request.n for request in answered)
    began_s = min((tally.began_s[number] for number in done), default=0.0)
    ended_s = max((tally.ended_s[number] for number in done), default=0.0)
    seconds = max(ended_s - began_s, 1e-9)
    took = [tally.ended_s[number] - tally.began_s[number] for number in done]
    groups = _group_seconds(requests[: replay.sent], tally)
    per_replica = [count for _, count in sorted(tally.replicas.items())]
    queried, cached, best = None, None, None
    grown = [now.since(then) for then, now in zip(before or (), after or (), strict=False)]
    # One that was started anew meanwhile counts from 0.
    if grown and all(each.queried_tokens >= 0 for each in grown):
        queried = round(sum(each.queried_tokens for each in grown))
        cached = sum(each.hit_tokens for each in grown) / queried if queried > 0 else None
        per_replica = per_replica or [round(each.requests) for each in grown]
    # Of a replica that got nothing no header tells.
    per_replica += [0] * (len(fleet.metrics_urls) - len(per_replica))
    if per_replica and prompt:
        best = ideal.cached_tokens(answered, trace.block_tokens, len(per_replica)) / prompt
    failed = sum(tally.failures.values())
    return Seen(
        options.url,
        fleet.router,
        replay.sent,
        len(done),
        dict(sorted(tally.failures.items())),
        replay.sent - len(done) - failed,
        dict(sorted(tally.decisions.items())),
        per_replica,
        cached,
        best,
        prompt,
        queried,
        seconds,
        tally.output_tokens / seconds,
        _of(took),
        _of(groups),
        _of(tally.late_s),
        tally.timeline.curves(ended_s, took, groups) if done else None,
    )


def _of(values: Sequence[float]) -> Percentiles | None:
    return percentiles(values) if values else None


def _group_seconds(requests: Sequence[Request], tally: _Tally) -> list[float]:
    """Of each group with more than one request, if all of them were answered."""
    numbers = ideal.groups(requests)
    sizes = Counter(numbers)
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for position, group in enumerate(numbers):
        ended_s = tally.ended_s[position] if tally.ended_s[position] >= 0 else float("inf")
        began[group] = min(began.get(group, float("inf")), tally.began_s[position])
        ended[group] = max(ended.get(group, 0.0), ended_s)
    return [
        ended[group] - began[group]
        for group, size in sizes.items()
        if size > 1 and ended[group] < float("inf")
    ]


def rows(found: Seen) -> list[tuple[str, list[str]]]:
    """For people. Rows that nobody told anything about are left out."""
    words = report_page.reasons(found.decisions) if found.decisions else []
    share = found.cached_share
    cells = [
        ("prompt tokens from cache", f"{share:.1%}" if share is not None else ""),
        (
            "of the ideal",
            f"{share / found.ideal_share:.1%}" if share is not None and found.ideal_share else "",
        ),
        *((word, f"{found.decisions.get(word, 0) / found.requests:.1%}") for word in words),
        ("spread of requests", f"{found.spread:.1%}" if found.spread is not None else ""),
        ("tokens per second", f"{found.tokens_per_second:,.0f}"),
        ("all of it took", f"{found.seconds:,.1f} s"),
        *((f"request, {p}", _seconds(found.request_s, p)) for p in PERCENTILES),
        *((f"group, {p}", _seconds(found.group_s, p)) for p in PERCENTILES),
        ("sent late by, p99", _seconds(found.late_s, "p99")),
        *((f"failed: {what}", f"{count:,}") for what, count in found.failures.items()),
        ("without an answer", f"{found.unanswered:,}" if found.unanswered else ""),
    ]
    return [
        ("", [found.router or found.server]),
        *((name, [cell]) for name, cell in cells if cell),
    ]


def heading(trace: Trace, options: Options, found: Seen, left_out: int) -> str:
    """What was sent, in a line."""
    timing = f"{options.inflight} in flight" if options.inflight else "as recorded"
    if not options.inflight and options.speed != 1:
        timing = f"{options.speed:g} times as fast as recorded"
    count = len(found.per_replica)
    replicas = f", {count} replica{'s' if count > 1 else ''}" if count else ""
    policy = f", policy {found.router}" if found.router else ""
    return (
        f"{trace.name}: {found.requests:,} requests"
        f"{f', {left_out:,} failed ones left out' if left_out else ''}; "
        f"sent to {found.server}{policy}{replicas}, timing {timing}"
    )


def _seconds(found: Percentiles | None, which: str) -> str:
    return f"{getattr(found, which):,.2f} s" if found else ""


# --- the command ----------------------------------------------------------------------------------


class _Bar:
    """Progress on standard error: a line that is written over, or one every ten seconds."""

    def __init__(self, replay: HttpReplay, total: int) -> None:
        self._replay = replay
        self._total = total
        self._tty = sys.stderr.isatty()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(0.5 if self._tty else 10.0)
            self.show()

    def show(self) -> None:
        tally = self._replay.tally
        failed = sum(tally.failures.values())
        done = tally.answered + failed
        full = BAR * done // self._total
        text = (
            f"[{'#' * full}{'.' * (BAR - full)}] {done:,} of {self._total:,} requests, "
            f"{self._replay.inflight:,} in flight{f', {failed:,} failed' if failed else ''}"
        )
        begin, end = ("\r", "\033[K") if self._tty else ("", "\n")
        print(f"{begin}{text}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._tty:
            self.show()
            print(file=sys.stderr)


async def _run(replay: HttpReplay, bar: _Bar) -> None:
    async with asyncio.TaskGroup() as group:
        shown = group.create_task(bar.run(), name="progress")
        try:
            await replay.run()
        finally:
            shown.cancel()


def main(parsed: argparse.Namespace) -> int:
    """The command; its exit code: 1 where lines were left out or requests failed.

    :raises SettingsError: bad usage.
    """
    options, key = _options(parsed), _key(parsed.api_key_env)
    report_page.check(parsed.html)
    trace, requests = opened(parsed)
    if parsed.speed is None and options.inflight is None:
        options = replace(options, inflight=trace.inflight)  # a made-up trace has its own
    context = ssl.create_default_context()
    server = Server(options, key, context)
    try:
        models = names(requests, server.models(), options)
    except Unusable as exc:
        print(f"rollmux replay: {exc}", file=sys.stderr)
        return 1
    if trace.events:
        kinds = ", ".join(sorted({event.kind for event in trace.events}))
        print(f"{trace.name}: {len(trace.events):,} events ({kinds}) are not sent", file=sys.stderr)
    descriptors.raise_to(MAX_OPEN + 100)  # one for each request in flight
    fleet = server.fleet()
    before = server.counters(fleet)
    replay = HttpReplay(
        requests,
        models,
        Prompts(trace.block_tokens, options.vocab_size, options.seed),
        options,
        key=key,
        context=context if options.url.startswith("https://") else None,
    )
    bar = _Bar(replay, len(requests))
    interrupted = False
    try:
        asyncio.run(_run(replay, bar))
    except KeyboardInterrupt:
        interrupted = True
    bar.close()
    after = server.counters(fleet) if before else None
    found = seen(trace, replay, requests, options, fleet, before, after)
    _tell(found, replay, len(requests))
    left_out = len(trace.requests) - len(requests)
    report = about(trace, [options], left_out)
    report["results"] = [asdict(found) | {"spread": found.spread}]
    head = heading(trace, options, found, left_out)
    written = give(parsed, report, head, rows(found)[1:], rows(found))
    if interrupted:
        raise KeyboardInterrupt
    return 1 if trace.faults or found.failures or not written else 0


def _options(parsed: argparse.Namespace) -> Options:
    inflight = parsed.inflight or [None]
    if len(inflight) > 1:
        raise SettingsError("--inflight: one number with --url")
    if parsed.inflight is not None and parsed.speed is not None:
        raise SettingsError("--inflight and --speed: give one of them")
    vocab_size = parsed.vocab_size or VOCABULARY
    if vocab_size < LEAST_VOCABULARY:
        raise SettingsError(f"--vocab-size: {vocab_size} tokens tell no prompts apart")
    try:
        url = replica_url(parsed.url)
        metrics = tuple(replica_url(each) for each in parsed.replica_metrics or ())
    except ValueError as exc:
        raise SettingsError(f"--url or --replica-metrics: {exc}") from exc
    return Options(
        url,
        inflight[0],
        parsed.speed or 1.0,
        parsed.model,
        vocab_size,
        metrics,
        parsed.seed,
    )


def _key(name: str | None) -> str:
    if name is None:
        return ""
    key = os.environ.get(name, "")
    if not key:
        raise SettingsError(f"--api-key-env: {name} is not set")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise SettingsError(f"--api-key-env: {name} holds what no header can carry")
    return key


def _tell(found: Seen, replay: HttpReplay, total: int) -> None:
    for error in replay.tally.errors:
        print(f"failed, {error}", file=sys.stderr)
    if replay.tally.failures_in_a_row >= STOP_AFTER:
        print(
            f"stopped after {found.sent:,} of {total:,} requests: the last {STOP_AFTER} and more "
            "were not answered",
            file=sys.stderr,
        )
    queried = found.queried_tokens
    if queried is not None and abs(queried - found.prompt_tokens) > FOREIGN * found.prompt_tokens:
        print(
            f"the replicas looked {queried:,} prompt tokens up, and {found.prompt_tokens:,} were "
            "sent: the share from cache is that of others' requests too",
            file=sys.stderr,
        )
