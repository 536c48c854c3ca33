"""The published recipe: LoRA GRPO on maths problems with TRL's AsyncGRPOTrainer, unmodified.

    rollmux run --replica URL --replica URL -- \\
        accelerate launch --config_file fsdp2.yaml sanity_lora.py --preset run1 --output-dir DIR

An ordinary trainer script: it would run as well against one vLLM server at --url.
DIR has to be a path that every replica sees (a bucket, NFS): the adapters go to DIR/.vllm_lora.
Checkpoints and, at the end, DIR/final-adapter and DIR/trainer_state.json go there too.
Started again with the same DIR, it goes on from the last complete checkpoint.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# A trainer's image need not have rollmux installed: find this file's neighbours from where it lies.
# At the end of the path, so that none of our folders hides a package of the image.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from trainer_entry.recipes import checkpoint, preset
from trainer_entry.recipes.reward import BoxedReward

# How an assistant's turn is read back from ChatML text. TRL knows it for the chat templates it has
# seen (chat_template_utils.py, add_response_schema); Qwen2.5-Math's is not among them.
CHATML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*|$", "content": "text"}},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--preset", default="run1", help=f"{', '.join(preset.names())}, or a path ending in .toml"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("sanity-lora"), help="of the run")
    parser.add_argument(
        "--url",
        default=os.environ.get("ROLLMUX_URL", "http://127.0.0.1:8000"),
        help="where the trainer finds its vLLM server",
    )
    parser.add_argument("--model", help="instead of the preset's")
    parser.add_argument("--dataset", help="instead of the preset's: a name, or a JSON Lines file")
    parser.add_argument("--max-steps", type=int, help="instead of the preset's")
    parser.add_argument("--report-to", default="none", help="trackio, wandb, tensorboard, ...")
    parser.add_argument("--run-name", help="for --report-to")
    parser.add_argument("--fresh", action="store_true", help="do not resume")
    parser.add_argument("--show", action="store_true", help="print the preset as JSON and stop")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        chosen = preset.with_overrides(
            preset.load(arguments.preset),
            model=arguments.model,
            dataset=arguments.dataset,
            max_steps=arguments.max_steps,
        )
        # Set by `accelerate launch`; one process without it.
        settings = chosen.trainer_settings(int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        print(f"--preset: {error}", file=sys.stderr)
        return 2
    if arguments.show:
        print(json.dumps(asdict(chosen), indent=2))
        return 0
    log_trl()
    train(chosen, settings, arguments)
    return 0


def log_trl() -> None:
    """Show TRL's INFO lines (syncs, dropped samples); nobody else installs a handler for them."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("trl")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def train(chosen: preset.Preset, settings: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Train, resuming if there is something to resume from, and write the final adapter."""
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    if getattr(tokenizer, "response_template", None) is None:
        tokenizer.response_template = CHATML
    config = AsyncGRPOConfig(
        output_dir=str(arguments.output_dir),
        vllm_server_base_url=arguments.url,
        report_to=arguments.report_to,
        run_name=arguments.run_name,
        **settings,
    )
    trainer = AsyncGRPOTrainer(
        model=chosen.model,
        args=config,
        train_dataset=problems(chosen.dataset),
        processing_class=tokenizer,
        reward_funcs=BoxedReward(config.max_completion_length),
        peft_config=LoraConfig(**chosen.lora),
    )
    if trainer.is_fsdp_enabled:
        untie_head(trainer.model)
    trainer.train(
        resume_from_checkpoint=None if arguments.fresh else resume_from(config.output_dir)
    )
    trainer.save_state()  # trainer_state.json, with everything logged
    save_final_adapter(trainer, arguments.output_dir / "final-adapter")
    print(f"done: {trainer.state.global_step} steps, policy v{trainer.model_version}", flush=True)


def problems(source: str) -> Any:
    """Columns `prompt` (chat messages) and `solution` (text) of a data set or a JSON Lines file."""
    from datasets import load_dataset

    if source.endswith(".jsonl"):
        loaded = load_dataset("json", data_files=source, split="train")
    else:
        loaded = load_dataset(source, split="train")
    return loaded.map(
        lambda row: {"prompt": row["prompt"], "solution": row["reward_model"]["ground_truth"]},
        remove_columns=loaded.column_names,
    )


def resume_from(output_dir: str) -> str | None:
    newest, passed_over = checkpoint.last_complete(Path(output_dir))
    for path, lacks in passed_over.items():
        print(f"not resuming from {path.name}: {'; '.join(lacks)}", flush=True)
    if newest:
        print(f"resuming from {newest}", flush=True)
    return str(newest) if newest else None


def untie_head(model: Any) -> None:
    """Give a tied `lm_head` a copy of its own, before FSDP2 shards the model.

    FSDP2 refuses a parameter that belongs to two groups, and accelerate makes the embedding a group
    of its own. LoRA on all linear layers leaves out embedding and head, so both stay as they are.
    """
    from torch.nn import Parameter

    base = model.get_base_model()
    if base.config.tie_word_embeddings:
        base.lm_head.weight = Parameter(base.lm_head.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = False


def save_final_adapter(trainer: Any, directory: Path) -> None:
    """Write the adapter for PEFT or vLLM to load. Every process has to call it: it gathers shards.

    `Trainer.save_model` writes nothing under SHARDED_STATE_DICT (transformers 5.24.0, trainer.py).
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            tensors[name] = whole.detach().cpu()
    if trainer.accelerator.is_main_process:
        model.save_pretrained(str(directory), state_dict=tensors, safe_serialization=True)


if __name__ == "__main__":
    sys.exit(main())
