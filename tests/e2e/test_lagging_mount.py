"""The lagging mount itself: what replicas in the other tests see must be what it says."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import RealParts
from tests.e2e.lagging_mount import lagging_mount, missing_for_mounts, seen_at

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(missing_for_mounts()), reason=missing_for_mounts()),
]
LAG_S, NEGATIVE_TTL_S = 0.6, 1.0
LOOK_S = 0.02
COARSE_S = 0.05  # the clock of file times ticks so seldom, at worst
BUSY_S = 5.0  # what a busy machine may add


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket"
    folder.mkdir()
    return folder


@pytest.fixture
def mount(real_parts: RealParts, source: Path) -> Iterator[Path]:
    with lagging_mount(source, LAG_S, NEGATIVE_TTL_S) as mount:
        yield mount


def seconds_until_read(file: Path) -> float:
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 10:
        try:
            file.read_bytes()
            return time.monotonic() - begun_s
        except FileNotFoundError:
            time.sleep(LOOK_S)
    raise AssertionError(f"{file} was never shown")


def test_new_entry_shows_after_the_lag(source: Path, mount: Path) -> None:
    begun_s = time.monotonic()
    (source / "new").write_bytes(b"x")
    while "new" not in [entry.name for entry in mount.iterdir()]:
        time.sleep(LOOK_S)
    assert LAG_S - COARSE_S <= time.monotonic() - begun_s < LAG_S + BUSY_S


def test_early_look_is_remembered(source: Path, mount: Path) -> None:
    (source / "new").write_bytes(b"x")
    assert NEGATIVE_TTL_S <= seconds_until_read(mount / "new") < NEGATIVE_TTL_S + BUSY_S


def test_folder_once_shown_is_not_hidden_by_a_new_entry(source: Path, mount: Path) -> None:
    (source / "policies").mkdir()
    (source / "policies" / "old").write_bytes(b"x")
    seconds_until_read(mount / "policies" / "old")
    (source / "policies" / "new").write_bytes(b"x")
    assert [entry.name for entry in (mount / "policies").iterdir()] == ["old"]


def test_process_put_behind_it_sees_the_mount_and_others_do_not(
    real_parts: RealParts, source: Path
) -> None:
    """A mount that lags for longer than the process can take to start."""
    (source / "new").write_bytes(b"x")
    with lagging_mount(source, 600.0, NEGATIVE_TTL_S) as mount:
        command = [*seen_at(mount, source), "ls", source]
        seen = subprocess.run(command, capture_output=True, text=True, check=True)
    assert seen.stdout == ""
    assert [entry.name for entry in source.iterdir()] == ["new"]
