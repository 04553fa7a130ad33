"""Whether the gradient that ranks have together is the gradient: of every parameter, summed once over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from posttrain.core.batch import Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ranks import joint_norm, of_one_copy
from posttrain.engine.sharded import ShardedLearner

DEAF = (
    "{} get no gradient from the values that they make: values would stay as they are. Look for a detach, a hook, or"
    " requires_grad=False in the value head"
)
MOVED = 0.005
"""Nats by which the weighted sum of the log-probs shall change where the weights are moved along its gradient: far
above rounding, and small enough that the change is linear."""
BOUND = 0.1
"""Largest relative difference of that change from what the gradient says. A gradient that is averaged over ranks, or
summed twice, is off by a factor of two at least; one without the part of a rank by 1 / ranks."""


def cotangent(logp: torch.Tensor) -> torch.Tensor:
    """What the log-probs of the fixed sequence are weighted with."""
    return torch.linspace(0.5, 1.5, len(logp), dtype=logp.dtype, device=logp.device)


def silent_on_all_ranks(
    learner: ShardedLearner, packed: Packed, parameters: Mapping[str, Any], head: Mapping[str, Any]
) -> list[str]:
    """The parameters of which no rank's rows get a gradient. Every rank calls it with the same tokens, and each weighs
    its part with 1 / ranks.

    Raises:
        InvariantError: on every rank, where the value head gets no gradient, or the gradients are not summed once.
    """
    scores = learner.forward(packed, entropy=False, value=bool(head))
    total = (scores.logp * cotangent(scores.logp)).sum()
    total = total if scores.value is None else total + scores.value.sum()
    (total / learner.ranks.world).backward()
    found = {n: p.grad.detach().clone() for n, p in {**parameters, **head}.items() if p.grad is not None}
    for p in (*parameters.values(), *head.values()):
        p.grad = None
    own = {n: bool(g.any()) for n, g in found.items()}
    heard = {n for one in learner.ranks.every(own) for n, any_there in one.items() if any_there}
    if deaf := [n for n in head if n not in heard]:
        raise InvariantError(DEAF.format(", ".join(deaf)))
    if scores.value is None or not head:
        summed_once(learner, packed, parameters, found)
    else:  # the values send gradients into the policy too: those of the log-probs alone are wanted
        summed_once(learner, packed, parameters, _of_logp(learner, packed, parameters, head))
    return [n for n in parameters if n not in heard]


def _of_logp(
    learner: ShardedLearner, packed: Packed, parameters: Mapping[str, Any], head: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    scores = learner.forward(packed, entropy=False, value=False)
    ((scores.logp * cotangent(scores.logp)).sum() / learner.ranks.world).backward()
    found = {n: p.grad.detach().clone() for n, p in parameters.items() if p.grad is not None}
    for p in (*parameters.values(), *head.values()):
        p.grad = None
    return found


@torch.no_grad()
def summed_once(
    learner: ShardedLearner, packed: Packed, parameters: Mapping[str, Any], gradient: Mapping[str, torch.Tensor]
) -> None:
    """Moving the weights along the gradient changes the log-probs as the gradient says."""
    ranks = learner.ranks
    own = math.sqrt(math.fsum(float(g.double().square().sum()) for g in gradient.values()))
    squared = joint_norm(of_one_copy(ranks, own, "gradient")) ** 2
    if not squared or not math.isfinite(squared):
        return
    before = {n: parameters[n].detach().clone() for n in gradient}
    said: list[float] = []
    for sign in (1.0, -1.0):
        for name, g in gradient.items():
            parameters[name].copy_(before[name] + sign * (MOVED / squared) * g)
        logp = learner.score(packed).astype(np.float64)
        said.append(float(logp @ np.linspace(0.5, 1.5, len(logp))))
    for name, kept in before.items():
        parameters[name].copy_(kept)
    share = (said[0] - said[1]) / 2 / MOVED
    if not abs(share - 1) <= BOUND:
        raise InvariantError(
            f"the gradient of {ranks.world} ranks is not that of the log-probs: along it they change by {share:.3g}"
            " times what it says. It was averaged over ranks, summed twice, or lacks a rank's part. Every update would"
            " be wrong; go on from the last checkpoint with a build that sums gradients once"
        )
