"""Votes of a generative judge: one against k, with and without a meta reward model, against a planted truth.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.judges --out results      # three seeds
    OMP_NUM_THREADS=1 python -m benchmarks.learning.judges --seeds 0 --pairs 20 --train 100

A judge is trained by imitation alone (the first stage of the recipe `judge`, two judgements in five wrong, in the form
of DeepSeek-GRM). It judges training pairs; each judgement is labelled by its pair (Eq. 10 of 2504.02495), and a meta
reward model learns the labels, from the judge's own weights. Then held-out pairs are judged `MOST` times each. What was
predicted before the run is in docs/research/LOG.md (2026-11-23, judges).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import posttrain
from posttrain.build.build_judges import generative_judge
from posttrain.build.build_reward_models import reward_member
from posttrain.config.env import Reward
from posttrain.environment.judged.judge_rules import best_half, chosen, summed
from posttrain.environment.make import environment
from posttrain.record import run_reader
from posttrain.role.judges.generative_judge import GenerativeJudge, JudgedTask, asked, meta_rows, right
from tests.mutants import planted

VOTES = (1, 2, 4, 8, 16, 32)
MOST = max(VOTES)
LABELLED = 4
"""Judgements of each training pair that the meta reward model learns from."""


@dataclass(frozen=True)
class Tally:
    """Agreement with the truth on held-out pairs, one figure a number of votes."""

    seed: int
    plain: dict[int, float]
    meta: dict[int, float]
    meta_agreement: float
    """Share of (right, wrong) judgements of one held-out pair that the meta reward model orders so."""


def agreement(judged: Sequence[JudgedTask], count: int, meta_TK: np.ndarray | None) -> float:
    """Share of tasks whose vote of `count` judgements names the better side, a tie counting half. Every run of `count`
    judgements that begins at a multiple of it is a vote."""
    told: list[float] = []
    for t, each in enumerate(judged):
        for first in range(0, MOST - count + 1, count):
            places = [k for k in range(first, first + count) if each.votes[k].scores is not None]
            if meta_TK is not None and len(places) > 1:
                places = [places[i] for i in best_half(meta_TK[t, places])]
            scores = np.array([each.votes[k].scores for k in places], np.float64)
            side = chosen(tuple(float(x) for x in summed(scores))) if len(places) else None
            told.append(0.5 if side is None else float(side == each.task.info["best"]))
    return float(np.mean(told))


def ordered(judge: GenerativeJudge, judged: Sequence[JudgedTask], meta_TK: np.ndarray) -> float:
    """How often the meta reward model scores a right judgement above a wrong one of the same pair."""
    wins: list[float] = []
    for t, each in enumerate(judged):
        good = np.array([right(judge.judging, each.task, v) for v in each.votes])
        above = meta_TK[t][good][:, None] - meta_TK[t][~good]
        wins += (above > 0).astype(float).ravel().tolist()
    return float(np.mean(wins)) if wins else float("nan")


def measured(seed: int, folder: Path, pairs: int, train: int, steps: int) -> Tally:
    """One judge and its meta reward model, from the first step on."""
    words = (f"seed={seed}", "env.args.format=grm", f"sft.steps={steps}", "rl=none", "env.heldout=0")
    posttrain.run("judge", *words, out=folder / "judge", quiet=True)
    run = run_reader.run_file(folder / "judge").run
    judge = generative_judge(run, Reward(function=f"judge:{folder / 'judge'}"), 0.0, reward_member)
    world = environment(run.env, seed)
    taught = asyncio.run(asked(judge, [world.train.task(10**6 + i) for i in range(train)], LABELLED))
    rows = meta_rows(judge.judging, taught)
    (folder / "meta.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    posttrain.run(
        "reward_model",
        *(f"seed={seed}", f"model={folder / 'judge'}", f"env.prompts={folder / 'meta.jsonl'}", "env.heldout=50"),
        *("reward_model.judgement=label", "reward_model.centre=0", "reward_model.steps=300"),
        out=folder / "meta",
        quiet=True,
    )
    paid = Reward(function=f"judge:{folder / 'judge'}", meta=str(folder / "meta"))
    judge = generative_judge(run, paid, 0.0, reward_member)
    held = [world.train.task(2 * 10**6 + i) for i in range(pairs)]
    judged = asyncio.run(asked(judge, held, MOST))
    meta_TK = np.array([judge.meta_scores(each.votes) for each in judged])
    plain = {k: agreement(judged, k, None) for k in VOTES}
    kept = {k: agreement(judged, k, meta_TK) for k in VOTES}
    return Tally(seed, plain, kept, ordered(judge, judged, meta_TK))


def table(tallies: Sequence[Tally]) -> str:
    """Markdown: the mean over seeds, and each seed."""
    lines = ["| votes | " + " | ".join(map(str, VOTES)) + " |", "|---" * (len(VOTES) + 1) + "|"]
    for name in ("plain", "meta"):
        for t in tallies:
            each: dict[int, float] = getattr(t, name)
            lines.append(f"| {name}, seed {t.seed} | " + " | ".join(f"{each[k]:.3f}" for k in VOTES) + " |")
    lines.append("")
    lines += [f"seed {t.seed}: the meta model orders {t.meta_agreement:.3f} of (right, wrong)" for t in tallies]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--train", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", help="a planted fault of tests/mutants, such as meta_labels_are_its_votes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with planted(args.fault) if args.fault else nullcontext():
        tallies = [measured(s, args.out / f"seed-{s}", args.pairs, args.train, args.steps) for s in args.seeds]
    (args.out / "judges.json").write_text(json.dumps([asdict(t) for t in tallies], indent=1))
    print(table(tallies))


if __name__ == "__main__":
    main()
