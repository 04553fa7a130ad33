"""Losses beside TRL's own code, of preferences and of SFT: value and gradient on the same weights and rows in float32.

    make parity
    python -m benchmarks.parity.parity [SEED]

For each loss of `parity_cases.py`, TRL's trainer computes the loss of a prepared batch on a tiny random model; ours
computes it packed, with shared prompts, and again in micro-batches. A reward model that we write is loaded by TRL's
RewardTrainer and compared in the same way, and rows of three forms are prepared and learned by SFTTrainer and by ours
(`parity_sft.py`). The loss may differ by 1e-6 of its size (2e-6 where a link squares), and the gradient of all weights
by 1e-5 of its norm (`GRADIENT` says where by more). The rows are drawn from the printed seed (`POSTTRAIN_SEED`, or one
of the clock). A difference is an exit status of 1; so is a TRL that cannot be imported: nothing is left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.parity import parity_sft, parity_trl
from benchmarks.parity.parity_cases import CASES, Case
from benchmarks.speed.grpo_work import Size, save_checkpoint
from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import mismatched, prepared
from posttrain.algorithm.preference.reward_model_loss import RankingLoss
from posttrain.config.run import Model
from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.scores import Reads
from posttrain.core.sampling import Sampling
from posttrain.core.streams import COLLISION, MARGIN, REFERENCE, SIDE, START, WEIGHT, Stream
from posttrain.core.types import SHOWN, Segment
from posttrain.engine.files.reward_folder import write_reward_model
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.ladder.pieces.link import SelfPlay, Square
from posttrain.ladder.pieces.preference_pieces import ReverseKL
from posttrain.ladder.preference_algorithm import SIDES

VALUE, GRADIENT = 1e-6, 1e-5
"""Largest differences: of the loss, relative to the largest of it, 1 and beta, which multiplies the rounding of
log-probs, and twice that for a link that squares, which doubles the relative rounding; and of the gradient, relative
to its norm, times 1 / tau for a link with a temperature, which multiplies the rounding of margins, and twice that for
a divergence other than the reverse KL: exp(sum of l) turns what the sum is off by into a relative difference."""
SQUARES = (Square, SelfPlay)
SMALL = Size(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, search=1, tries=1, repeats=1)
ROWS, LONGEST, PROMPT, FIRST = 6, 12, 7, 3
"""Rows of a batch, tokens of the longest completion and of the longest prompt, and the first id that is a symbol."""


@dataclass(frozen=True)
class Texts:
    """The rows of a batch as token ids: a prompt, and its completions in the order of `SIDES` (of a label, one)."""

    prompts: list[np.ndarray]
    completions: list[list[np.ndarray]]
    side: list[list[int]]

    @staticmethod
    def drawn(case: Case, rng: np.random.Generator) -> Texts:
        def ids(longest: int) -> np.ndarray:
            return rng.integers(FIRST, FIRST + 900, int(rng.integers(1, longest + 1))).astype(np.int32)

        order = SIDES[case.ours.rows]
        side = [list(order) if order else [int(i % 2)] for i in range(ROWS)]
        prompts = [ids(1 if case.prompt_is_one_token else PROMPT) for _ in range(ROWS)]
        return Texts(prompts, [[ids(LONGEST) for _ in s] for s in side], side)

    def segments(self) -> list[Segment]:
        return [
            segment(prompt, said) for prompt, each in zip(self.prompts, self.completions, strict=True) for said in each
        ]


def segment(prompt: np.ndarray, said: np.ndarray) -> Segment:
    ids = np.concatenate([prompt, said])
    mask = np.arange(len(ids)) >= len(prompt)
    return Segment(
        ids, mask, np.where(mask, 0, np.nan).astype(np.float32), np.where(mask, SHOWN, -1).astype(np.int32), Sampling()
    )


def saved(folder: Path, seed: int) -> tuple[Path, Path]:
    """Checkpoints of a policy and of a reference near it. Their distributions are far from uniform."""
    from transformers import AutoModelForCausalLM

    folders = folder / "policy", folder / "reference"
    torch.manual_seed(seed)
    save_checkpoint(SMALL, folders[0])
    save_checkpoint(SMALL, folders[1])
    model: Any = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.ndim > 1 else 1.0)
    model.save_pretrained(folders[0])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    model.save_pretrained(folders[1])
    return folders


def load(folder: Path) -> HFLearner:
    return HFLearner(load_policy(Model(path=str(folder)), None, 0))


@dataclass(frozen=True)
class Found:
    """What a side computed: the loss, and the gradient of each weight by its name."""

    loss: float
    gradient: dict[str, torch.Tensor]


def ours(case: Case, texts: Texts, policy: HFLearner, reference: HFLearner, micro: int) -> Found:
    """The loss of posttrain, in micro-batches of at most `micro` tokens."""
    a, said = case.ours, texts.segments()
    units = np.repeat(np.arange(ROWS, dtype=np.int32), [len(s) for s in texts.side])
    side_E = np.array([x for s in texts.side for x in s], np.int32)
    streams: dict[Stream, np.ndarray] = {SIDE: np.repeat(side_E, [s.spoken for s in said])}
    batch = Batch.of(said, unit_E=units, streams=streams)
    scored = {
        "reference": (REFERENCE, reference.score),
        "start": (START, policy.score),
        "collision": (COLLISION, policy.collision),
    }
    batch = batch.having({scored[n][0]: scored[n][1](batch) for n in a.reads})
    elsewhere = None
    if a.reads_mismatched:
        packed = Packed.of(mismatched(said, 512))
        ratio_M = (policy.score(packed) - reference.score(packed)).astype(np.float64)
        elsewhere = np.bincount(packed.sequence_M, ratio_M)
    batch, _ = prepared(a, batch, None, elsewhere)
    loss, total, named = PreferenceLoss(a), 0.0, policy.parameters()
    for p in named.values():
        p.grad = None
    policy.train_mode(True)
    for episodes in batch.bins(micro):
        part = batch.select(episodes)
        terms = loss.terms(part, policy.forward(part))
        terms.loss.backward()
        total += float(terms.loss.detach())
    return Found(total, {n: p.grad.clone() for n, p in named.items() if p.grad is not None})


def our_reward_model(made: HFLearner, texts: Texts, margins: Sequence[float], centre: float, micro: int) -> Found:
    """The loss of pairs under posttrain, in micro-batches of at most `micro` tokens."""
    said = texts.segments()
    spoken = [s.spoken for s in said]
    streams: dict[Stream, np.ndarray] = {
        SIDE: np.repeat(np.array([x for s in texts.side for x in s], np.int32), spoken),
        MARGIN: np.repeat(np.repeat(np.array(margins), 2), spoken),
        WEIGHT: np.full(sum(spoken), 1 / ROWS),
    }
    batch = Batch.of(said, unit_E=np.repeat(np.arange(ROWS, dtype=np.int32), 2), streams=streams)
    loss, total, named = RankingLoss(centre=centre), 0.0, made.parameters()
    made.train_mode(True)
    for episodes in batch.bins(micro):
        part = batch.select(episodes)
        terms = loss.terms(part, made.forward(part, Reads(rewards=True, logp=False)))
        terms.loss.backward()
        total += float(terms.loss.detach())
    held = {n.replace("reward_head.", ""): p.grad.clone() for n, p in named.items() if p.grad is not None}
    for p in named.values():
        p.grad = None
    return Found(total, held)


def reward_models_agree(at_policy: Path, folder: Path, there: parity_trl.Trainers, seed: int) -> bool:
    """A reward model that we write is loaded by TRL's `RewardTrainer`, whose loss and gradient are ours: pairs of mixed
    lengths in one padded batch, with margins and centring."""
    rng = np.random.default_rng([seed, 10**6])
    made = load_policy(Model(path=str(at_policy)), None, 0)
    made = replace(made, reward_head=RewardHead(HeadShape(), SMALL.hidden, seed=seed % 1000))
    write_reward_model(made, folder)
    texts, margins, centre = Texts.drawn(CASES[0], rng), rng.random(ROWS).tolist(), 0.05
    for each in texts.completions:
        each[:] = [np.append(said, made.stop_ids[0]).astype(np.int32) for said in each]
    pairs = [
        (np.concatenate([p, each[side.index(1)]]), np.concatenate([p, each[side.index(0)]]))
        for p, each, side in zip(texts.prompts, texts.completions, texts.side, strict=True)
    ]
    expected = Found(*there.rewarding(str(folder), pairs, margins, centre))
    ours_too = (our_reward_model(HFLearner(made), texts, margins, centre, micro) for micro in (10**6, 40))
    value, gradient = (max(x) for x in zip(*(apart(o, expected, 1.0) for o in ours_too), strict=True))
    good = value <= VALUE and gradient <= GRADIENT
    print(
        f"{'' if good else 'WRONG '}{'reward model':<28} {'RewardTrainer':<34} loss {expected.loss:>12.6f}  differs by"
        f" {value:.1e}, gradient by {gradient:.1e}",
        flush=True,
    )
    return good


def sft_agrees(case: parity_sft.SFTCase, at: Path, rng: np.random.Generator) -> bool:
    """Rows of one form as TRL's `SFTTrainer` learns them and as ours does."""
    rows = [case.row(rng) for _ in range(parity_sft.ROWS)]
    expected = Found(*parity_sft.theirs(case, rows, at))
    told = [apart(Found(*parity_sft.ours(rows, at, micro)), expected, 1.0) for micro in (10**6, 40)]
    value, gradient = (max(x) for x in zip(*told, strict=True))
    good = value <= VALUE and gradient <= GRADIENT
    print(
        f"{'' if good else 'WRONG '}{case.name:<28} {'SFTTrainer':<34} loss {expected.loss:>12.6f}  differs by"
        f" {value:.1e}, gradient by {gradient:.1e}",
        flush=True,
    )
    return good


