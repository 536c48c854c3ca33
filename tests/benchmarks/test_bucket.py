"""What a lagging mount shows of a folder, and when."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.bucket import LaggingFolder


class Clock:
    """A clock to move by hand; it starts at the present because file times do."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def mount(source: Path, clock: Clock, ttl_s: float = 30.0, **kwargs: bool) -> LaggingFolder:
    return LaggingFolder(source, 2.5, ttl_s, clock=clock, **kwargs)


def publish(source: Path, name: str = "v1") -> str:
    hidden = source / f".{name}.tmp"
    hidden.mkdir()
    (hidden / "weights").write_bytes(b"w")
    os.rename(hidden, source / name)
    return str(source / name / "weights")


def test_a_file_shows_after_the_lag(tmp_path: Path) -> None:
    path = publish(tmp_path)
    clock = Clock()
    folder = mount(tmp_path, clock)
    clock.now += 2.6
    assert folder.read(path) == b"w"


def test_a_look_too_early_is_remembered_as_a_miss(tmp_path: Path) -> None:
    path = publish(tmp_path)
    clock = Clock()
    folder = mount(tmp_path, clock)
    for later_s in (0.0, 3.0, 26.0):
        clock.now += later_s
        with pytest.raises(FileNotFoundError):
            folder.read(path)
    clock.now += 1.1
    assert folder.read(path) == b"w"


def test_each_look_can_start_the_memory_of_a_miss_anew(tmp_path: Path) -> None:
    path = publish(tmp_path)
    clock = Clock()
    folder = mount(tmp_path, clock, restarting=True)
    for later_s in (0.0, 20.0, 20.0):
        clock.now += later_s
        with pytest.raises(FileNotFoundError):
            folder.read(path)
    clock.now += 30.1
    assert folder.read(path) == b"w"


def test_each_mount_has_its_own_memory(tmp_path: Path) -> None:
    path = publish(tmp_path)
    clock = Clock()
    early, late = mount(tmp_path, clock), mount(tmp_path, clock)
    with pytest.raises(FileNotFoundError):
        early.read(path)
    clock.now += 3
    with pytest.raises(FileNotFoundError):
        early.read(path)
    assert late.read(path) == b"w"


def test_a_new_neighbour_does_not_hide_what_was_there(tmp_path: Path) -> None:
    path = publish(tmp_path)
    clock = Clock()
    folder = mount(tmp_path, clock)
    clock.now += 3
    folder.read(path)
    publish(tmp_path, "v2")
    assert folder.read(path) == b"w"


def test_what_is_deleted_is_gone(tmp_path: Path) -> None:
    path = publish(tmp_path)
    clock = Clock()
    folder = mount(tmp_path, clock)
    clock.now += 3
    folder.read(path)
    os.unlink(path)
    with pytest.raises(FileNotFoundError):
        folder.read(path)


def test_other_folders_do_not_lag(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "local").write_bytes(b"x")
    folder = mount(tmp_path / "bucket", Clock())
    assert folder.read(str(tmp_path / "local")) == b"x"
