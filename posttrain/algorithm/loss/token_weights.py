"""Aggregation as one weight per token, normalised over one minibatch. Later splits only select weights.

Worked example (A35): two episodes of 4 and 7 spoken tokens, each in a group of its own, max_tokens=10

    token_mean      1/11   1/11        prompt_mean    1/8    1/14
    sequence_mean   1/8    1/14        sequence_sum   1/2    1/2         constant   1/20   1/20
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posttrain.ladder.algorithm import Aggregate
from posttrain.system.errors import InvariantError


def weigh(
    aggregate: Aggregate, tokens_per_episode: Sequence[int], group_of_episode: Sequence[int], max_tokens: int
) -> NDArray[np.float64]:
    """The weight of each token in each episode, float64 [E]. The loss is then a plain weighted sum over tokens.

    Args:
        aggregate: how tokens are averaged (A35). `prompt_mean` is a token mean inside each group, then a mean over
            groups (DAPO as published, ScaleRL); `constant` divides each episode's sum by `max_tokens` (Dr.GRPO).
        tokens_per_episode: spoken tokens of each episode of the minibatch, all >= 1.
        group_of_episode: a label of the group each episode belongs to.
        max_tokens: L_max of the sampling contract.

    Raises:
        InvariantError: lengths disagree, or an episode has no spoken token (`credit_step` drops such episodes).
    """
    tokens_E = np.asarray(tokens_per_episode, np.float64)
    groups_E = np.asarray(group_of_episode)
    if tokens_E.shape != groups_E.shape or tokens_E.ndim != 1:
        raise InvariantError(f"weigh: {tokens_E.shape} token counts for {groups_E.shape} group labels")
    if np.any(tokens_E < 1) or max_tokens < 1:
        raise InvariantError(
            "weigh: every episode of a minibatch says at least one token, and max_tokens is at least 1"
        )
    if not len(tokens_E):
        return np.zeros(0)
    episodes = float(len(tokens_E))
    # Over the whole minibatch and never over a part, which has other denominators.
    match aggregate:
        case "token_mean":
            return np.full_like(tokens_E, 1 / tokens_E.sum())
        case "prompt_mean":
            # [P] tokens of each group, and 1 / (P * tokens of the own group) for each episode.
            _, index_E = np.unique(groups_E, return_inverse=True)
            tokens_P = np.bincount(index_E, weights=tokens_E)
            return 1 / (len(tokens_P) * tokens_P[index_E])
        case "sequence_mean":
            return 1 / (episodes * tokens_E)
        case "sequence_sum":
            return np.full_like(tokens_E, 1 / episodes)
        case "constant":
            return np.full_like(tokens_E, 1 / (episodes * max_tokens))
