"""The implicit process reward model of a reinforcement stage (PRIME). It learns the outcomes of each step's answers;
its log-probs then say which tokens an outcome was owed to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.algorithm.credit.process_rewards import OutcomeLoss
from posttrain.core.batch import Batch, Packed
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import OUTCOME, REFERENCE, WEIGHT
from posttrain.role.events import Observers, OutcomesEvent
from posttrain.role.trainer import Trainer
from posttrain.system.errors import DataError


@dataclass
class ImplicitModel:
    """`core.ports.Scorer` over a second model, which learns beside the policy."""

    trainer: Trainer
    """Its model and its optimizer, apart from the policy's."""
    beta: float
    """Factor of log model/reference in a token's implicit reward (`ImplicitOthers.beta`)."""

    def score(self, packed: Packed) -> np.ndarray:
        """float32 [M] log-probs by the model as it is now."""
        return self.trainer.learner.score(packed)

    def fingerprint(self) -> str:
        return self.trainer.learner.fingerprint()

    def learn(self, index: int, groups: Sequence[ScoredGroup], watch: Observers) -> Gauges:
        """One optimizer step on the outcomes of all scored answers of step `index`; DataError where one is not in
        0..1."""
        # The groups were scored before this call, so credit reads the model as it was before it saw these outcomes.
        answers = [s for g in groups for s in g.episodes if s.episode.spoken]
        if not answers:
            return {}
        batch = outcome_batch(answers, outcomes(answers))
        watch.emit(OutcomesEvent(index, batch))
        trainer_gauges = self.trainer.step(batch, OutcomeLoss(self.beta))
        # Other gauges of this trainer have the names of the policy's, and would be added to them.
        kept = {n: g for n, g in trainer_gauges.items() if n.startswith("implicit/")}
        # Without this gauge the scale of the loss was too large, and the step was left out.
        if "optim/grad_norm" in trainer_gauges:
            kept["implicit/grad_norm"] = trainer_gauges["optim/grad_norm"]
        return kept | {"implicit/answers": Gauge(len(answers), 1)}


def outcomes(answers: Sequence[Scored]) -> np.ndarray:
    """float64 [E]: the raw outcome of each answer; DataError where one is not in 0..1."""
    # The raw outcome, not the shaped reward: it must be a probability that an answer is right.
    raw = np.array([s.episode.reward for s in answers], np.float64)
    if np.any((raw < 0) | (raw > 1)):
        wrong = int(np.argmax((raw < 0) | (raw > 1)))
        raise DataError(
            f"task {answers[wrong].episode.task.id!r} has the outcome {raw[wrong]:g}, and an implicit process reward"
            " model learns the chance that an answer is right: its outcomes lie in 0..1. Set the weights of the"
            " rewards (env.rewards.0.weight) so that their sum does, or baseline=others"
        )
    return raw


def outcome_batch(answers: Sequence[Scored], outcome_E: np.ndarray) -> Batch:
    """The answers with their outcomes and the reference's log-probs, each answer with the same weight."""
    spoken = [s.episode.spoken for s in answers]
    return Batch.of(
        [segment for s in answers for segment in s.episode.segments],
        [i for i, s in enumerate(answers) for _ in s.episode.segments],
        streams={
            REFERENCE: np.concatenate([x for s in answers for x in s[REFERENCE]]),
            OUTCOME: np.repeat(outcome_E, spoken),
            WEIGHT: np.repeat(np.full(len(answers), 1 / len(answers)), spoken),
        },
    )
