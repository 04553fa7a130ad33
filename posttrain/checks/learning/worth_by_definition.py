"""What single answers are worth by definition, before they are compared: implicit rewards, values, rewards of turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.core.scored import Scored
from posttrain.core.streams import IMPLICIT, REFERENCE, VALUE
from posttrain.core.types import Episode


def verdict_terms(e: Episode) -> list[float]:
    """The terms of an episode's raw reward: weight times score of each verdict that counts."""
    # A score of a step that is not paid is no part of the outcome.
    return [j.weight * j.verdict.score for j in e.verdicts if j.counts and j.verdict.score is not None]


def implicit_worth(
    baseline: Any, i: int, mates: Sequence[int], samples: Sequence[tuple[int, Scored]]
) -> np.ndarray | None:
    """The sum of implicit process rewards from each token to the end of answer `i`, each less the siblings' level. An
    implicit reward is beta times the log-ratio of a token. The level is the mean over the other siblings of their mean
    log-ratios. None where a sibling has no scores. `mates`: the places in `samples` of the answer's group, its own
    included."""
    # One sibling without scores leaves the level of the others unknown.
    if any(IMPLICIT not in samples[j][1] or REFERENCE not in samples[j][1] for j in mates):
        return None
    ratios = {j: _log_ratio(samples[j][1]) for j in mates}
    others = [float(ratios[j].mean()) if len(ratios[j]) else 0.0 for j in mates if j != i]
    # The level is a mean over answers of their means over tokens, so that a long answer counts no more than a short
    # one.
    level = math.fsum(others) / len(others) if others else 0.0
    lead = ratios[i] - level
    # The sum from each token to the end: the leads are turned round, summed by a convolution with ones, and turned
    # back.
    return baseline.beta * np.convolve(lead[::-1], np.ones(len(lead)))[: len(lead)][::-1] if len(lead) else lead


def _log_ratio(s: Scored) -> np.ndarray:
    """The log-ratio of the implicit reward model to the reference, for each spoken token."""
    return np.concatenate(s[IMPLICIT]).astype(np.float64) - np.concatenate(s[REFERENCE])


def value_targets(baseline: Any, s: Scored, shaped: float, penalties: np.ndarray) -> np.ndarray | None:
    """The value target of each token: its estimate plus the GAE advantage."""
    if VALUE not in s:
        return None
    v = np.concatenate(s[VALUE]).astype(np.float64)
    turns = turn_rewards(s.episode)
    return v + advantages_to_go(baseline, v, shaped - turns.sum(), penalties - turns)


def turn_rewards(e: Episode) -> np.ndarray:
    """Returns the rewards that the environment paid for turns, at the last spoken token of each."""
    # `end` counts spoken tokens from 1.
    rewards = [(j.end or 0, j.weight * (j.verdict.score or 0.0)) for j in e.verdicts if j.paid]
    return np.array([math.fsum(score for end, score in rewards if end == t) for t in range(1, e.spoken + 1)])


def advantages_to_go(value: Any, v: np.ndarray, shaped: float, penalties: np.ndarray) -> np.ndarray:
    """GAE as an explicit sum over spoken tokens: A_t = sum_k (gamma lambda)^k delta_{t+k}.

    Args:
        value: the value baseline, with its settings.
        v: the estimate of each token's value.
        shaped: the reward that comes with the last token.
        penalties: the penalty of each token, less the reward of a turn that ends there.
    """
    if not len(v):
        return v
    # A penalty is paid with a minus. The rest of the reward comes with the last token.
    earned = np.negative(penalties)
    earned[-1] += shaped
    # delta_t = r_t + gamma V_{t+1} - V_t, where V is 0 behind the last token.
    delta = earned + value.gamma * np.append(v[1:], 0.0) - v
    fade = (value.gamma * value.gae_lambda) ** np.arange(len(v))
    # The sum over k >= 0 looks forward, so the deltas are turned round before the convolution, and the sums after it.
    return np.convolve(delta[::-1], fade)[: len(v)][::-1]
