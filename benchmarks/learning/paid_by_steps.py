"""RL that is paid by a process reward model alone, on sums and on longer chains: whether it trains a policy, and what
labels of answers that end early (`label.early_ends`) are for.

    python -m benchmarks.learning.paid_by_steps --arms recipe  # the recipe as it is: both worlds, seeds 0, 1, 2
    python -m benchmarks.learning.paid_by_steps --worlds sums --seeds 0  # all arms, in one world with one seed
    python -m benchmarks.learning.paid_by_steps --seconds 600            # start nothing after ten minutes

Of each world and seed one imitation is the start. Two process reward models learn from its answers: `whole` from whole
answers alone, `early` also from answers that end after an earlier step (`label.early_ends`), with as many steps of
training. Then arms of RL from the start; all but `outcome` are paid by one of the models and by nothing else. Held-out
accuracy is the environment's verdict; the gain is paired task by task. Prints a row for each arm, and adds it to
benchmarks/learning/results/paid_by_steps.json.

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

1 and 2 were wrong, and the runs were ended. Then, on seed 7 alone: a model of 6,144 answers with four completions a
step orders .69 of right and wrong planted chains after 800 steps, .52 after 2,400, when its training loss is half as
large: it knows its answers by heart. With early ends of the same answers, .56. Of 23,000 answers with one completion a
step, which take two to three times as long to label, .73 after 1,200 steps. RL by the minimum of its scores with a KL
of .5, at 3e-4 in place of 5e-4, 40 steps: .534 -> .709 [+.129, +.214], and still rising; a KL of .2 at 5e-4: .611
[+.021, +.131]. On chains of five and six terms a model of 18,000 such answers learns next to nothing (.55), and its
policy gains nothing: .576 -> .562. With early ends of 6,144 answers: .644 [+.027, +.105] by the minimum with a KL of .5
at 5e-4, and .374 [-.252, -.145] by `grpo_process` with the same KL. On sums of three to six terms the same model learns
to add from the short ones, and its policy gains on the long ones too.

So these became the recipe's settings, and the arm `recipe` is the recipe as it is, all of its stages in one run.
Written down before it was run:

6. On sums it ends above its start on each of seeds 0, 1, 2, with the lower end of the gain above 0.
7. On sums it gains .1 at least on each seed.
8. On sums of three to six terms (seed 7: .544 -> .749) it ends above its start on each of these seeds, with lower ends
   above 0 on all of them and on those of five and six terms alone.
9. Its answers stay as long as they were (tokens within a fifth): nothing is gained by stopping early.
10. It ends below .85 on sums, which the outcome alone reaches on sums: what the model pays is not exact.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from posttrain.config.env import Reward
from posttrain.config.run import Model, Optimizer, Reinforce, Run, Supervised
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.measure.interval import Score
from posttrain.core.sampling import Sampling
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GRPO, GRPO_PROCESS
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/learning/results/paid_by_steps.json"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class ChainWorld:
    """Sums of so many terms, and how long their chains are imitated."""

    terms: tuple[int, int]
    sft: int
    label: int
    """Steps of labelling, but for the recipe's own."""
    heldout: int = 200


WORLDS: Mapping[str, ChainWorld] = {
    "sums": ChainWorld((3, 4), 200, 16),
    "chains": ChainWorld((5, 6), 300, 8),
    "to six": ChainWorld((3, 6), 300, 8, heldout=400),
}
LONG = 5
"""Terms of the sums whose gain is told separately in the last of them."""


@dataclass(frozen=True)
class PaidArm:
    """How RL is paid."""

    model: str
    """`early`, `whole`, `own` for that of the recipe, or '' for the environment's outcome alone."""
    least: bool = False
    """Whether the minimum of the steps' scores is the answer's reward (GRPO with a KL of .5), in place of the scores of
    all steps (`grpo_process`)."""


ARMS: Mapping[str, PaidArm] = {
    "recipe": PaidArm("own", least=True),
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
    env = replace(base.env, args=args, heldout=own.heldout, rewards=(), measured=False)
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
    label = replace(label, prompts=128, siblings=2, completions=4, steps=WORLDS[world].label, sampling=SAMPLING)
    label = replace(label, early_ends=kind == "early")
    prm = replace(prm, steps=TRAINED, hands_on=True)
    run = replace(imitation(world, seed), model=Model(path=str(begun)), stages=(label, prm))
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


def shipped(world: str, seed: int) -> Run:
    """The recipe as it is, in a world, with all of its stages."""
    run, own = recipe("prm"), imitation(world, seed)
    env = replace(run.env, args=own.env.args, heldout=own.env.heldout)
    return replace(run, seed=seed, env=env, stages=(own.stages[0], *run.stages[1:]))


def verdicts(folder: Path, index: int) -> dict[str, float]:
    """Of each held-out prompt the share of answers that the environment calls right."""
    found: dict[str, list[float]] = {}
    for recorded in run_reader.episodes(folder, "rl", index, "eval"):
        own = [j.verdict.score for j in recorded.episode.verdicts if j.source == "arithmetic" and j.end is None]
        found.setdefault(str(recorded.episode.task.prompt), []).append(own[0] or 0.0)
    return {task: float(np.mean(x)) for task, x in found.items()}


def gained(before: Mapping[str, float], after: Mapping[str, float], tasks: Sequence[str]) -> list[float] | None:
    """The gain on some tasks with its 95 % interval; None where there are none, or nothing was measured after."""
    if not after or not tasks:
        return None
    found = Score.of([after[t] - before[t] for t in tasks], -1.0, 1.0)
    return [found.mean, found.low, found.high]


def play(arm: str, world: str, seed: int, begun: Path, paid: Path | None, folder: Path) -> dict[str, Any]:
    clock, stopped = time.perf_counter(), ""
    run = shipped(world, seed) if arm == "recipe" else rl(arm, world, seed, begun, paid)
    out = folder / f"rl-{world}-{arm.replace(', ', '-')}-{seed}"
    try:
        posttrain.run(run, out=out, quiet=True)
    except posttrain.PosttrainError as error:
        stopped = str(error).split(":")[0][:120]
    steps = [s for s in run_reader.steps(out) if s.stage == "rl"]
    before, after = (verdicts(out, i) for i in (0, run.stages[-1].steps))
    long = [t for t in before if t.count("+") + 1 >= LONG]
    return {
        "world": world,
        "arm": arm,
        "seed": seed,
        "before": float(np.mean(list(before.values()))),
        "after": float(np.mean(list(after.values()))) if after else 0.0,
        "gain": gained(before, after, list(before)),
        "long": gained(before, after, long),
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
                policy = start(world, seed, Path(scratch)) if set(missing) - {"recipe"} else Path()
                models: dict[str, Path] = {}
                for arm in missing:
                    if time.perf_counter() - begun > o.seconds:
                        return
                    kind = ARMS[arm].model
                    if kind in ("early", "whole") and kind not in models:
                        models[kind] = model(kind, world, seed, policy, Path(scratch))
                    rows.append(play(arm, world, seed, policy, models.get(kind), Path(scratch)))
                    print(json.dumps(rows[-1]), flush=True)
                    RESULTS.write_text(json.dumps({"rows": rows}, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
