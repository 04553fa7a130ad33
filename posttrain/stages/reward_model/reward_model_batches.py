"""Minibatches of a reward model, its loss, and its scores on held-out judgements and on a policy's answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.algorithm.preference.preference_minibatch import unit_of_each
from posttrain.algorithm.preference.reward_model_loss import RankingLoss
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core import abilities, seeds
from posttrain.core.batch import Batch
from posttrain.core.judgements import Judgement, Kind, Label, Rating
from posttrain.core.ports import Environment, Learner, PairRenderer
from posttrain.core.streams import RATING, SIDE, STEP, WEIGHT
from posttrain.core.types import Episode
from posttrain.diagnose.reward_quality import flattery
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.role.judges.step_judge import step_labels, step_scores
from posttrain.stages.preference.judged_batches import HELDOUT, AgreementReport, batch_of, completions
from posttrain.system.errors import DataError

PART = 256
"""Held-out judgements that are scored at once."""


def reward_batch(
    judged: Sequence[Judgement], stage: RewardModel, renderer: PairRenderer, context: int, ends: TokenEnds | None = None
) -> Batch:
    """The minibatch of these judgements (`batch_of`), with each judgement's share of the minibatch as WEIGHT.

    Ratings have the stream RATING too, and labels of steps the stream STEP.

    Args:
        ends: finds the tokens at which steps end; needed for labels of steps.

    Raises:
        DataError: all have weight 0; one has no rating of the stage's attributes, or a rating that is no class. The
            message has its place.
    """
    batch = batch_of(judged, renderer, context)
    # first_S: the first spoken token [M] of each sequence. unit_S: the judgement of each sequence. The weight of a
    # judgement stands on all tokens of all its completions. The total counts it once: at the first token of its first
    # sequence.
    first_S = np.searchsorted(batch.segment_M, np.arange(len(batch.lengths_S)))
    unit_S = np.arange(len(first_S)) if batch.unit_E is None else batch.unit_E
    total = float(batch[WEIGHT][first_S[np.searchsorted(unit_S, np.arange(batch.units))]].sum())
    if not total > 0:
        raise DataError("every judgement of the minibatch has weight 0: give at least one a weight above 0")
    batch = batch.having({WEIGHT: batch[WEIGHT] / total})
    if stage.judgement == "steps":
        assert ends is not None
        return batch.having({STEP: step_labels(judged, stage, batch, ends)})
    if stage.judgement != "rating":
        return batch
    rating_SK = np.array([_ratings(j, stage) for j in judged])
    return batch.having({RATING: rating_SK[batch.segment_M]})


def ranking_loss(stage: RewardModel) -> RankingLoss:
    """The loss that a stage asks for."""
    return RankingLoss(
        judged=stage.judgement,
        shape=stage.shape,
        margin=stage.margin,
        centre=stage.centre,
        pairs=stage.pairs,
        regularise=stage.regularise,
        alpha=stage.alpha,
        beta=stage.beta,
    )


def _ratings(judgement: Judgement, stage: RewardModel) -> list[float]:
    """The rating of each attribute of the stage, NaN where the judgement has none."""
    assert isinstance(judgement, Rating)
    ratings = [float(judgement.ratings.get(name, math.nan)) for name in stage.attributes]
    if all(math.isnan(x) for x in ratings):
        rated = ", ".join(judgement.ratings) or "nothing"
        raise judgement.told(
            f"it rates {rated}, and {stage.name} learns {', '.join(stage.attributes)}: leave the row out, or name other"
            f" attributes ({stage.name}.attributes)"
        )
    if any(math.isinf(x) for x in ratings):
        raise judgement.told("a rating is infinite: give a finite number")
    if stage.classes and not (ratings[0] == int(ratings[0]) and 0 <= ratings[0] < stage.classes):
        raise judgement.told(
            f"the rating {ratings[0]:g} of {stage.attributes[0]} is none of the classes 0 to {stage.classes - 1}:"
            f" number them from 0, or learn the number ({stage.name}.classes=0)"
        )
    return ratings


def heldout_of_kind(environment: Environment, kind: Kind) -> list[Judgement]:
    """One judgement of this kind about each held-out task, the same in every evaluation and every run."""
    draw = abilities.judgements(environment).draw
    return [draw(task, kind, seeds.generator(HELDOUT, f"judgement/{task.id}", 0)) for task in environment.heldout]


def heldout_agreement(
    judged: Sequence[Judgement],
    stage: RewardModel,
    learner: Learner,
    renderer: PairRenderer,
    context: int,
    ends: TokenEnds | None = None,
) -> AgreementReport | None:
    """Returns how well the scores order held-out judgements; None where these order nothing.

    Labelled steps: each right step is compared with all wrong steps (the area under the ROC curve). Pairs: the chosen
    with the rejected completion. A ranking: the mean over all its pairs. Single completions (labels, ratings): they are
    joined in random pairs with different labels or ratings. Each is in one pair at most, so the pairs are independent.
    """
    score: list[float] = []
    worth: list[float] = []
    unit: list[int] = []
    for i in range(0, len(judged), PART):
        part = judged[i : i + PART]
        batch = reward_batch(part, stage, renderer, context, ends)
        if stage.judgement == "steps":
            # Only the last token of a labelled step has a label; all others are NaN.
            at = np.flatnonzero(~np.isnan(batch[STEP]))
            score += step_scores(learner, batch)[at].tolist()
            worth += batch[STEP][at].tolist()
            continue
        first = np.searchsorted(batch.segment_M, np.arange(len(batch.lengths_S)))
        score += learner.rewards(batch).astype(np.float64).tolist()
        side_or_rating = batch[RATING if stage.judgement == "rating" else SIDE][first]
        # Several attributes count as their mean; an attribute that was not rated is left out of it.
        worth += (
            (np.nanmean(side_or_rating, 1) if side_or_rating.ndim > 1 else side_or_rating).astype(np.float64).tolist()
        )
        # `i` judgements were in the parts before this one: units are numbered over all parts.
        unit += (i + unit_of_each(batch)).tolist()
    if stage.judgement == "steps":
        return AgreementReport.of_labels(np.array(score), np.array(worth) > 0.5)
    partners, ids = _partners(judged, np.array(worth), np.array(unit)), [j.task.id for j in judged]
    # Single completions are paired at random, so a pair of them is of no one task.
    ids = ids if stage.judgement in ("pair", "ranking") else []
    return AgreementReport.of(np.array(score), np.array(worth), partners, ids)


@dataclass(frozen=True, eq=False)
class ScoredJudgements:
    """Judged completions with the scores that a reward model gives them.

    All arrays are [S], one entry a completion: `score`; `worth`, how it was judged (more is better); `tokens`, its
    length; `flattery`, its number of flattering phrases (these four float64); and `unit`, int64. Completions of one
    unit are compared with each other; -1: with none.
    """

    score: np.ndarray
    worth: np.ndarray
    tokens: np.ndarray
    flattery: np.ndarray
    unit: np.ndarray

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (better, worse): the places of the two completions of each pair inside a unit that were judged
        differently, int64 [P] each."""
        better: list[int] = []
        worse: list[int] = []
        for unit in np.unique(self.unit[self.unit >= 0]).tolist():
            members = np.flatnonzero(self.unit == unit)
            better_at, worse_at = np.nonzero(self.worth[members][:, None] > self.worth[members][None])
            better += members[better_at].tolist()
            worse += members[worse_at].tolist()
        return np.array(better, np.int64), np.array(worse, np.int64)


