"""Law 1, in expectation: every response of a small policy is listed, so the mean gradient is known exactly.

The policy is a free softmax over 3 tokens at each of 15 prefixes (31 responses, EOS included, at most 4 tokens). What
a paper claims unbiased must equal the gradient of E[R]; what is biased must equal its documented bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from law_toys import streams_of
from torch import Tensor

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.policy_loss import objective
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.scored import ScoredGroup
from posttrain.core.streams import RETURN, VALUE
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import Ema, GroupMean, Others, Value
from posttrain.ladder.pieces.correction import Mask, Truncate
from posttrain.ladder.policy_rows import DR_GRPO, EMA, GRPO, PPO, REINFORCE
from posttrain.toy.enumerated_policy import PrefixPolicy
from posttrain.toy.episodes import PlainEpisode, rewarded, scored_group

POLICY, SAMPLER = PrefixPolicy(0), PrefixPolicy(1)
ALL = POLICY.all
LENGTH = torch.tensor(POLICY.lengths, dtype=torch.float64)
R = torch.tensor(np.random.default_rng(2).integers(-4, 9, len(ALL)) / 4, dtype=torch.float64)
EXACT = POLICY.exact(R)
STATE_VALUE = np.random.default_rng(3).normal(size=len(POLICY.states)).astype(np.float32)


@cache
def a_group(chosen: tuple[int, ...], values: bool) -> ScoredGroup:
    """The group whose siblings gave these responses. Log-probs are read from the policies, not from here."""
    answers: list[PlainEpisode] = []
    for i in chosen:
        n = len(ALL[i])
        v = STATE_VALUE[POLICY.states_of(ALL[i])] if values else np.zeros(n, np.float32)
        one = np.full(n, -1, np.float32)
        answers.append(PlainEpisode(float(R[i]), [[n]], one, one, one, v))
    return scored_group("t", answers)


def expected(
    a: Algorithm, *, siblings: int = 2, ema: float = 0.0, values: bool = False, sampler: PrefixPolicy = POLICY
) -> Tensor:
    """E over all groups of siblings drawn from `sampler` of minus the loss's gradient at the policy, [15, 3]."""
    columns: dict[str, list[np.ndarray]] = {"advantage": [], "weight": [], "sequence": []}
    said: list[int] = []
    for chosen, p in sampler.groups(siblings):
        (g,) = credit_step(a, [a_group(chosen, values)], max_tokens=4, ema=ema).groups
        tokens = [POLICY.lengths[i] for i in chosen]
        weights = weigh(a.aggregate, tokens, [0] * siblings, 4) * p
        columns["advantage"] += [e.advantage[0] for e in g.episodes]
        columns["weight"].append(np.repeat(weights, tokens))
        columns["sequence"] += [np.full(n, len(said) + j) for j, n in enumerate(tokens)]
        said += chosen
    mu = torch.cat([SAMPLER.token_logp(y) if sampler is SAMPLER else POLICY.token_logp(y) for y in ALL]).detach()
    cuts = np.cumsum([0, *POLICY.lengths])
    index = np.concatenate([np.arange(cuts[i], cuts[i + 1]) for i in said])
    merged = {k: np.concatenate(v) for k, v in columns.items()}
    s = streams_of(merged["advantage"], merged["weight"], merged["sequence"], mu=mu.numpy()[index])
    logp = torch.cat([POLICY.token_logp(y) for y in ALL])[index]
    zero = torch.zeros_like(logp)
    s = s.having({VALUE: zero, RETURN: zero})
    return -POLICY.gradient(objective(a, s, TokenScores(logp, None, zero)).loss)


def near(found: Tensor, right: Tensor, tolerance: float = 1e-12) -> bool:
    return torch.allclose(found, right, rtol=0, atol=tolerance)


def test_the_world_is_whole() -> None:
    """31 responses whose probabilities sum to one."""
    assert len(ALL) == 31 and POLICY.probabilities().sum().item() == pytest.approx(1, abs=1e-14)
    assert EXACT.abs().max() > 0.1


