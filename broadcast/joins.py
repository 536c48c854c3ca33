"""Joins: many replicas' answers to one call, made into the one answer that the client gets.

What differs between replicas is compared. Where there is a weakest value that is true of all, it is
given; where there is none, the answer is an error that names who differs and how. It is never the
answer of whoever was asked, and does not depend on the order of asking: replicas are taken in the
fleet's order, which the caller keeps in the mapping it hands in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broadcast.answer import Answer, NoAnswer
from broadcast.answers import words
from broadcast.ledger import LiveAdapter
from routing.ids import ReplicaId

JSON = "application/json"
TEXT_CHARS = 2048
"""Of one replica's text in an error: a traceback's head and its message (field report O-11)."""

Answers = Mapping[ReplicaId, Answer | NoAnswer]
Urls = Mapping[ReplicaId, str]
"""For the words of an error. A replica without one is named by its id alone."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The one answer. ``error`` is the word for ``x-rollmux-error``; empty for a success."""

    status: int
    body: bytes
    content_type: str = JSON
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True)
class Facts:
    """What a client is told of one replica, or relies on. From ``/server_info``, JSON form.

    ``lora`` is (max_loras, max_lora_rank, max_cpu_loras), None without ``--enable-lora``.
    Source: vLLM 0.27.1, entrypoints/serve/dev/server_info/api_router.py and the config classes.
    """

    model: str | None
    dtype: str | None
    max_model_len: int | None
    block_tokens: int | None
    data_parallel_size: int | None
    lora: tuple[int | None, int | None, int | None] | None
    logprobs_mode: str | None = None
    generation_config: str | None = None
    prefix_caching: bool | None = None
    instance_id: str | None = None
    """Another for each start of a server, so it tells two servers apart, and two lives of one."""


MUST_AGREE = ("model", "dtype", "block_tokens", "data_parallel_size", "logprobs_mode")
"""Facts without a weakest value: two policies, two precisions, two block hashes, two sync paths,
two meanings of a log-probability."""
_LORA_KEYS = ("max_loras", "max_lora_rank", "max_cpu_loras")


def _encode(value: object) -> bytes:
    # As Starlette encodes, so that a joined body looks like a replica's own. Half a surrogate pair,
    # which UTF-8 cannot hold, becomes the JSON escape that it came as.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def _object(answer: Answer) -> dict[str, Any] | None:
    try:
        value = json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _error(status: int, code: str, message: str) -> Joined:
    # vLLM 0.27.1, entrypoints/openai/engine/protocol.py, ErrorResponse.
    error = {"message": message, "type": code, "param": None, "code": status}
    body = json.dumps({"error": error}, separators=(",", ":")).encode()
    return Joined(status, body, error=code)


def _who(replica: ReplicaId, urls: Urls) -> str:
    url = urls.get(replica)
    return f"replica {replica} ({url})" if url else f"replica {replica}"


def _what(answer: Answer | NoAnswer) -> str:
    if isinstance(answer, NoAnswer):
        return f"gave no answer ({answer.cause}{': ' if answer.detail else ''}{answer.detail})"
    return f"answered {answer.status}: {words(answer, TEXT_CHARS)}"


def failure(answers: Answers, urls: Urls, call: str) -> Joined | None:
    """The error of a call that did not succeed everywhere, naming each replica that failed.

    The status is the first one that a replica gave, else 502. None if every answer is 200.
    """
    failed = {
        id: answer
        for id, answer in answers.items()
        if isinstance(answer, NoAnswer) or not answer.ok
    }
    if not failed:
        return None
    given = [a.status for a in failed.values() if isinstance(a, Answer) and a.status >= 400]
    words = "; ".join(f"{_who(id, urls)} {_what(answer)}" for id, answer in failed.items())
    done = len(answers) - len(failed)
    return _error(
        given[0] if given else 502,
        "broadcast_failed",
        f"{call} failed on {len(failed)} of {len(answers)} replicas ({done} succeeded): {words}",
    )