def apart(one: Found, two: Found, beta: float) -> tuple[float, float]:
    """The differences of loss and gradient, as `VALUE` and `GRADIENT` bound them."""
    names = {n.removeprefix("model.") for n in one.gradient} ^ {n.removeprefix("model.") for n in two.gradient}
    if names:
        raise AssertionError(f"gradients of different weights: {sorted(names)[:4]}")
    of = {n.removeprefix("model."): g for n, g in two.gradient.items()}
    over = sum(float((g - of[n.removeprefix("model.")]).double().square().sum()) for n, g in one.gradient.items())
    size = sum(float(g.double().square().sum()) for g in two.gradient.values())
    return abs(one.loss - two.loss) / max(1.0, abs(two.loss), beta), (over / size) ** 0.5


def main(words: Sequence[str]) -> int:
    seed = int(words[0]) if words else int(os.environ.get("POSTTRAIN_SEED") or time.time_ns() % 2**31)
    print(f"seed {seed}; TRL {parity_trl.VERSION}; {len(CASES)} losses, {ROWS} rows each", flush=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        at_policy, at_reference = saved(Path(folder), seed % 1000)
        policy, reference = load(at_policy), load(at_reference)
        there = parity_trl.Trainers(str(at_policy), str(at_reference))
        for i, case in enumerate(CASES):
            rng = np.random.default_rng([seed, i])
            texts = Texts.drawn(case, rng)
            expected = Found(*there.of(case, texts))
            told = [
                apart(ours(case, texts, policy, reference, micro), expected, case.ours.beta) for micro in (10**6, 40)
            ]
            value, gradient = (max(x) for x in zip(*told, strict=True))
            doubled = 2 if isinstance(case.ours.link, SQUARES) else 1
            steep = 1 if isinstance(case.ours.divergence, ReverseKL) else 2
            steep /= min(1.0, getattr(case.ours.link, "tau", 1.0))
            bad = not (value <= doubled * VALUE and gradient <= steep * GRADIENT)
            wrong += bad
            print(
                f"{'WRONG ' if bad else ''}{case.name:<28} {case.trl:<34} loss {expected.loss:>12.6f}  differs by"
                f" {value:.1e}, gradient by {gradient:.1e}",
                flush=True,
            )
        wrong += not reward_models_agree(at_policy, Path(folder) / "reward", there, seed)
        at = parity_sft.checkpoint(Path(folder) / "chat", SMALL, seed % 1000)
        for i, case in enumerate(parity_sft.CASES):
            wrong += not sft_agrees(case, at, np.random.default_rng([seed, 10**6 + 1 + i]))
    count = len(CASES) + 1 + len(parity_sft.CASES)
    print(f"{wrong} of {count} differ" if wrong else f"all {count} agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
