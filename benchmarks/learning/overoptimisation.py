"""A policy against reward models that learned from too few pairs, with the truth beside the reward (2210.10760).

    python -m benchmarks.learning.overoptimisation                  # seeds 0, 1, 2
    python -m benchmarks.learning.overoptimisation --seeds 0 --dry  # one, and write nothing
    python -m benchmarks.learning.overoptimisation --page  # the statements and the pictures again, from the record
    python -m benchmarks.learning.overoptimisation --regularised  # plain and regularised (2406.10216); printed

The world is `replies`: its judges' taste is planted, so the gold score of every answer is known. A policy imitates
replies, reward models learn from pairs of them, and the policy is then chosen by best-of-n or trained by RL against
them. Both are drawn by sqrt KL to the imitation. Writes results/overoptimisation.json and
docs/research/overoptimisation/*.svg. The predictions were registered in docs/research/LOG.md before the first run.
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
from benchmarks.miniatures.draw import svg
from benchmarks.miniatures.miniature import Curve, Figures, Picture, Statement, mean
from posttrain.config.env import Reward
from posttrain.config.run import Model, Optimizer, Reinforce, Run, Supervised
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.diagnose.rules.notes_once import findings_of
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GRPO
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/learning/results/overoptimisation.json"
PICTURES = ROOT / "docs/research/overoptimisation"
SEEDS = (0, 1, 2)
WEAK, STRONG, BATCH, MEMBERS = 40, 250, 64, 4
"""Steps of a weak and of a strong reward model, pairs a step, and members of the ensembles."""
STEPS, GROUPS, WINDOW = 60, 16, 8
"""RL steps, groups of 8 a step, and steps of which figures are means: 1,024 answers to fresh prompts."""
DRAWS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = 200
"""Held-out prompts with 64 answers each, for best-of-n."""
NONE = 1e-6
"""Coefficient of a KL that is measured and holds nothing back."""


@dataclass(frozen=True)
class Arm:
    """One way to train against reward models."""

    models: tuple[str, ...]
    coef: float = NONE
    pessimism: float = 0.0
    worst: bool = False


FEW = tuple(f"weak{i}" for i in range(MEMBERS))
ARMS: Mapping[str, Arm] = {
    "weak, no KL": Arm(FEW[:1]),
    "weak, KL .1": Arm(FEW[:1], coef=0.1),
    "weak, KL .5": Arm(FEW[:1], coef=0.5),
    "mean of 4, no KL": Arm(FEW),
    "mean - std of 4, no KL": Arm(FEW, pessimism=1.0),
    "worst of 4, no KL": Arm(FEW, worst=True),
    "strong, no KL": Arm(("strong",)),
}
FREE, HELD, TIGHT, MEAN, PESSIMIST, WORST, MANY = ARMS
SHARES = (0.01, 0.3)
"""Shares of the language head's loss in a regularised reward model; .01 is that of the authors' code."""


def base(seed: int) -> Run:
    """The recipe's world, model and imitation."""
    run = recipe("rlhf")
    env = replace(run.env, rewards=(), measured=False)
    sft = run.stage("sft")
    assert isinstance(sft, Supervised)
    return replace(run, recipe="overoptimisation", seed=seed, env=env, stages=(replace(sft, eval=False),))


def reward_model(start: Path, seed: int, steps: int, **more: Any) -> Run:
    """From the weights of the imitation; head and pairs are drawn by the seed."""
    settings: dict[str, Any] = {"centre": 0.01, "optimizer": Optimizer(lr=2e-3), **more}
    stage = RewardModel(name="reward_model", steps=steps, batch=BATCH, **settings)
    return replace(base(seed), model=Model(path=str(start)), stages=(stage,))


def rl(start: Path, seed: int, arm: Arm, models: Mapping[str, Path]) -> Run:
    paths = "+".join(str(models[m]) for m in arm.models)
    reward = Reward(function=f"model:{paths}", combine="worst" if arm.worst else "mean", pessimism=arm.pessimism)
    stage = recipe("rlhf").stage("rl")
    assert isinstance(stage, Reinforce)
    stage = replace(
        stage,
        algorithm=patch(GRPO, "grpo", "", pull=KL(coef=arm.coef)),
        steps=STEPS,
        prompts=GROUPS,
        eval=False,
        eval_every=0,
    )
    env = replace(base(seed).env, rewards=(reward,), measured=True)
    return replace(base(seed), model=Model(path=str(start)), env=env, stages=(stage,))


def best_of(proxy_PN: np.ndarray, gold_PN: np.ndarray, n: int) -> tuple[float, float]:
    """Mean (proxy, gold) of the proxy's favourite among n of the N answers to each prompt, over all choices of n: the
    answer with i smaller ones is the favourite of C(i, n - 1) of C(N, n)."""
    _, total = proxy_PN.shape
    share = np.array([math.comb(i, n - 1) / math.comb(total, n) for i in range(total)])
    order = np.argsort(proxy_PN, 1, kind="stable")
    proxy, gold = (float((np.take_along_axis(x, order, 1) @ share).mean()) for x in (proxy_PN, gold_PN))
    return proxy, gold


