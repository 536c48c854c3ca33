"""A trainer as TRL 1.16 is one: saves an adapter, pauses, loads, resumes, unloads, deletes."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx

from benchmarks.adapter import write_adapter
from tests.proxy.conftest import Running

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


def policy(version: int) -> str:
    return f"trl-policy-v{version}"


def save(folder: Path, version: int, seed: str = "") -> Path:
    """A small adapter: writing one of the usual size takes longer than publishing it."""
    return write_adapter(folder / policy(version), f"{seed}{version}", hidden=16, layers=1)


async def load(running: Running, name: str, path: Path | str) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": False}
    return await running.client.post(LOAD, json=body)


async def publish(running: Running, folder: Path, version: int, *, seed: str = "") -> None:
    """One adapter of this version, which must be answered 200."""
    path = save(folder, version, seed)
    answer = await load(running, policy(version), path)
    assert answer.status_code == 200, answer.text


class Trainer:
    """One run of it. ``staleness`` is its ``max_staleness``; each call is checked as it checks."""

    def __init__(self, running: Running, folder: Path, *, staleness: int = 4) -> None:
        self.running = running
        self.folder = folder
        self.staleness = staleness
        self.version = 0

    async def sync(self) -> None:
        """TRL 1.16, async_grpo_trainer.py: the calls of one weight sync, in their order."""
        client = self.running.client
        version = self.version = self.version + 1
        path = save(self.folder, version)
        assert (await client.post("/pause?mode=keep")).status_code == 200
        answer = await load(self.running, policy(version), path)
        assert answer.status_code == 200, answer.text
        assert (await client.post("/resume")).status_code == 200
        old = version - self.staleness - 1
        if old >= 1:
            await client.post(UNLOAD, json={"lora_name": policy(old)})
        shutil.rmtree(self.folder / policy(old - 1), ignore_errors=True)
