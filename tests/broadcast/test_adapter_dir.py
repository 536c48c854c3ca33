"""The local check refuses what vLLM refuses or serves wrongly, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from broadcast.adapter_dir import (
    CONFIG,
    WEIGHTS,
    AdapterIncomplete,
    AdapterNotReadable,
    AdapterRefused,
    check,
    digest,
    read_shapes,
)

GOOD: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
    "modules_to_save": None,
    "use_dora": False,
    "bias": "none",
}
TENSORS = {"q.lora_A.weight": (8, 64), "q.lora_B.weight": (64, 8)}


def safetensors(tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A file of float32 zeros in the published format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "trl-policy-v1"
    path.mkdir()
    (path / CONFIG).write_text(json.dumps(GOOD))
    (path / WEIGHTS).write_bytes(safetensors(TENSORS))
    return path


def test_whole_adapter_passes_without_a_warning(adapter: Path) -> None:
    found = check(adapter, max_lora_rank=8, first_shapes=TENSORS)
    assert (found.rank, found.shapes, found.warnings) == (8, TENSORS, ())
    assert found.total_bytes == sum(f.stat().st_size for f in adapter.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 16}, "rank 16 is greater than the replicas' max_lora_rank 8"),
        ({"r": 0}, "positive integer"),
        ({"r": "8"}, "positive integer"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_config_that_vllm_refuses_is_refused(
    adapter: Path, change: dict[str, Any], words: str
) -> None:
    (adapter / CONFIG).write_text(json.dumps(GOOD | change))
    with pytest.raises(AdapterRefused, match=words) as caught:
        check(adapter, max_lora_rank=8)
    assert not isinstance(caught.value, AdapterIncomplete)


@pytest.mark.parametrize("change", [{"modules_to_save": []}, {"use_rslora": True}, {"new": 1}])
def test_config_that_vllm_takes_is_not_refused(adapter: Path, change: dict[str, Any]) -> None:
    (adapter / CONFIG).write_text(json.dumps(GOOD | change))
    assert check(adapter, max_lora_rank=8).warnings == ()


@pytest.mark.parametrize("change", [{"rank_pattern": {"q": 4}}, {"peft_type": "LOHA"}])
def test_doubtful_config_is_a_warning_only(adapter: Path, change: dict[str, Any]) -> None:
    (adapter / CONFIG).write_text(json.dumps(GOOD | change))
    assert len(check(adapter).warnings) == 1


def test_rank_is_not_checked_without_a_limit(adapter: Path) -> None:
    (adapter / CONFIG).write_text(json.dumps(GOOD | {"r": 512}))
    assert check(adapter).rank == 512


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -1])
def test_weights_cut_short_are_incomplete(adapter: Path, kept: int) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:kept])
    with pytest.raises(AdapterIncomplete, match=WEIGHTS):
        check(adapter)


@pytest.mark.parametrize(
    "weights",
    [
        bytes(100),  # has its size, not its bytes
        safetensors(TENSORS) + b"x",
        (2).to_bytes(8, "little") + b"[]",
        (200_000_000).to_bytes(8, "little") + b"{}",
        (13).to_bytes(8, "little") + b'{"a":{"b":1}}',
        b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
    ],
)
def test_weights_that_are_no_safetensors_are_incomplete(adapter: Path, weights: bytes) -> None:
    (adapter / WEIGHTS).write_bytes(weights)
    with pytest.raises(AdapterIncomplete):
        check(adapter)


@pytest.mark.parametrize("text", ["", "{", '{"r": 8', "[", "\0" * 40, '{"r": 8}'])
def test_config_cut_short_is_incomplete(adapter: Path, text: str) -> None:
    (adapter / CONFIG).write_text(text)
    with pytest.raises(AdapterIncomplete, match=CONFIG):
        check(adapter)


def test_config_that_is_no_object_is_refused(adapter: Path) -> None:
    (adapter / CONFIG).write_text("[1]")
    with pytest.raises(AdapterRefused, match="object"):
        check(adapter)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_file_is_incomplete(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    with pytest.raises(AdapterIncomplete, match=name):
        check(adapter)


def test_other_weight_formats_are_a_warning_only(adapter: Path) -> None:
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    found = check(adapter, first_shapes=TENSORS)
    assert found.shapes == {}
    assert "not checked" in found.warnings[0]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (TENSORS | {"q.lora_A.weight": (8, 48)}, r"lora_A.*\[8, 48\].*\[8, 64\]"),
        ({"q.lora_A.weight": (8, 64)}, "lora_B.*not there"),
        (TENSORS | {"z": (1,)}, r"z has shape \[1\].*not there"),
    ],
)
def test_shapes_unlike_the_first_adapter_are_refused(
    adapter: Path, tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    """vLLM 0.27.1 accepts them with 200 and serves something else."""
    (adapter / WEIGHTS).write_bytes(safetensors(tensors))
    with pytest.raises(AdapterRefused, match=words):
        check(adapter, first_shapes=TENSORS)
    assert check(adapter).shapes == tensors


@pytest.mark.parametrize("path", [Path("relative/dir"), Path("/nowhere/at/all")])
def test_what_is_not_here_is_not_judged(path: Path) -> None:
    with pytest.raises(AdapterNotReadable, match=str(path)):
        check(path)


def test_a_file_in_place_of_a_directory_is_not_judged(adapter: Path) -> None:
    with pytest.raises(AdapterNotReadable):
        check(adapter / CONFIG)


def test_scalar_tensor_has_an_empty_shape(adapter: Path) -> None:
    (adapter / WEIGHTS).write_bytes(safetensors({"s": ()}))
    assert read_shapes(adapter / WEIGHTS) == {"s": ()}


def test_digest_follows_names_and_bytes_and_nothing_else(adapter: Path, tmp_path: Path) -> None:
    first = digest(adapter)
    twin = tmp_path / "other-name"
    twin.mkdir()
    for file in sorted(adapter.iterdir(), reverse=True):
        (twin / file.name).write_bytes(file.read_bytes())
    os.utime(twin / CONFIG, (0, 0))
    (twin / "sub").mkdir()
    assert digest(twin) == first
    (twin / CONFIG).rename(twin / "renamed.json")
    assert digest(twin) != first
    (twin / "renamed.json").rename(twin / CONFIG)
    assert digest(twin) == first
    data = (twin / WEIGHTS).read_bytes()
    (twin / WEIGHTS).write_bytes(data[:-1] + b"\1")
    assert digest(twin) != first


def test_digest_does_not_confuse_where_one_file_ends(tmp_path: Path) -> None:
    for folder, a, b in (("x", b"12", b"3"), ("y", b"1", b"23")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").write_bytes(a)
        (tmp_path / folder / "b").write_bytes(b)
    assert digest(tmp_path / "x") != digest(tmp_path / "y")
