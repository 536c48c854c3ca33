"""What FastAPI and vLLM check of a request before a handler sees it, in their own words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import tokens
from benchmarks.httpd import Arrival
from benchmarks.replies import Refused, error, invalid, missing


def json_body(arrival: Arrival) -> Any:
    """The parsed body of an endpoint that insists on JSON."""
    kind = (arrival.header("content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(error(400, "Bad Request", text))
    return _parsed(arrival)


def _parsed(arrival: Arrival) -> Any:
    if not arrival.body:
        raise invalid(missing(("body",), None))
    try:
        return json.loads(arrival.body)
    except json.JSONDecodeError as trouble:
        raise invalid(
            {
                "type": "json_invalid",
                "loc": ("body", trouble.pos),
                "msg": "JSON decode error",
                "input": {},
                "ctx": {"error": trouble.msg},
            }
        ) from trouble


def json_object(arrival: Arrival, *, embedded: bool = False) -> dict[str, Any]:
    """``embedded``: a single field in the body, which FastAPI reads whatever its type is."""
    body = _parsed(arrival) if embedded else json_body(arrival)
    if not isinstance(body, dict):
        raise invalid(
            {
                "type": "model_attributes_type",
                "loc": ("body",),
                "msg": "Input should be a valid dictionary or object to extract fields from",
                "input": body,
            }
        )
    return body


def detail(text: str) -> Refused:
    return Refused(error(400, "Bad Request", text))


def loose_json(arrival: Arrival) -> dict[str, Any]:
    """The body of the handlers that parse it themselves (dev/rlhf/api_router.py)."""
    try:
        body: dict[str, Any] = json.loads(arrival.body)
    except ValueError as trouble:
        raise detail("Invalid JSON format") from trouble
    return body


def strings(body: Mapping[str, Any], *names: str) -> list[str]:
    errors: list[Mapping[str, object]] = []
    for name in names:
        if name not in body:
            errors.append(missing(("body", name), dict(body)))
        elif not isinstance(body[name], str):
            errors.append(
                {
                    "type": "string_type",
                    "loc": ("body", name),
                    "msg": "Input should be a valid string",
                    "input": body[name],
                }
            )
    if errors:
        raise invalid(*errors)
    return [body[name] for name in names]


def _bool(place: tuple[str, str], given: object) -> bool:
    text = str(given).lower()
    if text in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text in ("0", "false", "f", "no", "n", "off"):
        return False
    raise invalid(
        {
            "type": "bool_parsing",
            "loc": place,
            "msg": "Input should be a valid boolean, unable to interpret input",
            "input": given,
        }
    )


def body_flag(body: Mapping[str, Any], name: str) -> bool:
    return _bool(("body", name), body.get(name, False))


def flag(arrival: Arrival, name: str, default: bool) -> bool:
    return _bool(("query", name), arrival.query.get(name, default))


def choice(arrival: Arrival, name: str, choices: Sequence[str]) -> str:
    """A query parameter that is one of ``choices``; the first is the default."""
    given = arrival.query.get(name, choices[0])
    if given not in choices:
        quoted = [f"'{c}'" for c in choices]
        expected = " or ".join([", ".join(quoted[:-1]), quoted[-1]])
        raise invalid(
            {
                "type": "literal_error",
                "loc": ("query", name),
                "msg": f"Input should be {expected}",
                "input": given,
                "ctx": {"expected": expected},
            }
        )
    return given


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def check_prompt(prompt: Any) -> None:
    """A prompt of a type vLLM does not know: pydantic tells what each member of the union wants."""
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and (
        all(map(_is_token, prompt))
        or all(isinstance(p, str) for p in prompt)
        or all(isinstance(p, list) and all(map(_is_token, p)) for p in prompt)
    ):
        return
    errors: list[Mapping[str, object]] = []

    def wrong(kind: str, msg: str, given: object, *place: object, **context: object) -> None:
        entry: dict[str, object] = {"type": kind, "loc": ("body", "prompt", *place), "msg": msg}
        errors.append(entry | {"input": given} | ({"ctx": context} if context else {}))

    no_list, no_string = "Input should be a valid list", "Input should be a valid string"
    number, lists, strings = "list[constrained-int]", "list[list[constrained-int]]", "list[str]"
    if not isinstance(prompt, list):
        wrong("list_type", no_list, prompt, number)
        wrong("list_type", no_list, prompt, lists)
        wrong("string_type", no_string, prompt, "str")
        wrong("list_type", no_list, prompt, strings)
        raise invalid(*errors)
    for i, item in enumerate(prompt):
        if isinstance(item, int) and item < 0:
            msg = "Input should be greater than or equal to 0"
            wrong("greater_than_equal", msg, item, number, i, ge=0)
        elif isinstance(item, str):
            msg = "Input should be a valid integer, unable to parse string as an integer"
            wrong("int_parsing", msg, item, number, i)
        elif not isinstance(item, int):
            wrong("int_type", "Input should be a valid integer", item, number, i)
    for i, item in enumerate(prompt):
        if not isinstance(item, list):
            wrong("list_type", no_list, item, lists, i)
    wrong("string_type", no_string, prompt, "str")
    for i, item in enumerate(prompt):
        if not isinstance(item, str):
            wrong("string_type", no_string, item, strings, i)
    raise invalid(*errors)


def check_seed(body: Mapping[str, Any]) -> None:
    seed = body.get("seed")
    if isinstance(seed, int) and seed > 2**63 - 1:
        raise invalid(
            {
                "type": "less_than_equal",
                "loc": ("body", "seed"),
                "msg": f"Input should be less than or equal to {2**63 - 1}",
                "input": seed,
                "ctx": {"le": 2**63 - 1},
            }
        )


def token_prompts(prompt: Any) -> list[list[int]]:
    """A completion's prompt in any of its forms as lists of token ids."""
    if isinstance(prompt, str):
        return [tokens.encode(prompt)]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return [tokens.encode(p) if isinstance(p, str) else p for p in prompt]


def turns(messages: Any) -> list[tuple[str, str]]:
    """Roles and texts; of content parts only the text."""
    out = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        out.append((message.get("role", "user"), content))
    return out