def answers(start: Path, seed: int, models: Mapping[str, Path]) -> tuple[np.ndarray, np.ndarray]:
    """(proxy, gold), each [PROMPTS, 64]: answers of the imitation to held-out prompts."""
    run = rl(start, seed, ARMS[FREE], models)
    env = [f"env={run.env.name}", *(f"env.args.{k}={v}" for k, v in run.env.args.items()), f"env.heldout={PROMPTS}"]
    env += [f"env.rewards={run.env.rewards[0].function}", "env.measured=true"]
    report = posttrain.evaluate(start, *env, samples=DRAWS[-1], max_tokens=32, quiet=True)
    both = [[(e.reward, e.truth) for e in g.episodes] for g in report.groups]
    found = np.array(both, np.float64)
    return found[..., 0], found[..., 1]


def curve(folder: Path) -> np.ndarray:
    """float64 [STEPS, 3]: (KL to the imitation in nats an answer, proxy, gold) of each step's samples."""
    return np.array(
        [
            (
                s.gauges["policy/kl_reference"].mean * s.gauges["rollout/tokens"].mean,
                s.gauges["rollout/reward"].mean,
                s.gauges["rollout/truth"].mean,
            )
            for s in run_reader.steps(folder)
            if s.stage == "rl"
        ]
    )


def play(seed: int, folder: Path) -> dict[str, Any]:
    """One seed: figures of every arm, and its curves by step."""
    posttrain.run(base(seed), out=folder / "sft", quiet=True)
    start = folder / "sft"
    models: dict[str, Path] = {}
    figures: dict[str, dict[str, float]] = {"reward models": {}}
    for i, name in enumerate((*FEW, "strong")):
        models[name] = folder / name
        made = reward_model(start, 100 * (seed + 1) + i, STRONG if name == "strong" else WEAK)
        [done] = posttrain.run(made, out=models[name], quiet=True).stages
        assert done.agreement is not None
        figures["reward models"][name] = done.agreement[0]
    proxy, gold = answers(start, seed, models)
    scale = (float(proxy.mean()), float(proxy.std()))
    chosen = {n: best_of(proxy, gold, n) for n in DRAWS}
    figures["best of n"] = {f"gold, n = {n}": g for n, (_, g) in chosen.items()}
    figures["best of n"] |= {f"proxy, n = {n}": (p - scale[0]) / scale[1] for n, (p, _) in chosen.items()}
    curves: dict[str, list[list[float]]] = {}
    for name, arm in ARMS.items():
        out = folder / name.replace(" ", "_")
        posttrain.run(rl(start, seed, arm, models), out=out, quiet=True)
        x = curve(out)
        curves[name] = x.round(5).tolist()
        figures[name] = told(x, {f.rule for f in findings_of(run_reader.steps(out))})
        print(seed, name, {k: round(v, 3) for k, v in figures[name].items()}, flush=True)
    return {"seed": seed, "figures": figures, "curves": curves}


def regularised(seed: int, folder: Path) -> Figures:
    """Figures of RL without a KL against one weak model: plain, and with each of `SHARES`. All learn from the same
    pairs and begin with the same head."""
    posttrain.run(base(seed), out=folder / "sft", quiet=True)
    figures: dict[str, dict[str, float]] = {}
    for share in (0.0, *SHARES):
        name = f"share {share:g}"
        more = {"regularise": "sft", "alpha": share} if share else {}
        made = reward_model(folder / "sft", 100 * (seed + 1), WEAK, **more)
        [done] = posttrain.run(made, out=folder / f"rm {share:g}", quiet=True).stages
        assert done.agreement is not None
        run = rl(folder / "sft", seed, Arm(("one",)), {"one": folder / f"rm {share:g}"})
        posttrain.run(run, out=folder / name, quiet=True)
        rules = {f.rule for f in findings_of(run_reader.steps(folder / name))}
        figures[name] = {"agreement": done.agreement[0], **told(curve(folder / name), rules)}
        print(seed, name, {k: round(v, 3) for k, v in figures[name].items()}, flush=True)
    return figures


def told(x: np.ndarray, rules: set[str]) -> dict[str, float]:
    """The figures of one RL run: means over `WINDOW` steps."""
    smooth = np.array([x[i : i + WINDOW].mean(0) for i in range(len(x) - WINDOW + 1)])
    best = int(smooth[:, 2].argmax())
    return {
        "gold, first": float(x[0, 2]),
        "gold, best": float(smooth[best, 2]),
        "gold, last": float(smooth[-1, 2]),
        "sqrt KL at the best": math.sqrt(max(float(smooth[best, 0]), 0.0)),
        "sqrt KL, last": math.sqrt(max(float(smooth[-1, 0]), 0.0)),
        "proxy at gold's best": float(smooth[best, 1]),
        "proxy, last": float(smooth[-1, 1]),
        "the rule spoke": float("reward_without_truth" in rules),
    }


