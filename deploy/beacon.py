"""A beacon: a tiny adapter, written to find out how long replicas take to see what is written.

It is a whole adapter, of a module that no model has, so it fits all of them and changes none.
(vLLM 0.27.1 looks at the last part of a module's name only, lora/lora_model.py,
check_unexpected_modules; a file without tensors it does not load.) It lies where the daemon puts
its own copies, gets to a replica as they do, and is unloaded and deleted again, also when the
doctor is interrupted.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
import tempfile
from pathlib import Path

from broadcast import own_copy
from broadcast.adapter_dir import CONFIG, WEIGHTS
from broadcast.answer import NoAnswer
from broadcast.answers import LoadOutcome, classify_load, words
from broadcast.transport import Undelivered
from deploy.symptoms import BEACON_PREFIX, Sighting
from proxy.calls import Calls
from proxy.pushing import Pushing
from routing.ids import ReplicaId

RANK = 1  # no --max-lora-rank is too small for it
MODULE = "base_model.model.rollmux_beacon.q_proj"
READ = "expected target modules"
"""In the refusal of a model without any ``q_proj``: it has read the file all the same."""
GROWTH = 1.5
"""Of the wait between two looks, so that a mount that remembers a miss gets time to forget it."""
UNLOAD_S = 10.0


class Beacon:
    """One measurement on ``replicas``. ``told`` fills while it runs."""

    def __init__(
        self,
        calls: Calls,
        pushing: Pushing,
        replicas: tuple[ReplicaId, ...],
        folder: Path,
        *,
        limit_s: float,
        attempt_timeout_s: float,
        retry_s: float,
        retry_max_s: float,
    ) -> None:
        self.told: dict[ReplicaId, Sighting] = {}
        self._calls = calls
        self._pushing = pushing
        self._replicas = replicas
        self._name = f"{BEACON_PREFIX}{secrets.token_hex(4)}"
        self._folder = folder
        self._limit_s = limit_s
        self._attempt_timeout_s = attempt_timeout_s
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s

    def progress(self) -> str:
        seen = [f"{id} after {s.seconds:.1f} s" for id, s in self.told.items() if not s.trouble]
        waiting = [id for id in self._replicas if id not in self.told]
        return f"beacon: seen by {', '.join(seen) or 'nobody'}; waiting for {', '.join(waiting)}"

    async def measure(self) -> dict[ReplicaId, Sighting] | str:
        """Write, ask every replica until it has loaded, unload, delete; or why nothing could be
        written."""
        made = await asyncio.to_thread(write, self._folder, self._name)
        if isinstance(made, own_copy.NoCopy):
            return made.reason
        written_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self._replicas:
                    watch = self._watch(replica, made.path, written_s)
                    group.create_task(watch, name=f"beacon {replica}")
        finally:
            await self._clear(made.path)
        return {id: self.told[id] for id in self._replicas}

    async def _watch(self, replica: ReplicaId, copy: Path, written_s: float) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._retry_s
        looks = 0
        while True:
            looks += 1
            outcome, text, pushed = await self._load(replica, copy)
            seconds = loop.time() - written_s
            # A load whose answer was lost may have been carried out: then the name is taken.
            if outcome in (LoadOutcome.LOADED, LoadOutcome.ALREADY) or READ in text:
                self.told[replica] = Sighting(seconds, looks, pushed)
                return
            again = outcome in (
                LoadOutcome.NOT_VISIBLE,
                LoadOutcome.UNKNOWN,
                LoadOutcome.NEVER_RECEIVED,
            )
            if not again or seconds + wait_s > self._limit_s:
                self.told[replica] = Sighting(seconds, looks, pushed, text or outcome.value)
                return
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * GROWTH, self._retry_max_s)

    async def _load(self, replica: ReplicaId, copy: Path) -> tuple[LoadOutcome, str, bool]:
        """What one load came to, in a word and in words, and whether the files were pushed."""
        path = await self._pushing.deliver(replica, str(copy), str(copy))
        if isinstance(path, Undelivered):
            return LoadOutcome.REFUSED, path.text, True
        body = json.dumps({"lora_name": self._name, "lora_path": path}).encode()
        answer = await self._calls(
            replica, "POST", "/v1/load_lora_adapter", body, timeout_s=self._attempt_timeout_s
        )
        text = answer.detail if isinstance(answer, NoAnswer) else words(answer, 300)
        return classify_load(answer), text, path != str(copy)

    async def _clear(self, copy: Path) -> None:
        """Whatever came: the name is unloaded everywhere, then the files go."""
        body = json.dumps({"lora_name": self._name}).encode()
        await asyncio.gather(
            *(
                self._calls(replica, "POST", "/v1/unload_lora_adapter", body, timeout_s=UNLOAD_S)
                for replica in self._replicas
            )
        )
        await self._pushing.drop(self._replicas, copy)
        await asyncio.to_thread(own_copy.remove, copy)


def write(folder: Path, name: str) -> own_copy.OwnCopy | own_copy.NoCopy:
    """A whole adapter below ``folder``, where the daemon would put its copy of one in there."""
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    size = 4 * RANK  # of either matrix: one column, or one row, of float32
    header = {
        f"{MODULE}.lora_A.weight": {
            "dtype": "F32",
            "shape": [RANK, 1],
            "data_offsets": [0, size],
        },
        f"{MODULE}.lora_B.weight": {
            "dtype": "F32",
            "shape": [1, RANK],
            "data_offsets": [size, 2 * size],
        },
    }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # the format wants the tensors aligned
    with tempfile.TemporaryDirectory() as local:
        (Path(local) / CONFIG).write_text(json.dumps(config), "utf-8")
        (Path(local) / WEIGHTS).write_bytes(struct.pack("<Q", len(head)) + head + bytes(2 * size))
        return own_copy.make(Path(local), name, inside=folder)
