"""The work both sides of `preference.py` do: checkpoint, pairs and their lengths.

Letters: P pairs of an update; 2 completions each, the chosen one first.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.speed.grpo_work import SIBLINGS, SYMBOLS, lengths_PG

PROMPT = 32
"""Tokens of every prompt: half of a completion where lengths are equal, four fifths of the mean one where they are
not."""
LR = 1e-5
BETA = 0.1
LEAST = 2
"""Fewest tokens of a completion: a symbol and the stop token."""
WHAT = ("dpo", "dpo_ahead", "reward")
"""What an update learns. dpo: the reference's pass is part of it. dpo_ahead: both sides computed the reference before
the first update. reward: Bradley-Terry on a score of the last token."""


@dataclass(frozen=True)
class PairJob:
    """What one worker process is asked to do."""

    what: str
    checkpoint: str
    data: str
    """JSONL of the pairs of one update."""
    pairs: int
    threads: int

    def dump(self) -> str:
        return json.dumps(asdict(self))


def lengths_P2(regime: str, pairs: int) -> np.ndarray:
    """Tokens of each completion with its stop token, int64 [P, 2]: 64 everywhere, or log-normal with mean 40 and
    deviation 40, at most 256 (`grpo_work.lengths_PG`)."""
    table = lengths_PG(regime, -(-2 * pairs // SIBLINGS)).ravel()[: 2 * pairs]
    return np.maximum(table, LEAST).reshape(pairs, 2)


def write_pairs(path: Path, regime: str, pairs: int) -> int:
    """Write the rows (prompt, chosen, rejected) of one update, one symbol a token; returns their tokens, prompts of
    both sides and stop tokens included."""
    rng = np.random.default_rng(11)

    def text(tokens: int) -> str:
        return "".join(SYMBOLS[i] for i in rng.integers(0, len(SYMBOLS), tokens))

    lengths = lengths_P2(regime, pairs)
    rows = [{"prompt": text(PROMPT), "chosen": text(c - 1), "rejected": text(r - 1)} for c, r in lengths.tolist()]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return int(lengths.sum()) + 2 * PROMPT * pairs
