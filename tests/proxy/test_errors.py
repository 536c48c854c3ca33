"""Errors: every one has its row, and looks on the wire as vLLM's own would."""

from __future__ import annotations

import json
import re

import pytest

from proxy import errors
from proxy.errors import (
    TABLE,
    AdapterRefused,
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    NoReadyReplica,
    ProxyError,
    SuspectRequest,
    Unauthorized,
    UnknownModel,
    UnknownRoute,
    error_body,
)


def leaves() -> set[type[ProxyError]]:
    return set(ProxyError.__subclasses__())


def test_every_error_has_a_row_and_every_row_an_error():
    assert set(TABLE) == leaves()


def test_codes_are_short_and_none_is_used_twice():
    codes = [row.code for row in TABLE.values()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z_]{1,24}", code) for code in codes)


def test_every_docstring_says_whose_fault_it_is():
    for leaf in leaves():
        assert re.match(r"(The|Nobody's|Somebody else's)\b.*(fault|:)", leaf.__doc__ or ""), leaf


@pytest.mark.parametrize(
    ("leaf", "status", "code"),
    [
        ("NoReadyReplica", 503, "no_ready_replica"),
        ("UnknownRoute", 501, "unknown_route"),
        ("SuspectRequest", 500, "suspect_request"),
        ("UnknownModel", 404, "unknown_model"),
        ("RuntimeLoraDisabled", 501, "runtime_lora_disabled"),
        ("AdapterNotVisible", 504, "adapter_not_visible"),
        ("FleetOutage", 503, "fleet_outage"),
    ],
)
def test_statuses_of_the_contract(leaf, status, code):
    row = TABLE[getattr(errors, leaf)]
    assert (row.status, row.code) == (status, code)


def test_only_an_unknown_model_is_answered_404():
    """TRL reads a 404 to a load as a missing endpoint."""
    assert [leaf for leaf, row in TABLE.items() if row.status == 404] == [UnknownModel]


def test_body_has_the_shape_of_vllm():
    status, headers, body = error_body(BadRequest("no", param="model"))
    assert json.loads(body) == {
        "error": {"message": "no", "type": "BadRequestError", "param": "model", "code": 400}
    }
    assert status == 400
    assert dict(headers) == {
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body),
        b"x-rollmux-error": b"bad_request",
    }


def test_unknown_model_is_word_for_word_vllms():
    """vLLM 0.27.1 answers a request for an unknown adapter so."""
    _, _, body = error_body(UnknownModel("x"))
    assert body == (
        b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError",'
        b'"param":"model","code":404}}'
    )


@pytest.mark.parametrize(("seconds", "header"), [(0, b"1"), (0.2, b"1"), (5, b"5"), (5.1, b"6")])
def test_retry_after_is_a_whole_number_and_never_at_once(seconds, header):
    _, headers, _ = error_body(NoReadyReplica("none", seconds))
    assert dict(headers)[b"retry-after"] == header


@pytest.mark.parametrize(("status", "shown"), [(400, 400), (500, 500), (404, 502), (200, 502)])
def test_refused_adapter_keeps_the_replicas_status_but_never_404(status, shown):
    error = AdapterRefused("replica r1: rank is too high", status=status, type="InvalidUserInput")
    seen, _, body = error_body(error)
    assert seen == shown
    assert json.loads(body)["error"]["code"] == shown
    assert json.loads(body)["error"]["type"] == "InvalidUserInput"


def test_refused_adapter_without_a_type_has_one():
    assert AdapterRefused("no", status=400).type == "InternalServerError"


def test_messages_name_what_they_know():
    assert "60 s" in str(BodyTooSlow(60, 1234))
    assert "1234 bytes" in str(BodyTooSlow(60, 1234))
    assert "1024" in str(BodyTooLarge(1024))
    assert "GET /v2/x" in str(UnknownRoute("GET", "/v2/x"))
    assert str(SuspectRequest())


def test_a_client_without_a_key_is_told_the_scheme():
    _, headers, _ = error_body(Unauthorized())
    assert dict(headers)[b"www-authenticate"] == b"Bearer"


@pytest.mark.parametrize("name", ["\ud800", "\x00", "x" * 100_000, "é" * 9000])
def test_any_name_a_client_sends_can_be_answered(name):
    _, _, body = error_body(UnknownModel(name))
    assert json.loads(body)["error"]["code"] == 404
    assert len(body) < 4 * errors.MAX_MESSAGE_CHARS
