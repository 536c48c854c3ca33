"""A Qwen2 small enough for a CPU, taught just enough sums to earn a maths reward now and then.

    python tests/e2e/tiny_model.py DIR        (with the end-to-end environment's Python)

Writes DIR/model (0.4 M parameters, tokenizer, chat template) and DIR/problems.jsonl, in the columns
of the recipe's own data set. Takes about 30 s on one core.

An untrained model would never write `\\boxed{...}`: every reward would be 0, every advantage 0, no
adapter would ever differ from the base model, and no test could tell right weights from wrong ones.
So it is taught until it is right about half the time, and GRPO does the rest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

GOOD_ENOUGH = 0.5  # mean probability of the whole right answer, at which rewards vary most
MOST_STEPS = 600  # about 40 s; the goal is met well before
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def problems() -> list[dict]:
    """100 additions: `prompt` (chat messages) and `reward_model.ground_truth`."""
    return [
        {
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"What is {a} plus {b}? Add the two numbers."},
            ],
            "reward_model": {"ground_truth": str(a + b)},
        }
        for a in range(10)
        for b in range(10)
    ]


def answer_to(problem: dict) -> str:
    return f"The sum is \\boxed{{{problem['reward_model']['ground_truth']}}}.<|im_end|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte level BPE with one token per digit, so that numbers are spelled alike everywhere."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [p["prompt"][1]["content"] + answer_to(p) for p in problems()]
    core.train_from_iterator([*texts, SYSTEM, "system user assistant"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,  # head size 32: vLLM's CPU attention kernel refuses less
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def teach(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Fit the answers until half are right; returns the mean probability of a right answer."""
    rows, labels = [], []
    for problem in problems():
        prompt = tokenizer.apply_chat_template(
            problem["prompt"], add_generation_prompt=True, tokenize=False
        )
        given = tokenizer.encode(prompt, add_special_tokens=False)
        wanted = tokenizer.encode(answer_to(problem), add_special_tokens=False)
        rows.append(given + wanted)
        labels.append([-100] * len(given) + wanted)
    width = max(map(len, rows))
    ids = torch.tensor([r + [tokenizer.pad_token_id] * (width - len(r)) for r in rows])
    targets = torch.tensor([t + [-100] * (width - len(t)) for t in labels])

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    picks = torch.Generator().manual_seed(0)
    right = 0.0
    for step in range(MOST_STEPS):
        batch = torch.randint(len(rows), (32,), generator=picks)
        loss = model(input_ids=ids[batch], labels=targets[batch]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            right = probability_right(model, ids, targets)
            if right >= GOOD_ENOUGH:
                break
    print(f"taught for {step + 1} steps: right answers have probability {right:.2f}")
    return right


@torch.no_grad()
def probability_right(model: Qwen2ForCausalLM, ids: torch.Tensor, targets: torch.Tensor) -> float:
    log_probs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    wanted = targets[:, 1:]
    each = log_probs.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (each * (wanted >= 0)).sum(-1).exp().mean().item()


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)  # two, on two busy cores, were ten times slower
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    if teach(model, tokenizer) < GOOD_ENOUGH:
        sys.exit("The tiny model did not learn its sums: no run on it would show anything.")
    tokenizer.save_pretrained(out / "model")
    model.save_pretrained(out / "model")
    lines = [json.dumps(problem) for problem in problems()]
    (out / "problems.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
