"""The Hub, asked patiently: Jobs by label, the bucket, prices."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from deploy.hf_jobs.plan import TRAINER, JobSpec

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

T = TypeVar("T")
Say = Callable[[str], None]
Query = list[tuple[str, str | int | float | bool | None]]

LIVE: Final = ("SCHEDULING", "RUNNING")
"""Stages that are billed or will be (huggingface_hub 2.4.0, _jobs_api.py, JobStage)."""
CALL_S: Final = 30.0
"""One call: huggingface_hub's own client waits for ever."""
PASSING: Final = frozenset((408, 429, 500, 502, 503, 504))
"""Answers that say nothing about what was asked; the same as huggingface_hub's own list."""
MAX_RETRY_S: Final = 10.0
UNSURE_LOOKS: Final = 3
"""How often an empty list has to be read after a start whose answer was lost."""
EXPOSED_USD_HOUR: Final = 0.01
"""Flat, for a Job with an exposed port (Hugging Face's page on the prices of Jobs)."""
PRICE_S: Final = 10.0
"""Patience with the list of prices."""
UNITS_PER_HOUR: Final = {"second": 3600, "minute": 60, "hour": 1}

MISSING: Final = (
    "huggingface_hub is missing or older than 2.4; install it beside rollmux: "
    "uv tool install 'rollmux[hf]'"
)


class HubError(Exception):
    """The Hub refused, or did not answer for too long. One line, without a token."""

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing
        """Nothing is known about what was asked: it may be asked again."""


