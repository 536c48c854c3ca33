"""The contract test of routing policies: what every one of them must do, tried out.

``rollmux routers --check module:factory`` runs it on a policy of your own.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from routing.ids import ReplicaId
from routing.router import Decision, NoReplica, Router, RouteRequest, RouterSettings

_WORD = re.compile(r"[a-z][a-z0-9_-]*")

_GARBAGE: tuple[Any, ...] = (
    [],
    [7],
    list(range(15)),
    list(range(16)),
    list(range(17)),
    [2**31, 2**63, 2**64, 10**5000, -1, -(2**63)] * 4,
    [True, False] * 10,
    [0.5, float("nan"), float("inf")] * 8,
    [None] * 20,
    ["a prompt", "another", "\ud800"] * 8,
    [[1, 2, 3], [], [[[]]]] * 8,
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}] * 20,
    (1, 2, 3) * 10,
    b"",
    b"short",
    b"\xff\x00\xfe" * 100,
    "text that was never encoded \ud800" * 10,
    None,
    5,
    {"prompt": 1},
)
"""Prompts that a client may send; all but the first few are wrong, and for vLLM to refuse."""


@dataclass(slots=True)
class _Load:
    id: ReplicaId
    inflight: int = 0


def check(factory: Callable[[RouterSettings], Router]) -> list[str]:
    """What the policy that ``factory`` makes does against the contract; empty if nothing.

    Runs each rule on a router of its own, some thousand decisions in all. Never raises: a policy
    that does has broken the rule it was tried on.
    """
    violations: list[str] = []
    for rule in _RULES:
        try:
            violations += rule(factory)
        except Exception as failure:  # the policy's code is not ours
            doing = rule.__name__.strip("_").replace("_", " ")
            violations.append(f"{doing}: raised {type(failure).__name__}: {failure}")
        if violations and rule is _has_what_a_router_has:
            break  # the other rules could not but repeat it
    return list(dict.fromkeys(violations))


def _fleet(count: int) -> tuple[_Load, ...]:
    return tuple(_Load(ReplicaId(f"r{number}")) for number in range(count))


def _prompt(number: int) -> list[int]:
    """A template of 40 blocks of 16, then 61 tokens that are the prompt's own."""
    return [*range(640), *(1000 + number * 61 + position for position in range(61))]


_Make = Callable[[RouterSettings], Router]


def _has_what_a_router_has(make: _Make) -> Iterator[str]:
    router = make(RouterSettings())
    for member in ("name", "tracked_blocks"):
        if not hasattr(router, member):
            yield f"it has no {member}"
    for method in ("choose", "forget_adapter", "forget_replica", "forget_all"):
        if not callable(getattr(router, method, None)):
            yield f"it has no method {method}"
        elif inspect.iscoroutinefunction(getattr(router, method)):
            yield f"{method} is async: a policy is called synchronously"
    if not isinstance(getattr(router, "name", ""), str) or not _WORD.fullmatch(router.name):
        yield "its name is no lower-case word"


def _picks_a_candidate(make: _Make) -> Iterator[str]:
    """One that is not excluded; none if none is left."""
    router = make(RouterSettings())
    for size in range(5):
        fleet = _fleet(size)
        ids = [load.id for load in fleet]
        for number in range(size + 1):
            for exclude in combinations(ids, number):
                for candidates in (fleet, list(fleet)):
                    request = RouteRequest("m", _prompt(size), 1, frozenset(exclude))
                    yield from _faults(router, request, candidates)


def _takes_any_prompt(make: _Make) -> Iterator[str]:
    router = make(RouterSettings())
    fleet = _fleet(3)
    for prompt in _GARBAGE:
        for model in ("m", "", "\ud800"):
            try:
                yield from _faults(router, RouteRequest(model, prompt), fleet)
            except Exception as failure:  # the policy's code is not ours
                shown = ascii(prompt[:3] if isinstance(prompt, list) else prompt)[:60]
                yield f"prompt {shown}: raised {type(failure).__name__}"


