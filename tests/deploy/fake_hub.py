"""A Hub on a loopback socket: Jobs that can really run, labels, logs, buckets, prices, failures.

What it answers follows huggingface_hub 2.4.0 (hf_api.py, _jobs_api.py, _buckets.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "hf_FakeTokenThatNobodyMaySee"
OWNER = "me"
PAGE = 2
"""Jobs in one page of a list: small, so that every list here has several."""
GRACE_S = 20.0
"""From a cancelled Job's SIGTERM to its SIGKILL."""
LIVE = ("SCHEDULING", "RUNNING")
LABEL = re.compile(r"[A-Za-z0-9_-]{1,100}")
PRICES = {"cpu-basic": 0.000167, "h200": 0.083333}
"""Dollars a minute, by flavour."""


@dataclass
class Job:
    """One Job; ``reply`` is what the Hub tells of it."""

    id: str
    spec: dict[str, Any]
    stage: str = "SCHEDULING"
    message: str | None = None
    log: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    url: str | None = None
    """Where its exposed port is."""
    listed: bool = True
    """Whether lists show it: they may lag behind what was started."""
    health: int = 200
    """What ``/health`` of a Job answers that is no process."""

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.spec.get("labels", {})
        return labels

    @property
    def role(self) -> str:
        return self.labels.get("role", "")

    @property
    def live(self) -> bool:
        return self.stage in LIVE

    def reply(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "id": self.id,
            "createdAt": "2026-11-30T18:00:00.000Z",
            "startedAt": None if self.stage == "SCHEDULING" else "2026-11-30T18:00:30.000Z",
            "dockerImage": spec["dockerImage"],
            "command": spec["command"],
            "arguments": spec["arguments"],
            "environment": spec["environment"],
            "secrets": dict.fromkeys(spec.get("secrets", {}), ""),
            "flavor": spec["flavor"],
            "labels": self.labels,
            "volumes": spec.get("volumes"),
            "status": {
                "stage": self.stage,
                "message": self.message,
                "exposeUrls": [self.url] if self.url else None,
            },
            "network": spec.get("network"),
            "expose": spec.get("expose"),
            "owner": {"id": "0" * 24, "name": OWNER, "type": "user"},
        }


