"""Made-up traces in the shapes that rollouts have, by seed.

``python -m benchmarks.workloads NAME[:KEY=VALUE,…]`` writes one to standard output, as ``--record``
would have; ``rollmux replay --workload`` replays one without a file. Both have the same digest.

Times are those of a fleet that makes ``PACE_TOKENS_PER_S``; with the limit ``inflight`` that most
of them carry, replay does not need them.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import exp, log
from random import Random
from typing import ClassVar

import orjson
from blake3 import blake3

from benchmarks.trace import FORMAT, Event, Request, Trace

PACE_TOKENS_PER_S = 13_100
"""Two simulated replicas with 128 in flight (docs/replay.md)."""
TOKEN_S = 0.0093
"""For a token of a reply at that pace: a step of 64 sequences."""


class WorkloadError(ValueError):
    """One line: what is wrong with the words, and what there is."""


Text = tuple[object, int]
"""A piece of a prompt: what it says (equal keys, equal tokens) and its length in tokens."""


class _Numbers:
    """Ids of chained blocks, in order of first sight, as the recorder gives them."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._of_model: dict[str, dict[tuple[int, tuple[object, ...], int], int]] = {}
        self._given = 0

    def of(self, model: str, texts: Sequence[Text], begun: Sequence[int] = ()) -> array[int]:
        """One for each block of the prompt, the last one also where it is not whole. ``begun``:
        those of its first blocks, all whole, where they are known."""
        known = self._of_model.setdefault(model, {})
        total = sum(tokens for _, tokens in texts)
        ids = array("q", begun)
        before, first, first_begin = ids[-1] if ids else -1, 0, 0
        for begin in range(len(ids) * self._block_tokens, total, self._block_tokens):
            end = min(total, begin + self._block_tokens)
            while first_begin + texts[first][1] <= begin:
                first_begin += texts[first][1]
                first += 1
            last, last_end = first, first_begin + texts[first][1]
            while last_end < end:
                last += 1
                last_end += texts[last][1]
            # Equal blocks before it and the same texts up to the same place: the same tokens.
            key = (before, tuple(what for what, _ in texts[first : last + 1]), end)
            before = known.setdefault(key, self._given)
            if before == self._given:
                self._given += 1
            ids.append(before)
        return ids

    def forget(self, model: str) -> None:
        self._of_model.pop(model, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """GRPO's outline: steps of groups, and a new policy every few steps. Lengths in tokens."""

    name: ClassVar[str]
    seed: int = 0
    steps: int = 40
    prompts: int = 16
    """A step."""
    group: int = 8
    """Rollouts of a prompt."""
    reply: int = 1200
    """On average."""
    tail_percent: int = 80
    """Standard deviation of the logarithm of a reply's length: with 80 the longest tenth of the
    replies has 2.8 times the median and more."""
    longest: int = 16384
    """No reply has more."""
    sync: int = 4
    """Steps of a policy version."""
    versions: int = 5
    """Live at once, the newest included: TRL's max_staleness of 4, and one."""
    inflight: int = 128
    block: int = 16

    def texts(self, step: int, prompt: int, drawn: Random) -> list[Text]:
        """A prompt's."""
        raise NotImplementedError

    def trace(self) -> Trace:
        drawn, numbers = Random(self.seed), _Numbers(self.block)
        trace = Trace(self.label(), "", self.block, inflight=self.inflight)
        made = 0
        for step in range(self.steps):
            at_s = _at_s(made / PACE_TOKENS_PER_S)
            model = self._sync(trace, numbers, step, at_s)
            for prompt in range(self.prompts):
                texts = self.texts(step, prompt, drawn)
                ids = numbers.of(model, texts)
                length = sum(tokens for _, tokens in texts)
                at_s = _at_s(made / PACE_TOKENS_PER_S)
                for _ in range(self.group):  # at once, as a trainer sends them
                    output = self.reply_tokens(drawn)
                    made += output
                    trace.requests.append(Request(at_s, length, output, ids, model))
        return trace

    def label(self) -> str:
        """The words that make it again."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def reply_tokens(self, drawn: Random) -> int:
        """One reply's length: log-normal, with ``reply`` as its mean."""
        tail = self.tail_percent / 100
        length = exp(drawn.gauss(log(self.reply) - tail * tail / 2, tail))
        return max(1, min(self.longest, round(length)))

    def _sync(self, trace: Trace, numbers: _Numbers, step: int, at_s: float) -> str:
        """The policy of that step, published if it is new."""
        version = step // self.sync
        if step % self.sync == 0:
            trace.events.append(Event(at_s, "publish", _policy(version)))
            if version >= self.versions:
                trace.events.append(Event(at_s, "unload", _policy(version - self.versions)))
                numbers.forget(_policy(version - self.versions))
        return _policy(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo(Workload):
    """The published run: 16 prompts x 8 a step, 135 tokens under a template of 23."""

    name: ClassVar[str] = "grpo"
    prompt: int = 135
    template: int = 23

    def texts(self, step: int, prompt: int, drawn: Random) -> list[Text]:
        return [("template", self.template), ((step, prompt), self.prompt - self.template)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NearDuplicates(Workload):
    """Prompts that follow one text for most of their blocks, each parting from it elsewhere."""

    name: ClassVar[str] = "near-duplicates"
    prompt: int = 512
    shared: int = 400
    """At least; where a prompt parts is drawn between here and its last block."""

    def texts(self, step: int, prompt: int, drawn: Random) -> list[Text]:
        parts = drawn.randint(self.shared, max(self.shared, self.prompt - self.block))
        return [("text", parts), ((step, prompt), self.prompt - parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShot(Workload):
    """Questions after one of a few long preambles of worked examples."""

    name: ClassVar[str] = "few-shot"
    preambles: int = 4
    preamble: int = 3000
    question: int = 100
    reply: int = 400

    def texts(self, step: int, prompt: int, drawn: Random) -> list[Text]:
        return [
            (("preamble", drawn.randrange(self.preambles)), self.preamble),
            ((step, prompt), self.question),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents(Workload):
    """Rollouts of several turns: each prompt is the one before it, the reply, and what a tool said.

    They keep their times: a turn comes when the reply before it and the tool's answer are there, at
    ``TOKEN_S`` a token. ``inflight`` rollouts run at once; a step is as many as in GRPO.
    """

    name: ClassVar[str] = "agents"
    steps: int = 16
    tools: int = 2000
    """Descriptions of the tools, the same in all prompts."""
    task: int = 200
    turns: int = 6
    """On average."""
    answer: int = 250
    """Of a tool, on average."""
    tool_ms: int = 1500
    """What a tool takes, on average."""
    reply: int = 200
    longest: int = 4096

    def trace(self) -> Trace:
        drawn, numbers = Random(self.seed), _Numbers(self.block)
        trace = Trace(self.label(), "", self.block)
        per_step = self.prompts * self.group
        due: list[tuple[float, int, list[Text], array[int], str]] = []
        # The first ones do not all come at once: a run is long, and has no beginning.
        free = [
            (number * TOKEN_S * self.reply / self.inflight, 0) for number in range(self.inflight)
        ]
        begun, total = 0, self.steps * per_step
        while due or begun < total:
            if begun < total and free and (not due or free[0][0] <= due[0][0]):
                at_s, _ = heapq.heappop(free)
                step, place = divmod(begun, per_step)
                model = _policy(step // self.sync)
                if place == 0:
                    self._sync(trace, numbers, step, _at_s(at_s))
                task: list[Text] = [("tools", self.tools), ((step, place // self.group), self.task)]
                heapq.heappush(due, (at_s, begun, task, array("q"), model))
                begun += 1
                continue
            at_s, number, texts, ids, model = heapq.heappop(due)
            output = self.reply_tokens(drawn)
            length = sum(tokens for _, tokens in texts)
            ids = numbers.of(model, texts, ids)
            trace.requests.append(Request(_at_s(at_s), length, output, ids, model))
            at_s += output * TOKEN_S
            if drawn.random() * self.turns < 1:
                heapq.heappush(free, (at_s, number))
                continue
            answer = 1 + round(drawn.expovariate(1 / self.answer))
            at_s += drawn.expovariate(1e3 / self.tool_ms)
            turn = ((number, len(texts)), output + answer)
            whole = ids[: length // self.block]
            heapq.heappush(due, (at_s, number, [*texts, turn], whole, model))
        return trace


WORKLOADS: dict[str, type[Workload]] = {
    each.name: each for each in (Grpo, NearDuplicates, Agents, FewShot)
}
_MAX_VALUE = 10_000_000


def parse(words: str) -> Workload:
    """``NAME[:KEY=VALUE,…]``. Raises ``WorkloadError``."""
    name, _, rest = words.partition(":")
    kind = WORKLOADS.get(name)
    if kind is None:
        raise WorkloadError(_unknown("workload", name, WORKLOADS))
    keys = [field.name for field in fields(kind)]
    given: dict[str, int] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in keys:
            raise WorkloadError(_unknown(f"key of {name}", key, keys))
        low = 0 if key in ("seed", "tail_percent", "template", "shared") else 1
        if not value.isdecimal() or not low <= int(value) <= _MAX_VALUE:
            raise WorkloadError(
                f"{name}: {key}={value}: must be a whole number from {low} to {_MAX_VALUE}"
            )
        given[key] = int(value)
    workload = kind(**given)
    for part in ("template", "shared"):
        if getattr(workload, part, 0) >= getattr(workload, "prompt", _MAX_VALUE):
            raise WorkloadError(f"{name}: {part} must be shorter than prompt")
    return workload


def _unknown(what: str, word: str, known: Sequence[str] | dict[str, type[Workload]]) -> str:
    near = get_close_matches(word, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"{word!r} is no {what}; {hint}"


def make(words: str) -> Trace:
    """The trace of these words, with its digest. Raises ``WorkloadError``."""
    trace = parse(words).trace()
    hasher = blake3()
    for line in lines(trace):
        hasher.update(line)
    trace.digest = hasher.hexdigest(8)
    return trace


def lines(trace: Trace) -> Iterator[bytes]:
    """As ``--record`` writes them; at equal times events come first."""
    yield orjson.dumps({"rollmux_trace": FORMAT, "workload": trace.name}) + b"\n"
    events = list(reversed(trace.events))
    for request in trace.requests:
        while events and events[-1].at_s <= request.at_s:
            yield _event_line(events.pop())
        line = {
            "timestamp": _ms(request.at_s),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.ids.tolist(),
            "block_size": trace.block_tokens,
            "model": request.model,
            "status": 200,
        }
        yield orjson.dumps(line) + b"\n"
    while events:
        yield _event_line(events.pop())


def _event_line(event: Event) -> bytes:
    line = {"event": event.kind, "timestamp": _ms(event.at_s), "model": event.model}
    return orjson.dumps(line) + b"\n"


def _at_s(at_s: float) -> float:
    """Whole milliseconds: what a trace can say."""
    return round(at_s * 1e3) / 1e3


def _ms(at_s: float) -> int:
    return round(at_s * 1e3)


def _policy(version: int) -> str:
    return f"trl-policy-v{version}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workloads",
        description="Write a made-up trace to standard output.",
        epilog="workloads and their keys: "
        + "; ".join(
            f"{name}: {', '.join(f'{f.name}={f.default}' for f in fields(kind))}"
            for name, kind in WORKLOADS.items()
        ),
    )
    parser.add_argument("workload", metavar="NAME[:KEY=VALUE,…]")
    given = parser.parse_args()
    try:
        trace = parse(given.workload).trace()
    except WorkloadError as exc:
        parser.exit(2, f"{parser.prog}: {exc}\n")
    try:
        sys.stdout.buffer.writelines(lines(trace))
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()  # whoever read it has enough
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
