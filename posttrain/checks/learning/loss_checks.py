"""Checks that the gradients of the loss by each log-prob, entropy and value are those of its definition (`demand`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from posttrain.checks.learning.credit_by_definition import plain
from posttrain.checks.learning.gradient_by_definition import Demand, demand, value_demand
from posttrain.core.batch import Batch
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.streams import ADVANTAGE, WEIGHT
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.learner_passes import Passes
from posttrain.system.errors import InvariantError

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
    told: Callable[[int], str],
    causes: str,
) -> Gauges:
    """The gradient by each log-prob, over all micro-batches, is that which `define` computes from the log-probs.
    `told`: what is said of a spoken token in the message. `causes`: the usual causes of a difference, the one of a
    proportion of -1 first."""
    logp_M, asked_M = passes.joined(batch, passes.logp), passes.joined(batch, passes.logp_grad)
    if passes.stale_gradients:
        raise InvariantError(
            f"{passes.stale_gradients} parameters still held a gradient when the step began: it would be added to this"
            " one's. Clear gradients after every optimizer step"
        )
    want = define(logp_M)
    if want is None:
        return {}
    error_M = np.where(want.sure_M, np.abs(asked_M - want.want_M), 0.0)
    relative_M = error_M / np.maximum(want.size_M, 1e-3 * float(want.size_M.max(initial=0.0)) + 1e-30)
    worst = float(relative_M.max(initial=0.0))
    if not worst <= LOSS_BOUND:
        m = int(np.argmax(relative_M))
        square = float(want.want_M @ want.want_M)
        ratio = float(asked_M @ want.want_M) / square if square else np.nan
        raise InvariantError(
            f"the gradient is not that of {name}: for spoken token {m} ({told(m)}) the loss asked {asked_M[m]:.6g} of"
            f" its log-prob, the definition asks {want.want_M[m]:.6g}; over the minibatch the two are in the proportion"
            f" {ratio:.4g}. -1 is {causes}"
        )
    return {"canary/loss_gap": Gauge(worst, 1)}


def entropy_and_value_agree(a: Algorithm, batch: Batch, passes: Passes) -> None:
    """The gradient by each entropy is minus the weighted bonus, and by each value that of the value loss."""
    told: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if a.entropy is not None and passes.entropy_grad and plain(a.entropy) and a.distill is None and a.tokens is None:
        told["entropy"] = (passes.joined(batch, passes.entropy_grad), -a.entropy.coef * batch[WEIGHT])
    if a.learns_values is not None and passes.value and plain(a.learns_values):
        value_M, asked_M = (passes.joined(batch, column) for column in zip(*passes.value, strict=True))
        want = value_demand(a.learns_values, batch, value_M)
        if want is not None:
            told["value"] = (asked_M, want)
    for name, (got, want) in told.items():
        size = float(np.abs(want).max(initial=0.0))
        if len(got) != len(want) or float(np.abs(got - want).max(initial=0.0)) > 1e-4 * size + 1e-12:
            raise InvariantError(
                f"the loss asks the wrong thing of the {name}: its gradient is up to"
                f" {float(np.abs(got).max(initial=0.0)):.4g}, and {a.name} asks for up to {size:.4g} (largest"
                f" difference {float(np.abs(got - want).max(initial=0.0)) if len(got) == len(want) else np.nan:.3g})."
                " Check its sign, its coefficient and its weights"
            )
