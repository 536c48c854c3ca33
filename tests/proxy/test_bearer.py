"""Who gets the token, and who must never see it; and the daemon's own key."""

from __future__ import annotations

import logging

import pytest

from benchmarks.httpd import Arrival, Fault, Reply
from benchmarks.replica import SimulatedReplica
from proxy.settings import Secrets
from proxy.tokens import Bearer, TokenError
from tests.proxy.scripted import OK, ScriptedReplica

SECRET = "tok-5f2c9a"


def named(url: str, **rules: object) -> Bearer:
    """A token that the user named, before a replica that the user named."""
    bearer = Bearer(token=SECRET, **rules)  # type: ignore[arg-type]
    bearer.trust(url)
    return bearer


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://replica.example", True),
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost:8000", True),
        ("http://LOCALHOST:8000", True),
        ("http://replica.localhost:8000", False),  # a resolver may ask the network for it
        ("http://10.0.0.7:8000", False),
        ("http://replica.example", False),
        ("http://127.0.0.1.example", False),
        ("http://localhost.example", False),
    ],
)
def test_a_token_never_goes_over_plain_http_to_another_host_unless_asked(url, allowed):
    assert named(url).allowed(url) is allowed
    assert named(url, over_http=True).allowed(url)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://abc123.hf.jobs", True),
        ("https://abc123.hf.jobs/base", True),
        ("https://ABC123.HF.JOBS", True),
        ("http://abc123.hf.jobs", False),
        ("https://hf.jobs", False),
        ("https://evil-hf.jobs", False),
        ("https://x.hf.jobs.example", False),
        ("https://x.example/.hf.jobs", False),
        ("https://x.hf.jobs@evil.example", False),
        ("http://127.0.0.1:8000", False),
    ],
)
def test_a_token_nobody_named_goes_to_hf_jobs_over_https_only(url, allowed):
    bearer = named(url, hf_jobs_only=True, over_http=True)
    assert bearer.allowed(url) is allowed


def test_a_host_that_nobody_named_gets_no_token():
    assert not named("https://one.example").allowed("https://two.example")


def test_the_file_is_read_again_when_it_changes_or_was_rejected(tmp_path):
    now_s = 0.0
    path = tmp_path / "token"
    path.write_text("one\n")
    bearer = Bearer(path=path, clock=lambda: now_s)
    assert bearer.value() == b"Bearer one"
    path.write_text("two")
    assert bearer.value() == b"Bearer one"  # looked at once a second
    now_s = 1.0
    assert bearer.value() == b"Bearer two"
    path.write_text("three")
    bearer.rejected()
    assert bearer.value() == b"Bearer three"


@pytest.mark.parametrize("text", ["", "  \n", "two words", "ümlaut", "line\nbreak"])
def test_a_file_caught_half_written_keeps_the_old_token(tmp_path, text):
    path = tmp_path / "token"
    path.write_text("one")
    bearer = Bearer(path=path)
    path.write_text(text)
    bearer.rejected()
    assert bearer.value() == b"Bearer one"
    path.unlink()
    bearer.rejected()
    assert bearer.value() == b"Bearer one"


def test_a_file_that_cannot_be_read_at_the_start_is_an_error_without_its_content(tmp_path):
    with pytest.raises(TokenError, match="cannot read the token file"):
        Bearer(path=tmp_path / "none")
    (tmp_path / "bad").write_text("se cret")
    with pytest.raises(TokenError, match="what a header cannot") as caught:
        Bearer(path=tmp_path / "bad")
    assert "cret" not in str(caught.value)


def test_a_token_is_hidden_in_reprs_and_texts():
    bearer = Bearer(token=SECRET)
    assert SECRET not in repr(bearer)
    assert bearer.redact(f"no such token: {SECRET}") == "no such token: ***"


def test_what_an_editor_adds_to_a_token_file_is_left_out(tmp_path):
    (tmp_path / "token").write_bytes(b" abc \r\n")
    assert Bearer(path=tmp_path / "token").value() == b"Bearer abc"


