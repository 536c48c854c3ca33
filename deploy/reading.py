"""A replica's symptoms, read: its settings and state, or what bars the way to them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from broadcast.answer import Answer, Cause, NoAnswer
from broadcast.answers import UnloadOutcome, classify_unload, read_models, words
from broadcast.joins import Facts, facts
from deploy.symptoms import PushUse, Shown, Symptoms, TokenUse
from proxy.control import requests_running
from proxy.judge import Verdict, judge
from routing.ids import ReplicaId

BARRIERS = ("reachable", "tls", "token", "vllm")
"""Checks that a replica passes one after the other, before anything else is known of it."""


class Level(StrEnum):
    """How a check came out."""

    OK = "OK"
    WARN = "WARN"
    """A run will start; look at it all the same."""
    FAIL = "FAIL"
    SKIP = "SKIP"
    """Nobody could be asked, or nobody asked for it."""


@dataclass(frozen=True, slots=True)
class Ailment:
    """What is wrong with one replica."""

    level: Level
    seen: str
    fix: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A replica's symptoms, read. Only ``barrier`` counts where it is not None."""

    id: ReplicaId
    url: str
    barrier: tuple[str, Ailment] | None = None
    """The check of ``BARRIERS`` that stopped us, and how."""
    version: str = ""
    base: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    dev_mode: bool = True
    runtime_lora: bool = True
    facts: Facts | None = None
    """None where it does not tell."""
    env: Mapping[str, Any] | None = None
    """Its ``VLLM_*`` variables."""
    instances: frozenset[str] = frozenset()
    running: int = 0
    marker: str = ""
    paused: bool = False
    asleep: bool = False
    push: PushUse = PushUse.UNWANTED
    push_trouble: str = ""


def fail(seen: str, fix: str) -> Ailment:
    """No run can start."""
    return Ailment(Level.FAIL, seen, fix)


def warn(seen: str, fix: str) -> Ailment:
    """A run can start all the same."""
    return Ailment(Level.WARN, seen, fix)


def read(of: Symptoms) -> Reading:
    """What one replica's symptoms say."""
    barrier = _barrier(of)
    if barrier is not None or of.looks is None:
        return Reading(of.id, of.url, barrier)
    looks = of.looks
    models = read_models(looks.models)
    assert models is not None  # else _barrier had something to say
    infos = [info for shown in looks.infos if (info := _object(shown)) is not None]
    told = [found for info in infos if (found := facts(info)) is not None]
    marker = _object(looks.weights) or {}
    env = infos[0].get("vllm_env") if infos else None
    return Reading(
        of.id,
        of.url,
        version=str((_object(of.version) or {}).get("version", "")),
        base=tuple(models.base),
        adapters=tuple(models.adapters),
        dev_mode=not (isinstance(looks.paused, Answer) and looks.paused.status == 404),
        runtime_lora=classify_unload(looks.unload) is not UnloadOutcome.ENDPOINT_MISSING,
        facts=told[0] if told else None,
        env=env if isinstance(env, dict) else None,
        instances=frozenset(f.instance_id for f in told if f.instance_id),
        running=_running(looks.metrics),
        marker=str(marker.get("weight_version", "")),
        paused=(_object(looks.paused) or {}).get("is_paused") is True,
        asleep=(_object(looks.sleeping) or {}).get("is_sleeping") is True,
        push=of.push,
        push_trouble=of.push_trouble,
    )


