"""What a replica's answer to loading, unloading or listing adapters means.

Rows are tried from the top; the first that fits decides. Shapes and words are those of vLLM 0.27.1
(``entrypoints/openai/models/serving.py`` and ``lora/``), tried on a real replica. vLLM rewrites
paths in its messages to ``<path>``, so nothing here reads a path.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum

from broadcast.answer import Answer, NoAnswer


class LoadOutcome(StrEnum):
    """What one attempt to load came to."""

    LOADED = "loaded"
    NOT_VISIBLE = "not_visible"
    """The files are not there yet, or not whole yet: the same load may work later."""
    ALREADY = "already"
    """The name is taken there. Says nothing about which weights it stands for."""
    REFUSED = "refused"
    """vLLM will not have this adapter."""
    ENDPOINT_MISSING = "endpoint_missing"
    """The server was started without runtime LoRA updating."""
    ENGINE_DEAD = "engine_dead"
    NOT_VLLM = "not_vllm"
    """Something between us and vLLM answered: a bad token, or an edge's own page."""
    UNKNOWN = "unknown"
    """It may have been carried out, or may yet be."""
    NEVER_RECEIVED = "never_received"
    """It did not reach the replica."""


class UnloadOutcome(StrEnum):
    """What one attempt to unload came to."""

    GONE = "gone"
    """The name is not there now, whether or not it was."""
    REFUSED = "refused"
    ENDPOINT_MISSING = "endpoint_missing"
    ENGINE_DEAD = "engine_dead"
    NOT_VLLM = "not_vllm"
    UNKNOWN = "unknown"
    NEVER_RECEIVED = "never_received"


RESET = "/reset_prefix_cache?reset_running_requests=true"
"""Ask for what ``classify_reset`` reads: clear, even under requests that run."""


class ResetOutcome(StrEnum):
    """What one attempt to clear a prefix cache came to."""

    CLEARED = "cleared"
    HELD = "held"
    """Blocks are still in use: the same call may work later."""
    ENDPOINT_MISSING = "endpoint_missing"
    """The server was started without its development mode."""
    FAILED = "failed"
    """Dead, shut off, or an error: asking again is no use."""
    UNKNOWN = "unknown"
    """No whole answer: it may have been carried out, or may yet be."""


_HALF_PUBLISHED = re.compile(
    # The directory is there, the weights file is not (lora/lora_model.py, from_local_checkpoint).
    r"doesn't contain tensors"
    # The weights file is empty, cut short, or has its size but not its bytes (safetensors 0.8).
    r"|Error while deserializing"
    # adapter_config.json is empty or cut short: each message json.load has for that.
    r"|Expecting (?:value|property name|'[,:]' delimiter)|Unterminated string starting at"
    # The same file cut where it still parses (lora/peft_helper.py, from_dict).
    r"|Missing required configuration fields"
    # The mount is sick or remounting: EIO, ESTALE, ENOTCONN (FUSE daemon gone).
    r"|\[Errno (?:5|116|107)\]|Input/output error|Stale file handle"
    r"|Transport endpoint is not connected"
)
"""The 500s of a directory that is half there. They come as plain InternalServerError, like the
refusals that are for good ("LoRA rank 16 is greater than max_lora_rank 8.", "vLLM does not yet
support DoRA."), and differ from them in the message alone."""

MESSAGE_CHARS = 1 << 20
"""How far an error's message is looked through. What is shown of it is ``words``, far shorter."""

ENGINE_DEAD_TEXT = "EngineCore encountered an issue"
"""vLLM 0.27.1, EngineDeadError, sent as 500."""


def classify_load(answer: Answer | NoAnswer) -> LoadOutcome:
    """What the answer to ``POST /v1/load_lora_adapter`` means."""
    if isinstance(answer, NoAnswer):
        # Refused, or never connected: not received. Reset or timed out: vLLM does not cancel a load
        # when its client hangs up (no with_cancellation on that route), so it may still happen.
        return LoadOutcome.NEVER_RECEIVED if answer.never_received else LoadOutcome.UNKNOWN
    status, text = answer.status, _message(answer)
    if _edge(answer):
        return LoadOutcome.NOT_VLLM
    if status == 200:  # text "Success: LoRA adapter 'x' added successfully.", no content type
        return LoadOutcome.LOADED
    if _gateway(answer):
        return LoadOutcome.UNKNOWN
    if status == 503 or ENGINE_DEAD_TEXT in text:
        return LoadOutcome.ENGINE_DEAD
    if status == 404:
        # "Loading lora x failed: No adapter found for …" (LoRAAdapterNotFoundError); without it the
        # route itself is missing: Starlette's {"detail":"Not Found"}.
        missing = "No adapter found" not in text
        return LoadOutcome.ENDPOINT_MISSING if missing else LoadOutcome.NOT_VISIBLE
    if status == 400 and "has already been loaded" in text:
        return LoadOutcome.ALREADY
    if status >= 500 and _HALF_PUBLISHED.search(text):
        return LoadOutcome.NOT_VISIBLE
    return LoadOutcome.REFUSED


