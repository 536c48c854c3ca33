"""How an adapter's files get to a replica: the seam behind the publication machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from routing.ids import ReplicaId


@dataclass(frozen=True, slots=True)
class Undelivered:
    """The files are not there, and no load was sent. ``text`` says why, in one line."""

    text: str


class Deliver(Protocol):
    """Brings one adapter's files to one replica, where they are not there yet.

    Called again for each attempt to load. Never raises for what a network or a disk can do.
    """

    async def __call__(self, replica: ReplicaId) -> str | Undelivered:
        """The path under which that replica is to load them."""
        ...
