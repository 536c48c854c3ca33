"""The generation endpoints of a simulated replica: completions, chat, messages, tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from benchmarks import replies, tokens
from benchmarks.checks import (
    check_prompt,
    check_seed,
    json_body,
    json_object,
    token_prompts,
    turns,
)
from benchmarks.config import ReplicaConfig
from benchmarks.driver import Driver
from benchmarks.engine import Adapter, Job, Outcome, chain
from benchmarks.httpd import Arrival, Reply, with_headers
from benchmarks.replies import Refused, bad_request, error, invalid, json_reply, missing


@dataclass(frozen=True, slots=True)
class _Sampling:
    """What a generation asked for, checked."""

    max_tokens: int
    n: int
    draw: str
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: bool
    """Asked for; with how many alternatives is not simulated."""
    token_ids: bool
    stream: bool
    include_usage: bool


class Generations:
    """Answers generations by ``driver``; ``names`` are the adapters served by now."""

    def __init__(self, config: ReplicaConfig, driver: Driver, names: Mapping[str, Adapter]) -> None:
        self.config = config
        self.driver = driver
        self.names = names
        self.external: dict[str, list[str]] = {}
        """The engine's job ids for each id that /abort_requests may name."""
        self._ids = itertools.count(1)

    def alive(self) -> None:
        """Raises Refused with vLLM's 500 if the engine is dead."""
        if self.driver.engine.dead:
            raise Refused(error(500, "InternalServerError", replies.ENGINE_DEAD))

    def check_model(self, body: Mapping[str, Any]) -> Adapter | None:
        """The adapter a request names, None for the base. Adapters come first, as in vLLM."""
        name = body.get("model")
        if isinstance(name, str) and name in self.names:
            return None if self.config.base_under_every_name else self.names[name]
        if name and name != self.config.model:
            raise replies.unknown_model(name)
        return None

    def _sampling(
        self, body: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> _Sampling:
        """Checks in vLLM's order (sampling_params.py, _verify_args)."""
        n = body.get("n", 1)
        limit = self.config.max_model_len
        if max_tokens is not None and max_tokens > limit:
            text = (
                f"max_tokens={max_tokens} cannot be greater than max_model_len="
                f"max_total_tokens={limit}. Please request fewer output tokens."
            )
            raise bad_request(text, "max_tokens", max_tokens)
        if n is not None and n < 1:
            raise bad_request(f"n must be at least 1, got {n}.")
        temperature = 1.0 if body.get("temperature") is None else float(body["temperature"])
        if temperature < 0:
            text = f"temperature must be non-negative, got {temperature}."
            raise bad_request(text, "temperature", temperature)
        top_p = 1.0 if body.get("top_p") is None else float(body["top_p"])
        if not 0 < top_p <= 1:
            raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
        if max_tokens is not None and max_tokens < 1:
            text = f"max_tokens must be at least 1, got {max_tokens}."
            raise bad_request(text, "max_tokens", max_tokens)
        least = body.get("min_tokens") or 0
        if max_tokens is not None and least > max_tokens:
            raise bad_request(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {least}."
            )
        if logprobs is not None and logprobs > 20:
            text = f"Requested sample logprobs of {logprobs}, which is greater than max allowed: 20"
            raise bad_request(text, "logprobs", logprobs)
        seed = body.get("seed")
        draw = ""
        if temperature:
            draw = f"seed {seed}" if seed is not None else f"draw {next(self._ids)}"
        return _Sampling(
            max_tokens=max_tokens or 0,
            n=n or 1,
            draw=draw,
            ignore_eos=bool(body.get("ignore_eos")),
            logprobs=logprobs,
            prompt_logprobs=body.get("prompt_logprobs") is not None,
            token_ids=bool(body.get("return_token_ids")),
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )

    def _check_length(self, prompt: Sequence[int], max_tokens: int) -> None:
        limit = self.config.max_model_len
        if len(prompt) + max_tokens > limit:
            text = (
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {len(prompt)} input tokens, "
                f"for a total of {len(prompt) + max_tokens} tokens. Please reduce the length of "
                "the input prompt or the number of requested output tokens."
            )
            raise bad_request(text, "input_tokens", len(prompt))
        worst = max(prompt, default=0)
        if worst >= self.config.vocab_size:
            raise bad_request(f"Token id {worst} is out of vocabulary")

    def _begin(
        self,
        external: str,
        adapter: Adapter | None,
        prompts: Sequence[Sequence[int]],
        sampling: _Sampling,
    ) -> list[_Generation]:
        self.alive()
        name = adapter.name if adapter is not None else ""
        generations: list[_Generation] = []
        for prompt in prompts:
            blocks = chain(name, prompt, self.config.engine.block_tokens)
            for i in range(sampling.n):
                draw = f"{sampling.draw} {i}" if sampling.draw else ""
                length, reason = sampling.max_tokens, "length"
                mean = self.config.mean_output_tokens
                if mean is not None and not sampling.ignore_eos:
                    natural = tokens.reply_length(prompt, draw, mean)
                    if natural <= length:
                        length, reason = natural, "stop"
                number = len(generations)
                job = Job(
                    f"{external}-{number}-{next(self._ids)}",
                    blocks,
                    len(prompt),
                    length,
                    adapter,
                    reason,
                )
                generations.append(_Generation(job, prompt, draw))
                self.external.setdefault(f"{external}-{number}", []).append(job.id)
        for generation in generations:
            generation.done = self.driver.submit(generation.job)
        return generations

    async def _end(self, external: str, generations: Sequence[_Generation]) -> list[Outcome]:
        """Wait for all; if the client leaves meanwhile, they are aborted."""
        try:
            outcomes = [await g.done for g in generations]
        finally:
            self._forget(external, generations)
        if any(o.reason == "error" for o in outcomes):
            raise Refused(error(500, "InternalServerError", replies.ENGINE_DEAD))
        for generation, outcome in zip(generations, outcomes, strict=True):
            self._remember(generation, outcome)
        return outcomes

    def _forget(self, external: str, generations: Sequence[_Generation]) -> None:
        self.driver.leave([g.job.id for g in generations])
        for number in range(len(generations)):
            self.external.pop(f"{external}-{number}", None)

    def _remember(self, generation: _Generation, outcome: Outcome) -> None:
        """Blocks filled by the reply are cached too: the next turn's prompt starts with them."""
        size = self.config.engine.block_tokens
        if (outcome.job.prompt_tokens + outcome.tokens) // size > len(outcome.job.blocks):
            name = outcome.job.adapter.name if outcome.job.adapter is not None else ""
            whole = [*generation.prompt, *_tokens(generation, outcome)]
            self.driver.engine.store(chain(name, whole, size), outcome.weights)

    async def completions(self, arrival: Arrival) -> Reply:
        body = json_body(arrival)
        if not isinstance(body, dict):
            kind = type(body).__name__
            text = f"'{kind}' object has no attribute 'get'"
            return replies.raised(error(500, "InternalServerError", text))
        if not body.get("prompt") and body.get("prompt") != []:
            text = "Either prompt or prompt_embeds must be provided and non-empty."
            raise bad_request(text, "prompt")
        check_prompt(body["prompt"])
        check_seed(body)
        adapter = self.check_model(body)
        prompts = token_prompts(body["prompt"])
        if not prompts:
            raise bad_request("You must pass at least one prompt")
        if not all(prompts):
            raise bad_request("The decoder prompt cannot be empty")
        given = body.get("max_tokens")
        sampling = self._sampling(body, 16 if given is None else given, body.get("logprobs"))
        for prompt in prompts:
            self._check_length(prompt, sampling.max_tokens)
        request_id = body.get("request_id") or arrival.header("x-request-id")
        external = f"cmpl-{request_id or secrets.token_hex(8)}"
        generations = self._begin(external, adapter, prompts, sampling)
        base: dict[str, Any] = {
            "id": external,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or self.config.model,
        }
        if sampling.stream:
            pieces = self._stream_completion(external, base, generations, sampling, len(prompts))
            return Reply(200, b"", "text/event-stream; charset=utf-8", (), pieces)
        outcomes = await self._end(external, generations)
        choices = []
        for i, (generation, outcome) in enumerate(zip(generations, outcomes, strict=True)):
            ids = _tokens(generation, outcome)
            choices.append(
                {
                    "index": i,
                    "text": tokens.decode(ids),
                    "logprobs": _completion_logprobs(generation, outcome, sampling.logprobs),
                    "finish_reason": outcome.reason,
                    "stop_reason": None,
                    "token_ids": ids if sampling.token_ids else None,
                    "prompt_logprobs": (
                        generation.prompt_logprobs() if sampling.prompt_logprobs else None
                    ),
                    "prompt_token_ids": generation.prompt if sampling.token_ids else None,
                    "routed_experts": None,
                }
            )
        read = sum(map(len, prompts))
        reply = json_reply(
            base
            | {
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": replies.FINGERPRINT,
                "usage": replies.usage(read, sum(o.tokens for o in outcomes)),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )
        return self._with_load(arrival, reply)

    def _with_load(self, arrival: Arrival, reply: Reply) -> Reply:
        """The per-response load that a request header asks for."""
        form = (arrival.header("endpoint-load-metrics-format") or "").upper()
        waiting, usage = (
            float(self.driver.engine.gauges.waiting),
            self.driver.engine.gauges.kv_usage,
        )
        if form == "JSON":
            load = {
                "named_metrics": {"num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
            }
            return with_headers(reply, ("endpoint-load-metrics", f"JSON {json.dumps(load)}"))
        if form == "TEXT":
            text = (
                f"TEXT named_metrics.num_requests_waiting={waiting}, "
                f"named_metrics.kv_cache_usage_perc={usage}"
            )
            return with_headers(reply, ("endpoint-load-metrics", text))
        return reply

    async def _progress(
        self, external: str, generations: Sequence[_Generation]
    ) -> AsyncIterator[tuple[int, int, Outcome | None]]:
        """(choice, token number, outcome with the last token); token -1: ended without one."""
        sent = [0] * len(generations)
        open_choices = set(range(len(generations)))
        try:
            while open_choices:
                waiting = [generations[i].done for i in open_choices]
                # Several steps may fit into one turn; no need to wake up for each.
                pace_s = max(self.driver.engine.step_s(), 0.002)
                await asyncio.wait(waiting, timeout=pace_s, return_when="FIRST_COMPLETED")
                self.driver.pump()
                for i in sorted(open_choices):
                    generation = generations[i]
                    outcome = generation.done.result() if generation.done.done() else None
                    if outcome is None:
                        there = self.driver.engine.produced(generation.job.id)
                        there = min(there, generation.job.output_tokens - 1)
                        generation.weights = self.driver.engine.weights(generation.job.id)
                    else:
                        generation.weights = outcome.weights
                        there = outcome.tokens
                        open_choices.discard(i)
                    for number in range(sent[i], there):
                        last = outcome if number == there - 1 else None
                        yield i, number, last
                    if outcome is not None and sent[i] >= there:
                        yield i, -1, outcome
                    sent[i] = max(sent[i], there)
                    if outcome is not None:
                        self._remember(generation, outcome)
        finally:
            self._forget(external, generations)

    async def _stream_completion(
        self,
        external: str,
        base: dict[str, Any],
        generations: Sequence[_Generation],
        sampling: _Sampling,
        prompts: int,
    ) -> AsyncIterator[bytes]:
        written = 0
        async for i, number, outcome in self._progress(external, generations):
            generation = generations[i]
            if outcome is not None and outcome.reason == "error":
                yield _event(
                    orjson.loads(error(500, "InternalServerError", replies.ENGINE_DEAD).body)
                )
                yield b"data: [DONE]\n\n"
                return
            ids = [generation.token(number)] if number >= 0 else []
            written += len(ids)
            logprobs = None
            if sampling.logprobs is not None and ids:
                logprobs = _logprob_lists(generation, number, number + 1, sampling.logprobs)
            content: dict[str, Any] = base | {
                "choices": [
                    {
                        "index": i,
                        "text": tokens.decode(ids),
                        "logprobs": logprobs,
                        "finish_reason": outcome.reason if outcome is not None else None,
                        "stop_reason": None,
                        "prompt_token_ids": (
                            generation.prompt if sampling.token_ids and number == 0 else None
                        ),
                        "token_ids": ids if sampling.token_ids else None,
                    }
                ]
            }
            if outcome is not None and not sampling.include_usage:
                content["system_fingerprint"] = replies.FINGERPRINT
            yield _event(content)
        if sampling.include_usage:
            read = sum(len(g.prompt) for g in generations) // sampling.n
            counts = replies.usage(read, written, details=False)
            yield _event(
                base | {"choices": [], "usage": counts, "system_fingerprint": replies.FINGERPRINT}
            )
        yield b"data: [DONE]\n\n"

    def _start_chat(
        self, body: Mapping[str, Any], arrival: Arrival
    ) -> tuple[str, _Sampling, list[int], list[_Generation]]:
        if "messages" not in body:
            raise invalid(missing(("body", "messages"), body))
        check_seed(body)
        adapter = self.check_model(body)
        conversation = turns(body["messages"])
        if not conversation:
            raise bad_request(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        prompt = tokens.chat_tokens(conversation)
        given = body.get("max_completion_tokens") or body.get("max_tokens")
        rest = max(self.config.max_model_len - len(prompt), 1)
        top = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        sampling = self._sampling(body, rest if given is None else given, top)
        self._check_length(prompt, sampling.max_tokens)
        request_id = body.get("request_id") or arrival.header("x-request-id")
        external = f"chatcmpl-{request_id or secrets.token_hex(8)}"
        return external, sampling, prompt, self._begin(external, adapter, [prompt], sampling)

    async def chat(self, arrival: Arrival) -> Reply:
        body = json_object(arrival)
        external, sampling, prompt, generations = self._start_chat(body, arrival)
        base: dict[str, Any] = {
            "id": external,
            "object": "chat.completion.chunk" if sampling.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or self.config.model,
        }
        if sampling.stream:
            pieces = self._stream_chat(external, base, generations, sampling)
            return Reply(200, b"", "text/event-stream; charset=utf-8", (), pieces)
        outcomes = await self._end(external, generations)
        choices = []
        for i, (generation, outcome) in enumerate(zip(generations, outcomes, strict=True)):
            ids = _tokens(generation, outcome)
            choices.append(
                {
                    "index": i,
                    "message": {
                        "role": "assistant",
                        "content": tokens.decode(ids),
                        "refusal": None,
                        "annotations": None,
                        "audio": None,
                        "function_call": None,
                        "reasoning": None,
                    },
                    "logprobs": _chat_logprobs(generation, 0, len(ids), sampling.logprobs),
                    "finish_reason": outcome.reason,
                    "stop_reason": None,
                    "token_ids": ids if sampling.token_ids else None,
                    "routed_experts": None,
                }
            )
        return self._with_load(
            arrival,
            json_reply(
                base
                | {
                    "choices": choices,
                    "service_tier": None,
                    "system_fingerprint": replies.FINGERPRINT,
                    "usage": replies.usage(len(prompt), sum(o.tokens for o in outcomes)),
                    "prompt_logprobs": None,
                    "prompt_token_ids": prompt if sampling.token_ids else None,
                    "prompt_text": None,
                    "kv_transfer_params": None,
                    "ec_transfer_params": None,
                    "metrics": None,
                }
            ),
        )

    async def _stream_chat(
        self,
        external: str,
        base: dict[str, Any],
        generations: Sequence[_Generation],
        sampling: _Sampling,
    ) -> AsyncIterator[bytes]:
        first = True
        written = 0
        async for i, number, outcome in self._progress(external, generations):
            generation = generations[i]
            if first:
                first = False
                for j, other in enumerate(generations):
                    start = {
                        "index": j,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                    shown = other.prompt if sampling.token_ids else None
                    yield _event(
                        base | {"choices": [start], "prompt_token_ids": shown, "prompt_text": None}
                    )
            if outcome is not None and outcome.reason == "error":
                yield _event(
                    orjson.loads(error(500, "InternalServerError", replies.ENGINE_DEAD).body)
                )
                yield b"data: [DONE]\n\n"
                return
            ids = [generation.token(number)] if number >= 0 else []
            written += len(ids)
            choice: dict[str, Any] = {
                "index": i,
                "delta": {"content": tokens.decode(ids)},
                "logprobs": _chat_logprobs(generation, number, number + 1, sampling.logprobs)
                if ids
                else None,
                "finish_reason": None,
            }
            content: dict[str, Any] = base | {"choices": [choice]}
            if outcome is not None:
                choice |= {"finish_reason": outcome.reason, "stop_reason": None}
            if outcome is not None and not sampling.include_usage:
                content["system_fingerprint"] = replies.FINGERPRINT
            choice["token_ids"] = ids if sampling.token_ids else None
            yield _event(content)
        if sampling.include_usage:
            counts = replies.usage(len(generations[0].prompt), written, details=False)
            yield _event(
                base | {"choices": [], "usage": counts, "system_fingerprint": replies.FINGERPRINT}
            )
        yield b"data: [DONE]\n\n"

    async def messages(self, arrival: Arrival) -> Reply:
        """Anthropic's shape; no streaming here."""
        body = json_object(arrival)
        try:
            external, _, prompt, generations = self._start_chat(body, arrival)
            (outcome,) = await self._end(external, generations)
        except Refused as refused:
            detail = orjson.loads(refused.reply.body)["error"]
            shown = {"type": detail["type"], "message": detail["message"]}
            return json_reply({"type": "error", "error": shown}, refused.reply.status)
        reason = {"length": "max_tokens", "stop": "end_turn"}.get(outcome.reason)
        text = tokens.decode(_tokens(generations[0], outcome))
        return json_reply(
            {
                "id": external,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                "model": body.get("model") or self.config.model,
                **({"stop_reason": reason} if reason is not None else {}),
                "usage": {"input_tokens": len(prompt), "output_tokens": outcome.tokens},
            }
        )

    async def generate(self, arrival: Arrival) -> Reply:
        """vLLM's own token-in, token-out endpoint; no streaming here."""
        body = json_object(arrival)
        if "token_ids" not in body:
            raise invalid(missing(("body", "token_ids"), body))
        adapter = self.check_model(body)
        given = body.get("sampling_params") or {}
        sampling = self._sampling(given, given.get("max_tokens") or 16, given.get("logprobs"))
        self._check_length(body["token_ids"], sampling.max_tokens)
        external = f"generate-tokens-{secrets.token_hex(8)}"
        generations = self._begin(external, adapter, [body["token_ids"]], sampling)
        outcomes = await self._end(external, generations)
        choices = []
        for i, (generation, outcome) in enumerate(zip(generations, outcomes, strict=True)):
            ids = _tokens(generation, outcome)
            shown = None
            if sampling.logprobs is not None:
                values = generation.logprobs(len(ids))
                one = [
                    {"token": f"token_id:{t}", "logprob": v, "bytes": None}
                    for t, v in zip(ids, values, strict=True)
                ]
                shown = {"content": [e | {"top_logprobs": [e]} for e in one]}
            choices.append(
                {
                    "index": i,
                    "logprobs": shown,
                    "finish_reason": outcome.reason,
                    "token_ids": ids,
                    "routed_experts": None,
                }
            )
        return json_reply(
            {
                "request_id": external,
                "model": body.get("model") or self.config.model,
                "created": int(time.time()),
                "choices": choices,
                "usage": replies.usage(len(body["token_ids"]), sum(o.tokens for o in outcomes)),
                "prompt_logprobs": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
            }
        )


@dataclass(slots=True, eq=False)
class _Generation:
    """One choice of one request while it is made."""

    job: Job
    prompt: Sequence[int]
    draw: str
    weights: str = ""
    done: asyncio.Future[Outcome] = field(init=False)
    _made: tuple[str, list[int]] = ("", [])

    def token(self, number: int) -> int:
        """Token ``number`` under the weights known by now."""
        if self._made[0] != self.weights or len(self._made[1]) <= number:
            length = max(self.job.output_tokens, number + 1)
            made = tokens.reply_tokens(self.weights, self.prompt, self.draw, length)
            if self.job.reason == "stop":
                made[-1] = tokens.IM_END
            self._made = (self.weights, made)
        return self._made[1][number]

    def prompt_logprobs(self) -> list[dict[str, Any] | None]:
        """null for the first token, then each token's own (vLLM 0.27.1)."""
        values = tokens.logprobs(self.weights, self.prompt, "prompt", len(self.prompt))
        return [None] + [
            {str(token): {"logprob": value, "rank": 1, "decoded_token": tokens.decode([token])}}
            for token, value in zip(self.prompt[1:], values[1:], strict=True)
        ]

    def logprobs(self, count: int) -> list[float]:
        return tokens.logprobs(self.weights, self.prompt, self.draw, count)


def _tokens(generation: _Generation, outcome: Outcome) -> list[int]:
    generation.weights = outcome.weights
    return [generation.token(number) for number in range(outcome.tokens)]


def _logprob_lists(generation: _Generation, start: int, end: int, top: int) -> dict[str, Any]:
    """Log-probabilities of tokens ``start`` to ``end`` as /v1/completions shows them."""
    values = generation.logprobs(end)[start:end]
    texts = [tokens.decode([generation.token(i)]) for i in range(start, end)]
    offsets = list(itertools.accumulate((len(t) for t in texts), initial=0))[:-1]
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": [
            {text: value} | {f"{k}": value - 1 - k for k in range(top) if f"{k}" != text}
            for text, value in zip(texts, values, strict=True)
        ],
    }


def _completion_logprobs(
    generation: _Generation, outcome: Outcome, top: int | None
) -> dict[str, Any] | None:
    return None if top is None else _logprob_lists(generation, 0, outcome.tokens, top)


def _chat_logprobs(
    generation: _Generation, start: int, end: int, top: int | None
) -> dict[str, Any] | None:
    if top is None:
        return None
    values = generation.logprobs(end)[start:end]
    content = []
    for number, value in zip(range(start, end), values, strict=True):
        piece = tokens.piece(generation.token(number))
        entry = {"token": piece.decode("utf-8", "replace"), "logprob": value, "bytes": list(piece)}
        others = [
            {"token": f"{k}", "logprob": value - 1 - k, "bytes": [48 + k]} for k in range(top - 1)
        ]
        content.append(entry | {"top_logprobs": [entry, *others][:top]})
    return {"content": content}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)
