"""RL that is paid by a process reward model alone, on sums and on longer chains: whether it trains a policy, and what
labels of answers that end early (`label.early_ends`) are for.

    python -m benchmarks.paid_by_steps                          # both worlds, seeds 0, 1, 2
    python -m benchmarks.paid_by_steps --worlds sums --seeds 0  # one of them
    python -m benchmarks.paid_by_steps --seconds 600            # start nothing after ten minutes

Of each world and seed one imitation is the start. Two process reward models learn from its answers: `whole` from whole
answers alone, `early` also from answers that end after an earlier step (`label.early_ends`), with as many steps of
training. Then arms of RL from the start; all but `outcome` are paid by one of the models and by nothing else. Held-out
accuracy is the environment's verdict; the gain is paired task by task. Prints a row for each arm, and adds it to
benchmarks/results/paid_by_steps.json.

Before this was written, on seed 7 and sums alone, which is not among the measured ones: the recipe as it was (12 label
steps, 200 of training) fell from .534 to .042 under `grpo_process`; the answers that it was paid for stop after their
first step, which no answer of the imitation does, and score .8 to .98 there. With 24 and 800 steps it rose to .86 of
the rollouts and then fell the same way, to .572 held out; by the minimum of the scores .488, with a KL of .5 .706;
beside the outcome .906, where the outcome alone has .892. Nothing was run with `early_ends`, nor on chains.

Written down before these runs:

1. `early` ends above its start in both worlds and on all seeds, with the lower end of the gain above 0.
2. On sums it ends above .75 on all seeds, and its answers stay as long as they were (tokens within a tenth).
3. `early, min` gains less than `early` on sums, and its lower ends are above 0 too.
4. `whole` ends at least .1 below `early` on sums, on each seed that is run.
5. `outcome` ends above `early` on sums: what the verdict pays is exact, what the model pays is not.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from posttrain.core import reader
from posttrain.core.algorithm import patch
from posttrain.core.env import Reward
from posttrain.core.interval import Score
from posttrain.core.ladder import GRPO, GRPO_PROCESS
from posttrain.core.pieces.pull import KL
from posttrain.core.reward_model import RewardModel
from posttrain.core.run import Model, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.core.step_labels import StepLabeling
from posttrain.recipe.recipes import recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/paid_by_steps.json"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class ChainWorld:
    """Sums of so many terms, and how long their chains are imitated."""

    terms: tuple[int, int]
    sft: int
    label: int
    """Steps of labelling."""


WORLDS: Mapping[str, ChainWorld] = {"sums": ChainWorld((3, 4), 200, 16), "chains": ChainWorld((5, 6), 300, 8)}


@dataclass(frozen=True)
class PaidArm:
    """How RL is paid."""

    model: str
    """`early`, `whole`, or '' for the environment's outcome alone."""
    least: bool = False
    """Whether the minimum of the steps' scores is the answer's reward (GRPO with a KL of .5), in place of the scores of
    all steps (`grpo_process`)."""


ARMS: Mapping[str, PaidArm] = {
    "early": PaidArm("early"),
    "early, min": PaidArm("early", least=True),
    "outcome": PaidArm(""),
    "whole": PaidArm("whole"),
}


SAMPLING = Sampling(max_tokens=80)
RL = Reinforce(
    name="rl",
    algorithm=GRPO_PROCESS,
    sampling=SAMPLING,
    optimizer=Optimizer(lr=5e-4, warmup=5),
    prompts=32,
    siblings=8,
    steps=40,
    eval_every=0,
)
TRAINED = 500
"""Optimizer steps of the process reward models."""


def imitation(world: str, seed: int) -> Run:
    """The recipe's imitation in a world."""
    base, own = recipe("prm"), WORLDS[world]
    args = {"min_terms": own.terms[0], "max_terms": own.terms[1]}
    sft = base.stage("sft")
    assert isinstance(sft, Supervised)
    env = replace(base.env, args=args, rewards=())
    return replace(base, seed=seed, env=env, stages=(replace(sft, steps=own.sft),))


def start(world: str, seed: int, folder: Path) -> Path:
    """The imitation, as a plain model directory."""
    done = posttrain.run(imitation(world, seed), out=folder / f"sft-{world}-{seed}", quiet=True)
    return Path(posttrain.export(done.folder, folder / f"start-{world}-{seed}"))


