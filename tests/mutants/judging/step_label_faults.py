"""Faults between the steps of answers, their labels by completion, and the process reward model that pays them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from posttrain.core.streams import STEP
from posttrain.faults.planting import fault

Real = Callable[..., Any]

OUTCOME = ("env.rewards.0.steps=outcome", "env.measured=true", "rl.algorithm=grpo")


# --- labels by completion --------------------------------------------------------------------------------------------


@fault(
    "completed_before_the_step",
    seam="posttrain.role.judges.step_completion:begun",
    what="completions go on from a few tokens before the end of the step",
    harm="they write the step anew, so a wrong step has the label of a right one",
    source="trap of C06: the prefix of a step without the step itself",
    needs="process",
)
def _(real: Real) -> Real:
    return lambda e, upto: real(e, max(1, upto - 3))


@fault(
    "step_share_of_another_count",
    seam="posttrain.core.measure.answer_steps:StepValues.soft",
    what="the share of right completions is of one more than were judged",
    harm="a step that is always completed right never has the value 1, and the last one of an answer has a half",
    source="trap of C06: the answer itself counted as a completion, or an outage as a wrong one",
    needs="process",
)
def _(real: Real) -> Real:
    return lambda self: tuple(r / (n + 1) for r, n in zip(self.right, self.asked, strict=True))


@fault(
    "prover_with_replacement",
    seam="posttrain.core.measure.answer_steps:StepValues.best_of",
    what="the value of a best-of-K prover is made of the share of right completions, as if each could be drawn twice",
    harm="it is too low where few of few completions are right, so that rare successes count for less",
    source="trap of C06: 1 - (1 - c / n)^K in place of its unbiased form",
    shows=("label.prover=2",),
    needs="process",
)
def _(real: Real) -> Real:
    def best_of(self: Any, count: int) -> tuple[float, ...]:
        return tuple(1 - (1 - r / n) ** count for r, n in zip(self.right, self.asked, strict=True))

    return best_of


# --- the process reward model learns ---------------------------------------------------------------------------------


@fault(
    "step_labels_late",
    seam="posttrain.stages.reward_model.reward_model_batches:step_labels",
    what="each label is at the end of the step after its own",
    harm="the first wrong step looks right, and the one after it wrong",
    source="labels one step late",
    needs="process",
)
def _(real: Real) -> Real:
    def step_labels(judged: Any, stage: Any, batch: Any, ends: Any) -> np.ndarray:
        out = real(judged, stage, batch, ends)
        for s in range(len(judged)):
            at = np.flatnonzero((batch.segment_M == s) & ~np.isnan(out))
            out[at] = np.roll(out[at], 1)
        return out

    return step_labels


@fault(
    "step_labels_at_every_token",
    seam="posttrain.stages.reward_model.reward_model_batches:step_labels",
    what="tokens inside a step have its label too",
    harm="the model learns to judge a step before it is written, and long steps count most",
    source="trap of C06: labels spread over the tokens of a step",
    needs="process",
)
def _(real: Real) -> Real:
    def step_labels(judged: Any, stage: Any, batch: Any, ends: Any) -> np.ndarray:
        out = real(judged, stage, batch, ends)
        for t in range(len(out) - 2, -1, -1):
            if math.isnan(out[t]) and batch.segment_M[t] == batch.segment_M[t + 1]:
                out[t] = out[t + 1]
        return out

    return step_labels


@fault(
    "step_loss_sign",
    seam="posttrain.algorithm.preference.reward_model_loss:RankingLoss._stepwise",
    what="the loss takes right steps for wrong ones",
    harm="the policy is paid for its errors",
    source="trap of C06: 0 and 1 swapped by a data format",
    needs="process",
)
def _(real: Real) -> Real:
    def stepwise(self: Any, read: Any, given: Any) -> Any:
        read.batch = read.batch.having({STEP: 1 - read.batch[STEP]})
        return real(self, read, given)

    return stepwise


# --- what a policy is paid -------------------------------------------------------------------------------------------


@fault(
    "step_scores_late",
    seam="posttrain.role.judges.step_judge:StepJudge.given",
    what="each step is given the score of the step before it",
    harm="credit for an error falls on the step after it",
    source="labels one step late",
    needs="process",
)
def _(real: Real) -> Real:
    return lambda self, ends, scores: real(self, ends, [scores[0], *scores[:-1]])


@fault(
    "min_taken_as_product",
    seam="posttrain.role.judges.step_judge:aggregated",
    what="the scores of steps are multiplied where their minimum is asked for",
    harm="long answers score low whatever they say",
    source="min taken as product",
    shows=OUTCOME,
    needs="process",
)
def _(real: Real) -> Real:
    return lambda scores, how: math.prod(scores)


# --- implicit process rewards ----------------------------------------------------------------------------------------


@fault(
    "implicit_learns_before_it_scores",
    seam="posttrain.stages.training_step:score",
    what="the implicit process reward model learns the outcomes of a step before it scores its answers",
    harm="its rewards tell the outcome of the very answer, and look better than they are",
    source="trap of 2502.01456: the update of the reward model before, or after, its forward pass",
    needs="implicit",
)
def _(real: Real) -> Real:
    from posttrain.role.events import UNOBSERVED  # here, because it imports torch

    def score(*args: Any, implicit: Any, **kwargs: Any) -> Any:
        implicit.learn(0, real(*args, implicit=implicit, **kwargs), UNOBSERVED)
        return real(*args, implicit=implicit, **kwargs)

    return score


@fault(
    "implicit_outcomes_shifted",
    seam="posttrain.role.learning.implicit_reward_model:outcomes",
    what="the implicit process reward model learns of each answer the outcome of the one before it",
    harm="its rewards are noise, of the right size and with a loss that falls",
    source="pain 18: rewards and completions misaligned",
    needs="implicit",
)
def _(real: Real) -> Real:
    return lambda answers: np.roll(real(answers), 1)


@fault(
    "implicit_return_from_the_start",
    seam="posttrain.algorithm.credit.baseline_values:to_go",
    what="a token's credit counts the implicit process rewards up to it instead of those from it on",
    harm="tokens are paid for what was said before them",
    source="trap of C06: a cumulative sum in the wrong direction",
    needs="implicit",
)
def _(real: Real) -> Real:
    return lambda x_T: np.cumsum(x_T)
