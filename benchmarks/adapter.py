"""A LoRA adapter's directory: written for simulations, and read with vLLM's own complaints."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What the linear layers of a Qwen2 are called: the modules a replica expects."""

Read = Callable[[str], bytes]
"""Reads one file by its absolute path; raises OSError as ``open`` would."""


class Unreadable(ValueError):
    """The directory is there but not a whole, acceptable adapter. The text is vLLM's."""


def write_adapter(
    directory: Path,
    seed: int | str = 0,
    *,
    rank: int = 8,
    hidden: int = 128,
    layers: int = 2,
    modules: Sequence[str] = ("q_proj",),
    base: str = "tiny",
    **overrides: object,
) -> Path:
    """Write a whole adapter (float32, values from ``seed``) and return its directory.

    ``overrides`` are keys of ``adapter_config.json``; a value of ``...`` leaves the key out.
    Sizes fit the tiny Qwen2 of the end-to-end tests, so real vLLM takes it too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {}
    body = bytearray()
    for layer in range(layers):
        for module in modules:
            for matrix, shape in (("lora_A", (rank, hidden)), ("lora_B", (hidden, rank))):
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.{matrix}.weight"
                generator = random.Random(f"{seed} {name}")
                values = [generator.uniform(-0.2, 0.2) for _ in range(shape[0] * shape[1])]
                start = len(body)
                body += struct.pack(f"<{len(values)}f", *values)
                header[name] = {
                    "dtype": "F32",
                    "shape": list(shape),
                    "data_offsets": [start, len(body)],
                }
    head = json.dumps(header).encode()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(head)) + head + body)
    config: dict[str, object] = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    } | overrides
    kept = {key: value for key, value in config.items() if value is not ...}
    (directory / CONFIG).write_text(json.dumps(kept))
    return directory


def read_adapter(directory: str, max_rank: int, read: Read) -> str:
    """The digest of an adapter that vLLM 0.27.1 would load from ``directory``.

    Raises FileNotFoundError where vLLM says "No adapter found", and Unreadable with the text it
    puts between quotes after "Worker failed with error". Order of the checks and texts: vLLM
    0.27.1, lora/worker_manager.py _load_adapter, lora/peft_helper.py, lora/lora_model.py.
    """
    try:
        raw = read(f"{directory}/{CONFIG}")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(str(error)) from error
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise Unreadable(str(error)) from error
    missing = {key for key in ("r", "target_modules", "lora_alpha") if key not in config}
    if missing:
        raise Unreadable(f"Missing required configuration fields: {missing}")
    faults = []
    if config.get("modules_to_save"):
        faults.append("vLLM only supports modules_to_save being None.")
    if config.get("use_dora"):
        faults.append("vLLM does not yet support DoRA.")
    if config["r"] > max_rank:
        faults.append(f"LoRA rank {config['r']} is greater than max_lora_rank {max_rank}.")
    if config.get("bias", "none") != "none":
        faults.append("Adapter bias is not supported.")
    if faults:
        raise Unreadable(" ".join(faults))
    try:
        weights = read(f"{directory}/{WEIGHTS}")
    except OSError as error:
        raise Unreadable(f"{directory} doesn't contain tensors") from error
    _check_tensors(directory, weights)
    return blake3(raw + weights).hexdigest(length=8)


def _check_tensors(directory: str, weights: bytes) -> None:
    """The safetensors header against the file's length: texts of safetensors' own errors."""
    trouble = "Error while deserializing header: "
    if len(weights) < 8:
        raise Unreadable(trouble + "header too small")
    (length,) = struct.unpack_from("<Q", weights)
    if length > 100_000_000:  # safetensors' own bound
        raise Unreadable(trouble + "header too large")
    if 8 + length > len(weights):
        raise Unreadable(trouble + "invalid header length")
    try:
        header = json.loads(weights[8 : 8 + length])
    except ValueError as error:
        raise Unreadable(trouble + "invalid JSON in header: " + str(error)) from error
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if 8 + length + end != len(weights):
        raise Unreadable(trouble + "incomplete metadata, file not fully covered")
    modules = [name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in tensors]
    unexpected = [module for module in modules if module.rsplit(".", 1)[-1] not in MODULES]
    if unexpected:
        raise Unreadable(
            f"While loading {directory}, expected target modules in {set(MODULES)} but received "
            f"{unexpected}. Please verify that the loaded LoRA module is correct"
        )
