"""The maths reward: 1 if a finished completion's last `\\boxed{}` equals the known answer, else 0.

The last box and not the first, so that an early guess earns nothing once it is taken back.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Longer boxes are prose or runaway repetition, never an answer. The bound also keeps sympy, which
# has no time limit outside the main thread, from being handed something enormous.
LONGEST_ANSWER_CHARS = 300
BOX = r"\boxed{"


@dataclass(frozen=True, slots=True)
class BoxedReward:
    """A reward function for TRL: an instance can be pickled into the rollout process.

    `max_completion_tokens`: a completion this long was cut off, and earns nothing even if it had
    boxed the right answer before rambling on.
    """

    max_completion_tokens: int

    def __call__(
        self,
        completions: Sequence[Sequence[dict[str, str]]],
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        """One reward, 0.0 or 1.0, per completion; the three sequences have one length."""
        return [
            float(len(ids) < self.max_completion_tokens and is_right(messages[-1]["content"], gold))
            for messages, gold, ids in zip(completions, solution, completion_ids, strict=True)
        ]


def is_right(text: str, gold: str) -> bool:
    answer = last_boxed(text)
    return answer is not None and is_same(answer, gold)


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, braces balanced; None if it is missing or cut."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    inside = start + len(BOX)
    depth = 1
    at = inside
    while at < len(text):
        if text[at] == "\\":  # `\{`, `\}` and `\\` open and close nothing
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[inside:at]
        at += 1
    return None


def is_same(answer: str, gold: str) -> bool:
    """Alike as text without spacing, or equal as mathematics (math-verify)."""
    if not answer.strip() or len(answer) > LONGEST_ANSWER_CHARS:
        return False
    if without_spacing(answer) == without_spacing(gold):
        return True
    from math_verify import parse, verify  # only here: the rest needs no sympy

    # math-verify keeps its limits with signal.alarm, which only the main thread may use; TRL scores
    # in a worker thread (async_rollout_worker.py, _score_group), where asking for one raises.
    main = threading.current_thread() is threading.main_thread()
    limit_s = 5 if main else None
    parsed_gold = parse(f"${gold}$", parsing_timeout=limit_s)
    parsed_answer = parse(f"${answer}$", parsing_timeout=limit_s)
    return bool(
        parsed_gold
        and parsed_answer
        and verify(parsed_gold, parsed_answer, timeout_seconds=limit_s)
    )


def without_spacing(latex: str) -> str:
    """`latex` without dollars, spaces and the commands that only space or size what follows."""
    plain = latex.replace("$", "").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return re.sub(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[!,;: ]|\s+", "", plain)
