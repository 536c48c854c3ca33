"""Asks every replica for the numbers that prove which weights a policy name stands for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import orjson

from broadcast.answer import Answer
from broadcast.fleet import Replica
from broadcast.pause import Pause
from broadcast.proof import PROMPT, LogProbs, Outcome, Verdict, compare
from proxy.fanout import Fanout
from proxy.metrics import Metrics
from proxy.replicas import Replicas
from routing.ids import AdapterName, ReplicaId

log = logging.getLogger("rollmux")

MAX_TRIES = 50
"""Publications looked at until one is clear. A LoRA adapter is exactly zero only before its first
step; what is not clear by then drowns in noise, and asking on would only cost."""


class Proving:
    """At the first policy whose weights can be told from the base model's: two short calls each."""

    def __init__(
        self,
        replicas: Replicas,
        fanout: Fanout,
        pause: Pause,
        metrics: Metrics,
        *,
        timeout_s: float,
    ) -> None:
        self._replicas = replicas
        self._fanout = fanout
        self._pause = pause
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._left = MAX_TRIES

    async def prove(self, name: AdapterName) -> Verdict | None:
        """Check one policy, unless an earlier one was clear; None if there was nothing to do.

        A replica that serves the base model under the name is taken out for the rest of the run.
        """
        replicas = self._replicas
        holders = replicas.fleet.candidates(name)
        if not self._left or self._pause.real or not holders:
            return None
        self._left -= 1
        base_model = next((m for r in holders for m in r.base_models), None)
        if base_model is None:
            return None
        verdict = compare(await self._ask(holders, base_model), await self._ask(holders, name))
        self._metrics.weight_proofs.labels(verdict.outcome.value).inc()
        match verdict.outcome:
            case Outcome.UNCLEAR:
                log.debug("%s proves nothing: %s", name, verdict.words)
            case Outcome.AGREE:
                self._left = 0
                log.info("%s is served with the same weights everywhere (%s)", name, verdict.words)
            case Outcome.DIFFER:
                log.error("%s does not stand for the same weights: %s", name, verdict.words)
                for id in verdict.base_only:
                    why = f"serves the base model under {name}"
                    moved = replicas.fleet.exclude(
                        id, "wrong_weights", why, replicas.now_s(), for_good=True
                    )
                    replicas.apply(moved)
        return verdict

    async def _ask(self, holders: Sequence[Replica], model: str) -> dict[ReplicaId, LogProbs]:
        body = orjson.dumps(
            {
                "model": model,
                "prompt": list(PROMPT),
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": 0,
            }
        )
        answers = await self._fanout.all(
            holders, "POST", "/v1/completions", body, timeout_s=self._timeout_s
        )
        return {
            id: found
            for id, answer in answers.items()
            if isinstance(answer, Answer) and answer.ok and (found := _read(answer.body))
        }


def _read(body: bytes) -> list[float]:
    """One log-probability a prompt token; empty where the server gives none.

    vLLM 0.27.1: ``choices[0].prompt_logprobs`` is null for the first token, then a map from token
    id to ``{"logprob", …}`` with the prompt's own token first.
    """
    try:
        rows = orjson.loads(body)["choices"][0]["prompt_logprobs"]
        pairs = zip(PROMPT[1:], rows[1:], strict=True)
        return [float(row[str(token)]["logprob"]) for token, row in pairs]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError):
        return []
