"""Which checkpoint of a run can be resumed: the last one with every file there and none empty.

A job can die, and a bucket's mount can lose its last seconds, in the middle of writing one.
The newest folder is then exactly the wrong one to resume from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What TRL 1.16.0 writes (async_grpo_trainer.py, _save_checkpoint, on top of transformers 5.24.0,
# trainer.py, _save_checkpoint): rollout_state.json first, trainer_state.json last, and between:
#   one process: adapter_model.safetensors, adapter_config.json, optimizer.pt, scheduler.pt,
#     rng_state.pth
#   FSDP2 with SHARDED_STATE_DICT (accelerate 1.15.0, utils/fsdp_utils.py): pytorch_model_fsdp_0/
#     and optimizer_0/, each `.metadata` and the shards it names; scheduler.pt; rng_state_<rank>.pth
STATES = ("rollout_state.json", "trainer_state.json")
SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
UNSHARDED = ("adapter_model.safetensors", "adapter_config.json", "optimizer.pt")
# torch.distributed.checkpoint's names of shards; `.metadata` is a pickle that holds them as text.
SHARD = re.compile(rb"__\d+_\d+\.distcp")


def last_complete(output_dir: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """(newest complete `checkpoint-<step>` or None; newer ones passed over, and what they lack)."""
    passed_over: dict[Path, list[str]] = {}
    for checkpoint in newest_first(output_dir):
        lacks = lacking(checkpoint)
        if not lacks:
            return checkpoint, passed_over
        passed_over[checkpoint] = lacks
    return None, passed_over


def newest_first(output_dir: Path) -> list[Path]:
    """The `checkpoint-<step>` folders, highest step first. File times say nothing on a bucket."""
    found = [p for p in output_dir.glob("checkpoint-*") if step_of(p) is not None and p.is_dir()]
    return sorted(found, key=lambda p: step_of(p) or 0, reverse=True)


def step_of(checkpoint: Path) -> int | None:
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else None


def lacking(checkpoint: Path) -> list[str]:
    """What keeps `checkpoint` from being resumed, one phrase each; empty if it is complete."""
    lacks = [f"no {name}" for name in wanted(checkpoint) if not (checkpoint / name).is_file()]
    lacks += [
        f"{path.relative_to(checkpoint)} is empty"
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.stat().st_size == 0
    ]
    return lacks or wrong_states(checkpoint)


def wanted(checkpoint: Path) -> Iterator[str]:
    """Names of the files that a complete checkpoint of this kind has."""
    yield from STATES
    yield "scheduler.pt"
    if not any((checkpoint / folder).is_dir() for folder in SHARDED):
        yield from UNSHARDED
        yield "rng_state.pth"
        return
    ranks = {0}
    for folder in SHARDED:
        yield f"{folder}/.metadata"
        for shard in shards_of(checkpoint / folder):
            yield f"{folder}/{shard}"
            ranks.add(int(shard.split("_")[2]))
    # One process under FSDP writes rng_state.pth, several write one file each.
    yield from ["rng_state.pth"] if ranks == {0} else [f"rng_state_{r}.pth" for r in sorted(ranks)]


def shards_of(folder: Path) -> list[str]:
    try:
        metadata = (folder / ".metadata").read_bytes()
    except OSError:
        return []
    return sorted({name.decode() for name in SHARD.findall(metadata)})


def wrong_states(checkpoint: Path) -> list[str]:
    """The two JSON files must say what TRL reads from them, and be of this checkpoint."""
    rollout, trainer = (read_object(checkpoint / name) for name in STATES)
    wrong = [
        f"{STATES[0]} has no {key}"
        for key in ("prompt_index", "model_version")
        if key not in rollout
    ]
    if trainer.get("global_step") != step_of(checkpoint):
        wrong.append(f"{STATES[1]} is of step {trainer.get('global_step')}")
    return wrong


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one if it is cut or is something else."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
