"""The maths reward with the real math-verify, in a worker thread, where TRL calls it."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.e2e.conftest import RealParts
from tests.e2e.processes import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

CASES = {
    (r"\boxed{\frac{1}{2}}", "0.5"): 1.0,
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"): 1.0,
    (r"\boxed{(x+1)^2}", "x^2+2x+1"): 1.0,
    (r"\boxed{1{,}000}", "1000"): 1.0,
    (r"\boxed{0.51}", r"\frac{1}{2}"): 0.0,
    (r"\boxed{7}, no, \boxed{8}", "7"): 0.0,
    (r"\boxed{\frac{1}{}}", "1"): 0.0,
    (r"\boxed{nonsense \\}", "3"): 0.0,
    (r"\boxed{3}", r"no \formula"): 0.0,
}
SCORE = """
import asyncio, json, sys
from trainer_entry.recipes.reward import BoxedReward

cases = json.load(sys.stdin)
print(json.dumps(asyncio.run(asyncio.to_thread(
    BoxedReward(100),
    completions=[[{"role": "assistant", "content": text}] for text, _ in cases],
    solution=[gold for _, gold in cases],
    completion_ids=[[0]] * len(cases),
))))
"""


def test_equal_as_mathematics_is_right_and_nothing_raises(real_parts: RealParts) -> None:
    scored = subprocess.run(
        [real_parts.python, "-c", SCORE],
        input=json.dumps(list(CASES)),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert scored.returncode == 0, scored.stderr
    assert dict(zip(CASES, json.loads(scored.stdout.splitlines()[-1]), strict=True)) == CASES
