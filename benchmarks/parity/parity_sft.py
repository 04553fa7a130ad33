"""SFT beside TRL's `SFTTrainer` in `parity.py`: rows of three forms, prepared by each side from the same data.

TRL reads the rows, renders them, tokenizes and masks them, and computes its loss; ours does all of that by itself. So a
mask that is one token off, another template or another mean shows. The forms are texts, conversations of which every
turn of the assistant is learned, and prompts with completions.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.parity.parity_trl import PLAIN
from benchmarks.speed.grpo_work import Size
from posttrain.algorithm.loss.losses import Likelihood
from posttrain.config.env import Env
from posttrain.config.run import Model, Supervised
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.model.tiny_models import build_module, raw_bytes
from posttrain.environment.make import environment
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.role.learning.demonstrations import shown, together

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS, WORDS = 6, 7
Row = dict[str, Any]


@dataclass(frozen=True)
class SFTCase:
    """A form of rows, and what TRL's configuration says of it."""

    name: str
    row: Callable[[np.random.Generator], Row]
    config: dict[str, Any]


def words(rng: np.random.Generator) -> str:
    letters = [*"abcdefgh éß日"]
    return "".join(rng.choice(letters, int(rng.integers(1, 3 * WORDS)))).strip() or "a"


def said(role: str, rng: np.random.Generator) -> Row:
    return {"role": role, "content": words(rng)}


CASES = (
    SFTCase("sft text", lambda rng: {"text": "a" + words(rng)}, {}),
    SFTCase(
        "sft messages",
        lambda rng: {"messages": [said(r, rng) for r in ("system", *("user", "assistant") * int(rng.integers(1, 4)))]},
        {"assistant_only_loss": True},
    ),
    SFTCase("sft prompt and completion", lambda rng: {"prompt": words(rng), "completion": words(rng)}, {}),
)


def checkpoint(folder: Path, size: Size, seed: int) -> Path:
    """A tiny model with a chat template that marks what the assistant says, for TRL."""
    tokenizer = raw_bytes()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})  # type: ignore[dict-item]
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", TEMPLATE
    built = Model(
        hidden=size.hidden,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        ffn=size.ffn,
        context=256,
    )
    module: Any = build_module(built, tokenizer, seed)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(4.0 if p.ndim > 1 else 1.0)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def theirs(case: SFTCase, rows: list[Row], at: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of all rows in one batch of TRL's trainer, and the gradient of each weight."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = trl.SFTConfig(output_dir=tempfile.mkdtemp(), max_length=None, **PLAIN, **case.config)
    trainer: Any = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(at),
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    model = trainer.model.train()
    model.zero_grad(set_to_none=True)
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def ours(rows: list[Row], at: Path, micro: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The same under posttrain, in micro-batches of at most `micro` tokens."""
    policy = load_policy(Model(path=str(at)), None, 0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(f"{json.dumps(r)}\n" for r in rows))
        env = environment(Env(name="prompts", prompts=str(file), heldout=0), 0)
        renderer = Renderer(policy.tokenizer, policy.stop_ids, policy.context)  # pyright: ignore[reportArgumentType]
        stage = Supervised(name="sft", style="completion")

        async def all_shown() -> list[Any]:
            dialogue = lambda task: RenderedDialogue(renderer, task)  # noqa: E731
            rng = np.random.default_rng(0)
            tasks = [env.train.task(i) for i in range(len(rows))]
            return [await shown(env, renderer, dialogue, stage, t, rng, policy.context) for t in tasks]

        batch = together(asyncio.run(all_shown()))
    made, loss, total = HFLearner(policy), Likelihood(), 0.0
    made.train_mode(True)
    for episodes in batch.bins(micro):
        part = batch.select(episodes)
        terms = loss.terms(part, made.forward(part))
        terms.loss.backward()
        total += float(terms.loss.detach())
    return total, {n: p.grad.clone() for n, p in made.parameters().items() if p.grad is not None}
