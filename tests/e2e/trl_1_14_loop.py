"""TRL 1.14.2's own HTTP client and rollout worker, driven as its trainer drives them.

    PYTHONPATH=<TRL 1.14.2> python trl_1_14_loop.py URL OUTPUT_DIR MODEL PROBLEMS

Its trainer cannot run without a GPU: loading the model asks for a compiled kernel. What it says to
the server is all here: VLLMClient, and AsyncRolloutWorker with its process and its loop. The order
of calls is that of async_grpo_trainer.py, _sync_weight_lora. The adapters are random, for there is
no training step to make them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import trl
from accelerate import PartialState
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient

VERSIONS = 8
SAMPLES_PER_VERSION = 32
MAX_STALENESS = 4
CHATML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*|$", "content": "text"}},
}


def token_parity(completions, completion_ids, **_) -> list[float]:
    """A reward that always varies within a group."""
    return [sum(token % 2 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def save_adapter(model: Path, seed: int, directory: Path) -> None:
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    staged = directory.with_name(f".{directory.name}.tmp")
    adapted.save_pretrained(staged)
    staged.rename(directory)


def main() -> None:
    url, out, model, problems = sys.argv[1], *map(Path, sys.argv[2:])
    assert trl.__version__ == "1.14.2", f"this is TRL {trl.__version__}"
    PartialState()  # accelerate's loggers, which the client uses, refuse to work before it
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = CHATML

    client = VLLMClient(url)
    client.wait_for_server_ready()
    info = client.get_server_info()
    assert info["lora_config"]["max_loras"] >= MAX_STALENESS + 2
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert client.get_max_model_len() == 1024
    assert client.get_world_size() >= 1
    worker = AsyncRolloutWorker(
        model_name=str(model),
        lora_name="trl-policy",
        dataset=load_dataset("json", data_files=str(problems), split="train"),
        reward_funcs=[token_parity],
        processing_class=tokenizer,
        num_generations=8,
        max_inflight_tasks=32,
        queue_maxsize=64,
        vllm_server_url=url,
        max_tokens=24,
    )

    def sync(version: int) -> None:
        directory = out / ".vllm_lora" / f"trl-policy-v{version}"
        client.pause()
        save_adapter(model, version, directory)
        client.load_lora_adapter(directory.name, str(directory))
        client.resume()
        stale = version - (MAX_STALENESS + 1)
        if stale > 0:
            client.unload_lora_adapter(f"trl-policy-v{stale}")
        if stale > 1:
            shutil.rmtree(directory.with_name(f"trl-policy-v{stale - 1}"))
        worker.update_model_version(version)

    sync(1)
    worker.start()
    try:
        for version in range(2, VERSIONS + 1):
            take(worker, SAMPLES_PER_VERSION)
            sync(version)
        take(worker, SAMPLES_PER_VERSION)
    finally:
        worker.stop()


def take(worker: AsyncRolloutWorker, samples: int) -> None:
    for _ in range(samples):
        sample = worker.rollout_buffer.get(timeout=120)
        worker.check_health(300)
        assert len(sample.input_ids) == len(sample.old_log_probs)


if __name__ == "__main__":
    main()
