"""Tests a loss on synthetic numbers before its first use.

They are far off policy. A real first step is on policy, which would hide most mistakes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.loss.losses import PolicyLoss
from posttrain.algorithm.loss.minibatch_streams import CHOSEN, IMITATE, MIX, WAS_SHOWN
from posttrain.checks.check_schedule import due
from posttrain.checks.learning.gradient_by_definition import demand
from posttrain.checks.learning.loss_checks import loss_agrees
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.sampling import Sampling
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, START, VALUE, VERSION, WEIGHT
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.events import Event, LearnedEvent, Observer, ObserverReport, PackedEvent
from posttrain.role.learner_passes import Needs, Passes
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError

EPISODES, TOKENS = 6, 16


def agrees_on_synthetic_batch(a: Algorithm) -> None:
    """On a synthetic batch the loss has the gradients of the algorithm's definition, if all its pieces are covered.
    Learner, start of the step, sampler and reference differ by up to a nat per token. Credit varies and has both signs.
    So every bound of a trust region or a correction has tokens on both sides."""
    batch, logp_M, value_M = _synthetic()
    points_uphill(a, batch, logp_M, value_M)
    on_policy = batch.having({MU: logp_M, START: logp_M})  # as every first step begins
    points_uphill(a, on_policy, logp_M, value_M, least=batch.spoken // 2)
    if demand(a, batch, logp_M.astype(np.float64)) is None or a.hears or a.distill is not None:
        return  # what was heard, and the candidates of a teacher, have scores of their own
    logp, value, entropy = (torch.from_numpy(x).requires_grad_() for x in (logp_M, value_M, np.ones_like(logp_M)))
    PolicyLoss(a).terms(batch, TokenScores(logp, entropy, value)).loss.backward()
    everything = [np.arange(batch.episodes)]
    passes = Passes(Needs(), episodes=everything, logp=[_numbers(logp)], logp_grad=[_gradient(logp)])
    if entropy.grad is not None:
        passes.entropy_grad.append(_gradient(entropy))
    if value.grad is not None:
        passes.value.append((_numbers(value), _gradient(value)))
    try:
        loss_agrees(a, batch, passes)
    except InvariantError as error:
        raise InvariantError(f"on made-up numbers far off policy, before the first step: {error}") from error


def points_uphill(a: Algorithm, batch: Batch, logp_M: np.ndarray, value_M: np.ndarray, least: int = 1) -> None:
    """The policy term alone makes no token with credit > 0 less likely, and none with credit < 0 more likely. At
    `least` so many tokens move with their credit. The factor of a trust region is never negative, so this holds for
    every algorithm, covered by `demand` or not."""
    clip = None if a.clip is None else a.clip.without_top()
    alone = replace(
        a,
        clip=clip,
        pull=None,
        entropy=None,
        imitate=None,
        distill=None,
        hint=None,
        tokens=None,
        shown=None,
        rewards="sum",
        shape=(),
        scale="one",
    )
    logp, value = (torch.from_numpy(x).requires_grad_() for x in (logp_M, value_M))
    PolicyLoss(alone).terms(batch, TokenScores(logp, None, value)).loss.backward()
    with_credit_M = -_gradient(logp) * np.sign(batch[ADVANTAGE])
    wrong, right = int((with_credit_M < 0).sum()), int((with_credit_M > 0).sum())
    if wrong or right < least:
        raise InvariantError(
            f"on made-up numbers, before the first step: the loss of {a.name} moves {wrong} of {batch.spoken} tokens"
            f" against their credit and {right} with it. Check the sign of the policy term, and whether its trust"
            " region can be negative, is always 0, or is 0 at a ratio of 1, where every step begins"
        )


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _gradient(x: torch.Tensor) -> np.ndarray:
    return np.zeros(len(x)) if x.grad is None else x.grad.double().numpy()


def _synthetic() -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch of synthetic streams, always the same, and the learner's log-probs and values, float32 [M]."""
    rng = np.random.Generator(np.random.Philox(key=20_260_101))
    count = EPISODES * TOKENS
    ids = rng.integers(0, 9, (EPISODES, TOKENS + 1)).astype(np.int32)
    logp = rng.uniform(-3, -1, count).astype(np.float32)

    def near(by: float) -> np.ndarray:
        return (logp + rng.uniform(-by, by, count)).astype(np.float32)

    credit = rng.normal(size=count)
    weight = np.repeat(rng.uniform(0.5, 1.5, EPISODES) / count, TOKENS)
    starts, value = np.arange(EPISODES) * (TOKENS + 1), np.linspace(1, -1, count, dtype=np.float32)
    batch = Batch(
        ids_N=ids.ravel(),
        lengths_S=np.full(EPISODES, TOKENS + 1, np.int32),
        source_M=(starts[:, None] + np.arange(TOKENS)).ravel(),
        target_M=ids[:, 1:].ravel(),
        segment_M=np.repeat(np.arange(EPISODES, dtype=np.int32), TOKENS),
        sequence_S=np.arange(EPISODES, dtype=np.int32),
        sampling=Sampling(stop_ids=()),
        streams={
            MU: near(0.9),
            ADVANTAGE: credit,
            WEIGHT: weight,
            VERSION: np.zeros(count, np.int32),
            START: near(0.5),
            REFERENCE: near(0.7),
            VALUE: rng.uniform(-1, 1, count).astype(np.float32),
            RETURN: rng.uniform(-1, 1, count),
            CHOSEN: rng.random(count) < 0.7,
            MIX: rng.random(count),
            IMITATE: rng.random(count) / count,
            WAS_SHOWN: rng.random(count) < 0.2,
        },
    )
    return batch, logp, value


class LossCheck(Observer):
    """The loss has the gradients of its definition: on a synthetic batch before the first step, then at `due` steps."""

    async def begin(self, roles: ReinforceRoles) -> None:
        agrees_on_synthetic_batch(roles.stage.algorithm)

    def needs(self, roles: ReinforceRoles, event: PackedEvent) -> Needs:
        return Needs(logp=due(event.index), gradients=due(event.index))

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        match event:
            case LearnedEvent(packed=PackedEvent(index=index, batch=batch), passes=passes) if due(index):
                return ObserverReport(loss_agrees(roles.stage.algorithm, batch, passes))
            case _:
                return None
