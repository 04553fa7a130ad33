"""What saying wrong answers anew from their first wrong step adds to rejection sampling, and what it costs.

    python -m benchmarks.learning.regenerate --seeds 0 1

Chains of four and five sums, a policy that is often wrong, and four rounds of RFT that goes on from the last weights:
with the samples alone; with the first wrong step found by completions; with that step found by scores, here those of
the world itself, which knows each running sum; and with more samples a prompt, which spend as many tokens or more.
Every arm begins with the same weights and asks the same prompts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

import posttrain
from posttrain.config.env import Env
from posttrain.config.run import Evaluation, Model, Optimizer, Run, Supervised
from posttrain.config.stages.rejection import RFT, Regenerate, Rejection
from posttrain.core.gauge import merge
from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.environment.make import environment
from posttrain.recipe.example import TINY
from posttrain.record import run_reader
from posttrain.role.learning.rejection_selection import Candidate, read

ENV = Env(name="arithmetic", args={"min_terms": 5, "max_terms": 6, "judge_steps": True}, heldout=100)
ROUNDS = 4


@dataclass(frozen=True)
class RegenerateArm:
    """One way to get what is imitated."""

    name: str
    siblings: int
    how: Regenerate | None = None


ARMS = (
    RegenerateArm("4 samples", 4),
    RegenerateArm("4 samples, by completions", 4, Regenerate(separator=";")),
    RegenerateArm("4 samples, by scores", 4, Regenerate(by="scores")),
    RegenerateArm("8 samples", 8),
)


def imitation(steps: int) -> Run:
    """The policy that every arm begins with."""
    sft = Supervised(name="sft", style="cot", wrong=0.4, steps=steps, batch=64, optimizer=Optimizer(lr=4e-3, warmup=20))
    return Run(recipe="regenerate", threads=1, model=TINY, env=ENV, stages=(sft,), evaluation=Evaluation(samples=4))


def arm_run(arm: RegenerateArm, model: Path, seed: int) -> Run:
    stage = Rejection(
        name="reject",
        method=replace(RFT, weights="last", regenerate=arm.how),
        sampling=Sampling(max_tokens=48),
        optimizer=Optimizer(lr=1e-3, warmup=5),
        prompts=64,
        siblings=arm.siblings,
        batch=32,
        epochs=2,
        rounds=ROUNDS,
        steps=400,
        eval_every=0,
        checkpoint_every=0,
    )
    base = imitation(1)
    return replace(base, seed=seed, model=Model(path=str(model)), stages=(stage,), record_episodes=False)


def measured(arm: RegenerateArm, folder: Path) -> str:
    """One row: tokens said in all rounds; of the first round, prompts of which something is kept and completions a
    wrong answer; held-out accuracy."""
    rounds = [s.gauges for s in run_reader.steps(folder) if "rollout/tokens" in s.gauges]
    said = merge(*({"said": g["engine/tokens"]} for g in rounds))["said"].sum
    first = rounds[0]
    kept = first["reject/covered"].sum
    line = (
        f"{arm.name:28} {said / 1000:6.1f}k tokens, covered plainly {kept:.0f} of {first['reject/covered'].count:.0f}"
    )
    if arm.how is not None:
        tried, mended = first["reject/completions"], first["reject/mended"]
        line += f", {tried.mean:.2f} completions a wrong answer, mended {mended.sum:.0f} of {mended.count:.0f}"
        anew = [c for c in right_ones(folder) if c.begun is not None]
        line += f", right steps {first['reject/right_steps'].mean:.2f}, {len({c.prompt for c in anew})} more prompts"
        line += f" covered, {sound(folder, anew)} of {len(anew)} of them sound"
    plain = [c for c in right_ones(folder) if c.plain]
    line += f"; {sound(folder, plain)} of {len(plain)} right samples sound"
    shares = " ".join(f"{g['reject/covered'].mean:.2f}" for g in rounds)
    return f"{line}; covered by round {shares}; accuracy {posttrain.load(folder).accuracy:.3f}"


def right_ones(folder: Path) -> list[Candidate]:
    """What was right in the first round."""
    return [c for c in read(folder / "kept" / "reject-asked-0001").candidates if c.reward >= 1]


def sound(folder: Path, ones: list[Candidate]) -> int:
    """How many of these have no step that the world calls wrong: two errors may cancel."""
    world: Any = environment(ENV, run_reader.run_file(folder).run.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    count = 0
    for c in ones:
        ids = np.concatenate([s.ids[s.mask] for s in c.segments])
        text = "".join(tokenizer.decode(ids, skip_special_tokens=True).split())
        attempt = Attempt(world.train.task(int(c.prompt.rpartition("-")[2])), (text,), Stop.SAID, int)
        count += all(j.verdict.score == 1 for j in world.steps(attempt))
    return count


def rows(seeds: list[int], steps: int, folder: Path) -> Iterator[str]:
    posttrain.run(imitation(steps), out=folder / "sft", quiet=True)
    yield f"imitation: accuracy {posttrain.load(folder / 'sft').accuracy:.3f}"
    model = Path(posttrain.export(folder / "sft", folder / "model"))
    for seed in seeds:
        for i, arm in enumerate(ARMS):
            out = folder / f"{seed}-{i}"
            posttrain.run(arm_run(arm, model, seed), out=out, quiet=True)
            yield f"seed {seed}: {measured(arm, out)}"


if __name__ == "__main__":
    said = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    said.add_argument("--sft", type=int, default=200, help="steps of imitation before")
    given = said.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for row in rows(given.seeds, given.sft, Path(scratch)):
            print(row, flush=True)