def _barrier(of: Symptoms) -> tuple[str, Ailment] | None:
    """Why no more can be known of a replica: a check of ``BARRIERS``, and what is wrong."""
    if isinstance(of.version, NoAnswer):
        return _no_way(of.version, of.url)
    looks = of.looks
    assert looks is not None
    if b"HTTPS port" in of.version.body:  # nginx, to plain HTTP on a TLS port
        return "tls", fail("it speaks TLS", f"write {of.url.replace('http:', 'https:', 1)}")
    answers = [a for a in (of.version, looks.models, looks.paused) if isinstance(a, Answer)]
    for answer in answers:
        if judge(answer.status, answer.body) is Verdict.TOKEN_REJECTED:
            return "token", _rejected(answer, of)
    for path, shown in (("/v1/models", looks.models), ("/is_paused", looks.paused)):
        if isinstance(shown, NoAnswer):
            fix = "look at its log: its engine may stand still; restart it if it does not recover"
            return "vllm", fail(f"{path}: {shown.detail or shown.cause}", fix)
    if any(judge(a.status, a.body) is Verdict.ENGINE_DEAD for a in answers):
        return "vllm", fail("its engine is dead", "look at its log and restart it")
    version = _object(of.version)
    assert isinstance(looks.models, Answer)
    for path, answer, fine in (
        ("/version", of.version, version is not None and "version" in version),
        ("/v1/models", looks.models, read_models(looks.models) is not None),
    ):
        if not fine:
            if answer.status in (502, 503, 504):
                fix = "wait until vLLM has started there: an edge answers in its place"
            else:
                fix = "give the URL of the vLLM server itself: scheme, host, port and base path"
            return "vllm", fail(f"{path} is not vLLM's: {answer.status} {_short(answer)}", fix)
    if isinstance(looks.paused, Answer) and looks.paused.status >= 500:
        seen = f"/is_paused: {looks.paused.status} {_short(looks.paused)}"
        return "vllm", fail(seen, "look at its log and restart it")
    return None


def _no_way(shown: NoAnswer, url: str) -> tuple[str, Ailment]:
    text = shown.detail or shown.cause.value
    low = text.lower()
    secure = url.startswith("https://")
    if "mismatch" in low and "certificate" in low:
        return "tls", fail(text, "use the name that the certificate is for")
    if "certificate" in low:
        return "tls", fail(text, "give the CA's PEM file with --ca-file PATH")
    if secure and ("ssl" in low or "tls" in low):
        return "tls", fail(text, f"write {url.replace('https:', 'http:', 1)} if it has no TLS")
    if not secure and shown.cause is Cause.RESET:
        https = url.replace("http:", "https:", 1)
        return "tls", fail(f"it hangs up on plain HTTP ({text})", f"write {https} if it has TLS")
    if "name" in low or "getaddrinfo" in low or "nodename" in low:
        return "reachable", fail(text, "check the host name, and that it resolves here")
    if shown.cause is Cause.REFUSED:
        fix = "start vLLM there with --host 0.0.0.0, and check the port"
        return "reachable", fail("connection refused", fix)
    return "reachable", fail(text, "check host, port and firewall, and whether it has started")


def _rejected(answer: Answer, of: Symptoms) -> Ailment:
    own = answer.body.replace(b" ", b"") == b'{"error":"Unauthorized"}'  # vLLM's --api-key
    who = "vLLM's own --api-key" if own else "an edge in front of it"
    seen = f"{answer.status} from {who}"
    if of.token is TokenUse.HELD_BACK:
        fix = (
            "the token is kept from this URL: use https, or --token-over-http, and name the token "
            "with --token-env (HF_TOKEN alone goes to https://*.hf.jobs only)"
        )
    elif of.token is TokenUse.NONE:
        what = "that key" if own else "the token (on HF Jobs a Hugging Face token)"
        fix = f"give {what} with --token-env NAME or --token-file PATH"
    elif own:
        fix = "give the key that vLLM was started with, with --token-env NAME"
    else:
        fix = "give another token: on HF Jobs one that may read the Job's namespace"
    return fail(f"{seen}; {_SENT[of.token]}", fix)


_SENT = {
    TokenUse.NONE: "no token was sent",
    TokenUse.SENT: "the token was sent and rejected",
    TokenUse.HELD_BACK: "the token was not sent",
}


def _object(shown: Shown) -> dict[str, Any] | None:
    if isinstance(shown, NoAnswer) or not shown.ok:
        return None
    try:
        value = json.loads(shown.body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _running(page: Shown) -> int:
    try:
        return requests_running(page.body) if isinstance(page, Answer) and page.ok else 0
    except ValueError:
        return 0


def _short(answer: Answer) -> str:
    return " ".join(words(answer, 120).split()) or "(empty)"