PLAIN_PPO = patch(PPO, "plain", "-", whiten=None, aggregate="sequence_sum", baseline=Value(gae_lambda=1.0))
LOO = patch(REINFORCE, "loo", "-", baseline=Others())
IS = patch(REINFORCE, "is", "-", ratio="sequence_product")
UNBIASED: dict[str, Callable[[], Tensor]] = {
    "no baseline": lambda: expected(REINFORCE, siblings=1),
    "no baseline, two siblings": lambda: expected(REINFORCE),
    "moving baseline": lambda: expected(EMA, ema=0.7),
    "fast moving baseline": lambda: expected(patch(EMA, "fast", "-", baseline=Ema(decay=0.1)), ema=-2.0),
    "leave one out": lambda: expected(LOO),
    "values zero, lambda 1": lambda: expected(PLAIN_PPO, siblings=1),
    "values arbitrary, lambda 1": lambda: expected(PLAIN_PPO, siblings=1, values=True),
    "constant normaliser, up to its constant": lambda: 4 * expected(patch(LOO, "c", "-", aggregate="constant")),
    "ratio of the answer, off policy": lambda: expected(IS, siblings=1, sampler=SAMPLER),
    "ratio of the answer, off policy, leave one out": lambda: expected(
        patch(IS, "loo", "-", baseline=Others()), sampler=SAMPLER
    ),
    "uncapped correction of the answer": lambda: expected(
        patch(LOO, "c", "-", correction=(Truncate(cap=1e9, level="sequence"),)), sampler=SAMPLER
    ),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_what_is_unbiased_has_the_exact_gradient_as_its_mean(name: str) -> None:
    """Law 1: E over all groups equals the gradient of E[R], to 1e-12."""
    found = UNBIASED[name]()
    assert torch.allclose(found, EXACT, rtol=0, atol=1e-12), (found - EXACT).abs().max()


def per_token(f: Callable[[int, int], float]) -> Tensor:
    """E[sum_t f(response, t) * grad log pi(y_t)]."""
    p = POLICY.probabilities().detach()
    total = sum(p[i] * sum(f(i, t) * POLICY.token_logp(y)[t] for t in range(len(y))) for i, y in enumerate(ALL))
    assert isinstance(total, Tensor)
    return POLICY.gradient(total)


MEAN_R = float((POLICY.probabilities().detach() * R).sum())
SHORT_GRPO = patch(patch(GRPO, "g", "-", pull=None), "sum", "-", aggregate="sequence_sum")
SAMPLED_RATIO = (SAMPLER.probabilities() / POLICY.probabilities()).detach()
BIASED: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "own reward in the mean: (G-1)/G": (
        lambda: expected(patch(LOO, "c", "-", baseline=GroupMean())),
        lambda: EXACT / 2,
    ),
    "dr_grpo: (G-1)/G over the constant": (lambda: expected(DR_GRPO), lambda: EXACT / 2 / 4),
    "std of two siblings: the sign of the difference": (lambda: expected(SHORT_GRPO), lambda: _sign_gradient()),
    "sequence_mean: of E[R/len] less mean R times that of E[1/len]": (
        lambda: expected(patch(LOO, "m", "-", aggregate="sequence_mean")),
        lambda: POLICY.exact(R / LENGTH) - MEAN_R * POLICY.exact(1 / LENGTH),
    ),
    "lambda < 1 without values: early tokens are credited less": (
        lambda: expected(patch(PLAIN_PPO, "l", "-", baseline=Value(gae_lambda=0.5)), siblings=1),
        lambda: per_token(lambda i, t: float(R[i]) * 0.5 ** (len(ALL[i]) - 1 - t)),
    ),
    "token ratio off policy: states of the sampler": (
        lambda: expected(patch(REINFORCE, "t", "-", ratio="token"), siblings=1, sampler=SAMPLER),
        lambda: per_token(lambda i, t: float(R[i] * SAMPLED_RATIO[i] * _ratio(i, t))),
    ),
    "masked correction: only answers inside the band": (
        lambda: expected(
            patch(REINFORCE, "m", "-", correction=(Mask(low=0.5, high=2, level="sequence"),)),
            siblings=1,
            sampler=SAMPLER,
        ),
        lambda: POLICY.exact(R * ((SAMPLED_RATIO <= 2) & (SAMPLED_RATIO >= 0.5))),
    ),
    "capped correction": (
        lambda: expected(
            patch(REINFORCE, "m", "-", correction=(Truncate(cap=1.2, level="sequence"),)), siblings=1, sampler=SAMPLER
        ),
        lambda: POLICY.exact(R * SAMPLED_RATIO * (1 / SAMPLED_RATIO).clamp(max=1.2)),
    ),
}


