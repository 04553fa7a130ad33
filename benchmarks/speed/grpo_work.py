"""The work both sides of `grpo_step.py` do: checkpoint, prompts, lengths, reward; and how their processes talk.

Letters: P prompts of a step, G siblings of a prompt.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIBLINGS = 8
PROMPT = 16
"""Tokens of every prompt."""
TASKS = 4096
LR = 1e-5
SYMBOLS = [chr(0x4E00 + i) for i in range(1021)]
"""One token each; with pad, eos and unk a vocabulary of 1024."""
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CAP = 256
EQUAL = 64


@dataclass(frozen=True)
class Size:
    """A Qwen3 configuration. The search for TRL's fastest setting uses `search` prompts and `tries` steps; `repeats` is
    the default."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    search: int
    tries: int
    repeats: int


SIZES: Mapping[str, Size] = {
    "1m": Size(hidden=128, layers=4, heads=4, kv_heads=4, ffn=384, search=8, tries=2, repeats=5),
    "26m": Size(hidden=512, layers=8, heads=8, kv_heads=4, ffn=1536, search=4, tries=1, repeats=5),
}
REGIMES = ("equal", "heavy")


@dataclass(frozen=True)
class Job:
    """What one worker process is asked to do."""

    checkpoint: str
    regime: str
    prompts: int
    threads: int
    share: bool = True
    """`model.share_prefixes`; of our side alone."""
    rank: int = 0
    """Of an adapter that trains in place of all weights; 0: none. Of our side alone."""

    @property
    def cap(self) -> int:
        return EQUAL if self.regime == "equal" else CAP

    def dump(self) -> str:
        return json.dumps(asdict(self))


def lengths_PG(regime: str, prompts: int) -> np.ndarray:
    """Tokens each sibling says, int64 [P, G]: 64 everywhere, or log-normal with mean 40 and deviation 40, at most 256.

    The same table every step and on both sides. The draws are the quantiles of the distribution in a fixed random
    order, so that a small table has the same shape as a large one.
    """
    count = prompts * SIBLINGS
    if regime == "equal":
        return np.full((prompts, SIBLINGS), EQUAL)
    from statistics import NormalDist

    sigma2 = np.log(2.0)
    z = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    drawn = np.exp(np.log(40.0) - sigma2 / 2 + np.sqrt(sigma2) * z)
    order = np.random.Generator(np.random.Philox(key=7)).permutation(count)
    return np.clip(np.rint(drawn), 1, CAP).astype(np.int64)[order].reshape(prompts, SIBLINGS)


def prompt(index: int) -> str:
    """The prompt of task `index`: 16 symbols."""
    rng = np.random.Generator(np.random.Philox(key=index))
    return "".join(SYMBOLS[i] for i in rng.integers(0, len(SYMBOLS), PROMPT))


def reward(text: str) -> float:
    """Share of symbols with an even code point: costs nothing, and siblings nearly always differ."""
    return sum(ord(c) % 2 == 0 for c in text) / max(1, len(text))


def save_checkpoint(size: Size, folder: Path, positions: int = 512, rows: int | None = None) -> int:
    """A Qwen3 with random weights and a one-symbol-one-token tokenizer. Returns its number of parameters.

    Args:
        rows: of its embedding, where they are more than the tokenizer has tokens.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNK, *SYMBOLS])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    raw.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=PAD, eos_token=EOS, unk_token=UNK).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=rows or len(vocabulary),
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[PAD],
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=vocabulary[EOS], pad_token_id=vocabulary[PAD])
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def memory_mb() -> dict[str, float]:
    """Resident memory of this process now and at its highest, in MiB (Linux)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {"now_mb": int(lines["VmRSS"].split()[0]) / 1024, "peak_mb": int(lines["VmHWM"].split()[0]) / 1024}


class StepMemory:
    """Resident memory of this process before a step and at its highest in it, in MiB (Linux).

    The kernel adds up what each CPU counted of pages late, so a reading may lie a little under one
    before it: the peak of a step is the highest of every reading, and no reading is thrown away.
    """

    def __init__(self) -> None:
        self._before = memory_mb()["now_mb"]

    def begin(self) -> None:
        """A step begins: let the next peak begin here, where Linux allows it."""
        self._before = memory_mb()["now_mb"]
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def told(self) -> dict[str, float]:
        """`before_mb`, `now_mb` and `peak_mb` of the step that began last."""
        read = memory_mb()
        return {**read, "before_mb": self._before, "peak_mb": max(self._before, *read.values())}


class Wire:
    """A worker's end of the line: one JSON object per line. What libraries print goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")

    def receive(self) -> dict[str, Any]:
        """The next command; the end of the line means quit."""
        line = sys.stdin.readline()
        return json.loads(line) if line else {"do": "quit"}
