"""One run of ``rollmux doctor``: find the replicas, look, measure, judge, report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from deploy.beacon import Beacon
from deploy.doctor import Finding, Fleet, diagnose
from deploy.examination import Examination
from deploy.hold import Hold
from deploy.reading import Level
from deploy.symptoms import Asked, Symptoms
from proxy.calls import Calls
from proxy.daemon import bearer_of
from proxy.hub_jobs import HubJobs, HubUnanswered
from proxy.metrics import Metrics
from proxy.pushing import Pushing
from proxy.settings import Secrets, Settings, SettingsError
from proxy.sources import address_url, listed_urls
from proxy.tokens import HF_JOBS_SUFFIX, Bearer
from proxy.version import version
from routing.ids import ReplicaId

SILENT_S = 1.0
"""What takes longer than this says how far it is."""
REPEAT_S = 5.0

OWN_WORDS = ("check", "level", "id", "version")
"""Fields that hold nothing of a replica's, and stay as they are whatever a secret looks like."""

Say = Callable[[str], None]
T = TypeVar("T")


class NoList(Exception):
    """A source of replicas does not answer. The text names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The doctor's own options."""

    staleness: int
    rank: int | None
    beacon: Path | None
    """An absolute path to a directory."""
    hold_s: float
    as_json: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found."""

    symptoms: tuple[Symptoms, ...]
    asked: Asked
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.level is Level.FAIL for finding in self.findings)

    def count(self, level: Level) -> int:
        return sum(finding.level is level for finding in self.findings)


def read_wanted(options: Mapping[str, Any]) -> Wanted:
    """The doctor's own options, as parsed. Raises SettingsError."""
    folder = options["beacon"]
    if folder is not None and not Path(folder).is_dir():
        raise SettingsError(f"--beacon: {folder} is not a folder; give the one with the adapters")
    return Wanted(
        staleness=options["staleness"],
        rank=options["rank"],
        # As the replicas will be told it: a link is not followed, it may lead elsewhere there.
        beacon=Path(os.path.abspath(folder)) if folder is not None else None,
        hold_s=options["hold_reply_s"] or 0.0,
        as_json=options["json"],
    )


