"""What a loss asks of a forward pass and what it gives for spoken tokens, and the expected update of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from posttrain.core.batch import Packed


@dataclass(frozen=True)
class Rewards:
    """The output of a reward model's head for S segments: torch tensors, float32 at least."""

    score: Any
    """[S]: the one number of each segment."""
    outputs: Any
    """[S, K]: the numbers that the score is computed from; [M, 1] where the head reads every spoken token."""


@dataclass(frozen=True, eq=False)
class Reads:
    """The outputs that a loss needs from a forward pass (`Learner.forward`)."""

    entropy: bool = False
    value: bool = False
    candidates_MK: np.ndarray | None = None
    """int [M, K]: tokens whose log-probs are wanted too."""
    head_only: bool = False
    """Stop the gradient of the value at its head."""
    rewards: bool = False
    """The reward head's scores of the segments."""
    logp: bool = True
    """The log-probs of the spoken tokens. Without them the language-model head does not run."""
    heard: bool = False
    """The log-probs of the tokens that the policy was told (`Packed.heard`)."""


@dataclass(frozen=True)
class TokenScores:
    """Results of one differentiable forward pass for the M spoken tokens: torch tensors, float32 [M], on the model's
    device. What was not asked for is None. `entropy` is that of the distribution the token was drawn from."""

    logp: Any
    entropy: Any | None
    value: Any | None
    candidates: Any | None = None
    """[M, K]: log-probs of the candidate tokens that were asked for."""
    rewards: Rewards | None = None
    heard: Any | None = None
    """[H]: log-probs of the tokens that the policy was told (`Packed.heard`)."""
    computed: int | None = None
    """Positions that the layers computed: fewer than packed ones where shared beginnings are computed once."""
    balance: Any | None = None
    """Scalar: these tokens' part of the load-balance loss, where the batch asks for it (`Packed.balance_E`)."""


@dataclass(frozen=True, eq=False)
class Odds:
    """Position of each of M spoken tokens in the cumulative distribution of the p that it was drawn from; float64.

    Ids are summed in ascending order. Inverse-CDF sampling draws the token with any uniform number in [below, upto).
    """

    below_M: np.ndarray
    """Probability of all ids below the token's."""
    upto_M: np.ndarray
    """Probability of all ids up to the token's, with its own."""
    log_ratio_MK: np.ndarray
    """log q - log p of the token, for each q proportional to p^(1 / temperature) that was asked for."""
    distance_MK: np.ndarray
    """Total variation between q and p."""


@dataclass(frozen=True)
class ExpectedUpdate:
    """The next step of an optimizer for some entries of one parameter, computed by its definition in float64."""

    move: Any
    """The numbers that the step adds to the entries."""
    state: Mapping[str, Any]
    """The optimizer's state of these entries after the step. The key is WORD of its name `WORD.PARAMETER`."""
    size: float
    """Scale for differences from `move`: how far such a step moves an entry with a large gradient."""
    along: bool = False
    """Whether only the part along `move` is compared: in other directions the arithmetic's noise may be as large."""


class AdapterTrial(Protocol):
    """The methods that are needed to show that a sampler computes with the learner's adapter."""

    def loud(self) -> AbstractContextManager[None]:
        """Inside, the adapter holds numbers that change log-probs by much. Afterwards it has its own numbers again, bit
        for bit."""
        ...

    def without(self, packed: Packed) -> np.ndarray:
        """float32 [M]: log-probs of the model without its adapter."""
        ...
