"""A loss is tried before it is used: on numbers far off policy, where a real first step would still hide most
mistakes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.losses import PolicyLoss
from posttrain.algorithm.minibatch import MIX
from posttrain.checks.demand import demand
from posttrain.checks.loss import loss_agrees
from posttrain.checks.schedule import due
from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.errors import InvariantError
from posttrain.core.sampling import Sampling
from posttrain.core.scores import TokenScores
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, START, VALUE, VERSION, WEIGHT
from posttrain.role.events import Event, LearnedEvent, Observer, ObserverReport, PackedEvent
from posttrain.role.passes import Needs, Passes
from posttrain.role.roles import ReinforceRoles

EPISODES, TOKENS = 6, 16


def agrees_on_synthetic_batch(a: Algorithm) -> None:
    """The loss asks of made-up log-probs, entropies and values what the algorithm's definition asks, as far as the
    audit understands it.

    Learner, start of the step, sampler and reference differ by up to a nat a token, credit has both signs and varies,
    so that every bound of a trust region or a correction has tokens on both of its sides.
    """
    batch, logp_M, value_M = _made_up()
    points_uphill(a, batch, logp_M, value_M)
    if demand(a, batch, logp_M.astype(np.float64)) is None:
        return
    logp, value, entropy = (torch.from_numpy(x).requires_grad_() for x in (logp_M, value_M, np.ones_like(logp_M)))
    PolicyLoss(a).terms(batch, TokenScores(logp, entropy, value)).loss.backward()
    passes = Passes(Needs(), logp=[_numbers(logp)], logp_grad=[_gradient(logp)])
    if entropy.grad is not None:
        passes.entropy_grad.append(_gradient(entropy))
    if value.grad is not None:
        passes.value.append((_numbers(value), _gradient(value)))
    try:
        loss_agrees(a, batch, passes)
    except InvariantError as error:
        raise InvariantError(f"on made-up numbers far off policy, before the first step: {error}") from error


def points_uphill(a: Algorithm, batch: Batch, logp_M: np.ndarray, value_M: np.ndarray) -> None:
    """Whatever the trust region: the policy term alone makes no token with credit > 0 less likely and none with credit
    < 0 more.

    A push is never negative, so this holds for every algorithm, also where the audit does not know its pieces.
    """
    clip = None if a.clip is None else a.clip.without_top()
    alone = replace(
        a,
        clip=clip,
        pull=None,
        entropy=None,
        imitate=None,
        distill=None,
        tokens=None,
        shown=None,
        rewards="sum",
        shape=(),
        scale="one",
    )
    batch = batch.having({MIX: np.full(batch.spoken, 0.5)})
    logp, value = (torch.from_numpy(x).requires_grad_() for x in (logp_M, value_M))
    PolicyLoss(alone).terms(batch, TokenScores(logp, None, value)).loss.backward()
    with_credit_M = -_gradient(logp) * np.sign(batch[ADVANTAGE])
    wrong, right = int((with_credit_M < 0).sum()), int((with_credit_M > 0).sum())
    if wrong or not right:
        raise InvariantError(
            f"on made-up numbers, before the first step: the loss of {a.name} moves {wrong} of {batch.spoken} tokens"
            f" against their credit and {right} with it. Check the sign of the policy term, and whether its trust"
            " region can be negative or is always 0"
        )


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _gradient(x: torch.Tensor) -> np.ndarray:
    return np.zeros(len(x)) if x.grad is None else x.grad.double().numpy()


def _made_up() -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch of made-up streams, always the same, and the learner's log-probs and values, float32 [M]."""
    rng = np.random.Generator(np.random.Philox(key=20_260_101))
    count = EPISODES * TOKENS
    ids = rng.integers(0, 9, (EPISODES, TOKENS + 1)).astype(np.int32)
    logp = rng.uniform(-3, -1, count).astype(np.float32)

    def beside(by: float) -> np.ndarray:
        return (logp + rng.uniform(-by, by, count)).astype(np.float32)

    credit = rng.normal(size=count)
    weight = np.repeat(rng.uniform(0.5, 1.5, EPISODES) / count, TOKENS)
    starts = np.arange(EPISODES) * (TOKENS + 1)
    batch = Batch(
        ids_N=ids.ravel(),
        lengths_S=np.full(EPISODES, TOKENS + 1, np.int32),
        source_M=(starts[:, None] + np.arange(TOKENS)).ravel(),
        target_M=ids[:, 1:].ravel(),
        segment_M=np.repeat(np.arange(EPISODES, dtype=np.int32), TOKENS),
        sequence_S=np.arange(EPISODES, dtype=np.int32),
        sampling=Sampling(stop_ids=()),
        streams={
            MU: beside(0.9),
            ADVANTAGE: credit,
            WEIGHT: weight,
            VERSION: np.zeros(count, np.int32),
            START: beside(0.5),
            REFERENCE: beside(0.7),
            VALUE: rng.uniform(-1, 1, count).astype(np.float32),
            RETURN: rng.uniform(-1, 1, count),
        },
    )
    return batch, logp, rng.uniform(-1, 1, count).astype(np.float32)


class LossCheck(Observer):
    """The loss is tried on made-up numbers before the first step; at the steps of a second opinion its gradient is what
    it should be."""

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
