"""The labels of steps as a stream of a minibatch, and a process reward model's score at every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.batch import Batch, Packed
from posttrain.core.judgements import Judgement, StepLabels
from posttrain.core.measure.answer_steps import joined
from posttrain.role.judges.step_completion import TokenEnds

SCORE_TOKENS = 4096
"""Packed tokens that are scored at once."""


class TokenScorer(Protocol):
    """A model with a reward head that reads every token."""

    def forward(
        self, packed: Packed, *, entropy: bool, value: bool, rewards: bool = False, logp: bool = True
    ) -> Any: ...

    def train_mode(self, on: bool) -> None: ...


def step_scores(learner: TokenScorer, packed: Packed) -> np.ndarray:
    """float64 [M]: the chance of a right answer after each spoken token, as the reward head says it, without
    gradient."""
    learner.train_mode(False)
    out: list[np.ndarray] = []
    with torch.no_grad():
        for part in packed.split(SCORE_TOKENS):
            given = learner.forward(part, entropy=False, value=False, rewards=True, logp=False).rewards
            out.append(torch.sigmoid(given.outputs[:, 0].double()).cpu().numpy())
    return np.concatenate(out)


def step_labels(judged: Sequence[Judgement], stage: RewardModel, batch: Batch, ends: TokenEnds) -> np.ndarray:
    """float64 [M]: what a process reward model learns at the last token of each labelled step; NaN elsewhere. A neutral
    step (label 0) teaches nothing. Raises DataError: steps that end with another text than the stage says, a step
    without a token of its own, missing values, or no labelled step. The message has the row's place."""
    out = np.full(batch.spoken, math.nan)
    first = np.searchsorted(batch.segment_M, np.arange(len(batch.lengths_S) + 1))
    for s, j in enumerate(judged):
        assert isinstance(j, StepLabels)
        if j.separator != stage.separator:
            raise j.told(
                f"its steps end with {j.separator!r}, and {stage.name} scores steps that end with {stage.separator!r}:"
                f" set {stage.name}.separator and env.args.separator to the same text"
            )
        if stage.soft and not j.values:
            raise j.told(f"it has no values, and {stage.name}.soft=true learns them; set {stage.name}.soft=false")
        own = slice(int(first[s]), int(first[s + 1]))
        tokens = ends.upto(batch.target_M[own], joined(j.steps, j.separator)[1])
        if len(set(tokens)) < len(tokens):
            raise j.told("two of its steps end in the same token: leave the row out, or use a separator of its own")
        hard = [{1: 1.0, 0: math.nan, -1: 0.0}[x] for x in j.labels]
        said = list(j.values) if stage.soft else hard
        if all(math.isnan(x) for x in said):
            raise j.told("none of its steps is right or wrong: leave the row out")
        out[own][np.array(tokens) - 1] = said
    return out
