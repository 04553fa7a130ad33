"""Learned values: GAE (1506.02438) or V-trace (1802.01561) over spoken tokens, and the value loss (A05)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.system.errors import InvariantError


def gae(
    values_T: NDArray[np.float64], rewards_T: NDArray[np.float64], *, gamma: float, gae_lambda: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(advantage [T], return [T]) of one finished episode.

    T counts the spoken tokens of all segments. An observation is not an action of the policy, so its tokens are not
    here, and deleting them changes nothing. The value after the last token is 0.

        delta_t = r_t + gamma * V_{t+1} - V_t      A_t = delta_t + gamma * lambda * A_{t+1}      return_t = A_t + V_t

    >>> gae(np.array([.5, .6, .8]), np.array([0., 0., 1.]), gamma=1.0, gae_lambda=0.95)
    (array([0.4705, 0.39  , 0.2   ]), array([0.9705, 0.99  , 1.    ]))
    """
    if values_T.shape != rewards_T.shape or values_T.ndim != 1:
        raise InvariantError(f"gae: {values_T.shape} values for {rewards_T.shape} rewards")
    advantage_T = np.zeros_like(values_T)
    # V behind the last token is 0 and nothing is bootstrapped, not even where a limit cut the episode off.
    value_next, advantage_next = 0.0, 0.0
    for t in range(len(values_T) - 1, -1, -1):
        delta = rewards_T[t] + gamma * value_next - values_T[t]
        # One pass from the end: sum_k (gamma lambda)^k delta_{t+k} in its recursive form.
        advantage_next = delta + gamma * gae_lambda * advantage_next
        value_next = values_T[t]
        advantage_T[t] = advantage_next
    return advantage_T, advantage_T + values_T


def v_trace(
    values_T: NDArray[np.float64],
    rewards_T: NDArray[np.float64],
    ratio_T: NDArray[np.float64],
    *,
    gamma: float,
    gae_lambda: float,
    cap: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(advantage [T], return [T]) of an episode that another policy sampled (1802.01561, Eq. 1 and 4.2).

    With ratio = start/mu, rho_t = min(cap, ratio_t) and c_t = lambda * rho_t:

        return_t = V_t + rho_t * delta_t + gamma * c_t * (return_{t+1} - V_{t+1})
        A_t = r_t + gamma * return_{t+1} - V_t

    The weight of the policy gradient is the algorithm's correction, so A has none. On policy and with lambda 1 the
    targets are those of `gae`.
    """
    return_T = np.zeros_like(values_T)
    advantage_T = np.zeros_like(values_T)
    value_next, return_next = 0.0, 0.0
    for t in range(len(values_T) - 1, -1, -1):
        # One bounded ratio serves as rho and, times lambda, as c: the paper's rho-bar and c-bar are both `cap` here.
        rho = min(cap, float(ratio_T[t]))
        delta = rewards_T[t] + gamma * value_next - values_T[t]
        # The advantage reads the corrected target of the next token, not its
        # value: q_t = r_t + gamma * v_{t+1} in the paper, where v is the target.
        advantage_T[t] = rewards_T[t] + gamma * return_next - values_T[t]
        return_T[t] = values_T[t] + rho * delta + gamma * gae_lambda * rho * (return_next - value_next)
        value_next, return_next = values_T[t], return_T[t]
    return advantage_T, return_T


def value_loss(value_M: Tensor, old_M: Tensor | None, return_M: Tensor, clip: float | None) -> Tensor:
    """Loss per token [M]: 0.5 * max((V - ret)^2, (V_old + clamp(V - V_old, -clip, clip) - ret)^2) (A05), or without
    `clip` the first term. V_old .5, V .9, ret 1, clip .2 -> 0.045."""
    plain_M = (value_M - return_M).square()
    if clip is None:
        return 0.5 * plain_M
    if old_M is None:
        raise InvariantError(
            "a clipped value loss compares with the values at the start of the step, which are missing"
        )
    # The larger of both losses. Where the clipped value is the worse one, its gradient is 0 beyond
    # the bound: a value that has moved far since the step began gains nothing by moving further.
    near_M = old_M + (value_M - old_M).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain_M, (near_M - return_M).square())