def _nobody(call: str) -> Joined:
    return _error(503, "no_ready_replica", f"{call}: no replica is ready to answer")


def joined_success(answers: Answers, urls: Urls, call: str) -> Joined:
    """A broadcast: every replica's success, or an error that names who failed.

    Equal bodies are passed as they are. Others become ``{"replicas": {id: body}}``.
    """
    if not answers:
        return _nobody(call)
    failed = failure(answers, urls, call)
    if failed:
        return failed
    good = [answer for answer in answers.values() if isinstance(answer, Answer)]
    first = good[0]
    if all(answer.body == first.body for answer in good):
        return Joined(200, first.body, first.content_type)
    bodies = {}
    for id, answer in answers.items():
        assert isinstance(answer, Answer)
        value = _object(answer)
        bodies[id] = answer.text(TEXT_CHARS) if value is None else value
    return Joined(200, _encode({"replicas": bodies}))


def _read(answers: Answers, urls: Urls, call: str) -> Joined | dict[ReplicaId, dict[str, Any]]:
    """Every answer to a call that only looks, as a JSON object, or why not.

    A replica that died under the call is left out as long as another has answered: it will be
    compared when it joins again (field report O-23).
    """
    given = {id: answer for id, answer in answers.items() if isinstance(answer, Answer)}
    return _each(given or answers, urls, call)


def _each(answers: Answers, urls: Urls, call: str) -> Joined | dict[ReplicaId, dict[str, Any]]:
    """Every answer as a JSON object, or why not."""
    if not answers:
        return _nobody(call)
    failed = failure(answers, urls, call)
    if failed:
        return failed
    out = {}
    for id, answer in answers.items():
        assert isinstance(answer, Answer)
        value = _object(answer)
        if value is None:
            return _error(
                502, "unexpected_answer", f"{call}: {_who(id, urls)} {_what(answer)}, not an object"
            )
        out[id] = value
    return out


def _unexpected(call: str, replica: ReplicaId, urls: Urls, value: object) -> Joined:
    text = json.dumps(value)[:TEXT_CHARS]
    return _error(502, "unexpected_answer", f"{call}: {_who(replica, urls)} answered {text}")


def reset_cache(answers: Answers, urls: Urls, call: str = "/reset_prefix_cache") -> Joined:
    """``success`` is true only if it is everywhere. Also for the other cache resets.

    vLLM 0.27.1 answers an empty body for those: then so do we.
    """
    if all(isinstance(answer, Answer) and not answer.body for answer in answers.values()):
        return joined_success(answers, urls, call)
    values = _each(answers, urls, call)
    if isinstance(values, Joined):
        return values
    return Joined(200, _encode({"success": all(v.get("success") is True for v in values.values())}))


def abort_requests(answers: Answers, urls: Urls, call: str = "/abort_requests") -> Joined:
    """``aborted`` is the sum."""
    values = _each(answers, urls, call)
    if isinstance(values, Joined):
        return values
    total = 0
    for id, value in values.items():
        aborted = _int(value.get("aborted"))
        if aborted is None:
            return _unexpected(call, id, urls, value)
        total += aborted
    return Joined(200, _encode({"status": "aborted", "aborted": total}))


def collective_rpc(answers: Answers, urls: Urls, call: str = "/collective_rpc") -> Joined:
    """``results`` one after another: one per worker, as one larger server would give them.

    A method without results is answered with an empty body, by every replica or by none.
    """
    if all(isinstance(answer, Answer) and not answer.body for answer in answers.values()):
        return joined_success(answers, urls, call)
    values = _each(answers, urls, call)
    if isinstance(values, Joined):
        return values
    results: list[object] = []
    for id, value in values.items():
        part = value.get("results")
        if not isinstance(part, list):
            return _unexpected(call, id, urls, value)
        results += part
    return Joined(200, _encode({"results": results}))


