"""Law 1, in expectation, for the family: pass@k, maximum likelihood, baselines with the sample in them, teachers,
V-trace.

Credit depends on rewards and lengths alone, so groups are listed by classes of responses: a class has a mass, whose
gradient is the sum of its responses' scores. That makes groups of five exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from law_toys import streams_of
from torch import Tensor

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.credit.value_estimates import v_trace
from posttrain.algorithm.loss.policy_loss import objective
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.scored import ScoredGroup
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import GroupMean, Others, ToGo
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.shape import BestOf
from posttrain.ladder.policy_rows import (
    GPG,
    MAXRL,
    MAXRL_SUCCESS,
    OPD,
    OPMD,
    OPO,
    OTB,
    PKPO,
    REINFORCE,
    REMAX,
    RLOO,
    TOPR,
)
from posttrain.toy.enumerated_policy import PrefixPolicy, answer_kl, state_kl
from posttrain.toy.episodes import PlainEpisode, scored_group

POLICY, SAMPLER, REFERENCE = PrefixPolicy(0), PrefixPolicy(1), PrefixPolicy(5)
ALL = POLICY.all
BINARY = [float(i % 3 == 0) for i in range(len(ALL))]
GRADED = [[0.0, 0.5, 2.0][i % 3] for i in range(len(ALL))]

Class = tuple[float, int]
"""Reward and length."""


def classes(reward: list[float], *, lengths: bool = False) -> dict[Class, list[int]]:
    out: dict[Class, list[int]] = {}
    for i, r in enumerate(reward):
        out.setdefault((r, POLICY.lengths[i] if lengths else 1), []).append(i)
    return out


def masses(of: dict[Class, list[int]]) -> Tensor:
    """Probability of every class, differentiable in the logits."""
    p = POLICY.probabilities()
    return torch.stack([p[i].sum() for i in of.values()])


def group_of(chosen: tuple[Class, ...], greedy: float | None) -> ScoredGroup:
    return scored_group(
        "t", [PlainEpisode(r, [[n]], np.full(n, -1.0), np.full(n, -1.0)) for r, n in chosen], greedy=greedy
    )


def expected(
    a: Algorithm, reward: list[float], siblings: int, *, lengths: bool = False, greedy: float | None = None
) -> Tensor:
    """E over all groups of the mean over siblings of credit * score, [15, 3]: minus the gradient of a sequence sum."""
    of = classes(reward, lengths=lengths)
    p = masses(of)
    total = torch.zeros((), dtype=torch.float64)
    for places in product(range(len(of)), repeat=siblings):
        chosen = tuple(list(of)[i] for i in places)
        (g,) = credit_step(a, [group_of(chosen, greedy)], max_tokens=4, ema=0.0).groups
        for i, e in enumerate(g.episodes):
            rest = math.prod(float(p[j].detach()) for k, j in enumerate(places) if k != i)
            total = total + float(e.advantage[0][0]) * rest / siblings * p[places[i]]
    return POLICY.gradient(total)


def best_of(reward: list[float], k: int) -> Tensor:
    """Gradient of the expected best reward of k samples."""
    of = classes(reward)
    p, r = masses(of), [c[0] for c in of]
    return POLICY.gradient(
        torch.stack(
            [max(r[i] for i in s) * torch.stack([p[i] for i in s]).prod() for s in product(range(len(of)), repeat=k)]
        ).sum()
    )


def mean_of(reward: list[float]) -> Tensor:
    return POLICY.exact(torch.tensor(reward, dtype=torch.float64))


def likelihood(order: int) -> Tensor:
    """Gradient of log p of success truncated at `order`: -sum_{k <= order} (1 - p)^k / k."""
    p = (POLICY.probabilities() * torch.tensor(BINARY, dtype=torch.float64)).sum()
    return POLICY.gradient(-torch.stack([(1 - p) ** k / k for k in range(1, order + 1)]).sum())


def k_of(k: int, gain: bool = True) -> Algorithm:
    return patch(REINFORCE, "k", "-", shape=(BestOf(k=k, gain=gain),))


def averaged(f: Callable[[Class, Class], float], of: dict[Class, list[int]]) -> Tensor:
    """Gradient through the first of two samples alone of E[f(first, second)]."""
    p = masses(of)
    return POLICY.gradient(
        torch.stack([p[i] * p[j].detach() * f(a, b) for i, a in enumerate(of) for j, b in enumerate(of)]).sum()
    )


OF = classes(GRADED, lengths=True)
LEAVE_ONE_OUT = patch(k_of(2, gain=False), "others", "-", baseline=Others())
CASES: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    **{
        f"PKPO: best of {k} from {g}": (lambda k=k, g=g: expected(k_of(k), GRADED, g), lambda k=k: best_of(GRADED, k))
        for k, g in ((2, 2), (2, 3), (3, 4), (4, 4))
    },
    "PKPO: pass@4 from 5, as the ladder has it": (lambda: expected(PKPO, BINARY, 5), lambda: best_of(BINARY, 4)),
    "best of 2 from 4 without a gain: as unbiased": (
        lambda: expected(k_of(2, gain=False), GRADED, 4),
        lambda: best_of(GRADED, 2),
    ),
    "best of 2 under a mean of the others: (G - k) / (G - 1)": (
        lambda: expected(LEAVE_ONE_OUT, GRADED, 4),
        lambda: 2 / 3 * best_of(GRADED, 2),
    ),
    "best of 2 of 2 under a mean of the others: nothing": (
        lambda: expected(LEAVE_ONE_OUT, GRADED, 2),
        lambda: 0 * best_of(GRADED, 2),
    ),
    "MaxRL, successes alone: order G": (lambda: expected(MAXRL_SUCCESS, BINARY, 4), lambda: likelihood(4)),
    "MaxRL, centred: order G - 1": (lambda: expected(MAXRL, BINARY, 4), lambda: likelihood(3)),
    "ReMax, whatever the greedy answer earned": (
        lambda: expected(REMAX, GRADED, 2, greedy=0.7),
        lambda: mean_of(GRADED),
    ),
    "RLOO without its KL": (lambda: expected(patch(RLOO, "r", "-", pull=None), GRADED, 4), lambda: mean_of(GRADED)),
    "OPO: its baseline has the sample in it": (
        lambda: expected(OPO, GRADED, 2, lengths=True),
        lambda: mean_of(GRADED) - averaged(lambda a, b: (a[0] * a[1] + b[0] * b[1]) / (a[1] + b[1]), OF),
    ),
    "OPO of equal lengths: (G - 1) / G": (lambda: expected(OPO, GRADED, 3), lambda: 2 / 3 * mean_of(GRADED)),
    "OPMD: its baseline has the sample in it": (
        lambda: expected(OPMD, GRADED, 2),
        lambda: mean_of(GRADED) - averaged(lambda a, b: math.log((math.exp(a[0]) + math.exp(b[0])) / 2), OF),
    ),
    "GPG of one prompt: (G - 1) / G": (lambda: expected(GPG, GRADED, 3), lambda: 2 / 3 * mean_of(GRADED)),
}


@pytest.mark.parametrize("name", CASES)
def test_mean_gradient(name: str) -> None:
    """Law 1: what is unbiased has the exact gradient as its mean, what is biased the documented one, to 1e-12."""
    found, right = (f() for f in CASES[name])
    assert torch.allclose(found, right, rtol=0, atol=1e-12), (found - right).abs().max()
    assert right.abs().max() > 0.01 or "nothing" in name


# --- streams: every response listed, one sample a group, log-probs as the sampler stores them (float32) ---------------


def single(
    a: Algorithm, reward: list[float], *, sampler: PrefixPolicy = POLICY, reference: PrefixPolicy = REFERENCE
) -> Tensor:
    """E over single samples of minus the loss's gradient, [15, 3]."""
    return pairs(a, reward, 1, sampler=sampler, reference=reference)


