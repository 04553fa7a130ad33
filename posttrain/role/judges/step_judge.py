"""Process reward models: the labels of steps as a stream to train them, and their judge of the steps of an answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.config.env import Reward
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.scores import Reads
from posttrain.core.judgements import Judgement, StepLabels
from posttrain.core.measure.answer_steps import aggregated, joined, progress, step_ends
from posttrain.core.types import Episode, Segment
from posttrain.core.verdict import Judged, Verdict
from posttrain.role.judges.reward_judge import JudgeMember
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.system.errors import ConfigError, DataError

SCORE_TOKENS = 4096
"""Packed tokens that are scored at once."""


class TokenScorer(Protocol):
    """A model with a reward head that reads every token, as `step_scores` uses it: by a forward pass."""

    def forward(self, packed: Packed, reads: Reads = Reads()) -> Any: ...

    def train_mode(self, on: bool) -> None: ...


def step_scores(learner: TokenScorer, packed: Packed) -> np.ndarray:
    """float64 [M]: the chance of a right answer after each spoken token, as the reward head says it, without
    gradient."""
    learner.train_mode(False)
    out: list[np.ndarray] = []
    with torch.no_grad():
        # `split` keeps the order, so the scores of the parts are simply joined.
        for part in packed.split(SCORE_TOKENS):
            rewards = learner.forward(part, Reads(rewards=True, logp=False)).rewards
            out.append(torch.sigmoid(rewards.outputs[:, 0].double()).cpu().numpy())
    return np.concatenate(out)


def step_labels(judged: Sequence[Judgement], stage: RewardModel, batch: Batch, ends: TokenEnds) -> np.ndarray:
    """float64 [M]: what a process reward model learns at the last token of each labelled step; NaN elsewhere, and for a
    neutral step (label 0). DataError, with the row's place: another separator than the stage's, a step without a token
    of its own, missing values, or no labelled step."""
    out = np.full(batch.spoken, math.nan)
    # Spoken tokens of segment s are first[s] to first[s + 1].
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
        tokens_of_row = slice(int(first[s]), int(first[s + 1]))
        tokens = ends.upto(batch.target_M[tokens_of_row], joined(j.steps, j.separator)[1])
        if len(set(tokens)) < len(tokens):
            raise j.told("two of its steps end in the same token: leave the row out, or use a separator of its own")
        # NaN is no label: the loss leaves such a token out.
        hard = [{1: 1.0, 0: math.nan, -1: 0.0}[x] for x in j.labels]
        wanted = list(j.values) if stage.soft else hard
        if all(math.isnan(x) for x in wanted):
            raise j.told("none of its steps is right or wrong: leave the row out")
        # `out[...]` of a slice is a view, so this writes into `out`. A count of n tokens ends at index n - 1.
        out[tokens_of_row][np.array(tokens) - 1] = wanted
    return out


class StepScorer(Protocol):
    """A model with a reward head that reads every token, as `StepJudge` uses it: by its scores alone."""

    def tokens(self, packed: Packed) -> np.ndarray:
        """float64 [M]: the chance of a right answer after each spoken token, without gradient."""
        ...


@dataclass(eq=False)
class StepJudge:
    """`core.ports.EpisodeJudge` of a process reward model.

    The reward chooses the form of its verdicts (`config.env.Reward.steps`). score: a score of each step, which is no
    part of the outcome. pay: the same scores as payments at the ends of the steps. outcome: one verdict, with the
    steps' scores as one number.
    """

    name: str
    reward: Reward
    member: JudgeMember
    scorer: StepScorer
    separator: str
    ends: TokenEnds
    resolution: float = 1e-5
    """Relative difference up to which two scores count as equal; 1e-5 fits a model in float32."""
    line: str = ""
    """Description of the judge and of what it reads, as a line for people."""

    @property
    def measured(self) -> bool:
        return self.reward.measured

    async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        return await asyncio.to_thread(self.verdicts, episodes)

    def verdicts(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        """The verdicts about each episode. What the model cannot read is `failed`; an answer without a step is
        abstained from."""
        segments: list[Segment] = []
        ends_or_verdict: list[tuple[int, ...] | Verdict] = []
        for e in episodes:
            ends = step_tokens(self.name, e, self.ends, self.separator)
            try:
                segment = self.member.segment(e) if ends else None
            except DataError as error:
                ends_or_verdict.append(Verdict.failed("unreadable", str(error)))
                continue
            ends_or_verdict.append(ends or Verdict.abstain("it has no step"))
            segments += [] if segment is None else [segment]
        # Only episodes with a segment were scored. Their scores come in order; the others have their verdict already.
        scored = iter(self._scores(segments))
        return [
            (Judged(self.name, self.reward.weight, entry, measured=self.reward.measured, by_model=True),)
            if isinstance(entry, Verdict)
            else self.given(entry, next(scored)[np.array(entry) - 1].tolist())
            for entry in ends_or_verdict
        ]

    def given(self, ends: Sequence[int], scores: Sequence[float]) -> tuple[Judged, ...]:
        """The verdicts about one answer, from the end and the score of each step."""
        return step_verdicts(self.name, self.reward, ends, scores, self.resolution)

    def _scores(self, segments: Sequence[Segment]) -> list[np.ndarray]:
        """The score at each spoken token of each segment."""
        if not segments:
            return []
        packed = Packed.of(segments)
        score_M = self.scorer.tokens(packed)
        return [score_M[packed.segment_M == s] for s in range(len(segments))]


def step_tokens(name: str, e: Episode, ends: TokenEnds, separator: str) -> tuple[int, ...]:
    """The number of spoken tokens up to the end of each step.

    Raises:
        ConfigError: the episode has several turns.
    """
    if len(e.turns) > 1:
        raise ConfigError(
            f"reward model {name} scores the steps of an answer, and an answer to task {e.task.id!r} has"
            f" {len(e.turns)} turns: use an environment without tools or seats, or a reward model of whole answers"
        )
    spoken = e.segments[-1].ids[e.segments[-1].mask]
    return ends.upto(spoken, step_ends(ends.text(spoken), separator)) if len(spoken) else ()


def step_verdicts(
    name: str, r: Reward, ends: Sequence[int], scores: Sequence[float], resolution: float, why: Sequence[str] = ()
) -> tuple[Judged, ...]:
    """The verdicts of an episode, as the reward says, from its steps' ends, scores and reasons (`why`)."""
    bad = [x for x in scores if not np.isfinite(x)]
    if bad:
        return (
            Judged(
                name, r.weight, Verdict.failed("not finite", f"it scores {bad[0]}"), measured=r.measured, by_model=True
            ),
        )
    if r.steps == "outcome":
        said = " ".join(why) or ", ".join(f"{x:.3f}" for x in scores)
        verdict = Verdict.value(aggregated(scores, r.aggregate), why=said)
        return (Judged(name, r.weight, verdict, resolution=resolution, measured=r.measured, by_model=True),)
    each = progress(scores) if r.progress else scores
    # Without `measured`: such a reward is about the whole answer, so it has steps=outcome (checked when it is built).
    return tuple(
        Judged(name, r.weight, Verdict.value(x, why=said), end, r.steps == "pay", resolution, by_model=True)
        for end, x, said in zip(ends, each, why or [""] * len(scores), strict=True)
    )


def paid_by(r: Reward) -> str:
    """What a process reward model's scores become under this reward, in words for people."""
    what = {
        "score": "each step's score, read by algorithms that compare steps",
        "pay": "each step's score, paid at its end",
        "outcome": f"the {r.aggregate} of its steps' scores",
    }[r.steps]
    return what + (", as progress over the step before" if r.progress else "")
