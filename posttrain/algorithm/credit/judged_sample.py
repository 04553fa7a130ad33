"""A judged episode between shaping and credit: its reward, its KL penalty, and the sizes of their terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.algorithm.credit.reward_spread import Array
from posttrain.algorithm.loss import reference_penalty
from posttrain.core.measure.equal_numbers import rounding
from posttrain.core.scored import Scored
from posttrain.core.streams import REFERENCE, START
from posttrain.core.verdict import resolution
from posttrain.ladder.algorithm import Algorithm


@dataclass(frozen=True, eq=False)
class Sample:
    """One sibling of a prompt after shaping: its reward, and what credit adds or subtracts at single tokens."""

    scored: Scored
    shaped: float
    """The reward after shaping."""
    size: float
    """Sum of the absolute terms of `shaped`: the sources' weighted scores and what shaping added."""
    penalty_T: Array
    """coef * KL estimate of each spoken token; zeros where credit has no KL."""
    paid_T: Array
    """Rewards of turns, at the last token of each turn; zeros where the algorithm learns from no rewards."""
    dropped: str
    """Why the episode gets no gradient; '' where nothing forbids one."""

    @property
    def spoken(self) -> int:
        """Number of spoken tokens T."""
        return self.scored.episode.spoken

    @property
    def resolution(self) -> float:
        """Relative difference of rewards up to which they count as equal: that of the coarsest source."""
        return resolution(self.scored.episode.verdicts)

    @property
    def charged(self) -> float:
        """The KL penalties of all tokens together."""
        return math.fsum(self.penalty_T)

    @property
    def charged_size(self) -> float:
        """`size` plus the sum of the KL's absolute terms."""
        return self.size + math.fsum(np.abs(self.penalty_T))


def compared_rewards(a: Algorithm, samples: Sequence[Sample]) -> tuple[Array, float]:
    """(rewards [G] by which siblings are compared, the largest difference of these that counts as rounding)."""
    # A KL that each token is charged alone is subtracted from the credit later, and belongs to no reward.
    rewards = np.array([s.shaped - (s.charged if a.charges_answers else 0.0) for s in samples], np.float64)
    # A sum of large terms may be a small number, and its rounding error is that of the terms. So what counts as
    # rounding comes from the sizes of the terms, not from the rewards.
    sizes = [s.charged_size if a.charges_answers else s.size for s in samples]
    return rewards, rounding(sizes, max((s.resolution for s in samples), default=0.0))


def penalty(a: Algorithm, scored: Scored) -> Array:
    """coef * KL estimate of each spoken token [T] where the credit has a KL (A34); zeros where it has none."""
    pull = a.kl_in_credit
    if pull is None:
        return np.zeros(scored.episode.spoken)
    # The KL compares the policy that drew the tokens with the reference. With anchor=start that is the learner
    # at the start of the step. Otherwise the sampler's own log-probs are taken, which cost no forward pass.
    drawn_T = joined(scored[START]) if a.anchor == "start" else said_logp(scored)
    gap_T = drawn_T - joined(scored[REFERENCE])
    # The loss differentiates the same function, so both placements have one formula. Credit is numpy in float64.
    each_T = reference_penalty.estimate(pull.estimator, torch.from_numpy(gap_T)).numpy()  # pyright: ignore[reportUnknownMemberType]
    return pull.coef * each_T * early_weight(pull.early, gap_T)


def early_weight(early: float, gap_T: Array) -> Array:
    """1 + early * (share of the response's |log pi - log ref| that lies at a token or after it) [T] (IW-OPD).

    Gaps .2, -.1, .1 and early .5: shares 1, .5, .25, weights 1.5, 1.25, 1.125.
    """
    size_T = np.abs(gap_T)
    total = math.fsum(size_T)
    if not early or total <= 0:
        return np.ones_like(gap_T)
    # cumsum - size is the sum before the token. Divided by the total and subtracted from 1,
    # it is the share that lies at the token or after it.
    return 1 + early * (1 - (np.cumsum(size_T) - size_T) / total)


def said_logp(scored: Scored) -> Array:
    """The sampler's log-probs of the spoken tokens [T]."""
    return joined(tuple(s.logp[s.mask] for s in scored.episode.segments))


def joined(parts: tuple[np.ndarray, ...]) -> Array:
    """Per-segment arrays as one [T] over the episode's spoken tokens."""
    # The empty array first, so that an episode without segments gives [0] and not an error.
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)