def world_size(answers: Answers, urls: Urls, call: str = "/get_world_size") -> Joined:
    """The sum: a weight sync sends to the workers of all replicas.

    TRL reads ``world_size`` without looking at the status (TRL 1.16, weight_transfer.py).
    """
    values = _read(answers, urls, call)
    if isinstance(values, Joined):
        return values
    total = 0
    for id, value in values.items():
        size = _int(value.get("world_size"))
        if size is None or size < 1:
            return _unexpected(call, id, urls, value)
        total += size
    return Joined(200, _encode({"world_size": total}))


def is_paused(paused: bool) -> Joined:
    """What the trainer was told, whether or not a replica stands still."""
    return Joined(200, _encode({"is_paused": paused}))


def is_sleeping(answers: Answers, urls: Urls, call: str = "/is_sleeping") -> Joined:
    """All or none; some is an error: neither answer would be true of the fleet."""
    values = _read(answers, urls, call)
    if isinstance(values, Joined):
        return values
    for id, value in values.items():
        if not isinstance(value.get("is_sleeping"), bool):
            return _unexpected(call, id, urls, value)
    asleep = {id: value["is_sleeping"] for id, value in values.items()}
    if len(set(asleep.values())) > 1:
        return _disagree(call, {"is_sleeping": asleep}, urls)
    return Joined(200, _encode({"is_sleeping": all(asleep.values())}))


# Server facts


def facts(server_info: Mapping[str, Any]) -> Facts | None:
    """Facts of a parsed ``/server_info?config_format=json``; None for its text form."""
    config = server_info.get("vllm_config")
    if not isinstance(config, dict):
        return None

    def part(name: str) -> dict[str, Any]:
        value = config.get(name)
        return value if isinstance(value, dict) else {}

    model, cache, parallel = (part(p) for p in ("model_config", "cache_config", "parallel_config"))
    lora = config.get("lora_config")
    return Facts(
        model=_str(model.get("model")),
        dtype=_str(model.get("dtype")),
        max_model_len=_int(model.get("max_model_len")),
        block_tokens=_int(cache.get("block_size")),
        data_parallel_size=_int(parallel.get("data_parallel_size")),
        lora=(
            (
                _int(lora.get(_LORA_KEYS[0])),
                _int(lora.get(_LORA_KEYS[1])),
                _int(lora.get(_LORA_KEYS[2])),
            )
            if isinstance(lora, dict)
            else None
        ),
        logprobs_mode=_str(model.get("logprobs_mode")),
        generation_config=_str(model.get("generation_config")),
        prefix_caching=_bool(cache.get("enable_prefix_caching")),
        instance_id=_str(config.get("instance_id")),
    )


def disagreements(
    of: Mapping[ReplicaId, Facts], names: Iterable[str] = MUST_AGREE
) -> dict[str, dict[ReplicaId, object]]:
    """Facts of ``names`` that differ: name to each replica's value. Empty if all is well."""
    out: dict[str, dict[ReplicaId, object]] = {}
    for name in names:
        values: dict[ReplicaId, object] = {id: getattr(f, name) for id, f in of.items()}
        if len(set(values.values())) > 1:
            out[name] = values
    return out


def server_info(answers: Answers, urls: Urls, call: str = "/server_info") -> Joined:
    """The first replica's answer with the weakest limits of all.

    ``lora_config`` is null if it is null anywhere; its limits and ``max_model_len`` are the least.
    TRL decides by them whether adapters will do (TRL 1.16, async_grpo_trainer.py, ``__init__``).
    The text form cannot be compared and is passed only where it is equal everywhere.
    """
    values = _read(answers, urls, call)
    if isinstance(values, Joined):
        return values
    seen = {id: facts(value) for id, value in values.items()}
    first = next(iter(values.values()))
    of = {id: f for id, f in seen.items() if f is not None}
    if len(of) < len(seen):
        texts: dict[ReplicaId, object] = {id: v.get("vllm_config") for id, v in values.items()}
        if of or len({str(text) for text in texts.values()}) > 1:
            return _error(
                502,
                "replicas_disagree",
                f"{call}: the replicas' configurations differ as text; ask with "
                f"?config_format=json, which can be compared",
            )
        return Joined(200, _encode(first))
    wrong = disagreements(of)
    if wrong:
        return _disagree(call, wrong, urls)
    config = dict(first["vllm_config"])
    longest = _least(f.max_model_len for f in of.values())
    if longest is not None:
        config["model_config"] = {**config["model_config"], "max_model_len": longest}
    config["lora_config"] = _weakest_lora(config.get("lora_config"), list(of.values()))
    return Joined(200, _encode({**first, "vllm_config": config}))


