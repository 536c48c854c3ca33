"""An adapter's directory as it lies on disk: what vLLM would refuse or serve wrongly in it.

Reads files, never writes. Blocking: the shell calls it in a thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OTHER_WEIGHTS = ("adapter_model.bin", "adapter_model.pt")
"""Read by vLLM where there is no safetensors file (``lora/lora_model.py``)."""
REQUIRED = ("r", "lora_alpha", "target_modules")
"""Fields of the config without which vLLM raises (``lora/peft_helper.py``, from_dict)."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""
MAX_CONFIG_BYTES = 1_000_000
"""PEFT writes about 1 kB."""
CHUNK_BYTES = 1 << 20

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor by its name."""


class AdapterRefused(Exception):
    """vLLM would refuse this adapter, or serve it wrongly. The message says why."""


class AdapterIncomplete(AdapterRefused):
    """Files are missing or cut short. Seen through a mount it may only be not whole *yet*."""


class AdapterNotReadable(Exception):
    """The directory cannot be read from here, so nothing is known about it."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What was found. ``shapes`` is empty where the weights are not safetensors."""

    path: Path
    rank: int
    shapes: Shapes
    total_bytes: int
    warnings: tuple[str, ...] = ()


def check(
    path: Path, *, max_lora_rank: int | None = None, first_shapes: Shapes | None = None
) -> AdapterFiles:
    """Read the config and the header of the weights; the weights themselves are not read.

    ``max_lora_rank`` is the smallest of the replicas, ``first_shapes`` those of this run's first
    adapter: vLLM 0.27.1 accepts wrong shapes with 200 and then serves something else. Raises
    AdapterRefused, AdapterIncomplete or AdapterNotReadable.
    """
    if not path.is_absolute():
        raise AdapterNotReadable(f"{path} is not an absolute path")
    try:
        if not path.is_dir():
            raise AdapterNotReadable(f"{path} is not a directory here")
        config = _config(path / CONFIG)
        warnings = list(_refuse(config, max_lora_rank))
        shapes: Shapes = {}
        if (path / WEIGHTS).is_file():
            shapes = read_shapes(path / WEIGHTS)
            _compare(shapes, first_shapes)
            if not shapes:
                warnings.append(f"{WEIGHTS} holds no tensors")
        elif any((path / other).is_file() for other in OTHER_WEIGHTS):
            warnings.append(f"no {WEIGHTS}: the weights were not checked")
        else:
            raise AdapterIncomplete(f"{path} has no {WEIGHTS}")
        total_bytes = sum(file.stat().st_size for file in files(path))
    except OSError as exc:
        raise AdapterNotReadable(f"{path}: {exc.strerror or exc}") from exc
    return AdapterFiles(path, int(config["r"]), shapes, total_bytes, tuple(warnings))


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes from the header of a safetensors file whose size agrees with it.

    The format: 8 bytes of header length, little-endian; the header as JSON; the data, covered
    without a gap by the tensors' ``data_offsets``. Raises AdapterIncomplete, or OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header_bytes, header = _header(file, path)
    shapes: dict[str, tuple[int, ...]] = {}
    end = 0
    try:
        for name, tensor in header.items():
            if name != "__metadata__":
                shapes[name] = tuple(int(n) for n in tensor["shape"])
                end = max(end, int(tensor["data_offsets"][1]))
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        raise AdapterIncomplete(f"{path.name}: its header is not one of safetensors") from exc
    whole = 8 + header_bytes + end
    if size != whole:
        raise AdapterIncomplete(f"{path.name} has {size} bytes where its header says {whole}")
    return shapes


def digest(path: Path) -> str:
    """blake3, in hex, over the name, the length and the bytes of each file, sorted by name."""
    hasher = blake3()
    for file in files(path):
        name = os.fsencode(file.name)
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            hasher.update(b"%d:%s%d:" % (len(name), name, size))
            while chunk := stream.read(CHUNK_BYTES):
                hasher.update(chunk)
    return hasher.hexdigest()


def files(path: Path) -> list[Path]:
    """Every regular file right in ``path``, sorted by name. vLLM reads nothing below it."""
    return sorted((file for file in path.iterdir() if file.is_file()), key=lambda file: file.name)


def _config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except FileNotFoundError as exc:
        raise AdapterIncomplete(f"{path.parent} has no {CONFIG}") from exc
    except ValueError as exc:
        raise AdapterIncomplete(f"{CONFIG} is not whole: {exc}") from exc
    if not isinstance(config, dict):
        raise AdapterRefused(f"{CONFIG} is not a JSON object")
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise AdapterIncomplete(f"{CONFIG} lacks {', '.join(missing)}")
    return config


def _refuse(config: Mapping[str, Any], max_lora_rank: int | None) -> Iterator[str]:
    """Raise for what vLLM refuses (``lora/peft_helper.py``, validate_legal); yield warnings."""
    rank = config["r"]
    if not isinstance(rank, int) or rank <= 0:
        raise AdapterRefused(f"rank r must be a positive integer, it is {rank!r}")
    if max_lora_rank is not None and rank > max_lora_rank:
        raise AdapterRefused(
            f"rank {rank} is greater than the replicas' max_lora_rank {max_lora_rank}"
        )
    if config.get("use_dora"):
        raise AdapterRefused("vLLM does not support DoRA (use_dora)")
    if config.get("modules_to_save"):
        raise AdapterRefused(f"vLLM does not support modules_to_save {config['modules_to_save']}")
    if config.get("bias", "none") != "none":
        raise AdapterRefused(f"vLLM does not support an adapter's bias ({config['bias']!r})")
    if config.get("rank_pattern"):
        yield "rank_pattern is set: vLLM knows one rank per adapter"
    if config.get("peft_type", "LORA") != "LORA":
        yield f"peft_type is {config['peft_type']!r}, not LORA"


def _header(file: BinaryIO, path: Path) -> tuple[int, dict[str, Any]]:
    start = file.read(8)
    if len(start) < 8:
        raise AdapterIncomplete(f"{path.name} is empty or cut short ({len(start)} bytes)")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise AdapterIncomplete(f"{path.name} says its header has {length} bytes")
    try:
        header = json.loads(file.read(length))
    except ValueError as exc:
        raise AdapterIncomplete(f"{path.name}: its header is cut short or not JSON") from exc
    if not isinstance(header, dict):
        raise AdapterIncomplete(f"{path.name}: its header is not one of safetensors")
    return length, header


def _compare(shapes: Shapes, first: Shapes | None) -> None:
    if first is None or shapes == first:
        return
    for name in sorted({*shapes, *first}):
        ours, theirs = shapes.get(name), first.get(name)
        if ours != theirs:
            raise AdapterRefused(
                f"tensor {name} has shape {_words(ours)}, in this run's first adapter it has "
                f"{_words(theirs)}"
            )


def _words(shape: tuple[int, ...] | None) -> str:
    return "none (it is not there)" if shape is None else str(list(shape))
