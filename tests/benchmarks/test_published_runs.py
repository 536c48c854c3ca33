"""The published runs: the simulated loop tells who waited. All their figures: the benchmark."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from benchmarks.published_runs import (
    PROMPT_TOKENS,
    RUNS,
    Outcome,
    Run,
    rollouts,
    simulate,
    table,
    uncut_mean,
)
from benchmarks.workloads import Grpo

STEPS = (20, 80, 40, 40, 20)
"""Enough for the queue to fill or to drain."""


@pytest.mark.parametrize(("run", "steps"), list(zip(RUNS, STEPS, strict=True)))
def test_who_waits_is_who_waited(run: Run, steps: int):
    found = simulate(run, steps=steps)
    assert found.waits == run.waits
    assert run.step_s is None or found.step_s == pytest.approx(run.step_s, rel=0.1)
    # Filling the queue is no small part of so few steps, and their samples are younger.
    outcome = Outcome(
        replace(run, wall_s=None, tokens_per_second=None, staleness=None), found, found
    )
    assert not list(outcome.outside())
    assert not any("nan" in line for line in table([outcome], 0.0).splitlines())


def test_figures_that_are_off_are_told():
    run = replace(RUNS[1], queue=64, forward_backward_s=1.0, waits="trainer")
    found = simulate(run, steps=8)
    wrong = replace(
        run,
        waits="generation",
        step_s=found.step_s * 1.2,
        wall_s=found.seconds * 1.2,
        tokens_per_second=found.tokens_per_second * 1.3,
        queue_mean=60,
        staleness=found.staleness + 0.6,
    )
    told = "\n".join(Outcome(wrong, found, found).outside())
    for word in ("waits", "median step", "wall clock", "tokens per second", "queue", "staleness"):
        assert word in told


def test_replies_are_as_long_as_the_samples_say():
    for run in RUNS:
        lengths = [request.output_tokens for request in rollouts(run)]
        mean = sum(lengths) / len(lengths)
        assert mean + PROMPT_TOKENS == pytest.approx(run.sample_tokens, rel=0.03)
    drawn, workload = Random(1), Grpo(reply=uncut_mean(1000, 0.8), longest=3000)
    mean = sum(workload.reply_tokens(drawn) for _ in range(40_000)) / 40_000
    assert mean == pytest.approx(1000, rel=0.02)
