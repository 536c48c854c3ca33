"""Asks the Hub which Jobs carry a label, and at which URLs they can be reached."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx

from proxy.settings import is_loopback, replica_url

CALL_S = 10.0
MAX_PAGES = 100
"""Of Jobs that are alive under one label: far more than a run has."""
Query = list[tuple[str, str | int | float | bool | None]]
LIVE = ("SCHEDULING", "RUNNING")
"""Stages of a Job that serves or will (huggingface_hub 2.4.0, _jobs_api.py, JobStage)."""


class HubUnanswered(Exception):
    """The list could not be read whole; the text says why and holds no token."""


class HubJobs:
    """``label`` is ``KEY=VALUE`` or ``NAMESPACE/KEY=VALUE``; without one, the token's owner's Jobs.

    The token goes to the Hub over https only, or to loopback.
    """

    def __init__(self, label: str, *, endpoint: str, token: str | None) -> None:
        self.label = label
        self._namespace, _, self._filter = label.rpartition("/")
        self._endpoint = endpoint.rstrip("/")
        parts = urlsplit(endpoint)
        safe = parts.scheme == "https" or is_loopback(parts.hostname or "")
        self._headers = {"authorization": f"Bearer {token}"} if token and safe else {}
        self._client = httpx.AsyncClient(timeout=CALL_S, follow_redirects=False)

    def __repr__(self) -> str:
        return f"<HubJobs {self.label}>"

    async def urls(self) -> list[str]:
        """One URL for each Job that lives and exposes a port: its first one.

        A Job with a label ``role`` other than ``replica`` is left out. Raises HubUnanswered.
        """
        if not self._namespace:
            owner, _ = await self._get(f"{self._endpoint}/api/whoami-v2", [])
            try:
                self._namespace = str(owner["name"])
            except (KeyError, TypeError) as exc:
                raise HubUnanswered("it does not say whose token this is") from exc
        found: list[str] = []
        query: Query = [("label", self._filter), *(("stage", stage) for stage in LIVE)]
        url = f"{self._endpoint}/api/jobs/{self._namespace}"
        for _ in range(MAX_PAGES):
            jobs, url = await self._get(url, query)
            try:
                found += [job_url for job in jobs if (job_url := _url_of(job))]
            except (KeyError, TypeError, AttributeError, ValueError) as exc:
                raise HubUnanswered(f"a Job is not as expected ({exc!r})") from exc
            if not url:
                return found
            query = []  # the link to the next page has it
        raise HubUnanswered(f"more than {MAX_PAGES} pages of Jobs")

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, url: str, query: Query) -> tuple[Any, str]:
        """An answer and the address of its next page, if there is one.

        huggingface_hub 2.4.0, hf_api.py, list_jobs, and utils/_pagination.py: ``stage`` and
        ``label`` may be repeated; the next page is in the ``Link`` header.
        """
        try:
            # An empty list of parameters would take the ones away that the link has.
            answer = await self._client.get(url, params=query or None, headers=self._headers)
            if answer.status_code != 200:
                raise HubUnanswered(f"it answered {answer.status_code}")
            following = answer.links.get("next", {}).get("url", "")
            if following and not following.startswith(f"{self._endpoint}/"):
                raise HubUnanswered("its next page is on another host")
            return answer.json(), following
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
            raise HubUnanswered(f"no answer that can be read ({type(exc).__name__})") from exc


def _url_of(job: dict[str, Any]) -> str:
    """Where a Job serves, or nothing. huggingface_hub 2.4.0, _jobs_api.py, JobInfo."""
    status = job["status"]
    role = (job.get("labels") or {}).get("role", "replica")
    if status["stage"] not in LIVE or role != "replica" or not status.get("exposeUrls"):
        return ""
    return replica_url(status["exposeUrls"][0])
