"""Where replicas come from besides the command line: a file, a name in DNS, Jobs of the Hub."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from broadcast.fleet import Replica, ReplicaState
from proxy.hub_jobs import HubJobs, HubUnanswered
from proxy.replicas import Replicas
from proxy.settings import replica_url
from proxy.tokens import HF_JOBS_SUFFIX, Bearer
from routing.ids import ReplicaId

log = logging.getLogger("rollmux")

FILE_S = 1.0
"""How often the file is looked at."""
DNS_S = 5.0
"""How often the name is resolved; answers of a cluster's DNS live 5 to 30 s."""
HUB_S = 10.0
"""How often the Hub is asked for its Jobs."""
ABSENT_LOOKS = 3
"""A resolver may leave an address out for a moment: so often in a row it has to be missing."""


def listed_urls(text: str) -> list[str]:
    """The URLs of a replicas file. Raises ValueError, which names the line."""
    urls = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if word:
            try:
                urls.append(replica_url(word))
            except ValueError as exc:
                raise ValueError(f"line {number}: {exc}") from None
    return urls


def address_url(address: str, port: int) -> str:
    """The URL of a replica at an address of either family."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


class Sources:
    """Adds what appears and drains what is gone; ``watch`` starts the looks at a new replica."""

    def __init__(self, replicas: Replicas, watch: Callable[[Replica], None]) -> None:
        self._replicas = replicas
        self._watch = watch
        self._from_file: dict[str, ReplicaId] = {}
        self._from_dns: dict[str, ReplicaId] = {}
        self._from_hub: dict[str, ReplicaId] = {}
        self._absent: dict[str, int] = {}
        self._told = ""

    async def follow_file(self, path: Path) -> None:
        """For ever: one URL a line, ``#`` starts a comment. A bad line changes nothing."""
        stamp: tuple[int, int, int] | None = None
        while True:
            try:
                stat = await asyncio.to_thread(path.stat)
                found = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if found != stamp:
                    self.take_list(await asyncio.to_thread(path.read_text, "utf-8"), str(path))
                    stamp = found
            except (OSError, ValueError) as exc:
                self._tell(f"the replicas file {path} is left as it was: {exc}")
            await asyncio.sleep(FILE_S)

    def take_list(self, text: str, source: str) -> None:
        """Make the fleet what a list of URLs says. Raises ValueError and changes nothing."""
        self._settle(self._from_file, listed_urls(text), source, named=True)

    async def follow_dns(self, host: str, port: int) -> None:
        """For ever: every address of ``host`` is a replica."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(DNS_S):
                    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self.take_addresses([str(info[4][0]) for info in found], host, port)
            except (OSError, TimeoutError) as exc:
                self._tell(f"{host} is not resolved ({exc}); the fleet is left as it is")
            await asyncio.sleep(DNS_S)

    def take_addresses(self, addresses: Iterable[str], host: str, port: int) -> None:
        """One resolution. An address that is gone leaves once it is neither listed nor ready."""
        urls = {address_url(address, port) for address in addresses}
        self._keep_absent(self._from_dns, urls)
        self._settle(self._from_dns, sorted(urls), host, named=True)

    async def follow_hub(self, jobs: HubJobs, bearer: Bearer) -> None:
        """For ever: every Job with the label that exposes a port is a replica.

        A Job started in the place of a lost one has another URL, and comes in by itself. The Hub's
        own host names may have the token: the operator named the label.
        """
        while True:
            try:
                urls = set(await jobs.urls())
                for url in urls:
                    if (urlsplit(url).hostname or "").endswith(HF_JOBS_SUFFIX):
                        bearer.trust(url)
                self._keep_absent(self._from_hub, urls)
                self._settle(self._from_hub, sorted(urls), f"the Hub's Jobs with {jobs.label}")
            except HubUnanswered as exc:
                self._tell(f"the Hub does not list its Jobs ({exc}); the fleet is left as it is")
            await asyncio.sleep(HUB_S)

    def _keep_absent(self, known: dict[str, ReplicaId], urls: set[str]) -> None:
        """Put back into ``urls`` what a list left out that may yet be there."""
        for url, id in known.items():
            if url in urls:
                self._absent.pop(url, None)
                continue
            self._absent[url] = self._absent.get(url, 0) + 1
            replica = self._replicas.fleet.get(id)
            ready = replica is not None and replica.state is ReplicaState.READY
            if ready or self._absent[url] < ABSENT_LOOKS:
                urls.add(url)

    def _settle(
        self, known: dict[str, ReplicaId], urls: Iterable[str], source: str, *, named: bool = False
    ) -> None:
        wanted = dict.fromkeys(urls)
        for url in [u for u in known if u not in wanted]:
            id = known.pop(url)
            self._absent.pop(url, None)
            if id in self._replicas.fleet:
                log.info("%s (%s) is no longer in %s; it is drained", id, url, source)
                self._replicas.drain(id)
        for url in wanted:
            if url in known:
                continue
            try:
                replica = self._replicas.add(url, named=named)
            except ValueError:
                continue  # configured elsewhere too
            known[url] = replica.id
            log.info("%s (%s) comes from %s", replica.id, url, source)
            self._watch(replica)

    def _tell(self, line: str) -> None:
        """Once, until it is something else."""
        if line != self._told:
            self._told = line
            log.warning("%s", line)