def _decides_the_same_for_the_same_seed(make: _Make) -> Iterator[str]:
    def run(seed: int) -> list[object]:
        router, fleet = make(RouterSettings(seed=seed)), _fleet(4)
        decisions: list[object] = []
        for number in range(200):
            for position, load in enumerate(fleet):
                load.inflight = (number * 7 + position * 5) % 12 // 6
            request = RouteRequest("m", _prompt(number * number % 31))
            decisions.append(_choose(router, request, fleet))
        return decisions

    if any(run(seed) != run(seed) for seed in (0, 7)):
        yield "two routers of one seed decide differently: draw from settings.seed only"


def _spreads_new_prompts(make: _Make) -> Iterator[str]:
    """Loosely, 50 each: by chance alone, one run in a million falls out of these bounds."""
    router, fleet = make(RouterSettings()), _fleet(4)
    picks: Counter[str] = Counter()
    for number in range(200):
        decision = _choose(router, RouteRequest("m", _prompt(number)), fleet)
        if isinstance(decision, Decision):
            picks[decision.replica] += 1
    counts = [picks[load.id] for load in fleet]
    if min(counts) < 20 or max(counts) > 80:
        yield f"200 new prompts on 4 idle replicas were spread {counts}, not 20 to 80 each"


def _forgets_at_any_time(make: _Make) -> Iterator[str]:
    router, fleet = make(RouterSettings()), _fleet(3)

    def forget() -> None:
        router.forget_adapter("never-seen")
        router.forget_replica(ReplicaId("never-seen"))
        router.forget_adapter("m")
        router.forget_replica(ReplicaId("r1"))
        router.forget_all()

    forget()
    for number in range(48):  # what comes last leaves something to forget
        yield from _faults(router, RouteRequest("m", _prompt(number % 10)), fleet)
        if number % 5 == 0:
            router.forget_replica(ReplicaId("r0"))
        if number % 7 == 0:
            router.forget_adapter("m")
    router.forget_all()
    if router.tracked_blocks:
        yield f"tracked_blocks is {router.tracked_blocks} after forget_all"
    forget()
    yield from _faults(router, RouteRequest("m", _prompt(1)), fleet)


def _is_bounded(make: _Make) -> Iterator[str]:
    bound = 64
    router, fleet = make(RouterSettings(max_tracked_blocks=bound)), _fleet(2)
    for number in range(200):
        _choose(router, RouteRequest(f"m{number % 3}", _prompt(number)), fleet)
        if not 0 <= router.tracked_blocks <= bound:
            yield f"tracked_blocks is {router.tracked_blocks} where max_tracked_blocks is {bound}"
            return


_RULES: tuple[Callable[[_Make], Iterator[str]], ...] = (
    _has_what_a_router_has,
    _picks_a_candidate,
    _takes_any_prompt,
    _decides_the_same_for_the_same_seed,
    _spreads_new_prompts,
    _forgets_at_any_time,
    _is_bounded,
)


def _choose(router: Router, request: RouteRequest, candidates: Sequence[_Load]) -> object:
    answer: object = router.choose(request, candidates, 0.0)
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns, later and elsewhere, that nobody awaited it
    return answer


def _faults(router: Router, request: RouteRequest, candidates: Sequence[_Load]) -> Iterator[str]:
    """What is wrong with one answer."""
    before = [(load.id, load.inflight) for load in candidates]
    answer = _choose(router, request, candidates)
    if [(load.id, load.inflight) for load in candidates] != before:
        yield "choose changes the candidates it is handed: counting load is the caller's"
    if inspect.isawaitable(answer):
        yield "choose returns an awaitable: it must decide in one synchronous call"
        return
    left = {load.id for load in candidates} - request.exclude
    if not left:
        if not isinstance(answer, NoReplica):
            yield f"with no candidate left, choose returns {answer!r}, not NoReplica()"
        return
    if not isinstance(answer, Decision):
        yield f"choose returns {answer!r} where a candidate is left, not a Decision"
        return
    if answer.replica not in left:
        yield f"choose picks {answer.replica!r}, which is no candidate or is excluded"
    if not _WORD.fullmatch(answer.reason):
        yield f"the reason {answer.reason!r} is no lower-case word"
    if not 0 <= answer.matched_blocks <= answer.total_blocks:
        yield f"matched_blocks {answer.matched_blocks} of total_blocks {answer.total_blocks}"
