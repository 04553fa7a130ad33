"""Checks that an implicit process reward model scores before it learns, and learns the outcomes of the step's
answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.checks.stage_history import due
from posttrain.core.batch import Batch, Packed
from posttrain.core.gauge import Step
from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import IMPLICIT, OUTCOME, REFERENCE
from posttrain.role.events import Event, Observer, ObserverReport, OutcomesEvent, ScoredEvent
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError

NOISE = {"float32": 1e-3}
"""Largest difference of one log-prob in two passes of the same weights, in nats; `COARSE` in any other dtype."""
COARSE = 0.2


class ImplicitCheck(Observer):
    """An implicit process reward model scores a step first, and then learns the outcomes of its answers. In every step:
    no update between the step before and the scoring, and the outcome of each scored answer is learned. At `due` steps:
    one answer's scores are those of its tokens alone, and the loss is the cross entropy of scores and outcomes."""

    def __init__(self) -> None:
        self._updates = 0
        self._groups: Sequence[ScoredGroup] = ()
        self._expected: tuple[float, float] | None = None
        """The loss of the step, and how far off rounding may put it."""

    async def begin(self, roles: ReinforceRoles) -> None:
        # A resumed run goes on with a model that has learned.
        if roles.implicit is not None:
            self._updates = roles.implicit.trainer.version

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        if roles.implicit is None:
            return None
        match event:
            case ScoredEvent(e, groups):
                self._groups = groups
                scored_first(roles.implicit.trainer.version, self._updates)
                self._expected = None
                # Before the model learns this step's outcomes: afterwards its scores are others.
                if due(e.index) and (answers := [s for g in groups for s in g.episodes if s.episode.spoken]):
                    noise = NOISE.get(roles.run.model.dtype, COARSE)
                    scored_alone(roles.implicit, answers[e.index % len(answers)], noise)
                    self._expected = expected_loss(answers, roles.implicit.beta, noise)
            case OutcomesEvent(batch=batch):
                outcomes_agree(batch, self._groups)
        return None

    async def after(self, roles: ReinforceRoles, step: Step) -> ObserverReport | None:
        if roles.implicit is not None:
            # At the next scoring it must have taken exactly this number of updates.
            self._updates = roles.implicit.trainer.version
            if self._expected is not None and "implicit/loss" in step.gauges:
                outcome_loss_agrees(step.gauges["implicit/loss"].mean, *self._expected)
        self._groups, self._expected = (), None
        return None


def scored_first(updates: int, before: int) -> None:
    """An implicit process reward model has learned nothing since the step before when it scores a step."""
    if updates != before:
        raise InvariantError(
            f"the implicit process reward model has taken {updates - before} updates since the step before, and only"
            " now scores this one: it has seen the outcomes of the answers that it judges, so that its rewards tell"
            " them instead of what a token was worth. Score first, then let it learn"
        )


def scored_alone(model: Any, answer: Scored, noise: float) -> None:
    """The model's scores of an answer are those of the answer's tokens in a pass of their own."""
    recorded = np.concatenate(answer[IMPLICIT]).astype(np.float64)
    # One episode of all segments of the answer, alone in its batch.
    alone = model.score(Packed.of(answer.episode.segments, [0] * len(answer.episode.segments))).astype(np.float64)
    gap = float(np.abs(recorded - alone).max(initial=0.0))
    # The bound grows with the log-probs: a very improbable token has a rounding error to match.
    if not gap <= noise * (1 + float(np.abs(alone).max(initial=0.0))):
        raise InvariantError(
            f"the implicit process reward model scored task {answer.episode.task.id!r} (sibling"
            f" {answer.episode.sibling}) with log-probs that differ by up to {gap:.3g} from those of its tokens alone:"
            " look for a shift, another order, or scores of another model"
        )


def outcomes_agree(batch: Batch, groups: Sequence[ScoredGroup]) -> None:
    """The model learns from each scored answer once, with the answer's own raw outcome on all its tokens."""
    # As two sorted lists: the batch may hold the answers in any order, and equal ones as often as they occur.
    want = sorted((_tokens(s), s.episode.reward) for g in groups for s in g.episodes if s.episode.spoken)
    got: list[tuple[bytes, float | None]] = []
    for e in range(batch.episodes):
        outcomes = batch[OUTCOME][batch.sequence_M == e]
        # None where the tokens of an answer have several outcomes, which fits no outcome.
        got.append((batch.ids_of(e).tobytes(), float(outcomes[0]) if np.all(outcomes == outcomes[0]) else None))
    if [t for t, _ in want] != sorted(t for t, _ in got):
        raise InvariantError(
            f"the implicit process reward model learns from {len(got)} answers, and {len(want)} of the step were"
            " scored; they are not the same ones. It learns from each of them once"
        )
    # The tokens agree, so the outcomes are at fault.
    if want != sorted(got, key=lambda pair: (pair[0], math.inf if pair[1] is None else pair[1])):
        raise InvariantError(
            "the implicit process reward model learns outcomes that its answers did not have: what one answer earned"
            " stands at another. Look for a shift or another order between the scored answers and their outcomes"
        )


def expected_loss(answers: Sequence[Scored], beta: float, noise: float) -> tuple[float, float]:
    """(mean cross entropy of the scores and the outcomes, how far off rounding may put it).

    The cross entropy changes by at most `beta` for a change of 1 in a token's log-prob, so `noise` in each token's
    log-prob changes it by at most beta * noise * tokens.
    """
    losses: list[float] = []
    for s in answers:
        # log-odds of a right answer: beta times the sum of log-ratios over the whole answer.
        odds = beta * math.fsum(np.concatenate(s[IMPLICIT]).astype(np.float64) - np.concatenate(s[REFERENCE]))
        right = s.episode.reward or 0.0
        # Cross entropy of a logit x and a label y without overflow: max(x, 0) + log(1 + e^-|x|) - y x.
        losses.append(max(odds, 0.0) + math.log1p(math.exp(-abs(odds))) - right * odds)
    tokens = sum(s.episode.spoken for s in answers) / len(answers)
    return math.fsum(losses) / len(losses), 1e-5 + beta * noise * tokens


def outcome_loss_agrees(loss: float, expected: float, bound: float) -> None:
    """The loss of an implicit process reward model is the cross entropy of its scores and the outcomes."""
    if not abs(loss - expected) <= bound:
        raise InvariantError(
            f"the implicit process reward model learned with a loss of {loss:.6g}, and the cross entropy of its scores"
            f" and the outcomes is {expected:.6g}. Check the sign, beta, and that the sum over a whole answer is judged"
        )


def _tokens(s: Scored) -> bytes:
    """All ids of an answer, as bytes to compare."""
    return np.concatenate([segment.ids for segment in s.episode.segments]).tobytes()