def pairs(
    a: Algorithm,
    reward: list[float],
    siblings: int,
    *,
    sampler: PrefixPolicy = POLICY,
    reference: PrefixPolicy = REFERENCE,
) -> Tensor:
    """E over all groups of `siblings` responses of minus the loss's gradient, through credit and objective."""
    mu, ref = ([t.token_logp(y).detach().numpy() for y in ALL] for t in (sampler, reference))
    f = np.float32
    answers = [
        PlainEpisode(r, [[len(y)]], m.astype(f), m.astype(f), x.astype(f), energy=energy_of(y).astype(f))
        for r, y, m, x in zip(reward, ALL, mu, ref, strict=True)
    ]
    groups = list(sampler.groups(siblings))
    credit = credit_step(
        a, [scored_group(str(i), [answers[j] for j in g]) for i, (g, _) in enumerate(groups)], max_tokens=4, ema=0.0
    )
    said = [j for g, _ in groups for j in g]
    s = streams_of(
        np.concatenate([e.advantage[0] for g in credit.groups for e in g.episodes]),
        np.concatenate([np.full(POLICY.lengths[j], p / siblings) for g, p in groups for j in g]),
        np.repeat(np.arange(len(said)), [POLICY.lengths[j] for j in said]),
        mu=np.concatenate([mu[j] for j in said]),
        ref=np.concatenate([ref[j] for j in said]),
    )
    each = [POLICY.token_logp(y) for y in ALL]
    loss = objective(a, s, TokenScores(torch.cat([each[j] for j in said]), None, None)).loss
    return -POLICY.gradient(loss)


def energy_of(y: tuple[int, ...]) -> np.ndarray:
    """1 - 2 pi + sum_v pi_v^2 of every token of a response."""
    p = torch.softmax(POLICY.logits, -1).detach()[POLICY.states_of(y)]
    return (1 - 2 * p[torch.arange(len(y)), list(y)] + p.square().sum(-1)).numpy()


