"""Checks that a reward model is trained on what was judged.

Its head gets a gradient and is read at the end of a sequence. The sides of a judgement are those that were judged, have
the same prompt, and end in one stop token each. The loss is the one of its definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from posttrain.checks.data_checks import demonstration_ends_once
from posttrain.checks.judging.step_label_checks import expected_step_loss, steps_are_as_judged
from posttrain.checks.sampling.sampler_checks import reference_unmoved
from posttrain.checks.stage_history import due
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.batch import Batch
from posttrain.core.exchange.row_gradient import held
from posttrain.core.exchange.scores import Reads
from posttrain.core.gauge import Step
from posttrain.core.judgements import Judgement, Label, Pair
from posttrain.core.ports import Learner
from posttrain.core.streams import REFERENCE
from posttrain.role.events import Event, Observer, ObserverReport, PackedEvent
from posttrain.role.learning.logprob_tolerance import packed_text, unmeasured
from posttrain.role.roles import RewardRoles
from posttrain.stages.preference.preference_data import (
    judged_again,
    rows_of,
    sides_are_as_judged,
    sides_share_a_prompt,
    tokens_are_as_judged,
    told,
)
from posttrain.stages.preference.preference_reference import reference_says, starts_at_reference
from posttrain.system.errors import InvariantError

HEAD = "reward_head."
APART = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest difference of a loss from its definition's, relative to it and at least to 1, by the dtype of the model."""
FELT = 1e-6
"""When the token at which a score is read changes, the score must change by more than this, relative to its size."""


