"""What models say of spoken tokens, and what an optimizer is expected to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TokenScores:
    """What one differentiable forward pass says of the M spoken tokens. torch tensors, float32 [M] on the model's
    device.

    `entropy` is that of the distribution the token was drawn from; None where it was not asked for, like `value`.
    """

    logp: Any
    entropy: Any | None
    value: Any | None
    candidates: Any | None = None
    """[M, K]: log-probs of the candidate tokens that were asked for."""


@dataclass(frozen=True, eq=False)
class Odds:
    """Where each of M spoken tokens lies in the distribution p it was drawn from; float64.

    Ids are summed in ascending order: the token is what a uniform in [below, upto) picks through the inverse of p's
    cumulative distribution.
    """

    below_M: np.ndarray
    """Mass of the ids below the token's."""
    upto_M: np.ndarray
    """The same with the token's own."""
    log_ratio_MK: np.ndarray
    """log q - log p of the token, for each q proportional to p^(1 / temperature) that was asked for."""
    distance_MK: np.ndarray
    """Total variation between q and p."""


@dataclass(frozen=True)
class ExpectedUpdate:
    """What the next step of an optimizer does to some numbers of one parameter, by its definition in float64."""

    move: Any
    """What is added to them."""
    state: Mapping[str, Any]
    """What its state then holds of them, under `WORD.PARAMETER`, by word."""
    size: float
    """What a departure from `move` is compared with: how far such a step moves a number whose gradient is large."""
