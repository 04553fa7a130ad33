"""Checks that a loss has the gradients of its definition: before the first step, and at `due` steps.

Before the first step it is tested on synthetic numbers, which are far off policy. A real first step is on policy, which
would hide most mistakes. At `due` steps the gradients of the step's own minibatch are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.credit.adaptive_coefficients import of_step
from posttrain.algorithm.loss.losses import PolicyLoss
from posttrain.algorithm.loss.minibatch_streams import CHOSEN, IMITATE, MIX, WAS_SHOWN
from posttrain.checks.learning.gradient_by_definition import Demand, demand, value_demand
from posttrain.checks.stage_history import due
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, START, VALUE, VERSION, WEIGHT
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.events import Event, LearnedEvent, Observer, ObserverReport, PackedEvent
from posttrain.role.learner_passes import Needs, Passes
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError

EPISODES, TOKENS = 6, 16
"""Size of the synthetic batch."""


def agrees_on_synthetic_batch(a: Algorithm) -> None:
    """On a synthetic batch the loss has the gradients of the algorithm's definition, if all its pieces are covered.

    Learner, start of the step, sampler and reference differ by up to a nat per token. Credit varies and has both signs.
    So every bound of a trust region or a correction has tokens on both sides.
    """
    batch, logp_M, value_M = _synthetic()
    points_uphill(a, batch, logp_M, value_M)
    on_policy = batch.having({MU: logp_M, START: logp_M})  # as every first step begins
    # At a ratio of 1 no bound is near, so at least half of the tokens must move.
    points_uphill(a, on_policy, logp_M, value_M, least=batch.spoken // 2)
    if demand(a, batch, logp_M.astype(np.float64)) is None or a.hears or a.distill is not None:
        return  # what was heard, and the candidates of a teacher, have scores of their own
    # Entropies are made up: only the gradient by them is read.
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
    """The policy term alone makes no token with credit > 0 less likely, and none with credit < 0 more likely.

    At least `least` tokens must move with their credit. The factor of a trust region is never negative, so this holds
    for every algorithm, covered by `demand` or not.
    """
    clip = None if a.clip is None else a.clip.without_top()
    # All that may pull against the credit on purpose is taken out.
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
    # A step against the gradient: positive where the log-prob moves with its credit.
    with_credit_M = -_gradient(logp) * np.sign(batch[ADVANTAGE])
    wrong, right = int((with_credit_M < 0).sum()), int((with_credit_M > 0).sum())
    if wrong or right < least:
        raise InvariantError(
            f"on made-up numbers, before the first step: the loss of {a.name} moves {wrong} of {batch.spoken} tokens"
            f" against their credit and {right} with it. Check the sign of the policy term, and whether its trust"
            " region can be negative, is always 0, or is 0 at a ratio of 1, where every step begins"
        )


def _numbers(x: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor in float64."""
    return x.detach().double().numpy()


def _gradient(x: torch.Tensor) -> np.ndarray:
    """The gradient of a tensor in float64; zeros where it has none."""
    return np.zeros(len(x)) if x.grad is None else x.grad.double().numpy()


def _synthetic() -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch of synthetic streams, always the same, and the learner's log-probs and values, float32 [M]."""
    rng = np.random.Generator(np.random.Philox(key=20_260_101))
    count = EPISODES * TOKENS
    ids = rng.integers(0, 9, (EPISODES, TOKENS + 1)).astype(np.int32)
    logp = rng.uniform(-3, -1, count).astype(np.float32)

    # Each stream is the learner's log-probs with noise of its own, so none can stand for another unseen.
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
        if not isinstance(event, LearnedEvent) or not due(event.packed.index):
            return None
        # As the step learned: with its adapted coefficients, and in a warm-up with the value loss alone.
        a, _ = of_step(roles.stage.algorithm, roles.adaptive, event.packed.index)
        return ObserverReport(loss_agrees(a, event.packed.batch, event.passes))


LOSS_BOUND = 5e-6
"""Largest difference of the gradient by a log-prob, relative to the size of its terms. Measured values in float32 are
in docs/research/trust.md."""


