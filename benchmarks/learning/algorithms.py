"""Every algorithm from the same start with the same budget: the gain on held-out arithmetic, paired prompt by prompt.

    python -m benchmarks.learning.algorithms --seeds 0,1,2 --steps 40
    python -m benchmarks.learning.algorithms --only grpo,dapo --seeds 0

For each seed one SFT (imitating running sums, 40 % of them wrong) makes the start; every algorithm then takes the same
number of controller steps on the same prompts. The gain of a prompt is its accuracy after minus before on the same
sampling seeds; the bound is the lower end of the 95 % interval of the mean gain. Writes
docs/research/algorithm-table.md and benchmarks/learning/results/algorithms.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import posttrain
from posttrain.config.run import Model, Reinforce, Run
from posttrain.core.measure.interval import Score
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import StepMean
from posttrain.ladder.policy_rows import LADDER, VAPO
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/learning/results/algorithms.json"


REGIME: dict[str, tuple[Algorithm, str]] = {
    "vapo": (
        patch(VAPO, "vapo", VAPO.paper, baseline=replace(VAPO.baseline, length_alpha=1.0)),
        (
            "is the argued exception: it ran with baseline.length_alpha=1, since the paper's 0.05 is for answers of"
            " thousands of tokens, and gives lambda 0 up to 20 tokens. With it accuracy fell to 0.01; so does ppo with"
            " credit_lambda=0 (0.07), so it is the one-step credit of an untrained value. The published number is for"
            " long answers and values that know, and is ahead there:"
            " [miniature](miniatures.md#values-over-long-answers)"
        ),
    ),
}
"""Algorithms whose published numbers are meant for another regime than answers of some 14 tokens: what ran instead, and
why."""


TURNS = ("mt_grpo", "gigpo", "echo")
"""Lines that differ from others only where an episode has several turns."""
HINTED = tuple(name for name, a in LADDER.items() if a.hint is not None)
"""Lines whose teacher is shown a hint. This start has never seen one, so `hints.py` measures them apart."""


@dataclass(frozen=True)
class Row:
    """One algorithm on one seed."""

    algorithm: str
    seed: int
    before: float
    after: float
    gain: float
    low: float
    moved: int
    """Optimizer steps that moved weights."""
    seconds: float


def start(seed: int, folder: Path) -> Path:
    """The checkpoint every algorithm of this seed starts from, as a plain model directory."""
    base = recipe("arithmetic")
    done = posttrain.run(replace(base, seed=seed, stages=base.stages[:1]), out=folder / "sft", quiet=True)
    return posttrain.export(done.folder, folder / "start")


def accuracies(folder: Path, index: int) -> dict[str, float]:
    """Per held-out task, the mean raw outcome of the evaluation after `index` steps."""
    sums: dict[str, list[float]] = {}
    for recorded in run_reader.episodes(folder, "rl", index, "eval"):
        if recorded.episode.reward is not None:
            sums.setdefault(recorded.episode.task.id, []).append(recorded.episode.reward)
    return {task: float(np.mean(x)) for task, x in sums.items()}


def teacher(seed: int, steps: int, model: Path, folder: Path) -> str:
    """What distillation learns from: the start after `steps` steps of dr_grpo, as a plain model directory."""
    if not (folder / "teacher").exists():
        play("dr_grpo", seed, steps, model, folder / "teaching")
        posttrain.export(folder / "teaching" / "dr_grpo", folder / "teacher")
    return str(folder / "teacher")


def play(name: str, seed: int, steps: int, model: Path, folder: Path) -> Row:
    """One algorithm from the start for `steps` controller steps, stopping for nothing."""
    base = recipe("arithmetic")
    stage = base.stage("rl")
    assert isinstance(stage, Reinforce)
    chosen = REGIME[name][0] if name in REGIME else LADDER[name]
    reference = teacher(seed, steps, model, folder) if LADDER[name].taught else None
    stage = replace(
        stage,
        algorithm=chosen,
        reference=reference,
        steps=steps,
        eval_every=0,
        checkpoint_every=0,
        target=None,
        wall_time=None,
    )
    env = (
        replace(base.env, args={**base.env.args, "judge_steps": True})
        if isinstance(LADDER[name].baseline, StepMean)
        else base.env
    )
    run = Run(
        recipe=name,
        seed=seed,
        threads=1,
        model=Model(path=str(model)),
        env=env,
        evaluation=base.evaluation,
        stages=(stage,),
    )
    begun = time.perf_counter()
    result = posttrain.run(run, out=folder / name, quiet=True)
    before, after = accuracies(result.folder, 0), accuracies(result.folder, result.stages[0].steps)
    gain = Score.of([after[t] - before[t] for t in before], -1.0, 1.0)
    return Row(
        name,
        seed,
        float(np.mean(list(before.values()))),
        float(np.mean(list(after.values()))),
        gain.mean,
        gain.low,
        result.stages[0].optimizer_steps,
        time.perf_counter() - begun,
    )


def page(rows: list[Row], steps: int) -> str:
    """docs/research/algorithm-table.md."""
    names, seeds = list(dict.fromkeys(r.algorithm for r in rows)), len({r.seed for r in rows})
    lines = [
        "# Algorithms side by side",
        "",
        (
            "For people who doubt that an algorithm works here. After this page you know that each of"
            " them learned on the same start and prompts, and how"
        ),
        "surely.",
        "",
        (
            f"Same start, same prompts, {steps} controller steps each, seeds"
            f" {', '.join(str(s) for s in sorted({r.seed for r in rows}))}; held-out accuracy"
        ),
        (
            "sampled at temperature 1. `gain` is paired prompt by prompt, with the lower end of its 95 % interval,"
            " worst seed shown."
        ),
        (
            "Written by `python -m benchmarks.learning.algorithms`. This is a check that each learns, not a ranking:"
            " hyperparameters are shared."
        ),
        "",
        (
            "| algorithm | before | after | mean gain | worst seed's lower bound | optimizer steps that moved weights |"
            " seconds a seed |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        mine = [r for r in rows if r.algorithm == name]
        mean = {f: float(np.mean([getattr(r, f) for r in mine])) for f in ("before", "after", "gain", "seconds")}
        few = f" ({len(mine)} of {seeds} seeds)" if len(mine) < seeds else ""
        lines.append(
            f"| {name}{few} | {mean['before']:.3f} | {mean['after']:.3f} | {mean['gain']:+.3f} |"
            f" {min(r.low for r in mine):+.3f} | {', '.join(str(r.moved) for r in mine)} | {mean['seconds']:.0f} |"
        )
    lines += [
        "",
        (
            "- Algorithms that differ only in their trust region coincide: with one optimizer step a step it is silent"
            " (law 3). Where they part: [several updates](several-updates.md), miniatures.md."
        ),
    ]
    if absent := [f"`{n}`" for n in TURNS if n not in names]:
        lines.append(f"- {' and '.join(absent)} read the turns of an episode, and these answers are of one turn.")
    if absent := [f"`{n}`" for n in HINTED if n not in names]:
        lines.append(
            f"- {' and '.join(absent)} learn from a policy that is shown a hint, and this start has never seen one:"
            " measured apart, after an SFT with hints (`python -m benchmarks.learning.hints`, LOG.md)."
        )
    lines += [*(f"- `{name}` {why}." for name, (_, why) in REGIME.items() if name in names)]
    lines += (
        [
            "- `opd`, `iw_opd`, `mopd` and `gkd` learn from a teacher, not from rewards: the same start after as many"
            " steps of dr_grpo."
        ]
        if "opd" in names
        else []
    )
    lines += (
        ["- `grpo_process` is also given a verdict on every running sum (env.args.judge_steps=true)."]
        if "grpo_process" in names
        else []
    )
    return "\n".join(lines) + "\n"


def written(steps: int) -> list[Row]:
    """Rows of the results file, where they were run for as many steps."""
    facts = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"steps": 0}
    return [Row(**r) for r in facts["rows"]] if facts["steps"] == steps else []


def write(rows: list[Row], steps: int) -> None:
    """The results file and the page, after every row: a run that is cut short leaves what it found."""
    order = list(LADDER)
    rows = sorted(rows, key=lambda r: (r.seed, order.index(r.algorithm)))
    (ROOT / "docs/research/algorithm-table.md").write_text(page(rows, steps), encoding="utf-8")
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "steps": steps,
        "rows": [asdict(r) for r in rows],
    }
    RESULTS.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--only",
        default=",".join(n for n in LADDER if n not in (*TURNS, *HINTED)),
        help="comma-separated algorithm names",
    )
    parser.add_argument("--dry", action="store_true", help="print the table, write nothing")
    parser.add_argument(
        "--add", action="store_true", help="keep the rows of the results file and run only what is missing there"
    )
    args = parser.parse_args()
    names = args.only.split(",")
    rows = written(args.steps) if args.add else []
    for seed in (int(s) for s in args.seeds.split(",")):
        missing = [n for n in names if not any((r.algorithm, r.seed) == (n, seed) for r in rows)]
        with tempfile.TemporaryDirectory() as scratch:
            model = start(seed, Path(scratch)) if missing else Path()
            for name in missing:
                rows.append(play(name, seed, args.steps, model, Path(scratch)))
                r = rows[-1]
                if not args.dry:
                    write(rows, args.steps)
                print(
                    f"seed {seed} {name:15s} {r.before:.3f} -> {r.after:.3f}  gain {r.gain:+.3f} (>= {r.low:+.3f}) "
                    f" {r.moved} steps  {r.seconds:.0f} s",
                    flush=True,
                )
    print(page(rows, args.steps))


if __name__ == "__main__":
    main()
