"""Proof of the bytes: do all replicas really serve an adapter's weights under its name?

A listing shows a name and a path, not what is computed. The log-probabilities of a fixed prompt
show it: on each replica the adapter's must differ from the base model's, and must be the same on
all. How far numbers of equal weights lie apart is measured on the base model itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from routing.ids import ReplicaId

PROMPT = tuple(range(10, 42))
"""Token ids that every vocabulary has; two blocks of 16."""
CLEAR = 3.0
"""An effect counts when it is so many times the noise."""
SHARE = 0.1
"""Replicas agree when they differ by no more than this share of the adapter's effect."""
TINY = 1e-6
"""Below it two log-probabilities are the same number, written differently."""

LogProbs = Sequence[float]
"""Of the prompt's tokens, from the second on."""


class Outcome(StrEnum):
    AGREE = "agree"
    DIFFER = "differ"
    UNCLEAR = "unclear"
    """The adapter does as good as nothing yet (its weights begin at zero), or nobody answered."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``base_only`` are replicas that answer as the base model while others do not."""

    outcome: Outcome
    words: str = ""
    base_only: tuple[ReplicaId, ...] = ()


def compare(base: Mapping[ReplicaId, LogProbs], adapter: Mapping[ReplicaId, LogProbs]) -> Verdict:
    """Judge what the replicas answered; those in ``base`` and in ``adapter`` are the same."""
    ids = [id for id in adapter if id in base and _alike(base[id], adapter[id])]
    if not ids:
        return Verdict(Outcome.UNCLEAR, "no replica answered")
    first = ids[0]
    noise = max((_apart(base[first], base[id]) for id in ids), default=0.0) + TINY
    effect = {id: _apart(base[id], adapter[id]) for id in ids}
    strongest = max(effect.values())
    if strongest <= CLEAR * noise:
        return Verdict(Outcome.UNCLEAR, f"no effect over the noise of {noise:.2g}")
    silent = tuple(id for id in ids if effect[id] <= CLEAR * noise)
    if silent:
        return Verdict(
            Outcome.DIFFER,
            f"{', '.join(silent)} answers as the base model does, the others do not",
            silent,
        )
    apart = {id: _apart(adapter[first], adapter[id]) for id in ids}
    worst = max(apart, key=lambda id: apart[id])
    if apart[worst] > max(CLEAR * noise, SHARE * strongest):
        return Verdict(
            Outcome.DIFFER,
            f"{first} and {worst} differ by {apart[worst]:.2g}, the adapter's effect is "
            f"{strongest:.2g}, the noise {noise:.2g}: they serve different weights",
        )
    return Verdict(Outcome.AGREE, f"{len(ids)} replicas, effect {strongest:.2g}")


def _alike(one: LogProbs, other: LogProbs) -> bool:
    return len(one) == len(other) > 0


def _apart(one: LogProbs, other: LogProbs) -> float:
    if len(one) != len(other):
        return float("inf")
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)