def own_baselines(reward: list[float]) -> Tensor:
    """E over pairs of sum_t B_t * grad log pi_t: B_t holds the sample's own reward, and nothing else where its mate has
    ended."""
    p, total = POLICY.probabilities().detach(), torch.zeros((), dtype=torch.float64)
    weight = [np.cumsum(energy_of(y)) for y in ALL]
    for i, y in enumerate(ALL):
        for j, mate in enumerate(ALL):
            both = range(min(len(y), len(mate)))
            shared = [
                (weight[i][t] * reward[i] + weight[j][t] * reward[j]) / (weight[i][t] + weight[j][t]) for t in both
            ]
            b = torch.tensor(shared + [reward[i]] * (len(y) - len(shared)), dtype=torch.float64)
            total = total + p[i] * p[j] * (b * POLICY.token_logp(y)).sum()
    return POLICY.gradient(total)


def whole_kl() -> Tensor:
    """Gradient of KL(pi || reference) over whole responses."""
    return POLICY.gradient(answer_kl(POLICY, REFERENCE))


def visited_kl() -> Tensor:
    """Gradient of KL(pi || teacher) of the next token, where the policy goes."""
    return POLICY.gradient(state_kl(POLICY, REFERENCE, POLICY.visits()))


PAID = KL(coef=1.0, estimator="k1", placement="reward")
STREAMS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "OPD: reverse KL of every visited token": (
        lambda: single(patch(OPD, "sum", "-", aggregate="sequence_sum"), GRADED),
        lambda: -visited_kl(),
    ),
    "OTB: its baselines have the sample in them": (
        lambda: pairs(OTB, GRADED, 2),
        lambda: mean_of(GRADED) - own_baselines(GRADED),
    ),
    "RLOO: E[R] - .03 KL of whole answers": (
        lambda: pairs(RLOO, GRADED, 2),
        lambda: mean_of(GRADED) - 0.03 * whole_kl(),
    ),
    "KL to go: E[R] - KL of whole answers": (
        lambda: single(patch(REINFORCE, "g", "-", baseline=ToGo(), pull=PAID), GRADED),
        lambda: mean_of(GRADED) - whole_kl(),
    ),
    "KL of the whole answer for every token: the same": (
        lambda: single(patch(REINFORCE, "g", "-", pull=PAID), GRADED),
        lambda: mean_of(GRADED) - whole_kl(),
    ),
    "a group mean shrinks the KL with the reward": (
        lambda: pairs(patch(REINFORCE, "g", "-", baseline=GroupMean(), pull=PAID), GRADED, 2),
        lambda: (mean_of(GRADED) - whole_kl()) / 2,
    ),
    "TOPR: successes as the sampler draws them, failures at most as often as the policy would": (
        lambda: single(TOPR, BINARY, sampler=SAMPLER),
        lambda: tapered(),
    ),
}


def tapered() -> Tensor:
    mu, pi = SAMPLER.probabilities().detach(), POLICY.probabilities().detach()
    r = 2 * torch.tensor(BINARY, dtype=torch.float64) - 1
    return POLICY.exact(r * torch.where(r >= 0, mu, torch.minimum(mu, pi)) / pi)


@pytest.mark.parametrize("name", STREAMS)
def test_mean_gradient_with_streams(name: str) -> None:
    """Law 1, where credit reads log-probs, which are stored in float32."""
    found, right = (f() for f in STREAMS[name])
    assert torch.allclose(found, right, rtol=0, atol=3e-7), (found - right).abs().max()
    assert right.abs().max() > 0.01


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_v_trace_targets_are_the_policys_values(gamma: float) -> None:
    """Without a cap, the mean target of the first token under the sampler is the policy's value, whatever the values
    were; a cap of 1 moves it, towards the sampler's."""
    p, mu = POLICY.probabilities().detach(), SAMPLER.probabilities().detach()
    v = np.random.default_rng(0).normal(size=len(POLICY.states))
    means: dict[float, float] = {}
    for cap in (1e9, 1.0):
        total = 0.0
        for i, y in enumerate(ALL):
            ratio = (POLICY.token_logp(y) - SAMPLER.token_logp(y)).detach().exp().numpy()
            rewards = np.zeros(len(y))
            rewards[-1] = GRADED[i]
            values = v[POLICY.states_of(y)]
            total += float(mu[i]) * float(v_trace(values, rewards, ratio, gamma=gamma, gae_lambda=1.0, cap=cap)[1][0])
        means[cap] = total
    exact = sum(float(p[i]) * gamma ** (POLICY.lengths[i] - 1) * GRADED[i] for i in range(len(ALL)))
    assert means[1e9] == pytest.approx(exact, abs=1e-12) and abs(means[1.0] - exact) > 0.01
