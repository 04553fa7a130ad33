"""Whether a policy learns from itself where it is shown more: SDPO and SDFT on arithmetic, after two kinds of SFT.

    python -m benchmarks.learning.hints --seeds 0,1
    python -m benchmarks.learning.hints --seeds 0 --only told --seconds 200

Both starts imitate running sums, of which 40 % are wrong, as the recipe `arithmetic` does. `untold` has seen nothing
else. `told` was shown a hint in half of its demonstrations, `<3+4=7>` or `<3+4=3+4=7>`, and those were right: it has
learned to use one. Every arm then takes the same number of steps on the same prompts; none is shown an answer under the
policy's own prompt. Printed for each: held-out accuracy at temperature 1, without a hint, before and after.

Written down before any run (no pilot):

1. `untold`: `sdpo` and `sdft` end within .1 of the start or below it. What was never seen is no hint.
2. `told`: `sdft` and `opsd` end more than .1 above the start: behind the answer nearly all is right.
3. `told`: `sdpo` ends above its start, and below `sdft`: some groups have no right answer, and its hints are longer.
4. `told`: `dr_grpo` ends highest.

`sdpo` and `opsd` had teachers with the weights of now when this was written. Both lost what there was (LOG.md), and
`sdpo` has the authors' moving average since; what it was is `sdpo_now`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from benchmarks.learning.from_start import run_from
from posttrain.config.run import Run, Supervised
from posttrain.core import seeds
from posttrain.core.types import Task
from posttrain.environment.gallery import GALLERY
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.hint import Hint
from posttrain.ladder.policy_rows import DR_GRPO, OPD, SDFT, SDPO
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/learning/results/hints.json"
STEPS, RATE = 40, 5e-4


class ToldSums(Arithmetic):
    """Arithmetic in which every other task stands behind a hint, and is then demonstrated without an error."""

    def _train(self, index: int) -> Task:
        task = super()._train(index)
        if index % 2 == 0:
            return task
        right = super().demonstrate(task, "cot", seeds.generator(self.seed, "told", index), 0.0)[1]
        return replace(task, prompt=self.hinted(task if index % 4 == 1 else replace(task, answer=right)))

    def demonstrate(self, task: Task, style: str, rng: np.random.Generator, wrong: float) -> tuple[str, str]:
        return super().demonstrate(task, style, rng, 0.0 if "=" in str(task.prompt) else wrong)


GALLERY["told_sums"] = f"{__name__}:ToldSums"
ARMS: dict[str, tuple[Algorithm, float | None]] = {
    "dr_grpo": (DR_GRPO, None),
    "sdpo": (SDPO, 0.95),
    "sdpo_now": (patch(SDPO, "sdpo_now", "2601.20802", hint=Hint()), None),
    "sdft": (SDFT, None),
    "opsd": (patch(OPD, "opsd", "prime-rl algo/opsd.py", hint=Hint(of="answer")), None),
}
"""Each with the decay of the moving average that it reads."""
STARTS = ("untold", "told")


def start(kind: str, seed: int, folder: Path) -> Path:
    """What all arms of a seed begin with, as a plain model directory. `told` has twice as many steps, so that both have
    seen as many demonstrations without a hint."""
    base = recipe("arithmetic")
    sft = base.stages[0]
    assert isinstance(sft, Supervised)
    if kind == "told":
        base = replace(base, env=replace(base.env, name="told_sums"))
        sft = replace(sft, steps=2 * sft.steps)
    done = posttrain.run(replace(base, seed=seed, stages=(sft,)), out=folder / f"sft-{kind}-{seed}", quiet=True)
    return Path(posttrain.export(done.folder, folder / f"{kind}-{seed}"))


def run_of(arm: str, seed: int, model: Path) -> Run:
    algorithm, ema = ARMS[arm]
    run = run_from(model, DR_GRPO, name=arm, seed=seed, rate=RATE, steps=STEPS)
    stage: Any = run.stages[0]
    optimizer = replace(stage.optimizer, ema=ema)
    return replace(run, stages=(replace(stage, algorithm=algorithm, optimizer=optimizer),))


def play(kind: str, arm: str, seed: int, model: Path, folder: Path) -> dict[str, Any]:
    """One arm: held-out accuracy before and after, and the share of answers that had a hint in the first step."""
    begun = time.perf_counter()
    out = posttrain.run(run_of(arm, seed, model), out=folder / f"{kind}-{arm}-{seed}", quiet=True).folder
    steps = run_reader.steps(out)
    measured = {
        i: [r.episode.reward for r in run_reader.episodes(out, "rl", i, "eval") if r.episode.reward is not None]
        for i in (0, STEPS)
    }
    shares = [s.gauges["teacher/hinted"].mean for s in steps if "teacher/hinted" in s.gauges]
    return {
        "start": kind,
        "arm": arm,
        "seed": seed,
        "before": float(np.mean(measured[0])),
        "after": float(np.mean(measured[STEPS])),
        "hinted": [shares[0], shares[-1]] if shares else None,
        "seconds": time.perf_counter() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--only", choices=STARTS, help="one of the two starts")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    begun = time.perf_counter()
    for seed in map(int, args.seeds.split(",")):
        for kind in [args.only] if args.only else STARTS:
            known = {(r["start"], r["arm"], r["seed"]) for r in rows}
            missing = [a for a in args.arms.split(",") if (kind, a, seed) not in known]
            with tempfile.TemporaryDirectory() as scratch:
                model = start(kind, seed, Path(scratch)) if missing else Path()
                for arm in missing:
                    if time.perf_counter() - begun > args.seconds:
                        return
                    rows.append(play(kind, arm, seed, model, Path(scratch)))
                    print(json.dumps(rows[-1]), flush=True)
                    facts = {"date": time.strftime("%Y-%m-%d"), "steps": STEPS, "rows": rows}
                    RESULTS.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
