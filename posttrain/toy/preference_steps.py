"""Steps of gradient descent on pairs in a small world, with the library's preference losses.

>>> from posttrain.ladder.preference_rows import IPO
>>> from posttrain.toy.enumerated_policy import PrefixPolicy
>>> policy, start = (PrefixPolicy(0, vocabulary=3, longest=1) for _ in range(2))
>>> round(descend(IPO, policy, start, [((0,), (1,))], steps=400, lr=0.1)[-1], 2)
5.0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import prepared
from posttrain.core.exchange.scores import TokenScores
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.toy.pairs import AnswerPair, TablePolicy, batch_of_pairs, pair_logp


def gap(policy: TablePolicy, reference: TablePolicy, pair: AnswerPair) -> float:
    """Returns how much more the policy has raised the log-prob of the chosen answer than that of the rejected one, in
    nats, against the reference."""
    with torch.no_grad():
        moved = pair_logp(policy, [pair]) - pair_logp(reference, [pair])
    first = len(pair[0])
    return float(moved[:first].sum() - moved[first:].sum())


def descend(
    a: PreferenceAlgorithm,
    policy: TablePolicy,
    reference: TablePolicy,
    pairs: Sequence[AnswerPair],
    *,
    steps: int,
    lr: float,
) -> list[float]:
    """Train on all pairs at once; returns the gap of the first pair before each step and at the end."""
    # Prepared once, because all pairs are in every step and the reference does not change.
    batch, _ = prepared(a, batch_of_pairs(reference, pairs))
    gaps = [gap(policy, reference, pairs[0])]
    for _ in range(steps):
        logp_M = pair_logp(policy, pairs)
        loss = PreferenceLoss(a).terms(batch, TokenScores(logp=logp_M, entropy=None, value=None)).loss
        with torch.no_grad():
            policy.logits -= lr * torch.autograd.grad(loss, policy.logits)[0]
        gaps.append(gap(policy, reference, pairs[0]))
    return gaps
