"""The ids that travel through every layer. Distinct types, so that none passes for another."""

from __future__ import annotations

from typing import NewType

ReplicaId = NewType("ReplicaId", str)
"""Short and stable for the life of the daemon: ``r0``, ``r1``, … in order of configuration."""

AdapterName = NewType("AdapterName", str)
"""What a request calls ``model`` and a load calls ``lora_name``, for example ``trl-policy-v7``."""

BlockHash = NewType("BlockHash", bytes)
"""Stands for one whole block and all blocks before it, under one model name."""