def judge(each: Sequence[Figures]) -> list[Statement]:
    """What was predicted, and whether it came."""
    last, best, spoke = "gold, last", "gold, best", "the rule spoke"
    middle = mean(each)
    bon = [middle["best of n"][f"gold, n = {n}"] for n in DRAWS]

    def always(text: str, holds: Any) -> Statement:
        return Statement(text, all(holds(f) for f in each))

    return [
        always(
            "1. weak, no KL: gold ends below its best by more than .1, and the proxy rises further, on every seed",
            lambda f: f[FREE][last] < f[FREE][best] - 0.1 and f[FREE]["proxy, last"] > f[FREE]["proxy at gold's best"],
        ),
        always("2. KL .5 ends with more gold than no KL, on every seed", lambda f: f[TIGHT][last] > f[FREE][last]),
        always(
            "3. KL .5 ends within .05 of its best gold, on every seed",
            lambda f: f[TIGHT][last] > f[TIGHT][best] - 0.05,
        ),
        Statement(
            "4. best of n: gold rises up to n = 64, each fourfold n by less than the one before, in the mean",
            bon[6] > bon[4] > bon[2] > bon[0] and bon[2] - bon[0] > bon[4] - bon[2] > bon[6] - bon[4],
        ),
        Statement(
            "5. the mean of 4 ends with more gold than one, and mean - std with more than that, in the mean",
            middle[PESSIMIST][last] > middle[MEAN][last] > middle[FREE][last],
        ),
        Statement(
            "6. the worst of 4 ends with more gold than one, in the mean", middle[WORST][last] > middle[FREE][last]
        ),
        always(
            "7. without KL ensembles lose gold too: mean of 4 ends below its best by more than .05, on every seed",
            lambda f: f[MEAN][last] < f[MEAN][best] - 0.05,
        ),
        always(
            "8. six times the pairs end with more gold than 4 weak models, without KL, on every seed",
            lambda f: f[MANY][last] > max(f[MEAN][last], f[PESSIMIST][last], f[WORST][last]),
        ),
        always(
            "9. reward_without_truth speaks in weak, no KL, and not in KL .5, on every seed",
            lambda f: f[FREE][spoke] == 1 and f[TIGHT][spoke] == 0,
        ),
    ]


def write(played: Sequence[Mapping[str, Any]]) -> None:
    """The pictures: gold by sqrt KL, of RL and best-of-n; and gold and proxy by step without KL."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    curves: dict[str, Curve] = {}
    for name in ARMS:
        x = np.mean([p["curves"][name] for p in played], 0)
        x = np.array([x[i : i + WINDOW].mean(0) for i in range(0, len(x) - WINDOW + 1, 2)])
        order = np.maximum.accumulate(x[:, 0])  # KL falls a little at times: the line goes on
        curves[name] = Curve(np.sqrt(np.maximum(order, 0)).tolist(), x[:, 2].tolist())
    middle = mean([p["figures"] for p in played])
    kl = [math.sqrt(math.log(n) - (n - 1) / n) for n in DRAWS]
    curves["best of n, weak"] = Curve(kl, [middle["best of n"][f"gold, n = {n}"] for n in DRAWS])
    picture = Picture("Gold score against what was optimised", "sqrt KL to the imitation (nats an answer)", "gold")
    (PICTURES / "gold.svg").write_text(svg(curves, picture), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    parser.add_argument("--page", action="store_true", help="from the record, without playing")
    parser.add_argument("--regularised", action="store_true", help="regularised reward models; write nothing")
    args = parser.parse_args()
    if args.regularised:
        found: list[Figures] = []
        for seed in map(int, args.seeds.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                found.append(regularised(seed, Path(folder)))
        for arm, row in mean(found).items():
            print(f"{arm:24s} " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
        return
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"played": []}
    played = {p["seed"]: p for p in stored["played"]}
    for seed in [] if args.page else map(int, args.seeds.split(",")):
        begun = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            played[seed] = {**play(seed, Path(folder)), "seconds": round(time.process_time() - begun, 1)}
        if not args.dry:
            RESULTS.write_text(json.dumps({"played": [played[s] for s in sorted(played)]}, indent=1) + "\n")
    each = [played[s]["figures"] for s in sorted(played)]
    for arm, row in mean(each).items():
        print(f"{arm:24s} " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
    for s in judge(each):
        print("yes" if s.true else "NO ", s.text)
    if not args.dry:
        write([played[s] for s in sorted(played)])


if __name__ == "__main__":
    main()
