"""From the worlds of `posttrain.toy` to credit, a batch and streams, as laws need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.push_factor import TrustInputs
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.config.run import Reinforce
from posttrain.core.batch import Batch
from posttrain.core.scored import Credit
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, START, WEIGHT
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.pack import pack
from posttrain.toy.episodes import SAMPLING, rewarded


def credits(
    a: Algorithm, *groups: Sequence[float], lengths: Sequence[Sequence[int]] | None = None
) -> list[list[float]]:
    """Credit of the first token of every sample of every group."""
    credit = credit_step(a, rewarded(*groups, lengths=lengths), max_tokens=20, ema=0.0)
    return [[float(e.advantage[0][0]) for e in g.episodes] for g in credit.groups]


STAGE = Reinforce(name="laws", sampling=SAMPLING)
NOW = 4
"""Version of the weights at the start of a toy step; its one optimizer step makes the next."""


def batch_of(a: Algorithm, credit: Credit, *, turned: bool = False, with_start: bool = True) -> Batch:
    """The step as one minibatch, through the packer of real runs. `turned` puts the last group and the last sibling
    first."""
    if turned:
        credit = replace(credit, groups=tuple(replace(g, episodes=g.episodes[::-1]) for g in credit.groups[::-1]))
    (made,) = pack(credit, a, STAGE, seed=0, step=0, version=NOW)
    assert made.batch is not None, "every token is silent"
    return made.batch if with_start else made.batch.having({START: None})


def look(ratio: Tensor, advantage: Tensor, sequence: np.ndarray | None = None) -> TrustInputs:
    """What a trust region sees of these tokens: each in an episode of its own, the anchor at log-prob -1."""
    log_ratio = ratio.log()
    places = np.arange(len(ratio)) if sequence is None else sequence
    streams = streams_of(advantage.numpy(), np.ones(len(ratio)), places, mu=np.full(len(ratio), -1.0))
    return TrustInputs(ratio, log_ratio, advantage, log_ratio - 1, streams)


def streams_of(
    advantage: np.ndarray,
    weight: np.ndarray,
    sequence: np.ndarray,
    mu: np.ndarray,
    start: np.ndarray | None = None,
    ref: np.ndarray | None = None,
) -> Streams:
    """Streams in float64 from plain arrays."""

    def put(x: np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(x, np.float64))

    held = {MU: mu, ADVANTAGE: advantage, WEIGHT: weight, START: start, REFERENCE: ref}
    return Streams(
        torch.as_tensor(np.asarray(sequence, np.int64)),
        int(np.max(sequence)) + 1,
        streams={s: put(x) for s, x in held.items() if x is not None},
    )
