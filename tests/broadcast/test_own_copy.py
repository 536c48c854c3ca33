"""The daemon's own copy: its name tells its bytes, and it is whole or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from broadcast import own_copy
from broadcast.adapter_dir import digest
from broadcast.own_copy import FOLDER, NoCopy, OwnCopy, leftovers, make, remove


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "lora" / "trl-policy-v1"
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"weights")
    return path


def made(path: Path, name: str = "trl-policy-v1") -> OwnCopy:
    copy = make(path, name)
    assert isinstance(copy, OwnCopy), copy
    return copy


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_copy_lies_beside_the_adapter_under_name_and_digest(adapter: Path) -> None:
    copy = made(adapter)
    assert copy.path == adapter.parent / FOLDER / f"trl-policy-v1-{digest(adapter)}"
    assert copy.made
    assert names(copy.path) == names(adapter)
    assert digest(copy.path) == copy.digest == digest(adapter)
    assert names(copy.path.parent) == {copy.path.name}


def test_copy_survives_the_trainer_deleting_or_rewriting_its_own(adapter: Path) -> None:
    copy = made(adapter)
    with (adapter / "adapter_model.safetensors").open("r+b") as file:
        file.write(b"OTHER")
    shutil.rmtree(adapter)
    assert (copy.path / "adapter_model.safetensors").read_bytes() == b"weights"


def test_other_bytes_under_the_same_name_get_another_path(adapter: Path) -> None:
    first = made(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"weightz")
    second = made(adapter)
    assert first.path != second.path
    assert first.path.is_dir()


def test_same_bytes_again_are_not_copied_again(adapter: Path) -> None:
    first = made(adapter)
    inode = (first.path / "adapter_config.json").stat().st_ino
    second = made(adapter)
    assert second == OwnCopy(first.path, first.digest, made=False)
    assert (first.path / "adapter_config.json").stat().st_ino == inode
    assert names(first.path.parent) == {first.path.name}


@pytest.mark.parametrize("harm", ["cut", "missing", "added"])
def test_damaged_copy_is_made_anew(adapter: Path, harm: str) -> None:
    copy = made(adapter)
    weights = copy.path / "adapter_model.safetensors"
    if harm == "cut":
        weights.write_bytes(b"wei")
    elif harm == "missing":
        weights.unlink()
    else:
        (copy.path / "more").write_bytes(b"")
    again = made(adapter)
    assert again.made
    assert again.path == copy.path
    assert digest(again.path) == again.digest


def test_what_is_too_large_is_not_copied(adapter: Path) -> None:
    with (adapter / "optimizer.pt").open("wb") as file:
        file.truncate(300 << 20)  # sparse
    copy = make(adapter, "v1")
    assert isinstance(copy, NoCopy)
    assert "300 MB, more than 256 MB" in copy.reason
    assert not (adapter.parent / FOLDER).exists()


def test_folders_inside_are_left_out(adapter: Path) -> None:
    (adapter / "checkpoint-1").mkdir()
    (adapter / "checkpoint-1" / "big").write_bytes(b"x")
    assert names(made(adapter).path) == {"adapter_config.json", "adapter_model.safetensors"}


def test_unwritable_place_is_a_reason_not_an_error(adapter: Path) -> None:
    (adapter.parent / FOLDER).write_text("a file in the way")
    copy = make(adapter, "v1")
    assert isinstance(copy, NoCopy)
    assert "cannot be written" in copy.reason


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_unreadable_adapter_is_a_reason_not_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    assert isinstance(make(tmp_path / path, "v1"), NoCopy)
    assert not (tmp_path / FOLDER).exists()


def test_failed_copy_leaves_nothing_behind(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(own_copy.os, "fsync", full)
    copy = make(adapter, "v1")
    assert isinstance(copy, NoCopy)
    assert "No space left" in copy.reason
    assert names(adapter.parent / FOLDER) == set()


def test_old_half_made_copies_are_swept_and_young_ones_kept(adapter: Path) -> None:
    folder = adapter.parent / FOLDER
    for name, age_s in (("old", 4000), ("young", 100)):
        temp = folder / f".tmp-{name}"
        temp.mkdir(parents=True)
        then = temp.stat().st_mtime - age_s
        os.utime(temp, (then, then))
    copy = made(adapter)
    assert names(folder) == {copy.path.name, ".tmp-young"}


@pytest.mark.parametrize("name", ["a/b", "../up", "..", ".tmp-x", "ä" * 300, "x" * 300, ""])
def test_any_name_becomes_one_harmless_component(adapter: Path, name: str) -> None:
    copy = made(adapter, name)
    assert copy.path.parent == adapter.parent / FOLDER
    assert not copy.path.name.startswith(".")
    assert len(copy.path.name) < 200


def test_names_that_look_alike_after_cleaning_keep_apart(adapter: Path) -> None:
    assert made(adapter, "a/b").path != made(adapter, "a_b").path


def test_remove_deletes_the_copy_and_keeps_the_folder(adapter: Path) -> None:
    copy = made(adapter)
    assert remove(copy.path)
    assert not remove(copy.path)
    assert names(adapter.parent / FOLDER) == set()


def test_remove_touches_nothing_else(adapter: Path) -> None:
    for path in (adapter, adapter.parent, adapter.parent / FOLDER, adapter.parent / FOLDER / ".."):
        with pytest.raises(ValueError, match="not a copy of ours"):
            remove(path)
    assert adapter.is_dir()


def test_leftovers_are_copies_not_kept(adapter: Path) -> None:
    keep, other = made(adapter, "v1"), made(adapter, "v2")
    (adapter.parent / FOLDER / ".tmp-now").mkdir()
    assert leftovers(adapter.parent, [keep.path]) == [other.path]
    assert leftovers(adapter, []) == []