class Interrupted(Exception):
    """The user wants to stop. Carries the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Stop:
    """Turns SIGINT, SIGTERM and SIGHUP into a flag that is looked at between calls.

    A call that starts a Job is never cut off half-way: nobody would know whether it runs.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.number = 0
        self.masked = False
        """Set while cleaning up: a further signal changes nothing."""

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            if before[number] is not signal.SIG_IGN:  # started by nohup: stays ignored
                signal.signal(number, self._seen)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        self.set(number)

    def set(self, number: int) -> None:
        """As if the signal had come."""
        self.number = number
        self._event.set()

    def check(self) -> None:
        """:raises Interrupted: a signal has come."""
        if self.number and not self.masked:
            raise Interrupted(self.number)

    def forget(self) -> None:
        self.number = 0
        self._event.clear()

    def sleep(self, seconds: float) -> None:
        """Up to ``seconds``. :raises Interrupted: at once when a signal comes."""
        if self.masked:
            time.sleep(seconds)
        else:
            self._event.wait(seconds)
            self.check()


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where the Hub is and as whom we come. The ``repr`` shows no token."""

    endpoint: str
    token: str

    def __repr__(self) -> str:
        return f"<Credentials for {self.endpoint}>"


def credentials(environ: Mapping[str, str]) -> Credentials:
    """``HF_TOKEN``, else what ``hf auth login`` saved. :raises HubError: there is no token."""
    _library()
    from huggingface_hub import constants, get_token

    token = environ.get("HF_TOKEN", "").strip() or get_token()
    if not token:
        raise HubError("no token; set HF_TOKEN, or run: hf auth login")
    return Credentials(environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT, token)


def _library() -> None:
    try:
        from huggingface_hub import HfApi

        HfApi.list_jobs_hardware  # noqa: B018  # new in 2.x
    except (ImportError, AttributeError) as error:
        raise HubError(MISSING) from error


class Hub:
    """Use as a context manager: it puts its own HTTP client under huggingface_hub.

    Each call is tried again for ``patience_s`` while the Hub does not answer or answers that it
    cannot. :raises HubError: from every method. Between tries ``stop`` is looked at.
    """

    def __init__(
        self,
        who: Credentials,
        *,
        say: Say,
        stop: Stop | None = None,
        patience_s: float = 300.0,
        retry_s: float = 1.0,
    ) -> None:
        _library()
        from huggingface_hub import HfApi

        self._who = who
        self._say = say
        self._stop = stop or Stop()
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._api = HfApi(endpoint=who.endpoint, token=who.token)
        self.unsure = False
        """Whether a Job was started without an answer; it may turn up in a list later."""
        self.namespace = ""
        """Whose Jobs: filled by ``login``."""

    def __enter__(self) -> Self:
        import httpx2
        from huggingface_hub import set_client_factory

        def client() -> httpx2.Client:
            return httpx2.Client(timeout=CALL_S, follow_redirects=True)

        set_client_factory(client)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from huggingface_hub import close_session

        close_session()

    def login(self, namespace: str = "") -> str:
        """The namespace of the Jobs: the one given, else the token's owner."""
        self.namespace = namespace or str(
            self._patiently("asking who we are", lambda: self._api.whoami())["name"]
        )
        return self.namespace

    # Jobs

    def jobs(self, labels: Mapping[str, str], *, live: bool) -> list[JobInfo]:
        """Every Job with all of these labels; ``live``: only those that cost money."""
        query: Query = [("label", f"{key}={value}") for key, value in labels.items()]
        if live:
            query += [("stage", stage) for stage in LIVE]
        found = self._patiently("listing Jobs", lambda: self._list(query))
        return [job for job in found if not live or job.status.stage in LIVE]

    def _list(self, query: Query) -> list[JobInfo]:
        """``HfApi.list_jobs`` without its retries, which sleep where no signal is seen."""
        from huggingface_hub import JobInfo
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        headers = build_hf_headers(token=self._who.token)
        url = f"{self._who.endpoint}/api/jobs/{self.namespace}"
        found: list[JobInfo] = []
        while url:
            answer = get_session().get(url, params=query or None, headers=headers)
            hf_raise_for_status(answer)
            found += [JobInfo(**job, endpoint=self._who.endpoint) for job in answer.json()]
            url = answer.links.get("next", {}).get("url", "")
            query = []  # the link has it
        return found

    def inspect(self, id: str) -> JobInfo:
        return self._patiently(
            "looking at a Job",
            lambda: self._api.inspect_job(job_id=id, namespace=self.namespace),
        )

    def start(self, spec: JobSpec, secrets: Mapping[str, str]) -> JobInfo:
        """Start a Job, once: its labels name it, so one whose answer was lost is found again."""
        from huggingface_hub import Volume

        tries = itertools.count()

        def attempt() -> JobInfo:
            if next(tries) and (found := self.jobs(spec.labels, live=True)):
                return found[0]
            return self._api.run_job(
                image=spec.image,
                command=list(spec.command),
                env=dict(spec.env),
                secrets={name: secrets[name] for name in spec.secrets},
                flavor=spec.flavor,
                timeout=spec.timeout_s,
                name=spec.name,
                labels=dict(spec.labels),
                volumes=[
                    Volume(
                        type="bucket",
                        source=volume.bucket,
                        mount_path=volume.mount,
                        read_only=volume.read_only,
                    )
                    for volume in spec.volumes
                ],
                expose=list(spec.expose) or None,
                network_group=spec.network_group,
                network_aliases=list(spec.network_aliases) or None,
                namespace=self.namespace,
            )

        self.unsure = True
        try:
            job = self._patiently(f"starting {spec.name}", attempt)
        except HubError as error:
            self.unsure = error.passing or next(tries) > 1  # refused at the first try: no Job
            raise
        self.unsure = False
        return job

    def cancel(self, id: str) -> None:
        """A Job that is gone or has ended already is as good as cancelled."""
        from huggingface_hub.errors import HfHubHTTPError

        def attempt() -> None:
            try:
                self._api.cancel_job(job_id=id, namespace=self.namespace)
            except HfHubHTTPError as error:
                if error.response.status_code not in (404, 409):
                    raise

        self._patiently("cancelling a Job", attempt)

    def cancel_all(
        self, labels: Mapping[str, str], poll_s: float, *, known: Iterable[str] = ()
    ) -> int:
        """Cancel by label until the Hub lists none alive; how many there were.

        The trainer goes first, so that it starts no replica in the place of a cancelled one.
        ``known`` are ids that a list may not show yet.
        """
        end_s = time.monotonic() + self._patience_s
        seen: set[str] = set()
        for id in known:
            self.cancel(id)
        for look in itertools.count():
            live = self.jobs(labels, live=True)
            if not live and look >= (UNSURE_LOOKS if self.unsure else 0):
                return len(seen)
            if live and look and time.monotonic() > end_s:
                left = ", ".join(job.id for job in live)
                raise HubError(f"still not ended: {left}; look at {self._who.endpoint}/jobs")
            for job in sorted(live, key=lambda job: (job.labels or {}).get("role") != TRAINER):
                if job.id not in seen:
                    self._say(f"cancelling {name_of(job)} ({job.id})")
                seen.add(job.id)
                self.cancel(job.id)
            self._stop.sleep(poll_s)
        raise AssertionError("the count has no end")

    def logs(self, id: str, *, follow: bool = False, tail: int | None = None) -> Iterable[str]:
        """Lines of a Job's log, until now or until its end. The token is blotted out."""
        from huggingface_hub.errors import HfHubHTTPError

        lines = self._api.fetch_job_logs(
            job_id=id, namespace=self.namespace, follow=follow, tail=tail
        )
        try:
            for line in lines:
                yield self._clean(line)
        except HfHubHTTPError as error:
            raise HubError(f"reading a log: {self._clean(_reason(error))}") from error
        except _transport() as error:
            raise HubError(f"reading a log: no answer ({type(error).__name__})") from error

    def last_lines(self, id: str, count: int) -> list[str]:
        """The end of a log, if it can be had."""
        try:
            return list(self.logs(id, tail=count))[-count:]
        except HubError as error:
            return [f"({error})"]

    # The rest

    def make_bucket(self, id: str) -> None:
        """A private bucket. :raises HubError: there is a public one of that name."""
        self._patiently(
            f"making the bucket {id}",
            lambda: self._api.create_bucket(id, private=True, exist_ok=True),
        )
        info = self._patiently(f"looking at the bucket {id}", lambda: self._api.bucket_info(id))
        if not info.private:
            raise HubError(
                f"the bucket {id} is public, and every policy would be; make it private "
                f"(hf buckets settings {id} --private) or give another --bucket"
            )

    def prices(self) -> dict[str, float]:
        """Dollars an hour by flavour. No run waits long for them.

        :raises HubError: the Hub does not tell.
        """
        hardware = self._patiently(
            "asking for prices", self._api.list_jobs_hardware, min(self._patience_s, PRICE_S)
        )
        return {
            item.name: item.unit_cost_usd * UNITS_PER_HOUR[item.unit_label]
            for item in hardware
            if item.unit_label in UNITS_PER_HOUR
        }

    def _clean(self, text: str) -> str:
        """Whatever the Hub or a log may echo, the token is shown nowhere."""
        return text.replace(self._who.token, "***")

    def _patiently(self, what: str, call: Callable[[], T], patience_s: float | None = None) -> T:
        from huggingface_hub.errors import HfHubHTTPError

        patience_s = self._patience_s if patience_s is None else patience_s
        end_s = time.monotonic() + patience_s
        wait_s = self._retry_s
        told = False
        while True:
            self._stop.check()
            try:
                return call()
            except HfHubHTTPError as error:
                why = self._clean(_reason(error))
                if error.response.status_code not in PASSING:
                    raise HubError(f"{what}: {why}") from error
            except _transport() as error:
                why = f"no answer ({type(error).__name__})"
            except json.JSONDecodeError:  # a page of something in between, with status 200
                why = "an answer that is not the Hub's"
            if time.monotonic() + wait_s > end_s:
                raise HubError(f"{what}: {why}, for {patience_s:g} s", passing=True)
            if not told:
                self._say(f"{what}: {why}; trying again for up to {patience_s:g} s")
                told = True
            self._stop.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)