def _weakest_lora(first: object, of: Sequence[Facts]) -> dict[str, Any] | None:
    limits = [f.lora for f in of if f.lora is not None]
    if len(limits) < len(of) or not isinstance(first, dict):
        return None
    weakest = {key: _least(limit[nth] for limit in limits) for nth, key in enumerate(_LORA_KEYS)}
    return {**first, **{key: value for key, value in weakest.items() if value is not None}}


# Models


def models(
    answers: Answers, live: Sequence[LiveAdapter], urls: Urls, call: str = "/v1/models"
) -> Joined:
    """Base cards first, with the least ``max_model_len`` of all, then the live adapters in order.

    TRL reads ``data[0].max_model_len`` (TRL 1.16, async_grpo_trainer.py). A live adapter is listed
    with the path that the trainer gave, whatever the replicas loaded; nothing else is listed, so a
    name that is on its way, or left over on one replica, does not show.
    """
    values = _read(answers, urls, call)
    if isinstance(values, Joined):
        return values
    base: dict[ReplicaId, list[dict[str, Any]]] = {}
    cards: dict[str, dict[str, Any]] = {}
    for id, value in values.items():
        data = value.get("data")
        if not isinstance(data, list):
            return _unexpected(call, id, urls, value)
        listed = [card for card in data if isinstance(card, dict)]
        base[id] = [card for card in listed if card.get("parent") is None]
        for card in listed:
            if card.get("parent") is not None and isinstance(card.get("id"), str):
                cards.setdefault(card["id"], card)
    names: dict[ReplicaId, object] = {id: [c.get("id") for c in of] for id, of in base.items()}
    if len({_encode(value) for value in names.values()}) > 1:
        return _disagree(call, {"base models": names}, urls)
    first = next(iter(base.values()))
    if not first:
        return _unexpected(call, next(iter(base)), urls, next(iter(values.values())))
    longest = _least(_int(card.get("max_model_len")) for of in base.values() for card in of)
    data = [{**card, "max_model_len": longest} for card in first]
    data += [_card(adapter, cards.get(adapter.name), first[0]) for adapter in live]
    return Joined(200, _encode({"object": "list", "data": data}))


def _card(
    adapter: LiveAdapter, listed: Mapping[str, Any] | None, base: Mapping[str, Any]
) -> dict[str, Any]:
    """A replica's own card for the name, else one of vLLM's shape.

    vLLM 0.27.1, entrypoints/openai/engine/protocol.py, ModelCard.
    """
    card: dict[str, Any] = {
        "id": adapter.name,
        "object": "model",
        "created": base.get("created", 0),
        "owned_by": "vllm",
        "root": adapter.path,
        "parent": base.get("id"),
        "max_model_len": None,
        "permission": base.get("permission", []),
    }
    return {**card, **(listed or {}), "root": adapter.path}


def _disagree(call: str, facts: Mapping[str, Mapping[ReplicaId, object]], urls: Urls) -> Joined:
    words = []
    for name, values in facts.items():
        each = ", ".join(f"{_show(v)} on {_who(id, urls)}" for id, v in values.items())
        words.append(f"{name} is {each}")
    return _error(
        502,
        "replicas_disagree",
        f"{call}: the replicas differ: {'; '.join(words)}. Start them with the same options",
    )


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _str(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)
