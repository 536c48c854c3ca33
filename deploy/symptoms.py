"""What one replica showed of itself: the facts from which the doctor judges. Plain data, no IO."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from broadcast.answer import Answer, NoAnswer
from routing.ids import ReplicaId

Shown = Answer | NoAnswer

BEACON_PREFIX = "rollmux-beacon-"
"""Of the names of adapters that are loaded only to see whether they can be."""


class TokenUse(StrEnum):
    """What a replica was told of the bearer token."""

    NONE = "none"
    """There is no token."""
    SENT = "sent"
    HELD_BACK = "held_back"
    """There is one, but this URL may not have it (``proxy/tokens.py``, ``Bearer.allowed``)."""


class PushUse(StrEnum):
    """Whether adapters will be pushed to a replica."""

    UNWANTED = "unwanted"
    """Nobody asked: ``--adapter-transport path``."""
    PUSHED = "pushed"
    ABSENT = "absent"
    """It has no push endpoint."""
    TROUBLE = "trouble"
    """It has one, but cannot be pushed to; ``push_trouble`` says why."""


@dataclass(frozen=True, slots=True)
class Looks:
    """The answers of a replica that answered at all; asked at once, on connections of their own."""

    models: Shown
    """``GET /v1/models``"""
    paused: Shown
    """``GET /is_paused``, which goes through the engine's loop."""
    sleeping: Shown
    """``GET /is_sleeping``"""
    weights: Shown
    """``GET /weight_info``"""
    metrics: Shown
    """``GET /metrics``"""
    unload: Shown
    """``POST /v1/unload_lora_adapter`` without a name: changes nothing, tells whether the route is
    there."""
    infos: tuple[Shown, ...]
    """``GET /server_info?config_format=json``, several times: one URL may hide several servers."""


@dataclass(frozen=True, slots=True)
class Symptoms:
    """One replica. ``looks`` is None where ``version`` was never answered."""

    id: ReplicaId
    url: str
    token: TokenUse
    version: Shown
    """``GET /version``"""
    looks: Looks | None = None
    push: PushUse = PushUse.UNWANTED
    push_trouble: str = ""


@dataclass(frozen=True, slots=True)
class Sighting:
    """When one replica could load the beacon. ``trouble`` is why it never did; empty if it did."""

    seconds: float
    """From the written file to the load, or to when it was given up."""
    looks: int
    """Loads that were tried."""
    pushed: bool = False
    """It was pushed to the replica instead of being read from the folder."""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """How one reply fared that was held back. ``trouble`` is what cut it off; empty if nothing."""

    seconds: float
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the operator wants of the fleet, and what was measured for it."""

    staleness: int = 4
    """The trainer's ``max_staleness``; 4 is TRL's default (1.16, async_grpo_config.py)."""
    rank: int | None = None
    """Of the adapters that will be trained."""
    push_required: bool = False
    load_timeout_s: float = 300.0
    hold_s: float = 0.0
    beacon: dict[ReplicaId, Sighting] | str | None = None
    """By replica, or why the beacon could not be written; None where nobody asked."""
    held: dict[ReplicaId, Held] | None = None