async def test_the_token_is_on_every_call_to_a_replica(start):
    """An edge that demands it on every path lets the whole life of a daemon through."""
    async with SimulatedReplica(bearer=SECRET) as a, SimulatedReplica(bearer=SECRET) as b:
        running = await start([a.url, b.url], secrets=Secrets(token=SECRET))
        assert (await running.complete("tiny", [1])).status_code == 200
        for method, path in (
            ("POST", "/pause?mode=abort"), ("POST", "/resume"), ("POST", "/reset_prefix_cache"),
            ("GET", "/server_info?config_format=json"), ("GET", "/version"), ("GET", "/v1/models"),
        ):  # fmt: skip
            answer = await running.client.request(method, path)
            assert answer.status_code == 200, (path, answer.text)
        for replica in (a, b):
            assert replica.log
            assert {r.header("authorization") for r in replica.log} == {f"Bearer {SECRET}"}


async def test_hf_token_does_not_go_to_a_replica_elsewhere(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], secrets=Secrets(hf_token=SECRET))
        await running.complete("tiny", [1])
        seen = [*replica.probes, *replica.generations]
        assert {arrival.header("authorization") for arrival in seen} == {None}


async def test_a_clients_own_credentials_do_not_replace_the_token(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], secrets=Secrets(token=SECRET))
        body = {"model": "tiny", "prompt": "x"}
        headers = {"authorization": "Bearer clients-own"}
        await running.client.post("/v1/completions", json=body, headers=headers)
        sent = [v for k, v in replica.generations[0].headers if k == "authorization"]
        assert sent == [f"Bearer {SECRET}"]


async def test_a_clients_own_credentials_pass_where_there_is_nothing_to_guard(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url])
        body = {"model": "tiny", "prompt": "x"}
        headers = {"authorization": "Bearer clients-own"}
        await running.client.post("/v1/completions", json=body, headers=headers)
        assert replica.generations[0].header("authorization") == "Bearer clients-own"


ECHOES = {
    "401": (401, f"<html>the token {SECRET} has expired"),
    "502": (502, f"<html>bad gateway for Bearer {SECRET}"),
    "engine": (500, f'{{"error":{{"message":"EngineCore encountered an issue {SECRET}"}}}}'),
}


@pytest.mark.parametrize("name", ECHOES)
async def test_an_echoed_token_shows_nowhere(start, caplog, name):
    """Not in logs, errors, status or metrics, whether traffic or a probe met it."""
    caplog.set_level(logging.DEBUG, "rollmux")
    status, text = ECHOES[name]
    fault = Fault(status=status, body=text.encode(), content_type="text/html")
    async with ScriptedReplica() as replica:
        running = await start([replica.url], secrets=Secrets(token=SECRET), hold_s=0.3)
        replica.faults.add("/v1/completions", fault)
        shown = [(await running.complete("tiny", [1])).text]
        replica.faults.add("*", fault)
        await running.until_ready(0)
        await running.complete("tiny", [1])
        for path in ("/proxy/status", "/proxy/", "/metrics", "/health", "/v1/models"):
            shown += [(await running.client.get(path)).text]
        assert not [text for text in [*shown, *caplog.messages] if SECRET in text]


async def test_without_the_daemons_key_only_live_is_open(start):
    async with ScriptedReplica() as replica:
        running = await start([replica.url], secrets=Secrets(api_key="the-key"))
        body = {"model": "tiny", "prompt": "x"}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "the-key"}):
            for path in ("/v1/completions", "/v1/load_lora_adapter", "/pause"):
                answer = await running.client.post(path, json=body, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["x-rollmux-error"] == "unauthorized"
                assert answer.json()["error"]["code"] == 401
            for path in ("/metrics", "/proxy/status", "/health", "/v1/models"):
                assert (await running.client.get(path, headers=headers)).status_code == 401
            assert (await running.client.get("/proxy/live", headers=headers)).status_code == 200
        assert not replica.generations
        headers = {"authorization": "Bearer the-key"}
        answer = await running.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert replica.generations[0].header("authorization") is None  # it is ours, not vLLM's


async def test_proxies_of_the_environment_and_netrc_are_ignored(start, monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))

    async def script(arrival: Arrival) -> Reply:
        return Reply(200, OK)

    async with ScriptedReplica(script) as replica:
        running = await start([replica.url], secrets=Secrets(token=SECRET))
        assert (await running.complete("tiny", [1])).status_code == 200
        seen = [*replica.probes, *replica.generations]
        assert {arrival.header("authorization") for arrival in seen} == {f"Bearer {SECRET}"}
