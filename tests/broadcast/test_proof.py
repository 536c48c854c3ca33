"""What log-probabilities of one prompt prove about many replicas."""

from __future__ import annotations

import pytest

from broadcast.proof import Outcome, compare
from routing.ids import ReplicaId

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
BASE = [-1.0, -2.0, -3.0]
V1 = [-1.5, -2.0, -3.0]
V2 = [-1.0, -2.0, -4.0]


def near(values: list[float], by: float) -> list[float]:
    return [v + by for v in values]


@pytest.mark.parametrize(
    ("base", "adapter", "outcome"),
    [
        ({A: BASE, B: BASE}, {A: V1, B: V1}, Outcome.AGREE),
        ({A: BASE, B: near(BASE, 0.02)}, {A: V1, B: near(V1, -0.02)}, Outcome.AGREE),
        ({A: BASE, B: BASE}, {A: BASE, B: BASE}, Outcome.UNCLEAR),
        ({A: BASE, B: near(BASE, 0.1)}, {A: near(BASE, 0.1), B: BASE}, Outcome.UNCLEAR),
        ({A: BASE, B: BASE}, {A: V1, B: BASE}, Outcome.DIFFER),
        ({A: BASE, B: BASE}, {A: V1, B: V2}, Outcome.DIFFER),
        ({A: BASE, B: near(BASE, 0.02)}, {A: V1, B: V2}, Outcome.DIFFER),
        ({A: BASE}, {A: V1}, Outcome.AGREE),
        ({}, {}, Outcome.UNCLEAR),
        ({A: BASE}, {B: V1}, Outcome.UNCLEAR),
        ({A: BASE, B: BASE[:2]}, {A: V1, B: V1[:2]}, Outcome.UNCLEAR),
    ],
)
def test_verdict(base, adapter, outcome):
    assert compare(base, adapter).outcome is outcome


def test_who_answers_as_the_base_model_is_named():
    verdict = compare({A: BASE, B: BASE, C: BASE}, {A: V1, B: BASE, C: V1})
    assert verdict.base_only == (B,)
    assert "b answers as the base model does" in verdict.words


def test_different_policies_name_nobody_as_the_base_model():
    assert compare({A: BASE, B: BASE}, {A: V1, B: V2}).base_only == ()
