"""Distances between two next-token distributions at the sampled positions: binary, top-k, and whole. Q is the policy's,
P the one it is compared with: the anchor's (often the sampler's), or a teacher's. There are K candidate tokens; all
others are summed into one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.core.streams import TOP_IDS, TOP_LOGP
from posttrain.ladder.pieces.trust_region import Divergence
from posttrain.system.errors import InvariantError

TINY = 1e-12
"""Least probability of the other tokens. It is computed as 1 minus a sum near 1, so a smaller value is rounding."""


def distance(
    region: Divergence, logq_M: Tensor, logp_M: Tensor, batch: Streams, candidates_MK: Tensor | None
) -> Tensor:
    """Distance [M] between P (log-probs logp_M of the sampled tokens) and the policy Q (A18).

    mu .99, pi .8: TV .19, KL .181. Top-2 of mu [.5, .3, .1, .06, .04] against pi [.4, .35, .12, .05, .08]: TV .10, KL
    .0207.
    """
    # [M, K]: the candidates as columns. All other tokens together are one
    # more outcome, of probability 1 - sum: the distances below add it.
    p, q = logp_M[:, None], logq_M[:, None]
    if region.top:
        ids_MK = batch[TOP_IDS]
        if batch.target_M is None or candidates_MK is None:
            raise InvariantError(
                "a top-k divergence compares the policy's log-probs of the candidates, and the forward pass was not"
                " asked for them (candidates_MK)"
            )
        is_sampled_MK = ids_MK == batch.target_M[:, None]
        # The sampled token gets a column of its own, unless it is among the candidates: it would count twice.
        own_column = ~is_sampled_MK.any(1, keepdim=True)
        # Log-prob -inf is probability 0: the extra column then adds nothing, and the rest is not made smaller by it.
        p = torch.cat([batch[TOP_LOGP], p.masked_fill(~own_column, -torch.inf)], 1)
        q = torch.cat([candidates_MK, q.masked_fill(~own_column, -torch.inf)], 1)
    return total_variation(p, q) if region.measure == "tv" else forward_kl(p, q)


def total_variation(logp_MK: Tensor, logq_MK: Tensor) -> Tensor:
    """[M]: half the sum of |P - Q| over the candidates and the rest."""
    p, q = logp_MK.exp(), logq_MK.exp()
    # The rest has probability 1 - sum p, so its difference is sum q - sum p: the rest itself is never formed.
    return 0.5 * ((p - q).abs().sum(1) + (p.sum(1) - q.sum(1)).abs())


def forward_kl(logp_MK: Tensor, logq_MK: Tensor) -> Tensor:
    """[M]: KL(P || Q) over the candidates and the rest."""
    p = logp_MK.exp()
    # Where p is 0 its term is 0. Computed, -inf - -inf would be NaN.
    inside = torch.where(p > 0, p * (logp_MK - logq_MK), torch.zeros_like(p)).sum(1)
    rest_p, rest_q = rest(logp_MK), rest(logq_MK)
    # A rest of TINY is rounding of 1 - sum p. log of it would be a number without meaning, so it counts as 0.
    return inside + torch.where(rest_p > TINY, rest_p * (rest_p.log() - rest_q.log()), torch.zeros_like(rest_p))


def binary_kl(logp_M: Tensor, logq_M: Tensor) -> Tensor:
    """[M]: KL(P || Q) over two outcomes, the sampled token and any other."""
    return forward_kl(logp_M[:, None], logq_M[:, None])


def jensen_shannon(teacher_MK: Tensor, student_MK: Tensor, beta: float) -> Tensor:
    """Generalised JSD [M] over the candidates and the rest, differentiable in the student (GKD, A30).

    beta * KL(T || M) + (1 - beta) * KL(S || M), M = beta T + (1 - beta) S; beta 0 is KL(T || S), beta 1 KL(S || T).
    T (.8, .2), S (.5, .5): KL(S || T) .223144, KL(T || S) .192745, JSD_.5 .050672.
    """
    # [M, K + 1] log-probs that sum to 1: the candidates, and all other
    # tokens as one. Gradients flow through the student's rest too.
    t = torch.cat([teacher_MK, rest(teacher_MK)[:, None].log()], 1)
    s = torch.cat([student_MK, rest(student_MK)[:, None].log()], 1)
    # For beta 0 and 1 the mixture M is one of the two distributions, and the formula gives 0. As
    # in GKD these values stand for the limits of JSD / beta and JSD / (1 - beta).
    if beta in (0, 1):
        a, b = (t, s) if beta == 0 else (s, t)
        return (a.exp() * (a - b)).sum(1)
    # log M is computed from log-probs alone: probabilities as small as e^-100 keep their digits.
    m = torch.logaddexp(t + math.log(beta), s + math.log(1 - beta))
    return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(1)


def rest(logp_MK: Tensor) -> Tensor:
    """[M]: probability outside the candidates."""
    return (1 - logp_MK.exp().sum(1)).clamp_min(TINY)