def _ratio(i: int, t: int) -> float:
    y = ALL[i]
    return float((POLICY.token_logp(y)[t] - SAMPLER.token_logp(y)[t]).detach().exp())


def _sign_gradient() -> Tensor:
    """Two siblings, std ddof 1: credit is sign(R - R') / sqrt 2, so the mean gradient is that of E[sum over R' of p(R')
    sign]."""
    p = POLICY.probabilities().detach()
    return POLICY.exact(torch.sign(R[:, None] - R[None, :]) @ p / math.sqrt(2))


@pytest.mark.parametrize("name", BIASED)
def test_what_is_biased_has_the_documented_bias(name: str) -> None:
    """Law 1: the mean gradient is the documented one, and is not that of E[R]."""
    found, right = (f() for f in BIASED[name])
    assert torch.allclose(found, right, rtol=0, atol=1e-12), (found - right).abs().max()
    assert (found - EXACT).abs().max() > 0.01


def weight_of(a: Algorithm, p: float, g: int) -> float:
    """What an algorithm multiplies the gradient of a prompt's success rate p with: rewards are 0 or 1, so only counts
    matter.

    A correct answer's score has mean grad p / p, a wrong one's -grad p / (1 - p); patterns of g rewards are listed.
    """
    patterns = [[float(k >> i & 1) for i in range(g)] for k in range(2**g)]
    credit = credit_step(a, rewarded(*patterns), max_tokens=1, ema=0.0)
    total = 0.0
    for r, c in zip(patterns, credit.groups, strict=True):
        mass = math.prod(p if x else 1 - p for x in r)
        total += (
            mass
            / g
            * sum(float(e.advantage[0][0]) * (x / p - (1 - x) / (1 - p)) for e, x in zip(c.episodes, r, strict=True))
        )
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("g", [2, 4, 5])
def test_weight_of_a_prompt_by_its_success_rate(p: float, g: int) -> None:
    """REINFORCE and RLOO weigh prompts alike (1), the group mean by (G-1)/G, GRPO by its std, (r - mean)/mean as
    maximum likelihood of order G - 1 (A17: p = .5, G = 4 gives 1.75)."""
    mean = patch(LOO, "c", "-", baseline=GroupMean())
    assert weight_of(REINFORCE, p, g) == pytest.approx(1)
    assert weight_of(LOO, p, g) == pytest.approx(1)
    assert weight_of(mean, p, g) == pytest.approx((g - 1) / g)
    by_counts = sum(
        math.comb(g, k)
        * p**k
        * (1 - p) ** (g - k)
        * (k / g)
        * (1 - k / g)
        / math.sqrt(k * (g - k) / (g * (g - 1)))
        / (p * (1 - p))
        for k in range(1, g)
    )
    assert weight_of(patch(mean, "std", "-", scale="group_std"), p, g) == pytest.approx(by_counts)
    assert weight_of(patch(mean, "maxrl", "-", scale="group_mean"), p, g) == pytest.approx((1 - (1 - p) ** (g - 1)) / p)
