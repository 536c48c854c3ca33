"""A preset: the settings of one run, read from TOML, each file naming only what it changes.

Keys: `base` (the preset it changes), `model`, `dataset`, `completions_per_step`; `[lora]` goes to
PEFT's LoraConfig, `[trainer]` to TRL's AsyncGRPOConfig, unchanged. `[fleet]` says what the run
expects of the replicas and the daemon: the trainer does not use it, a launcher may.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("presets")
LONGEST_CHAIN = 10  # presets on presets; more is a cycle


@dataclass(frozen=True, slots=True)
class Preset:
    model: str
    dataset: str
    completions_per_step: int
    lora: dict[str, Any]
    trainer: dict[str, Any]
    fleet: dict[str, Any]

    def trainer_settings(self, world_size: int) -> dict[str, Any]:
        """`[trainer]` with `gradient_accumulation_steps` for `world_size` trainer processes.

        Where the preset does not set it, an optimizer step is made `completions_per_step` long;
        ValueError if that does not divide evenly.
        """
        if "gradient_accumulation_steps" in self.trainer:
            return self.trainer
        at_once = self.trainer["per_device_train_batch_size"] * world_size
        if self.completions_per_step % at_once:
            raise ValueError(
                f"{self.completions_per_step} completions a step do not divide into micro-batches "
                f"of {at_once} ({world_size} processes): change per_device_train_batch_size"
            )
        return self.trainer | {"gradient_accumulation_steps": self.completions_per_step // at_once}


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Preset:
    """The preset of this name, or at this path; ValueError naming the fault if it is not one."""
    layers: list[dict[str, Any]] = []
    path: Path | None = locate(name, Path.cwd())
    while path:
        if len(layers) == LONGEST_CHAIN:
            raise ValueError(f"{name}: its chain of bases does not end")
        layers.append(read(path))
        base = layers[-1].pop("base", None)
        path = locate(base, path.parent) if base else None
    merged: dict[str, Any] = {"lora": {}, "trainer": {}, "fleet": {}}
    for layer in reversed(layers):
        for key, value in layer.items():
            merged[key] = merged[key] | value if isinstance(value, dict) else value
    missing = Preset.__dataclass_fields__.keys() - merged.keys()
    if missing:
        raise ValueError(f"{name}: no {', '.join(sorted(missing))}")
    return Preset(**merged)


def locate(name: str, folder: Path) -> Path:
    if name.endswith(".toml"):
        return folder / name
    if name not in names():
        raise ValueError(f"no preset {name!r}; there are {', '.join(names())}, or a path.toml")
    return FOLDER / f"{name}.toml"


def read(path: Path) -> dict[str, Any]:
    try:
        layer = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    tables = {"lora", "trainer", "fleet"}
    plain = {"base", "model", "dataset", "completions_per_step"}
    for key, value in layer.items():
        if key not in tables | plain or (key in tables) != isinstance(value, dict):
            raise ValueError(f"{path}: {key!r} is not a key of a preset, or not of that kind")
    return layer


def with_overrides(preset: Preset, **changes: Any) -> Preset:
    """`preset` with the given fields; None means unchanged. `max_steps` goes to the trainer."""
    given = {key: value for key, value in changes.items() if value is not None}
    if "max_steps" in given:
        given["trainer"] = preset.trainer | {"max_steps": given.pop("max_steps")}
    return replace(preset, **given)