def score_reaches(learner: Learner, ids: np.ndarray) -> None:
    """Checks that the reward head and the weights beneath it get a gradient from the score of a fixed text."""
    learner.train_mode(True)
    text = packed_text(ids, prompt=len(ids) // 2)
    rewards = learner.forward(text, Reads(rewards=True, logp=False)).rewards
    assert rewards is not None
    score: torch.Tensor = rewards.score
    parameters = dict(learner.parameters())
    head = {n: p for n, p in parameters.items() if n.startswith(HEAD)}
    without_gradient = [n for n, p in head.items() if not p.requires_grad]
    if not without_gradient and score.requires_grad:
        # `backward` would store them on the parameters, and the first step needs parameters without gradients.
        gradients = torch.autograd.grad(score.sum(), list(parameters.values()), allow_unused=True)
        with_gradient = {
            n
            for n, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None and bool(held(gradient).any())
        }
        without_gradient = [n for n in head if n not in with_gradient]
        beneath = any(n not in head for n in with_gradient)
    else:
        # The error about the head is enough; the weights beneath it are not looked at.
        without_gradient, beneath = list(head), True
    learner.train_mode(False)
    if without_gradient or not head:
        raise InvariantError(
            f"{', '.join(without_gradient) or 'the reward head'} gets no gradient from the score that it makes: it"
            " would stay as it was drawn. Look for a detach, a hook, or requires_grad=False in the reward head"
        )
    if not beneath:
        raise InvariantError(
            "no weight beneath the reward head gets a gradient from its score: the model would stay as it was loaded."
            " Look for a detach between the hidden states and the head"
        )


def reads_the_end(learner: Learner, batch: Batch) -> None:
    """Checks that the score of a sequence is read at its last token: where that of the first sequence is changed, its
    score must change, and all others must stay."""
    # The first two judgements of the minibatch, or the only one.
    two = batch.select(batch.members(0)) if batch.units < 2 else batch.select(np.r_[batch.members(0), batch.members(1)])
    ids = two.ids_N.copy()
    at = int(np.cumsum(two.lengths_S)[0]) - 1
    # The new token is another token of the sequence: the one before, or the first. If both are equal to the old one,
    # the first score is not compared.
    ids[at] = ids[at - 1] if ids[at - 1] != ids[at] else ids[0]
    changed = replace(two, ids_N=ids, target_M=ids[two.source_M + 1])
    before, after = learner.rewards(two), learner.rewards(changed)
    if ids[at] != two.ids_N[at] and abs(after[0] - before[0]) <= FELT * max(1.0, abs(float(before[0]))):
        raise InvariantError(
            "the score of a completion does not depend on its last token, at which this reward head reads: it is read"
            " at another token, or after another cut"
        )
    if np.abs(after[1:] - before[1:]).max(initial=0.0) > 1e-3 * max(1.0, float(np.abs(before).max())):
        raise InvariantError("the score of a completion depends on the sequence beside it in the minibatch")


def expected_loss(
    judged: Sequence[Judgement], stage: RewardModel, score_S: np.ndarray, logp_S: np.ndarray | None = None
) -> float | None:
    """The loss of a minibatch from its definition, in float64. None for ratings, and for a head that reads every token.

    Args:
        score_S: the scores of the completions, judgement by judgement, in the order of `told`.
        logp_S: given where the stage regularises, that is, trains the language head too: the log-prob of each
            completion, or with dpo its log-ratio to the reference.
    """
    if stage.judgement == "rating" or stage.pool == "token":
        return None
    weights = [j.weight if isinstance(j, Pair) else 1.0 for j in judged]
    total, next_S = 0.0, 0
    for j, weight in zip(judged, weights, strict=True):
        completions = told(j)
        r = [float(x) for x in score_S[next_S : next_S + len(completions)]]
        logps = None if logp_S is None else [float(x) for x in logp_S[next_S : next_S + len(completions)]]
        next_S += len(completions)
        # R are the scores. A label: -log sigmoid(+-R). A pair: -log sigmoid(R_c - R_r - margin), by Bradley and Terry.
        # A ranking: the mean over its pairs (2203.02155), or Plackett-Luce, sum_k log sum_(i >= k) exp(R_i - R_k).
        if isinstance(j, Label):
            loss = _minus_log_sigmoid(r[0] if j.good else -r[0])
        elif isinstance(j, Pair):
            loss = _minus_log_sigmoid(r[0] - r[1] - ((j.margin or 0.0) if stage.margin else 0.0))
        elif stage.pairs:
            gaps = [r[a] - r[b] for a in range(len(r)) for b in range(a + 1, len(r))]
            loss = sum(map(_minus_log_sigmoid, gaps)) / len(gaps)
        else:
            loss = sum(float(np.logaddexp.reduce(r[k:])) - r[k] for k in range(len(r) - 1))
        if len(r) > 1:
            # For a pair this is centre * (R_c + R_r)^2 (2312.09244).
            loss += stage.centre * (2 / len(r) * sum(r)) ** 2
        if stage.regularise != "none":
            assert logps is not None
            # The language head is trained besides (2406.10216): on the chosen completion, or on the pair as DPO is.
            x = logps[0] if stage.regularise == "sft" else logps[0] - logps[1]
            loss = (1 - stage.alpha) * loss + stage.alpha * _minus_log_sigmoid(stage.beta * x)
        total += weight * loss
    return total / sum(weights)


def _minus_log_sigmoid(x: float) -> float:
    # Stable for both signs: exp gets no positive number.
    return math.log1p(math.exp(-abs(x))) + max(-x, 0.0)


def loss_is(loss: float, expected: float, dtype: str) -> None:
    """Checks that the `loss` of a minibatch is the `expected` one of its definition."""
    if not abs(loss - expected) <= APART[dtype] * max(1.0, abs(expected)):
        raise InvariantError(
            f"the loss of this minibatch is {loss:.6g}, and that of its judgements with the same scores is"
            f" {expected:.6g} by its definition. Look at the sign of the margin, which of two is the chosen one, the"
            " weights of the judgements, and what is added (centre, regularise)"
        )


class RankingCheck(Observer):
    """The checks of a stage that trains a reward model: before its first step, and on every minibatch."""

    def __init__(self, *, first: bool) -> None:
        self._first = first
        """Whether the first minibatch is still to come. False from the beginning in a resumed stage."""
        self._expected: float | None = None
        """The loss of the minibatch from its definition; None where it is not compared in this step."""

    async def begin(self, roles: RewardRoles) -> None:
        score_reaches(roles.learner, roles.sync.probe_ids)

    def on_event(self, roles: RewardRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PackedEvent):
            return None
        demonstration_ends_once(event.batch, roles.stop_ids, roles.text)
        sides_share_a_prompt(event.batch, roles.text)
        if roles.stage.judgement != "rating":
            judged = judged_again(roles, event.index)
            sides_are_as_judged(event.batch, rows_of(judged))
            units = range(len(judged)) if due(event.index) else [event.index % len(judged)]
            tokens_are_as_judged(roles, event.batch, judged, units)
            if roles.stage.judgement == "steps":
                steps_are_as_judged(roles, event.batch, judged)
                if due(event.index):
                    self._expected = expected_step_loss(roles, event.batch, judged)
            elif due(event.index):
                logp_S = None if roles.stage.regularise == "none" else self._language(roles, event.batch)
                # Scored before the update, so with the same weights as the loss.
                self._expected = expected_loss(judged, roles.stage, roles.learner.rewards(event.batch), logp_S)
        if self._first:
            self._first = False
            if roles.stage.pool == "last":
                reads_the_end(roles.learner, event.batch)
        return None

    def _language(self, roles: RewardRoles, batch: Batch) -> np.ndarray:
        """float64 [S]: log-probs of the completions, or their log-ratios to the reference, where there is one.

        Also checks the reference, the model with which the stage began: its weights have not changed, and before the
        first step every log-ratio to it is 0.
        """
        logp_M, reference, dtype = roles.learner.score(batch), roles.reference, roles.run.model.dtype
        ratio_M = logp_M.astype(np.float64)
        if reference is not None:
            reference_unmoved(reference)
            now_M, temperature = reference.score(batch), batch.sampling.temperature
            reference_says(
                batch[REFERENCE], now_M, unmeasured(dtype, temperature), "the reference log-probs in the minibatch"
            )
            if self._first:
                starts_at_reference(logp_M, now_M, dtype, lambda: roles.learner.exact(batch), temperature)
            ratio_M -= now_M
        return np.bincount(batch.segment_M, ratio_M, len(batch.lengths_S))

    async def after(self, roles: RewardRoles, step: Step) -> ObserverReport | None:
        if self._expected is not None and "ranking/loss" in step.gauges and not step.notes:
            loss_is(step.gauges["ranking/loss"].mean, self._expected, roles.run.model.dtype)
        self._expected = None
        return None
