"""The share of the learning rate that an optimizer step uses. Each rule is a type in `ladder.pieces.step_size` and a
function here, registered for that type."""

from __future__ import annotations

import math
from functools import singledispatch

from posttrain.algorithm.loss.mismatch_correction import effective_share
from posttrain.algorithm.register import missing
from posttrain.core.gauge import Gauges
from posttrain.ladder.pieces.step_size import EffectiveSize, StepScale
from posttrain.system.errors import InvariantError

ANSWER_RATIO, ANSWER_RATIO_SQUARE = "policy/answer_ratio", "policy/answer_ratio_square"
"""Gauges of pi(y)/mu(y) and of its square, over the responses of a minibatch."""


@singledispatch
def step_share(scale: StepScale, gauges: Gauges) -> float:
    """The share, from the gauges of the whole minibatch, so that a split changes nothing."""
    raise missing(scale, step_share)


@step_share.register
def _(scale: EffectiveSize, gauges: Gauges) -> float:
    """Ratios 1, 1, 1, 1: share 1. Ratios 4, 1, 1, 1 with base 1: ESS = 49 / (4 * 19) = .644737, share .802955."""
    if ANSWER_RATIO not in gauges:
        raise InvariantError(f"step_scale=effectivesize reads the gauge {ANSWER_RATIO}, and the loss gave none")
    share = effective_share(gauges[ANSWER_RATIO], gauges[ANSWER_RATIO_SQUARE])
    # The square root is the usual rule by which the learning rate of an
    # Adam-like optimizer follows the size of its batch, here the effective one.
    return math.sqrt(min(1.0, share / scale.base))