class FakeHub:
    """Use as a context manager. All Jobs are ended when it closes.

    ``run_job(job)`` is called for each new Job, on the thread of the call; without it a Job is
    RUNNING at once and does nothing.
    """

    def __init__(self, run_job: Callable[[Job], None] | None = None) -> None:
        self.jobs: list[Job] = []
        self.buckets: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.failures = 0
        """So many next calls are answered 503."""
        self.pages = 0
        """So many next calls are answered 200 with a page of something in between."""
        self.refusals: dict[str, tuple[int, str]] = {}
        """Calls, as METHOD PATH, that are answered with a status and an error."""
        self.cut_replies: list[str] = []
        """Calls, as METHOD PATH, that are carried out and whose reply is lost."""
        self.on_call: Callable[[str], None] = lambda call: None
        """Called before each call is carried out, on its thread."""
        self.folder: Path | None = None
        """Where every bucket is mounted: its files are those of the bucket."""
        self._run_job = run_job or self._just_runs
        self._numbers = itertools.count(0xABC)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for job in list(self.jobs):
            self.cancel(job)
        for job in list(self.jobs):
            if job.process:
                job.process.wait(GRACE_S + 5)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # For tests

    def live(self, role: str = "") -> list[Job]:
        with self._lock:
            return [j for j in self.jobs if j.live and role in ("", j.role)]

    def told(self) -> dict[str, list[str]]:
        """What to read when a test fails: the end of every Job's log."""
        return {
            f"{j.role} {j.labels.get('replica', '')} {j.stage} {j.message}": j.log[-15:]
            for j in self.jobs
        }

    def until(self, holds: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait for a state of the Hub; looked at whenever a Job or a call changes it."""
        end_s = time.monotonic() + limit_s
        with self._changed:
            while not holds():
                assert time.monotonic() < end_s, f"not within {limit_s:g} s: {self.told()}"
                self._changed.wait(0.1)

    def end(self, job: Job, stage: str, message: str | None = None) -> None:
        """A Job ends by itself."""
        with self._changed:
            if job.live:
                job.stage, job.message = stage, message
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        with self._changed:
            was_live = job.live
            if was_live:
                job.stage = "CANCELED"
            self._changed.notify_all()
        if was_live and job.process and job.process.poll() is None:
            threading.Thread(target=self._kill, args=(job.process,), daemon=True).start()

    @staticmethod
    def _kill(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # as a container's runtime: its first process only
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def run_for_real(self, job: Job, env: Mapping[str, str]) -> None:
        """The Job's own command as a process; its exit ends the Job.

        The first URL that it prints is where its exposed port is: 8000 is there for one of them.
        """
        job.url = None
        job.process = subprocess.Popen(
            job.spec["command"],
            env={
                **env,
                **job.spec["environment"],
                **job.spec.get("secrets", {}),
                "JOB_ID": job.id,
                "HF_ENDPOINT": self.url,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        job.stage = "RUNNING"
        threading.Thread(target=self._watch, args=(job, job.process), daemon=True).start()

    def _watch(self, job: Job, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                job.log.append(line.rstrip("\n"))
                if job.spec.get("expose") and job.url is None and line.startswith("http://"):
                    job.url = line.strip()
        code = process.wait()
        self.end(job, "ERROR" if code else "COMPLETED", f"exit code {code}" if code else None)

    def _just_runs(self, job: Job) -> None:
        job.stage = "RUNNING"

    # What the Hub does

    def create(self, spec: dict[str, Any]) -> Job | str:
        """A new Job, or what is wrong with the request."""
        if problem := _problem(spec, self.buckets):
            return problem
        with self._changed:
            job = Job(f"{next(self._numbers):024x}", spec)
            if spec.get("expose"):
                # As https://{id}--8000.hf.jobs: an edge that wants a token.
                job.url = f"{self.url}/edge/{job.id}"
            self.jobs.append(job)
            self._run_job(job)
            self._changed.notify_all()
        return job

    def find(self, id: str) -> Job | None:
        return next((job for job in self.jobs if job.id == id), None)

    def called(self, call: str) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()
        self.on_call(call)


def _problem(spec: dict[str, Any], buckets: Mapping[str, Any]) -> str:
    if not isinstance(spec.get("command"), list) or not all(
        isinstance(word, str) for word in spec["command"]
    ):
        return "command must be a list of strings"
    if spec.get("flavor") not in PRICES:
        return f"unknown flavor {spec.get('flavor')}"
    if not isinstance(spec.get("timeoutSeconds"), int):
        return "these tests want an explicit timeout on every Job"
    for values in (spec.get("environment", {}), spec.get("secrets", {})):
        if not all(isinstance(value, str) for value in values.values()):
            return "environment and secrets must be strings"
    for pair in spec.get("labels", {}).items():
        if not all(LABEL.fullmatch(word) for word in pair):
            return f"bad label {pair}"
    for volume in spec.get("volumes", []):
        if volume["type"] == "bucket" and volume["source"] not in buckets:
            return f"no bucket {volume['source']}"
    network = spec.get("network")
    if network and not re.fullmatch(r"[a-z0-9-]{1,46}", network["group"]):
        return "bad network group"
    if network and not all(re.fullmatch(r"[a-z0-9-]{1,34}", a) for a in network["aliases"]):
        return "bad network alias"
    return ""


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    """Head and body in one packet: in two, the second waits for the client's delayed ACK."""

    def log_message(self, *_: object) -> None:
        """Not to the test's output."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        hub = self.hub
        at = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        call = f"{method} {at.path}"
        if at.path.startswith("/edge/"):
            return self._edge(at.path)
        hub.called(call)
        if hub.failures > 0:
            hub.failures -= 1
            return self._json(503, {"error": "Service Unavailable"})
        if hub.pages > 0:
            hub.pages -= 1
            return self._json(200, "<html>Back soon</html>", {"content-type": "text/html"})
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._json(401, {"error": "Invalid credentials in Authorization header"})
        body = json.loads(raw) if raw else {}
        if call in hub.refusals:
            status, why = hub.refusals[call]
            return self._json(status, {"error": why})
        answer = self._answer(call, at.path.strip("/").split("/"), parse_qs(at.query), body)
        if call in hub.cut_replies:
            hub.cut_replies.remove(call)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        if answer is None:
            return self._json(404, {"error": "Not Found"})
        return self._json(*answer)

    def _edge(self, path: str) -> None:
        """An exposed port of a Job that is no process."""
        job = self.hub.find(path.split("/")[2])
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._json(401, {})
        elif job is None or job.stage != "RUNNING":
            self._json(404, {})
        else:
            self._json(job.health, {})

    def _answer(
        self, call: str, parts: list[str], query: dict[str, list[str]], body: Any
    ) -> tuple[int, Any, dict[str, str]] | tuple[int, Any] | None:
        hub = self.hub
        match call.split(" ")[0], parts:
            case "GET", ["api", "whoami-v2"]:
                return 200, {"type": "user", "name": OWNER, "orgs": []}
            case "GET", ["api", "jobs", "hardware"]:
                return 200, [_hardware(name, usd) for name, usd in PRICES.items()]
            case "POST", ["api", "jobs", ns] if ns == OWNER:
                made = hub.create(body)
                return (400, {"error": made}) if isinstance(made, str) else (200, made.reply())
            case "GET", ["api", "jobs", ns] if ns == OWNER:
                return self._list(query)
            case "GET", ["api", "jobs", ns, id] if ns == OWNER and (job := hub.find(id)):
                return 200, job.reply()
            case "POST", ["api", "jobs", ns, id, "cancel"] if ns == OWNER and (job := hub.find(id)):
                if not job.live:
                    return 409, {"error": f"the Job is {job.stage}"}
                hub.cancel(job)
                return 200, job.reply()
            case "GET", ["api", "jobs", ns, id, "logs"] if ns == OWNER and (job := hub.find(id)):
                return 200, list(_events(job)), {"content-type": "text/event-stream"}
            case "POST", ["api", "buckets", ns, name]:
                id = f"{ns}/{name}"
                url = {"url": f"{hub.url}/buckets/{id}"}
                if id in hub.buckets:
                    return 409, url | {"error": "exists"}
                hub.buckets[id] = {"private": body.get("visibility") == "private"}
                return 200, url
            case "GET", ["api", "buckets", ns, name] if f"{ns}/{name}" in hub.buckets:
                bucket = hub.buckets[f"{ns}/{name}"]
                return 200, {
                    "id": f"{ns}/{name}",
                    "private": bucket["private"],
                    "createdAt": "2026-11-30T18:00:00.000Z",
                    "size": 0,
                    "totalFiles": 0,
                }
            case "POST", ["api", "buckets", ns, name, "paths-info"] if (
                f"{ns}/{name}" in hub.buckets
            ):
                return 200, [
                    {"type": "file", "path": path, "size": (hub.folder / path).stat().st_size}
                    for path in body["paths"]
                    if hub.folder and (hub.folder / path).is_file()
                ]
        return None

    def _list(self, query: dict[str, list[str]]) -> tuple[int, Any, dict[str, str]]:
        wanted = dict(pair.split("=", 1) for pair in query.get("label", []))
        stages = query.get("stage", [])
        with self.hub._lock:
            found = [
                job.reply()
                for job in self.hub.jobs
                if job.listed
                and (not stages or job.stage in stages)
                and wanted.items() <= job.labels.items()
            ]
        first = int(query.get("cursor", ["0"])[0])
        headers = {}
        if first + PAGE < len(found):
            others = "&".join(
                f"{key}={value}" for key in ("stage", "label") for value in query.get(key, [])
            )
            link = f"{self.hub.url}/api/jobs/{OWNER}?{others}&cursor={first + PAGE}"
            headers["link"] = f'<{link}>; rel="next"'
        return 200, found[first : first + PAGE], headers

    def _json(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        kind = {"content-type": "application/json", **(headers or {})}
        body = (
            json.dumps(content).encode()
            if kind["content-type"] == "application/json"
            else "".join(content).encode()
        )
        self.send_response(status)
        for name, value in kind.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client gave up
            self.wfile.write(body)


def _events(job: Job) -> Iterator[str]:
    for number, line in enumerate([f"===== Job started at {job.id} =====", *job.log]):
        stamp = f"2026-11-30T18:00:{number % 60:02d}.000Z"
        yield f"data: {json.dumps({'data': line, 'timestamp': stamp})}\n\n"


def _hardware(name: str, usd: float) -> dict[str, Any]:
    return {
        "name": name,
        "prettyName": name.upper(),
        "cpu": "8 vCPU",
        "ram": "64 GB",
        "ephemeralStorage": "100 GB",
        "accelerator": None,
        "unitCostMicroUSD": round(usd * 1e6),
        "unitCostUSD": usd,
        "unitLabel": "minute",
    }


def log_of(path: Path) -> list[dict[str, Any]]:
    """What a stand-in for an executable wrote: one JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