def name_of(job: JobInfo) -> str:
    """``trainer`` or ``replica 1``, by the Job's labels."""
    labels = job.labels or {}
    return " ".join(filter(None, (labels.get("role"), labels.get("replica")))) or "a Job"


def live_price(jobs: Iterable[JobInfo], prices: Mapping[str, float]) -> float | None:
    """Dollars an hour of Jobs, or nothing where a flavour has no price."""
    total = 0.0
    for job in jobs:
        price = prices.get(str(job.flavor))
        if price is None:
            return None
        total += price + (EXPOSED_USD_HOUR if job.expose else 0.0)
    return total


def stderr(text: str) -> None:
    """Progress goes beside the output."""
    print(f"rollmux deploy hf: {text}", file=sys.stderr, flush=True)


def _transport() -> type[Exception]:
    import httpx2

    return httpx2.TransportError


def _reason(error: Any) -> str:
    """What the Hub said, in one line. Headers, and so the token, are in none of it."""
    status = error.response.status_code
    said = error.server_message or str(error).partition("\n\n(Request ID")[0]
    line = " ".join(str(said).split())[:300]
    if status in (401, 403):
        return f"the Hub answered {status}; the token may not do that: {line}"
    if status == 402:
        return f"the Hub answered 402; Jobs need credit or a paid plan: {line}"
    return f"the Hub answered {status}: {line}"
