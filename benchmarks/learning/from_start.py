"""Runs of one stage of reinforcement from a model that was taught arithmetic badly on purpose: what `updates.py` and
`staleness.py` share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import posttrain
from posttrain.config.run import Model, Optimizer, Reinforce, Run
from posttrain.ladder.algorithm import Algorithm
from posttrain.recipe.recipes import recipe


def start(seed: int, folder: Path) -> Path:
    """The checkpoint that all arms of this seed start from, as a plain model directory."""
    if not (folder / f"start-{seed}").exists():
        base = recipe("arithmetic")
        done = posttrain.run(replace(base, seed=seed, stages=base.stages[:1]), out=folder / f"sft-{seed}", quiet=True)
        posttrain.export(done.folder, folder / f"start-{seed}")
    return folder / f"start-{seed}"


def run_from(
    model: Path,
    algorithm: Algorithm,
    *,
    name: str,
    seed: int,
    rate: float,
    steps: int,
    base: Run | None = None,
    ema: float | None = None,
    **rl: Any,
) -> Run:
    """Reinforcement from a model, for a number of steps whatever it reaches.

    Args:
        base: the run whose stage `rl` and environment these are; None: the recipe `arithmetic`.
        ema: decay of a moving average of the weights.
        rl: further settings of the stage.
    """
    base = base or recipe("arithmetic")
    stage = base.stage("rl")
    assert isinstance(stage, Reinforce)
    ends: dict[str, Any] = {"eval_every": 0, "checkpoint_every": 0, "target": None, "wall_time": None}
    optimizer = Optimizer(lr=rate, warmup=0, ema=ema)
    stage = replace(stage, algorithm=algorithm, optimizer=optimizer, steps=steps, **ends, **rl)
    return Run(
        recipe=name,
        seed=seed,
        threads=1,
        model=Model(path=str(model)),
        env=base.env,
        evaluation=replace(base.evaluation, samples=2),
        stages=(stage,),
    )
