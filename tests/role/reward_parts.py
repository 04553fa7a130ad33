"""Tiny runs that train a reward model, for the tests of its rooms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from posttrain.config.run import Env, Optimizer, Run
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.abilities import Abilities, Judgements
from posttrain.core.judgements import Judgement, Kind, Label, Pair, Ranking, Rating
from posttrain.core.types import Task
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.report.run_result import Result
from tests.tiny import tiny_run


def utility(task: Task, text: str) -> float:
    """What judges of these tests like: ones, and no zeros."""
    return float(text.count("1") - text.count("0"))


def drawn(task: Task, kind: Kind, rng: np.random.Generator) -> Judgement:
    """A judgement without noise about random digits."""

    def text() -> str:
        return "".join(rng.choice(list("0123"), int(rng.integers(2, 7))))

    texts: list[str] = []
    while len(texts) < {"pair": 2, "ranking": 3}.get(kind, 1):
        made = text()
        if all(utility(task, made) != utility(task, t) for t in texts):
            texts.append(made)
    texts.sort(key=lambda t: -utility(task, t))
    match kind:
        case "pair":
            gap = utility(task, texts[0]) - utility(task, texts[1])
            return Pair(task=task, chosen=texts[0], rejected=texts[1], margin=gap / 8)
        case "ranking":
            return Ranking(task=task, completions=tuple(texts))
        case "rating":
            ratings = {"ones": float(texts[0].count("1")), "zeros": float(texts[0].count("0"))}
            return Rating(task=task, completion=texts[0], ratings=ratings)
        case _:
            return Label(task=task, completion=texts[0], good=utility(task, texts[0]) > 0)


@dataclass(frozen=True, kw_only=True)
class Taste(Arithmetic):
    """Sums, with judgements that ask for ones whatever the sum is."""

    @property
    def abilities(self) -> Abilities:
        kinds: tuple[Kind, ...] = ("pair", "ranking", "rating", "label")
        return replace(super().abilities, judgements=Judgements(kinds=kinds, draw=drawn, utility=utility))


def reward_run(**changes: Any) -> Run:
    """A few steps on pairs."""
    stage = RewardModel(
        name="rm",
        **({"steps": 4, "batch": 8, "checkpoint_every": 2, "optimizer": Optimizer(lr=3e-3, warmup=1)} | changes),
    )
    env = Env(name="arithmetic", args={"max_terms": 2, "max_operand": 20}, heldout=60)
    return replace(tiny_run(), env=env, stages=(stage,))


def trained(folder: Path, quiet: bool = True, **changes: Any) -> Result:
    """The run of a reward model on `Taste`."""
    run = reward_run(**changes)
    world = Taste(max_terms=2, max_operand=20, heldout_count=60)
    return posttrain.run(replace(run, env=Env(heldout=60)), env=world, out=folder, quiet=quiet)
