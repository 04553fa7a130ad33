"""Judgements made of demonstrations: the right text of a task is preferred to a false one."""

from __future__ import annotations

import numpy as np

from posttrain.core.abilities import Judgements, Write
from posttrain.core.judgements import Judgement, Kind, Label, Pair
from posttrain.core.types import Task
from posttrain.system.errors import ConfigError, DataError, InvariantError

KINDS: tuple[Kind, ...] = ("pair", "label")


def judgements_of(write: Write, style: str) -> Judgements:
    """Pairs of a right and a false demonstration of one style, and single ones with the label of what they are.

    Both texts of a pair are written with the same random numbers, so that they differ by the error alone.
    """

    def draw(task: Task, kind: Kind, rng: np.random.Generator) -> Judgement:
        if kind not in KINDS:
            raise ConfigError(f"demonstrations give judgements of kind {' and '.join(KINDS)}, and not {kind!r}")
        seed = int(rng.integers(1 << 62))
        right, false = (_text(write, task, style, seed, wrong) for wrong in (0.0, 1.0))
        if kind == "label":
            good = bool(rng.random() < 0.5)
            return Label(task=task, completion=right if good else false, good=good)
        if right == false:
            raise DataError(f"the right and the false demonstration of task {task.id!r} are the same text: {right!r}")
        return Pair(task=task, chosen=right, rejected=false)

    return Judgements(kinds=KINDS, draw=draw)


def _text(write: Write, task: Task, style: str, seed: int, wrong: float) -> str:
    _, completion = write(task, style, np.random.default_rng(seed), wrong)
    if not isinstance(completion, str):
        raise InvariantError(
            f"style {style!r} writes episodes of several turns, and a judgement is about one completion: set the"
            " environment's judged_style to a style of one turn, or to ''"
        )
    return completion