def model(kind: str, world: str, seed: int, begun: Path, folder: Path) -> Path:
    """The run that labels steps and learns from the labels."""
    base = recipe("prm")
    label, prm = base.stage("label"), base.stage("prm")
    assert isinstance(label, StepLabeling) and isinstance(prm, RewardModel)
    label = replace(label, early_ends=kind == "early", steps=WORLDS[world].label, sampling=SAMPLING)
    run = replace(imitation(world, seed), model=Model(path=str(begun)), stages=(label, replace(prm, steps=TRAINED)))
    out = folder / f"prm-{world}-{kind}-{seed}"
    posttrain.run(run, out=out, quiet=True)
    return out


def rl(arm: str, world: str, seed: int, begun: Path, paid: Path | None) -> Run:
    run, how, stage = imitation(world, seed), ARMS[arm], RL
    env = run.env
    if paid is None:
        stage = replace(stage, algorithm=GRPO)
    elif how.least:
        stage = replace(stage, algorithm=patch(GRPO, "grpo_kl", GRPO.paper, pull=KL(coef=0.5)))
        env = replace(env, rewards=(Reward(function=f"model:{paid}", steps="outcome"),), measured=True)
    else:
        env = replace(env, rewards=(Reward(function=f"model:{paid}"),))
    return replace(run, model=Model(path=str(begun)), env=env, stages=(stage,))


def verdicts(folder: Path, index: int) -> dict[str, float]:
    """Of each held-out task the share of answers that the environment calls right."""
    found: dict[str, list[float]] = {}
    for recorded in reader.episodes(folder, "rl", index, "eval"):
        own = [j.verdict.score for j in recorded.episode.verdicts if j.source == "arithmetic" and j.end is None]
        found.setdefault(recorded.episode.task.id, []).append(own[0] or 0.0)
    return {task: float(np.mean(x)) for task, x in found.items()}


def play(arm: str, world: str, seed: int, begun: Path, paid: Path | None, folder: Path) -> dict[str, Any]:
    clock, stopped = time.perf_counter(), ""
    run, out = rl(arm, world, seed, begun, paid), folder / f"rl-{world}-{arm.replace(', ', '-')}-{seed}"
    try:
        posttrain.run(run, out=out, quiet=True)
    except posttrain.PosttrainError as error:
        stopped = str(error).split(":")[0][:120]
    steps = [s for s in reader.steps(out) if s.stage == "rl"]
    before, after = (verdicts(out, i) for i in (0, run.stages[0].steps))
    gain = Score.of([after[t] - before[t] for t in before], -1.0, 1.0) if after else Score(math.nan, -1.0, -1.0, 0)
    return {
        "world": world,
        "arm": arm,
        "seed": seed,
        "before": float(np.mean(list(before.values()))),
        "after": float(np.mean(list(after.values()))) if after else 0.0,
        "gain": [gain.mean, gain.low, gain.high] if after else None,
        "tokens": [steps[0].gauges["rollout/tokens"].mean, steps[-1].gauges["rollout/tokens"].mean],
        "stopped": stopped,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": time.perf_counter() - clock,
    }


def written() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--worlds", default=",".join(WORLDS))
    given.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    given.add_argument("--arms", default=";".join(ARMS), help="separated by ;")
    given.add_argument("--seconds", type=float, default=math.inf, help="start no arm after this time")
    o = given.parse_args()
    begun, rows = time.perf_counter(), written()
    for seed in map(int, o.seeds.split(",")):
        for world in o.worlds.split(","):
            done = {(r["world"], r["arm"], r["seed"]) for r in rows}
            missing = [a for a in o.arms.split(";") if (world, a, seed) not in done]
            with tempfile.TemporaryDirectory() as scratch:
                policy = start(world, seed, Path(scratch)) if missing else Path()
                models: dict[str, Path] = {}
                for arm in missing:
                    if time.perf_counter() - begun > o.seconds:
                        return
                    kind = ARMS[arm].model
                    if kind and kind not in models:
                        models[kind] = model(kind, world, seed, policy, Path(scratch))
                    rows.append(play(arm, world, seed, policy, models.get(kind), Path(scratch)))
                    print(json.dumps(rows[-1]), flush=True)
                    RESULTS.write_text(json.dumps({"rows": rows}, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
