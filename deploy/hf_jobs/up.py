"""Starting a run and watching it: replicas first, then the trainer, nothing left if it fails."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httpx

from deploy.hf_jobs.hub import LIVE, Hub, HubError, Interrupted, Say, Stop, name_of
from deploy.hf_jobs.plan import REPLICA, Plan
from proxy.settings import is_loopback
from proxy.tokens import HF_JOBS_SUFFIX

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

WATCHING: Final = "rollmux deploy hf: the trainer's Job watches over the replicas"
"""The first line of the trainer's Job that is ours: from here on it cleans up after itself."""
HEALTH_S: Final = 10.0
LAST_LINES: Final = 20
"""Of a failed Job's log that are shown."""
PROGRESS_S: Final = 30.0
"""A wait says something at least so often."""
NOT_FOUND_LOOKS: Final = 3


class StartError(Exception):
    """The run did not come up. One line or, with the end of a log, several."""


def up(plan: Plan, hub: Hub, secrets: Mapping[str, str], stop: Stop, say: Say) -> JobInfo:
    """Start every Job of the run; returns the trainer's once it watches over the replicas.

    Whatever was started is cancelled, by label, when this ends in any other way.
    :raises StartError: a Job failed, or the time is over, or the name is in use.
    :raises HubError: the Hub refused, or did not answer for too long.
    :raises Interrupted: a signal came.
    """
    _refuse_others(plan, hub)
    hub.make_bucket(plan.bucket)
    known: list[str] = []
    try:
        for index in range(plan.replicas):
            job = hub.start(plan.replica(index), secrets)
            known.append(job.id)
            say(f"replica {index} is {job.id}: {job.url}")
        _refuse_others(plan, hub)  # somebody may have started the same at the same time
        _until_ready(plan, hub, secrets, stop, say)
        trainer = hub.start(plan.trainer(), secrets)
        known.append(trainer.id)
        say(f"the trainer is {trainer.id}: {trainer.url}")
        _until_watching(plan, trainer.id, hub, stop, say)
    except BaseException as error:
        stop.masked = True
        why = "interrupted" if isinstance(error, Interrupted) else "the start failed"
        say(f"{why}; every Job of this start is cancelled")
        try:
            hub.cancel_all(plan.labels, plan.poll_s, known=known)
        except HubError as left:
            say(f"NOT everything was cancelled: {left}; `rollmux deploy hf down --run {plan.run}`")
        raise
    return trainer


def _refuse_others(plan: Plan, hub: Hub) -> None:
    """The trainer finds its replicas by the run's name: two launches of it would mix."""
    live = [
        job
        for job in hub.jobs({"run": plan.run}, live=True)
        if (job.labels or {}).get("launch") != plan.launch
    ]
    if live:
        names = ", ".join(f"{name_of(job)} ({job.id})" for job in live)
        raise StartError(
            f"the run {plan.run} has Jobs that live: {names}; end them with "
            f"`rollmux deploy hf down --run {plan.run}`, or give another --run"
        )


def _until_ready(plan: Plan, hub: Hub, secrets: Mapping[str, str], stop: Stop, say: Say) -> None:
    """Every replica runs and, where it can be reached from here, answers ``/health``."""
    waited = _Waited(plan.start_timeout_s, say)
    ready: set[str] = set()
    with httpx.Client(timeout=HEALTH_S, trust_env=True) as client:
        while True:
            states: dict[str, str] = {}
            jobs = hub.jobs(plan.labels | {"role": REPLICA}, live=False)
            for job in jobs:
                _raise_if_ended(job, hub)
                urls = job.status.expose_urls or []
                if job.status.stage != "RUNNING" or (plan.network_group is None and not urls):
                    states[name_of(job)] = job.status.stage
                elif plan.network_group is None and job.id not in ready:
                    answer = _health(client, urls[0], secrets["HF_TOKEN"])
                    if answer == "200":
                        ready.add(job.id)
                    else:
                        states[name_of(job)] = f"RUNNING, /health {answer}"
            if not states and len(jobs) >= plan.replicas:
                ending = "; the trainer waits until they serve" if plan.network_group else ""
                say(f"{plan.replicas} replicas are up after {waited.seconds:.0f} s{ending}")
                return
            waited.look("; ".join(f"{name}: {state}" for name, state in sorted(states.items())))
            stop.sleep(plan.poll_s)


def _until_watching(plan: Plan, id: str, hub: Hub, stop: Stop, say: Say) -> None:
    """The trainer's Job has said that it looks after the replicas."""
    waited = _Waited(plan.start_timeout_s, say)
    while True:
        job = hub.inspect(id)
        _raise_if_ended(job, hub, may_complete=True)
        if job.status.stage not in LIVE:
            return
        if job.status.stage == "RUNNING" and any(
            WATCHING in line for line in hub.last_lines(id, 10_000)
        ):
            say("the trainer has started, and ends the replicas when it ends")
            return
        waited.look(f"trainer: {job.status.stage}")
        stop.sleep(plan.poll_s)


def wait(plan_run: str, id: str, hub: Hub, stop: Stop, say: Say, *, poll_s: float) -> bool:
    """Until the trainer's Job ends; whether it completed. No hiccup of the Hub ends it.

    :raises Interrupted: a signal came; the run goes on.
    :raises HubError: the Job cannot be looked at, for a reason that does not pass.
    """
    stage = ""
    refused = 0
    while True:
        try:
            job = hub.inspect(id)
            refused = 0
        except HubError as error:
            refused = 0 if error.passing else refused + 1
            if refused >= NOT_FOUND_LOOKS:
                raise
            say(f"{error}; the run is not touched by that")
        else:
            if job.status.stage != stage:
                stage = job.status.stage
                message = f" ({job.status.message})" if job.status.message else ""
                say(f"run {plan_run}: the trainer is {stage}{message}")
            if stage not in LIVE:
                return stage == "COMPLETED"
        stop.sleep(poll_s)


class _Waited:
    """A wait that tells what it waits for, and has an end."""

    def __init__(self, limit_s: float, say: Say) -> None:
        self._limit_s = limit_s
        self._say = say
        self._began_s = self._said_s = time.monotonic()
        self._told = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def look(self, missing: str) -> None:
        """:raises StartError: the time is over."""
        if self.seconds > self._limit_s:
            raise StartError(f"not up after {self._limit_s:g} s: {missing} (--start-timeout-s)")
        now_s = time.monotonic()
        if missing != self._told or now_s - self._said_s >= PROGRESS_S:
            self._told, self._said_s = missing, now_s
            self._say(f"{missing} ({self.seconds:.0f} s of {self._limit_s:g} s)")


def _raise_if_ended(job: JobInfo, hub: Hub, *, may_complete: bool = False) -> None:
    stage = job.status.stage
    if stage in LIVE or (may_complete and stage == "COMPLETED"):
        return
    message = f": {job.status.message}" if job.status.message else ""
    lines = hub.last_lines(job.id, LAST_LINES)
    raise StartError(
        "\n  ".join([f"{name_of(job)} ({job.id}) ended as {stage}{message}; its log ends:", *lines])
    )


def _health(client: httpx.Client, url: str, token: str) -> str:
    """The status of a replica's ``/health``, or what is in the way of it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    safe = is_loopback(host) or (parts.scheme == "https" and host.endswith(HF_JOBS_SUFFIX))
    headers = {"authorization": f"Bearer {token}"} if safe else {}
    try:
        return str(client.get(f"{url}/health", headers=headers).status_code)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return type(error).__name__
