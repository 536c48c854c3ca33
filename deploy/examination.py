"""Looks at every replica once, and changes nothing: the doctor's questions and their answers."""

from __future__ import annotations

import asyncio

from broadcast.answer import NoAnswer
from deploy.symptoms import Looks, PushUse, Symptoms, TokenUse
from proxy.calls import Calls
from proxy.pushing import ENDPOINT, Pushing
from proxy.tokens import Bearer
from routing.ids import ReplicaId

LOOK_S = 15.0
"""One call. A server busy reading a large adapter answers late (field report: 7 s)."""
INFO_S = 60.0
"""The first ``/server_info`` of a server's life collects its environment (1.3 s on an idle one)."""
INFOS = 3
"""Two servers that take turns behind one URL show both faces with so many calls."""
AT_ONCE = 32
"""Replicas looked at side by side: 10 connections each."""


class Examination:
    """``urls`` by replica, in the fleet's order; ``done`` fills while it runs.

    ``push_key``: there is a key for push endpoints.
    """

    def __init__(
        self,
        calls: Calls,
        bearer: Bearer,
        pushing: Pushing,
        urls: dict[ReplicaId, str],
        *,
        push_wanted: bool,
        push_key: bool,
    ) -> None:
        self.done: dict[ReplicaId, Symptoms] = {}
        self._calls = calls
        self._bearer = bearer
        self._pushing = pushing
        self._push_wanted = push_wanted
        self._push_key = push_key
        self._urls = urls
        self._turn = asyncio.Semaphore(AT_ONCE)

    def progress(self) -> str:
        missing = [f"{id} ({url})" for id, url in self._urls.items() if id not in self.done]
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        return f"looked at {len(self.done)} of {len(self._urls)} replicas; waiting for {shown}"

    async def look(self) -> tuple[Symptoms, ...]:
        async with asyncio.TaskGroup() as group:
            for replica, url in self._urls.items():
                group.create_task(self._look_at(replica, url), name=f"look at {replica}")
        return tuple(self.done[id] for id in self._urls)

    async def _look_at(self, replica: ReplicaId, url: str) -> None:
        async with self._turn:
            get, post, calls = "GET", "POST", self._calls
            token = TokenUse.NONE
            if self._bearer:
                token = TokenUse.SENT if self._bearer.allowed(url) else TokenUse.HELD_BACK
            version = await calls(replica, get, "/version", timeout_s=LOOK_S)
            if isinstance(version, NoAnswer):
                self.done[replica] = Symptoms(replica, url, token, version)
                return
            unload = "/v1/unload_lora_adapter"
            models, paused, sleeping, weights, metrics, unloaded, *infos = await asyncio.gather(
                calls(replica, get, "/v1/models", timeout_s=LOOK_S),
                calls(replica, get, "/is_paused", timeout_s=LOOK_S),
                calls(replica, get, "/is_sleeping", timeout_s=LOOK_S),
                calls(replica, get, "/weight_info", timeout_s=LOOK_S),
                calls(replica, get, "/metrics", timeout_s=LOOK_S),
                calls(replica, post, unload, b"{}", timeout_s=LOOK_S),
                *(
                    calls(replica, get, "/server_info?config_format=json", timeout_s=INFO_S)
                    for _ in range(INFOS)
                ),
            )
            push, trouble = PushUse.UNWANTED, ""
            if self._push_wanted:
                push, trouble = await self._ask_push(replica, url)
            looks = Looks(models, paused, sleeping, weights, metrics, unloaded, tuple(infos))
            self.done[replica] = Symptoms(replica, url, token, version, looks, push, trouble)

    async def _ask_push(self, replica: ReplicaId, url: str) -> tuple[PushUse, str]:
        """Without the key first: an endpoint that is there refuses that, and no other says so."""
        bare = await self._calls(replica, "GET", ENDPOINT, timeout_s=LOOK_S)
        if isinstance(bare, NoAnswer) or bare.status not in (401, 403):
            return PushUse.ABSENT, ""
        if not self._push_key:
            return PushUse.TROUBLE, "it takes pushed adapters, but there is no key here"
        why = await self._pushing.find(replica, f"{replica} ({url})")
        return (PushUse.TROUBLE, why) if why else (PushUse.PUSHED, "")
