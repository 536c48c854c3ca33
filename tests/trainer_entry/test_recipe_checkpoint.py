"""Which checkpoint a run is resumed from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_entry.recipes.checkpoint import lacking, last_complete

ONE_PROCESS = [
    "rollout_state.json",
    "trainer_state.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
]
TWO_RANKS = [
    "rollout_state.json",
    "trainer_state.json",
    "scheduler.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "pytorch_model_fsdp_0/.metadata",
    "pytorch_model_fsdp_0/__0_0.distcp",
    "pytorch_model_fsdp_0/__1_0.distcp",
    "optimizer_0/.metadata",
    "optimizer_0/__0_0.distcp",
    "optimizer_0/__1_0.distcp",
]


def write(output_dir: Path, step: int, files: list[str]) -> Path:
    """A checkpoint with these files, as TRL, transformers and accelerate write them."""
    checkpoint = output_dir / f"checkpoint-{step}"
    contents = {
        "rollout_state.json": json.dumps({"prompt_index": 3, "model_version": 2}).encode(),
        "trainer_state.json": json.dumps({"global_step": step}).encode(),
        # A pickle: only the names in it matter here.
        ".metadata": b"\x80\x04\x8c\x0c__0_0.distcp\x94..\x8c\x0c__1_0.distcp\x94.",
    }
    for name in files:
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.get(path.name, b"bytes"))
    return checkpoint


@pytest.mark.parametrize("files", [ONE_PROCESS, TWO_RANKS])
def test_newest_complete_one_is_chosen(tmp_path: Path, files: list[str]) -> None:
    write(tmp_path, 50, files)
    newest = write(tmp_path, 100, files)  # "100" sorts before "50" as text
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete(tmp_path) == (newest, {})


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert last_complete(tmp_path) == (None, {})
    assert last_complete(tmp_path / "absent") == (None, {})


@pytest.mark.parametrize(
    ("files", "missing"),
    [(files, name) for files in (ONE_PROCESS, TWO_RANKS) for name in files],
)
def test_one_missing_file_passes_it_over(tmp_path: Path, files: list[str], missing: str) -> None:
    older = write(tmp_path, 50, files)
    cut = write(tmp_path, 100, files)
    (cut / missing).unlink()
    chosen, passed_over = last_complete(tmp_path)
    assert chosen == older
    assert f"no {missing}" in passed_over[cut]


@pytest.mark.parametrize(
    ("files", "empty"),
    [(files, name) for files in (ONE_PROCESS, TWO_RANKS) for name in files],
)
def test_one_empty_file_passes_it_over(tmp_path: Path, files: list[str], empty: str) -> None:
    older = write(tmp_path, 50, files)
    cut = write(tmp_path, 100, files)
    (cut / empty).write_bytes(b"")
    chosen, passed_over = last_complete(tmp_path)
    assert chosen == older
    assert f"{empty} is empty" in passed_over[cut]


@pytest.mark.parametrize("folder", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_one_missing_folder_of_shards_passes_it_over(tmp_path: Path, folder: str) -> None:
    cut = write(tmp_path, 100, [name for name in TWO_RANKS if not name.startswith(folder)])
    assert last_complete(tmp_path) == (None, {cut: [f"no {folder}/.metadata"]})


@pytest.mark.parametrize("cut_off", ['{"prompt_index": 3, "mod', "[]", '{"prompt_index": 3}'])
def test_cut_rollout_state_is_not_complete(tmp_path: Path, cut_off: str) -> None:
    checkpoint = write(tmp_path, 100, ONE_PROCESS)
    (checkpoint / "rollout_state.json").write_text(cut_off)
    assert "rollout_state.json has no model_version" in lacking(checkpoint)


def test_trainer_state_of_another_step_is_not_complete(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 50, ONE_PROCESS).rename(tmp_path / "checkpoint-100")
    assert lacking(checkpoint) == ["trainer_state.json is of step 50"]