def main(settings: Settings, secrets: Secrets, wanted: Wanted, *, out: Say, progress: Say) -> bool:
    """Check a fleet and report it line by line; whether nothing failed."""
    # What the daemon would log is what the doctor reports, in its own words.
    logging.getLogger("rollmux").addHandler(logging.NullHandler())
    report = asyncio.run(check(settings, secrets, wanted, progress))
    told = clean(as_data(report), secrets)
    if wanted.as_json:
        out(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        for line in lines(told):
            out(line)
    return report.ok


async def check(settings: Settings, secrets: Secrets, wanted: Wanted, progress: Say) -> Report:
    """Look at every replica that the settings name, and measure what is wanted."""
    bearer = bearer_of(settings, secrets)
    asked = Asked(
        wanted.staleness,
        wanted.rank,
        push_required=settings.adapter_transport == "push",
    )
    try:
        found = await _told(find_urls(settings, secrets, bearer), progress, lambda: "finding them")
    except NoList as trouble:
        fix = "check the setting, and that it can be reached from here"
        return Report((), asked, (Finding("sources", Level.FAIL, str(trouble), fix),))
    urls = {ReplicaId(f"r{number}"): url for number, url in enumerate(found)}
    calls = Calls(
        urls.get,
        bearer,
        context=ssl.create_default_context(cafile=settings.ca_file),
        trust_env=settings.trust_env,
    )
    pushing = Pushing(
        calls,
        Metrics(version()),
        key=secrets.push_key,
        transport=settings.adapter_transport,
        cache=Path(tempfile.gettempdir()),
        max_bytes=1 << 20,
        timeout_s=settings.attempt_timeout_s,
    )
    try:
        examination = Examination(
            calls,
            bearer,
            pushing,
            urls,
            push_wanted=settings.adapter_transport != "path",
            push_key=secrets.push_key is not None,
        )
        symptoms = await _told(examination.look(), progress, examination.progress)
        fleet = Fleet(symptoms, asked)
        if wanted.beacon is not None:
            beacon = Beacon(
                calls,
                pushing,
                fleet.loadable(),
                wanted.beacon,
                limit_s=settings.load_timeout_s,
                attempt_timeout_s=settings.attempt_timeout_s,
                retry_s=settings.load_retry_s,
                retry_max_s=settings.load_retry_max_s,
            )
            asked = replace(asked, beacon=await _told(beacon.measure(), progress, beacon.progress))
        if wanted.hold_s:
            hold = Hold(calls, fleet.idle(), wanted.hold_s)
            asked = replace(asked, held=await _told(hold.measure(), progress, hold.progress))
    finally:
        await calls.close()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn
    return Report(symptoms, asked, diagnose(Fleet(symptoms, asked)))


async def find_urls(settings: Settings, secrets: Secrets, bearer: Bearer) -> list[str]:
    """Every replica's URL once, from all sources, as the daemon finds them. Raises NoList."""
    found = list(settings.replicas)
    if settings.replicas_file:
        try:
            text = await asyncio.to_thread(Path(settings.replicas_file).read_text, "utf-8")
            found += listed_urls(text)
        except (OSError, ValueError) as exc:
            raise NoList(f"--replicas-file {settings.replicas_file}: {exc}") from exc
    if settings.replicas_dns:
        host, _, port = settings.replicas_dns.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as exc:
            raise NoList(f"--replicas-dns {settings.replicas_dns}: {exc}") from exc
        found += sorted({address_url(str(info[4][0]), int(port)) for info in infos})
    if settings.replicas_hf_label:
        found += await _hub_urls(settings.replicas_hf_label, settings, secrets, bearer)
    return list(dict.fromkeys(found))


async def _hub_urls(label: str, settings: Settings, secrets: Secrets, bearer: Bearer) -> list[str]:
    jobs = HubJobs(label, endpoint=settings.hub_endpoint, token=secrets.hub_token)
    try:
        found = sorted(set(await jobs.urls()))
    except HubUnanswered as exc:
        raise NoList(f"--replicas-hf-label {label}: {exc}") from exc
    finally:
        await jobs.close()
    for url in found:
        if (urlsplit(url).hostname or "").endswith(HF_JOBS_SUFFIX):
            bearer.trust(url)
    return found


async def _told(work: Coroutine[Any, Any, T], say: Say, progress: Callable[[], str]) -> T:
    """The result of ``work``; while it takes long, ``say`` tells how far it is."""
    task = asyncio.ensure_future(work)
    wait_s = SILENT_S
    try:
        while not (await asyncio.wait((task,), timeout=wait_s))[0]:
            say(progress())
            wait_s = REPEAT_S
    finally:
        if not task.done():  # interrupted: it tidies up before we go
            task.cancel()
            await asyncio.wait((task,))
    return task.result()


def as_data(report: Report) -> dict[str, Any]:
    """All of it, ready for JSON; the shape is in ``docs/doctor.md``."""
    beacon = report.asked.beacon if isinstance(report.asked.beacon, dict) else {}
    held = report.asked.held or {}
    replicas = [
        {
            "id": each.id,
            "url": each.url,
            "beacon": asdict(beacon[each.id]) if each.id in beacon else None,
            "hold": asdict(held[each.id]) if each.id in held else None,
        }
        for each in report.symptoms
    ]
    return {
        "version": version(),
        "ok": report.ok,
        "failed": report.count(Level.FAIL),
        "warnings": report.count(Level.WARN),
        "replicas": replicas,
        "checks": [asdict(finding) for finding in report.findings],
    }


def clean(value: Any, secrets: Secrets) -> Any:
    """``value`` without the secrets that a replica may have sent back."""
    if isinstance(value, str):
        for secret in filter(None, astuple(secrets)):
            value = value.replace(secret, "***")
        return value
    if isinstance(value, dict):
        return {k: v if k in OWN_WORDS else clean(v, secrets) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(inner, secrets) for inner in value]
    return value


def lines(told: Mapping[str, Any]) -> list[str]:
    """One line a check, and a last one that counts them."""
    width = max(len(found["check"]) for found in told["checks"])
    shown = []
    for found in told["checks"]:
        fix = f"; fix: {found['fix']}" if found["fix"] else ""
        shown.append(f"{found['level']:<4}  {found['check']:<{width}}  {found['seen']}{fix}")
    verdict = "a run can start" if told["ok"] else "mend what failed first"
    counts = f"{told['failed']} failed, {told['warnings']} warnings"
    return [*shown, f"{len(told['replicas'])} replicas, {counts}: {verdict}"]


def to_stderr(line: str) -> None:
    """Progress goes beside the report."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"rollmux doctor: {line}\n")
        sys.stderr.flush()
