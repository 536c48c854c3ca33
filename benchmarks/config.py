"""How a simulated replica was started, as far as it shows outside."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """vLLM's options and environment variables; the defaults are those of a quick test."""

    model: str = "tiny"
    root: str | None = None
    """Path of the base model; None: the same as its name."""
    max_model_len: int = 1024
    vocab_size: int = 321
    dtype: str = "torch.bfloat16"
    max_lora_rank: int = 8
    lora: bool = True
    """--enable-lora"""
    runtime_lora: bool = True
    """VLLM_ALLOW_RUNTIME_LORA_UPDATING"""
    dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE"""
    base_under_every_name: bool = False
    """A planted fault: lists adapters, and computes with the base model."""
    weight_transfer: bool = False
    """--weight-transfer-config"""
    data_parallel_size: int = 1
    api_key: str | None = None
    bearer: str | None = None
    """What an edge in front demands on every path; it answers 401 in HTML otherwise."""
    keep_alive_s: float = 5.0
    mean_output_tokens: int | None = None
    """Replies end by themselves after this many tokens on average; None: at max_tokens."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    notice_s: float = 0.1
    """From the engine's death to the 500 of whoever waits (facts: 0.1 s)."""
    exit_s: float = 0.3
    """From there to refused connections; infinite: VLLM_KEEP_ALIVE_ON_ENGINE_DEATH."""