def classify_unload(answer: Answer | NoAnswer) -> UnloadOutcome:
    """What the answer to ``POST /v1/unload_lora_adapter`` means."""
    if isinstance(answer, NoAnswer):
        return UnloadOutcome.NEVER_RECEIVED if answer.never_received else UnloadOutcome.UNKNOWN
    status, text = answer.status, _message(answer)
    if _edge(answer):
        return UnloadOutcome.NOT_VLLM
    if status == 200:  # "Success: LoRA adapter 'x' removed successfully."
        return UnloadOutcome.GONE
    if _gateway(answer):
        return UnloadOutcome.UNKNOWN
    if status == 503 or ENGINE_DEAD_TEXT in text:
        return UnloadOutcome.ENGINE_DEAD
    if status == 404:  # NotFoundError "The lora adapter 'x' cannot be found.", or no such route
        found_out = "cannot be found" in text
        return UnloadOutcome.GONE if found_out else UnloadOutcome.ENDPOINT_MISSING
    return UnloadOutcome.REFUSED


def classify_reset(answer: Answer | NoAnswer) -> ResetOutcome:
    """What the answer to ``POST /reset_prefix_cache`` means.

    vLLM 0.27.1 answers 200 with ``{"success": false}`` while blocks are held; nothing but
    ``true`` counts as cleared.
    """
    if isinstance(answer, NoAnswer):
        return ResetOutcome.UNKNOWN
    if _edge(answer):
        return ResetOutcome.FAILED
    if answer.status == 200:
        data = _json(answer)
        done = isinstance(data, dict) and data.get("success") is True
        return ResetOutcome.CLEARED if done else ResetOutcome.HELD
    if _gateway(answer):
        return ResetOutcome.UNKNOWN
    return ResetOutcome.ENDPOINT_MISSING if answer.status == 404 else ResetOutcome.FAILED


@dataclass(frozen=True, slots=True)
class Models:
    """What ``GET /v1/models`` lists: names of base models, and adapters, name to path."""

    base: tuple[str, ...]
    adapters: dict[str, str]


def read_models(answer: Answer | NoAnswer) -> Models | None:
    """The answer to ``GET /v1/models``; None if it is no such list.

    A base model's card has no ``parent``; an adapter's ``root`` is the path it was loaded from
    (``show_available_models``).
    """
    if isinstance(answer, NoAnswer) or answer.status != 200:
        return None
    data = _json(answer)
    cards = data.get("data") if isinstance(data, dict) else None
    if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards):
        return None
    return Models(
        tuple(str(card["id"]) for card in cards if not card.get("parent")),
        {str(card["id"]): str(card.get("root") or "") for card in cards if card.get("parent")},
    )


def read_list(answer: Answer | NoAnswer) -> dict[str, str] | None:
    """Name and path of each adapter that ``read_models`` finds."""
    models = read_models(answer)
    return None if models is None else models.adapters


def is_hopeless(answer: Answer | NoAnswer) -> bool:
    """Whether asking that replica the same again is no use: dead, shut off, or no such route.

    For calls that every vLLM serves (``/v1/models``), or every one in server dev mode
    (``/reset_prefix_cache``).
    """
    return classify_unload(answer) in (
        UnloadOutcome.ENGINE_DEAD,
        UnloadOutcome.NOT_VLLM,
        UnloadOutcome.ENDPOINT_MISSING,
    )


def _message(answer: Answer) -> str:
    """What decides what an error means: it may quote names and paths of any length first."""
    return words(answer, MESSAGE_CHARS)


def words(answer: Answer, limit: int = 2048) -> str:
    """The message of an error body, or its text where it has none; at most ``limit`` characters."""
    data = _json(answer)
    if isinstance(data, dict):
        # {"error": {"message": …}}; {"error": "…"} (dev endpoints); {"message": …} (older vLLM);
        # {"detail": …} (Starlette).
        found = data.get("error", data.get("message", data.get("detail")))
        if isinstance(found, dict):
            found = found.get("message")
        if isinstance(found, str):
            return found if len(found) <= limit else found[:limit] + "…"
    return answer.text(limit)


def _edge(answer: Answer) -> bool:
    """Not vLLM's: 401 and 403 always (the token, or an edge); a redirect; a page of HTML.

    A page with 502, 503 or 504 is left to ``_gateway``: an edge that lost the answer.
    """
    if answer.status in (401, 403) or 300 <= answer.status < 400:
        return True
    return _html(answer) and answer.status not in (502, 503, 504)


def _gateway(answer: Answer) -> bool:
    """Something in between lost the replica's answer: it may have been carried out.

    vLLM itself sends neither 502 nor 504, and its own 503 is empty or JSON.
    """
    if answer.status in (502, 504):
        return True
    return answer.status == 503 and bool(answer.body.strip()) and _json(answer) is None


def _html(answer: Answer) -> bool:
    start = answer.body[:256].lstrip().lower()
    return "html" in answer.content_type or start.startswith((b"<!doctype", b"<html"))


def _json(answer: Answer) -> object:
    if answer.body[:64].lstrip()[:1] != b"{":
        return None
    try:
        data: object = json.loads(answer.body)
    except ValueError:
        return None
    return data
