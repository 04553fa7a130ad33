"""What the end-to-end tests share: tiny overrides, prompts and a reward of one's own, checkpoints as somebody else made
them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from posttrain.cli import main
from posttrain.core.gauge import Step
from posttrain.engine.model.tiny_models import build_module, characters
from posttrain.ladder.pieces.baseline import Baseline
from posttrain.ladder.pieces.link import Link
from posttrain.ladder.pieces.preference_pieces import Added, LabelNoise, MarginTerm, Statistic
from posttrain.ladder.pieces.shape import Shaping
from posttrain.ladder.pieces.trust_region import TrustRegion
from posttrain.record import run_reader
from posttrain.record.checkpoint import find
from posttrain.role.weights.saved_weights import WEIGHTS
from posttrain.system.subclass_registry import alternatives
from tests.engine.engine_parts import tiny
from tests.vocabularies import train_bpe, train_byte_level, train_unigram

SMALL = (
    "threads=1",
    "slots=16",
    "evaluation.samples=2",
    "model.hidden=32",
    "model.ffn=64",
    "model.heads=2",
    "model.kv_heads=1",
)
RL = (
    "rl.steps=2",
    "rl.prompts=4",
    "rl.siblings=3",
    "rl.eval_every=0",
    "rl.checkpoint_every=1",
    "rl.sampling.max_tokens=6",
)
LADDER = (
    *("ladder", *SMALL, *(w for w in RL if "eval_every" not in w), "env.heldout=20", "rl.eval_every=1"),
    *(f"{stage}.batch=8" for stage in ("pretrain", "sft", "cot", "dpo", "sft_continued")),
    *(f"{stage}.steps=2" for stage in ("pretrain", "sft", "cot", "dpo")),
)
TEXTS = [f"say {a} and {b}: " for a in range(20) for b in ("cat", "naïve café", "42 + 7")]
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bpe": lambda: train_bpe(TEXTS, 300),
    "unigram": lambda: train_unigram(TEXTS, 80),
    "byte_level": lambda: train_byte_level(TEXTS, 280),
    "characters": lambda: characters("".join(sorted(set("".join(TEXTS))))),
}
REWARD = "def reward(task, text):\n    return float(sum(map(ord, text)) % 7 + len(text))\n"
"""Spread on nearly any two texts."""


def mine(folder: Path, rows: int = 20, reward: str = REWARD) -> tuple[str, ...]:
    """Words of a run on prompts and a reward written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, code = folder / "mine.jsonl", folder / "mine.py"
    prompts.write_text(
        "".join(f'{{"prompt": "say {a}: ", "answer": "{a}", "completion": "{a}"}}\n' for a in range(rows))
    )
    code.write_text(reward)
    return (
        "verifiable",
        "sft=none",
        *SMALL,
        *RL,
        f"env.prompts={prompts}",
        f"env.rewards={code}:reward",
        "env.heldout=2",
    )


def model_at(folder: Path, arch: str = "qwen3", tokenizer: str = "characters") -> Path:
    """A checkpoint as somebody else would have made it."""
    made = TOKENIZERS[tokenizer]()
    build_module(tiny(arch), made, 0).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def play(folder: Path, *words: str) -> Path:
    """`posttrain run WORDS --out FOLDER`, which must succeed."""
    assert main(["run", *words, "--out", str(folder)]) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> str:
    """The message a command ends with, and its exit code."""
    assert main(list(words)) == code
    said = capsys.readouterr().err
    assert said.strip().splitlines()[-1].startswith("posttrain: ") and "Traceback" not in said
    return said


def rl_steps(folder: Path) -> list[Step]:
    """The RL steps of a run, whose numbers are finite."""
    found = [s for s in run_reader.steps(folder) if s.stage == "rl"]
    for step in found:
        wrong = {n: g for n, g in step.gauges.items() if g.count and not math.isfinite(g.mean)}
        assert not wrong, wrong
    return found


def weights(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights a run began with and those of its last checkpoint."""
    return load_file(folder / "kept" / "start" / WEIGHTS), load_file(find(folder).folder / WEIGHTS)


def moved(folder: Path) -> bool:
    """Every tensor (but a value head nobody reads) is finite and another one than at the start."""
    before, after = weights(folder)
    assert all(bool(torch.isfinite(t).all()) for t in after.values())
    return all(not torch.equal(before[n], after[n]) for n in after if not n.startswith("value_head."))


def forget() -> None:
    """Make this process one that never imported a file of the user's."""
    for choice in (TrustRegion, Baseline, Shaping, Link, Statistic, LabelNoise, MarginTerm, Added):
        for c in alternatives(choice):
            if not c.__module__.startswith("posttrain."):
                c.withdraw()
    for name in [n for n in sys.modules if n.startswith("posttrain_user_")]:
        del sys.modules[name]