def scored_judgements(
    environment: Environment, kind: Kind, learner: Learner, renderer: PairRenderer, context: int, *, whole: bool
) -> ScoredJudgements:
    """Judgements about held-out tasks, or with `whole` about all tasks of a finite source, with their scores."""
    draw, source = abilities.judgements(environment).draw, environment.train
    tasks = [*environment.heldout]
    if whole and source.count is not None:
        tasks += [source.task(i) for i in range(source.count)]
    judged = [draw(t, kind, seeds.generator(HELDOUT, f"judgement/{t.id}", 0)) for t in tasks]
    score, worth, tokens, unit = _scores(judged, learner, renderer, context)
    partners = _partners(judged, worth, unit)
    flattering = np.array([float(flattery(text)) for j in judged for text, _ in completions(j)])
    return ScoredJudgements(score, worth, tokens, flattering, partners)


def _scores(
    judged: Sequence[Judgement], learner: Learner, renderer: PairRenderer, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(score, side, number of tokens, number of its judgement), each [S], of the judged completions."""
    # The list begins with an empty part, so that without any judgement the arrays are empty.
    parts: list[tuple[np.ndarray, ...]] = [(np.zeros(0),) * 3 + (np.zeros(0, np.int64),)]
    for i in range(0, len(judged), PART):
        batch = batch_of(judged[i : i + PART], renderer, context)
        spoken = np.bincount(batch.segment_M, minlength=len(batch.lengths_S))
        unit = i + unit_of_each(batch)
        # `cumsum - spoken`: the place of the first spoken token of each completion. Its side stands on all of them.
        parts.append((learner.rewards(batch), batch[SIDE][np.cumsum(spoken) - spoken], spoken, unit))
    score, side, tokens, unit = map(np.concatenate, zip(*parts, strict=True))
    return score.astype(np.float64), side.astype(np.float64), tokens.astype(np.float64), unit


def scored_answers(
    answers: Sequence[Sequence[Episode]],
    worth: Callable[[Episode], float | None],
    learner: Learner,
    renderer: PairRenderer,
    context: int,
) -> ScoredJudgements:
    """The answers of a policy, prompt by prompt, with their scores. The answers to one prompt are a unit.

    Args:
        worth: what an answer is worth; not None for any of them. Values are rounded to 1e-9, so that float noise does
            not order answers.
    """
    episodes = [e for of_prompt in answers for e in of_prompt]
    judged = [Label(task=e.task, completion=e.text, good=True) for e in episodes]
    score, _, tokens, _ = _scores(judged, learner, renderer, context)
    values = [value for e in episodes if (value := worth(e)) is not None]
    return ScoredJudgements(
        score,
        np.round(np.array(values, np.float64), 9),
        tokens,
        np.array([float(flattery(e.text)) for e in episodes]),
        np.repeat(np.arange(len(answers)), [len(of_prompt) for of_prompt in answers]),
    )


def _partners(judged: Sequence[Judgement], worth: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """int64 [S]: the unit of each completion. Single ones are joined in pairs; -1: no partner was left."""
    if not judged or not isinstance(judged[0], Label | Rating):
        return unit
    unit_of, waiting = np.full(len(unit), -1), list[int]()
    # Greedy pairing in a random order that is always the same. All completions that wait have the same worth: two with
    # different worth would have been joined when the second one came.
    for s in seeds.generator(0, "heldout-pairs", len(unit)).permutation(len(unit)).tolist():
        partner = next((waiting_one for waiting_one in waiting if worth[waiting_one] != worth[s]), None)
        if partner is None:
            waiting.append(s)
        else:
            waiting.remove(partner)
            unit_of[s] = unit_of[partner] = s
    return unit_of