def loss_agrees(a: Algorithm, batch: Batch, passes: Passes) -> Gauges:
    """The loss's gradient by each log-prob, over all micro-batches, is that of its definition over the minibatch."""
    entropy_and_value_agree(a, batch, passes)
    return gradient_agrees(
        a.name,
        batch,
        passes,
        lambda logp_M: demand(a, batch, logp_M),
        lambda m: f"credit {batch[ADVANTAGE][m]:.4g}, weight {batch[WEIGHT][m]:.4g}",
        "a flipped sign; a constant is a scale counted twice or per micro-batch; else check the ratio's anchor, the"
        " trust region and the KL's direction",
    )


def gradient_agrees(
    name: str,
    batch: Batch,
    passes: Passes,
    define: Callable[[np.ndarray], Demand | None],
    describe: Callable[[int], str],
    causes: str,
) -> Gauges:
    """The gradient by each log-prob, over all micro-batches, is that which `define` computes from the log-probs.

    Args:
        define: the definition, from the log-probs [M]; it gives None where it does not cover the loss.
        describe: words for the message about a spoken token, by its place in the batch.
        causes: the end of the message, after "-1 is ": the usual causes, that of a proportion of -1 first.
    """
    logp_M, asked_M = passes.joined(batch, passes.logp), passes.joined(batch, passes.logp_grad)
    if passes.stale_gradients:
        raise InvariantError(
            f"{passes.stale_gradients} parameters still held a gradient when the step began: it would be added to this"
            " one's. Clear gradients after every optimizer step"
        )
    want = define(logp_M)
    if want is None:
        return {}
    # Next to a bound rounding decides, so those tokens are not compared.
    error_M = np.where(want.sure_M, np.abs(asked_M - want.want_M), 0.0)
    # Faint terms are measured by a thousandth of the largest; 1e-30 is for a minibatch whose terms are all 0.
    relative_M = error_M / np.maximum(want.size_M, 1e-3 * float(want.size_M.max(initial=0.0)) + 1e-30)
    worst = float(relative_M.max(initial=0.0))
    if not worst <= LOSS_BOUND:
        m = int(np.argmax(relative_M))
        # The projection on the expected gradient: -1 tells of a sign, any other constant of a scale.
        square = float(want.want_M @ want.want_M)
        ratio = float(asked_M @ want.want_M) / square if square else np.nan
        raise InvariantError(
            f"the gradient is not that of {name}: for spoken token {m} ({describe(m)}) the loss asked {asked_M[m]:.6g}"
            f" of its log-prob, the definition asks {want.want_M[m]:.6g}; over the minibatch the two are in the"
            f" proportion {ratio:.4g}. -1 is {causes}"
        )
    return {"canary/loss_gap": Gauge(worst, 1)}


def entropy_and_value_agree(a: Algorithm, batch: Batch, passes: Passes) -> None:
    """The gradient by each entropy is minus the weighted bonus, and by each value that of the value loss."""
    compared: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if a.entropy is not None and passes.entropy_grad:
        compared["entropy"] = (passes.joined(batch, passes.entropy_grad), -a.entropy.coef * batch[WEIGHT])
    if a.learns_values is not None and passes.value:
        value_M, asked_M = (passes.joined(batch, column) for column in zip(*passes.value, strict=True))
        want = value_demand(a.learns_values, batch, value_M)
        if want is not None:
            compared["value"] = (asked_M, want)
    for name, (got, want) in compared.items():
        size = float(np.abs(want).max(initial=0.0))
        # `joined` gives one number for each token, so both have one length. Written so that a NaN is wrong.
        # 1e-12 is for gradients that are all 0.
        gap = float(np.abs(got - want).max(initial=0.0))
        if not gap <= 1e-4 * size + 1e-12:
            raise InvariantError(
                f"the loss asks the wrong thing of the {name}: its gradient is up to"
                f" {float(np.abs(got).max(initial=0.0)):.4g}, and {a.name} asks for up to {size:.4g} (largest"
                f" difference {gap:.3g}). Check its sign, its coefficient and its weights"
            )
