"""Presets of the recipe, and the script's command line without a trainer's packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_entry.recipes import preset

RECIPE = Path(preset.__file__).with_name("sanity_lora.py")


def test_published_runs_are_what_was_published() -> None:
    runs = [preset.load(f"run{n}") for n in range(1, 6)]
    for run in runs:
        assert (run.model, run.dataset, run.completions_per_step) == (
            "Qwen/Qwen2.5-Math-1.5B",
            "sail/Sanity-Test-R1D-1.5B",
            128,
        )
        assert run.lora == {"r": 1, "lora_alpha": 2, "target_modules": "all-linear"}
        wanted = {
            "learning_rate": 4e-5,
            "lr_scheduler_type": "constant",
            "num_generations": 8,
            "max_completion_length": 3000,
            "weight_sync_steps": 4,
            "max_staleness": 4,
        }
        assert wanted.items() <= run.trainer.items()
        assert run.fleet["max_model_len"] == 4096
    keys = ("token_budget", "gradient_accumulation_steps", "gradient_checkpointing")
    keys += ("max_inflight_tasks", "queue_maxsize")
    assert [tuple(run.trainer.get(key) for key in keys) for run in runs] == [
        (0, None, None, 128, 512),
        (16384, 6, None, 128, 512),
        (16384, 6, False, 128, 512),
        (16384, 6, False, 128, 512),
        (16384, 6, False, 384, 768),
    ]
    assert [run.fleet.get("replicas") for run in runs] == [2, 2, 2, 3, 3]
    assert [run.fleet.get("load_retry_s") for run in runs] == [None, None, None, 0.5, 0.5]


def test_step_is_as_long_as_the_preset_says_on_any_number_of_processes() -> None:
    run1 = preset.load("run1")
    assert run1.trainer_settings(1)["gradient_accumulation_steps"] == 128
    assert run1.trainer_settings(2)["gradient_accumulation_steps"] == 64
    assert preset.load("run2").trainer_settings(2)["gradient_accumulation_steps"] == 6
    with pytest.raises(ValueError, match="128 completions a step do not divide"):
        run1.trainer_settings(3)


def test_file_of_ones_own_may_stand_on_a_published_preset(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "run5"\nmodel = "other"\n[trainer]\nmax_steps = 3\n')
    loaded = preset.load(str(mine))
    assert (loaded.model, loaded.trainer["max_steps"]) == ("other", 3)
    assert loaded.trainer["queue_maxsize"] == 768
    changed = preset.with_overrides(loaded, max_steps=5, model=None, dataset="data.jsonl")
    assert (changed.model, changed.dataset) == ("other", "data.jsonl")
    assert changed.trainer == loaded.trainer | {"max_steps": 5}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('base = "mine.toml"', "does not end"),
        ('base = "run9"', "no preset 'run9'; there are cpu-smoke, recipe, run1"),
        ("model = ", "Invalid value"),
        ('modle = "m"', "'modle' is not a key of a preset"),
        ("trainer = 3", "'trainer' is not a key of a preset, or not of that kind"),
        ('model = "m"', "no completions_per_step, dataset"),
    ],
)
def test_faulty_file_is_named_with_its_fault(tmp_path: Path, text: str, fault: str) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(text)
    with pytest.raises(ValueError, match=fault):
        preset.load(str(mine))


def test_script_shows_a_preset_from_anywhere_and_without_torch(tmp_path: Path) -> None:
    shown = run_script(tmp_path, "--preset", "run4", "--max-steps", "7", "--show")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["trainer"]["max_steps"] == 7


def test_script_refuses_an_unknown_preset_with_code_2(tmp_path: Path) -> None:
    refused = run_script(tmp_path, "--preset", "run9")
    assert refused.returncode == 2
    assert "no preset 'run9'" in refused.stderr


def run_script(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as a trainer's image would: no rollmux installed, none on the path."""
    command = [sys.executable, "-I", "-S", str(RECIPE), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30)
