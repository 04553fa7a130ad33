"""Pairs of answers as a batch of the library, and a policy with one softmax for all positions.

Axis letters: S states of a table, V vocabulary, M spoken tokens.

>>> policy = TiedPolicy([0.2, 0.4, 0.4])
>>> pairs = [((1, 1, 0), (1, 0))]
>>> batch = batch_of_pairs(policy, pairs)
>>> batch.units, batch.spoken, [round(x, 3) for x in pair_logp(policy, pairs).exp().tolist()]
(1, 5, [0.4, 0.4, 0.2, 0.4, 0.2])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Batch
from posttrain.core.sampling import Sampling
from posttrain.core.streams import REFERENCE, SIDE
from posttrain.core.types import Segment
from posttrain.toy.enumerated_policy import Response

AnswerPair = tuple[Response, Response]
"""The chosen answer and the rejected one."""


class TablePolicy(Protocol):
    """A policy whose next token is drawn from a row of a table."""

    logits: Tensor
    """[S, V]"""

    def states_of(self, y: Sequence[int]) -> list[int]:
        """The row for each token of an answer."""
        ...


class TiedPolicy:
    """One softmax for all positions: what is learned at one place holds at all places. Token 0 ends an answer."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.logits = torch.tensor([shares], dtype=torch.float64).log().requires_grad_()

    def states_of(self, y: Sequence[int]) -> list[int]:
        return [0] * len(y)

    def shares(self) -> np.ndarray:
        """The probability of each token, [V]."""
        return torch.softmax(self.logits.detach(), -1)[0].numpy()


def pair_logp(policy: TablePolicy, pairs: Sequence[AnswerPair]) -> Tensor:
    """Log-prob [M] of every token of the pairs, the chosen answer first, differentiable."""
    answers = [y for pair in pairs for y in pair]
    states = [s for y in answers for s in policy.states_of(y)]
    return torch.log_softmax(policy.logits, -1)[states, [token for y in answers for token in y]]


def batch_of_pairs(reference: TablePolicy, pairs: Sequence[AnswerPair]) -> Batch:
    """One minibatch of these pairs, each a unit, with the log-probs of this policy as the reference."""
    # Answers are in the order chosen, rejected, chosen, rejected, as in `pair_logp`.
    lengths = [len(y) for pair in pairs for y in pair]
    sides = np.tile(np.array([1, 0], np.int32), len(pairs))
    streams = {SIDE: np.repeat(sides, lengths), REFERENCE: pair_logp(reference, pairs).detach().numpy()}
    segments = [_segment(y) for pair in pairs for y in pair]
    return Batch.of(segments, unit_E=np.repeat(np.arange(len(pairs), dtype=np.int32), 2), streams=streams)


def _segment(y: Response) -> Segment:
    """An answer after a prompt of one token."""
    mask = np.arange(len(y) + 1) > 0
    logp = np.where(mask, 0.0, np.nan).astype(np.float32)
    return Segment(np.array([0, *y], np.int32), mask, logp, np.where(mask, 0, -1).astype(np.int32), Sampling())
