"""A loss is one file: this one is added from outside, reads pairs of answers, and is trained with by the trainer's one
verb."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.algorithm.loss.losses import STEP_SHARE
from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.config.run import Optimizer
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import Reads, TokenScores
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.streams import WEIGHT
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.role.events import (
    DifferentiatedEvent,
    Event,
    LearnedEvent,
    Observer,
    ObserverReport,
    Observers,
    PackedEvent,
)
from posttrain.role.learner_passes import Needs
from posttrain.role.trainer import Trainer
from tests.engine.engine_parts import policy, segments

PAIRS = 5


@dataclass(frozen=True)
class Margin:
    """softplus(-beta * (log-prob of the first answer - log-prob of the second)), the mean over pairs."""

    beta: float = 0.1

    def reads(self, micro: Batch) -> Reads:
        return Reads()

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        held = streams(micro, dtype=scores.logp.dtype)
        sums = scores.logp.new_zeros(micro.episodes).index_add(0, held.sequence_M, scores.logp)
        weight = scores.logp.new_zeros(micro.episodes).index_copy(0, held.sequence_M, held[WEIGHT])
        margin = self.beta * (sums[::2] - sums[1::2])
        loss = (weight[::2] * torch.nn.functional.softplus(-margin)).sum()
        return Terms(loss, {"margin/right": Gauge(float((margin > 0).sum()), len(margin))})

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        return {
            "margin/loss": Gauge(math.fsum(float(p.loss) for p in parts), 1),
            "margin/right": Gauge(sum(p.gauges["margin/right"].sum for p in parts), batch.units),
        }


def pairs() -> Batch:
    said = segments(2 * PAIRS, seed=4, longest=20)
    unit = np.repeat(np.arange(PAIRS, dtype=np.int32), 2)
    weight = np.full(sum(s.spoken for s in said), 1 / PAIRS)
    return Batch.of(said, unit_E=unit, streams={WEIGHT: weight})


def trainer(micro_tokens: int, lr: float = 0.0) -> Trainer:
    learner = HFLearner(policy(dtype=torch.float64))
    return Trainer(
        learner, StageOptimizer(learner.parameters(), Optimizer(lr=lr or 1e-9, warmup=0, clip=math.inf)), micro_tokens
    )


class Heard(Observer):
    """Remembers what happened, and the gradient that the optimizer is handed."""

    def __init__(self, t: Trainer) -> None:
        self.trainer, self.events, self.gradient = t, list[type](), dict[str, torch.Tensor]()
        self.versions: list[int] = []
        self.told: list[float] = []

    def needs(self, roles: Any, event: PackedEvent) -> Needs:
        return Needs(logp=True, gradients=True)

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        self.events.append(type(event))
        self.versions.append(self.trainer.version)
        if isinstance(event, LearnedEvent):
            self.told.append(event.lr)
        if isinstance(event, DifferentiatedEvent):
            self.told.append(event.share)
            self.gradient = {n: p.grad.clone() for n, p in self.trainer.trained().items() if p.grad is not None}
            assert (
                sum(map(len, event.passes.logp_grad)) == event.packed.batch.spoken == sum(map(len, event.passes.logp))
            )


def test_micro_batches_of_whole_pairs_give_the_gradient_of_the_minibatch() -> None:
    whole, split = (Heard(trainer(tokens)) for tokens in (10**6, 24))
    seen = [h.trainer.step(pairs(), Margin(), Observers([h])) for h in (whole, split)]
    assert len(pairs().split(24)) > 1 and all(micro.episodes % 2 == 0 for micro in pairs().split(24))
    assert whole.gradient.keys() == split.gradient.keys()
    for name, g in whole.gradient.items():
        torch.testing.assert_close(split.gradient[name], g, rtol=1e-12, atol=1e-14)
    assert seen[0]["margin/loss"].sum == pytest.approx(seen[1]["margin/loss"].sum, abs=1e-12)
    assert seen[0]["margin/right"] == seen[1]["margin/right"]


def test_it_is_learned_and_observed_like_any_other() -> None:
    t = trainer(64, lr=3e-3)
    heard = Heard(t)
    seen = [t.step(pairs(), Margin(), Observers([heard])) for _ in range(12)]
    assert seen[-1]["margin/loss"].sum < seen[0]["margin/loss"].sum and seen[-1]["margin/right"].mean == 1
    assert heard.events == [PackedEvent, DifferentiatedEvent, LearnedEvent] * 12
    assert heard.versions[:6] == [0, 0, 1, 1, 1, 2]


def test_who_observes_may_stop_the_step_before_the_weights_move() -> None:
    class Objects(Observer):
        def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
            if isinstance(event, DifferentiatedEvent):
                raise ValueError("no")

    t = trainer(64, lr=1e-2)
    before = {n: p.detach().clone() for n, p in t.trained().items()}
    with pytest.raises(ValueError, match="no"):
        t.step(pairs(), Margin(), Observers([Objects()]))
    assert t.version == 0 and all(torch.equal(before[n], p) for n, p in t.trained().items())


@dataclass(frozen=True)
class Careful(Margin):
    """A loss that asks for a part of the learning rate."""

    share: float = 0.25

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        return {**super().gauges(batch, parts), STEP_SHARE: Gauge(self.share, 1)}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_loss_can_ask_for_a_part_of_the_learning_rate(kind: str) -> None:
    """The weights move by that part of what they would have, also where a factor of the loss is not seen."""
    moves: list[dict[str, torch.Tensor]] = []
    for loss in (Margin(), Careful()):
        learner = HFLearner(policy(dtype=torch.float64))
        config = Optimizer(kind=kind, lr=1e-3, warmup=0, clip=math.inf, weight_decay=0.0)  # type: ignore[arg-type]
        t = Trainer(learner, StageOptimizer(learner.parameters(), config), 64)
        before = {n: p.detach().clone() for n, p in t.trained().items()}
        heard = Heard(t)
        seen = t.step(pairs(), loss, Observers([heard]))
        moves.append({n: p.detach() - before[n] for n, p in t.trained().items()})
        share = 0.25 if isinstance(loss, Careful) else 1.0
        assert heard.told == [share, 1e-3 * share] and seen["optim/lr"].mean == 1e-3 * share
    for name, whole in moves[0].items():
        torch.testing.assert_close(moves[1][name], 0.25 * whole, rtol=1e-9, atol=1e-15)
