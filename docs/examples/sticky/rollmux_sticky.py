"""A routing policy for rollmux: a prompt goes where the same prompt went before.

Simpler than the built-in ``prefix``: prompts that only begin alike are strangers here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from routing.ids import ReplicaId
from routing.router import Decision, NoReplica, ReplicaLoad, RouteRequest, RouterSettings

Key = tuple[str, bytes]


class Sticky:
    """Keeps the last replica of each prompt, oldest out first."""

    name = "sticky"

    def __init__(self, settings: RouterSettings) -> None:
        self._bound = settings.max_tracked_blocks
        self._threshold = settings.spill_threshold
        self._seen: OrderedDict[Key, ReplicaId] = OrderedDict()
        self._turn = settings.seed

    @property
    def tracked_blocks(self) -> int:
        return len(self._seen)

    def choose(
        self, request: RouteRequest, candidates: Sequence[ReplicaLoad], now_s: float
    ) -> Decision | NoReplica:
        left = [c for c in candidates if c.id not in request.exclude]
        if not left:
            return NoReplica()
        # Ties are taken in turn: a policy that always took the first one would fill it up.
        self._turn += 1
        start = self._turn % len(left)
        idlest = min(left[start:] + left[:start], key=lambda c: c.inflight)
        key = _key(request)
        before = self._seen.get(key) if key is not None else None
        favourite = next((c for c in left if c.id == before), None)
        if favourite is None:
            picked, reason = idlest, "fresh"
        elif favourite.inflight - idlest.inflight > self._threshold:
            picked, reason = idlest, "moved"
        else:
            picked, reason = favourite, "sticky"
        if key is not None:
            self._seen[key] = picked.id
            self._seen.move_to_end(key)
            if len(self._seen) > self._bound:
                self._seen.popitem(last=False)
        return Decision(picked.id, reason)

    def forget_adapter(self, model: str) -> None:
        self._drop([key for key in self._seen if key[0] == model])

    def forget_replica(self, replica: ReplicaId) -> None:
        self._drop([key for key, owner in self._seen.items() if owner == replica])

    def forget_all(self) -> None:
        self._seen.clear()

    def _drop(self, keys: list[Key]) -> None:
        for key in keys:
            del self._seen[key]


def _key(request: RouteRequest) -> Key | None:
    """Model and prompt as bytes; None for a prompt that vLLM will refuse anyway."""
    prompt = request.prompt
    try:
        return request.model, prompt if isinstance(prompt, bytes) else array("q", prompt).tobytes()
    except (TypeError, ValueError, OverflowError):
        return None


def create(settings: RouterSettings) -> Sticky:
    return Sticky(settings)
