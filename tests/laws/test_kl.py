"""KL to the reference: which pairs of estimator and placement have the gradient they are said to have (A34, A08)."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from law_toys import streams_of
from torch import Tensor

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.policy_loss import objective
from posttrain.algorithm.loss.reference_penalty import estimate, in_loss
from posttrain.core.exchange.scores import TokenScores
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces import pull as data
from posttrain.ladder.pieces.pull import KL, Estimator, Placement, SequenceL2
from posttrain.ladder.policy_rows import REINFORCE
from posttrain.system.errors import ConfigError
from posttrain.toy.enumerated_policy import PrefixPolicy, answer_kl, state_kl
from posttrain.toy.episodes import PlainEpisode, scored_group

REF = torch.tensor([0.5, 0.5], dtype=torch.float64).log()


def bandit(p: float = 0.8) -> Tensor:
    """Logits of a two-armed policy with probabilities (p, 1 - p)."""
    return torch.tensor([math.log(p), math.log(1 - p)], dtype=torch.float64, requires_grad=True)


def slope(estimator: Estimator, placement: Placement, sampler: tuple[float, float] = (0.8, 0.2)) -> float:
    """Enumerated d/d logit 0 of the estimate, with pi = (.8, .2), ref = (.5, .5) and arms drawn from `sampler`."""
    logits = bandit()
    lp, mu = torch.log_softmax(logits, 0), torch.tensor(sampler, dtype=torch.float64)
    k = estimate(estimator, lp - REF, lp - mu.log())
    total = torch.zeros((), dtype=torch.float64)
    if placement in ("reward", "both"):
        total = total + (mu * k.detach() * lp).sum()
    if placement in ("loss", "both"):
        total = total + (mu * k).sum()
    return torch.autograd.grad(total, logits)[0][0].item()


TRUE, FORWARD = 0.221807, 0.3
TABLE: dict[tuple[Estimator, Placement], float] = {
    ("k1", "reward"): TRUE,
    ("k2", "loss"): TRUE,
    ("k3", "loss"): FORWARD,
    ("k3", "both"): TRUE,
    ("rk3", "loss"): TRUE,
    ("k1", "loss"): 0.0,
    ("k1", "both"): TRUE,
    ("k3", "reward"): -0.078193,
    ("rk3", "reward"): -0.078193,
    ("k2", "reward"): -0.049495,
    ("k2", "both"): TRUE - 0.049495,
    ("rk3", "both"): TRUE - 0.078193,
}


@pytest.mark.parametrize("pair", TABLE, ids=["/".join(p) for p in TABLE])
def test_gradient_of_every_pair(pair: tuple[Estimator, Placement]) -> None:
    """A34: the enumerated gradient of every pair; true .221807, forward KL .300000, k3 in the reward of the wrong
    sign."""
    assert slope(*pair) == pytest.approx(TABLE[pair], abs=2e-6)


def test_means_of_the_estimators() -> None:
    """A34: pi = (.8, .2), ref = (.5, .5): E k1 = E k3 = KL = .192745, E k2 = .172320."""
    lp = torch.log_softmax(bandit(), 0)
    means = {
        e: (lp.exp() * estimate(e, lp - REF, torch.zeros_like(lp))).sum().item() for e in ("k1", "k2", "k3", "rk3")
    }
    assert means == pytest.approx({"k1": 0.192745, "k2": 0.172320, "k3": 0.192745, "rk3": 0.192745}, abs=1e-6)


def test_ratio_weighted_k3_is_exact_off_policy() -> None:
    """A08: arms drawn from (.6, .4): E r k3 = .192745 and its gradient .221807; plain k3 has mean .290486 and gradient
    .525."""
    lp, mu = torch.log_softmax(bandit(), 0), torch.tensor([0.6, 0.4], dtype=torch.float64)
    assert (mu * estimate("rk3", lp - REF, lp - mu.log())).sum().item() == pytest.approx(0.192745, abs=1e-6)
    assert (mu * estimate("k3", lp - REF)).sum().item() == pytest.approx(0.290486, abs=1e-6)
    assert slope("rk3", "loss", (0.6, 0.4)) == pytest.approx(TRUE, abs=1e-6)
    assert slope("k3", "loss", (0.6, 0.4)) == pytest.approx(0.525, abs=1e-6)


def test_the_table_of_the_data_is_the_measured_one() -> None:
    """Legal pairs are exact or say what they are instead; every other pair is refused, and says why."""
    for pair in product(("k1", "k2", "k3", "rk3"), ("reward", "loss", "both")):
        exact = abs(slope(*pair) - TRUE) < 1e-5
        if pair in data._KL_TRUTH:
            kl = KL(coef=0.1, estimator=pair[0], placement=pair[1])
            assert kl.truth.startswith("exact") == exact
            assert kl.in_credit == (pair[1] != "loss") and in_loss(kl) == (pair[1] != "reward")
        else:
            assert not exact or pair == ("k1", "both")
            with pytest.raises(ConfigError, match="Use one of"):
                KL(coef=0.1, estimator=pair[0], placement=pair[1])
            assert pair in data._KL_REFUSED
    assert not in_loss(SequenceL2()) and not in_loss(None)


# --- sequences: the library's own credit and objective, every response listed ----------------------------------------

POLICY, REFERENCE = PrefixPolicy(0), PrefixPolicy(5)
ALL = POLICY.all


def through_the_library(pull: KL) -> Tensor:
    """E over single samples of the loss's gradient with reward 0 and coefficient 1, [15, 3]."""
    a = (
        patch(REINFORCE, "kl", "-", pull=pull, ratio="token")
        if pull.estimator == "rk3"
        else patch(REINFORCE, "kl", "-", pull=pull)
    )
    logp = [POLICY.token_logp(y) for y in ALL]
    ref = [REFERENCE.token_logp(y).detach().numpy() for y in ALL]
    mu = [x.detach().numpy() for x in logp]
    answers = [
        PlainEpisode(0.0, [[len(y)]], m.astype(np.float32), reference=r.astype(np.float32))
        for y, m, r in zip(ALL, mu, ref, strict=True)
    ]
    credit = credit_step(a, [scored_group(str(i), [x]) for i, x in enumerate(answers)], max_tokens=4, ema=0.0)
    s = streams_of(
        np.concatenate([g.episodes[0].advantage[0] for g in credit.groups]),
        np.repeat(POLICY.probabilities().detach().numpy(), POLICY.lengths),
        np.repeat(np.arange(len(ALL)), POLICY.lengths),
        mu=np.concatenate(mu),
        ref=np.concatenate(ref),
    )
    return POLICY.gradient(objective(a, s, TokenScores(torch.cat(logp), None, None)).loss)


def whole_answer_kl() -> Tensor:
    """Gradient of KL(pi || ref) over responses."""
    return POLICY.gradient(answer_kl(POLICY, REFERENCE))


def visited_kl(forward: bool) -> Tensor:
    """Gradient of the tokens' KL, either way round, where the policy goes."""
    return POLICY.gradient(state_kl(POLICY, REFERENCE, POLICY.visits(), forward=forward))


@pytest.mark.parametrize(("estimator", "placement"), [("k1", "reward"), ("k3", "both")])
def test_exact_for_whole_answers(estimator: Estimator, placement: Placement) -> None:
    """k1 in the reward and k3 in both have the gradient of the KL over whole answers (float32 log-probs in the
    reward)."""
    found = through_the_library(KL(coef=1.0, estimator=estimator, placement=placement))
    assert torch.allclose(found, whole_answer_kl(), rtol=0, atol=2e-7)


@pytest.mark.parametrize(("estimator", "forward"), [("k2", False), ("rk3", False), ("k3", True)])
def test_exact_only_token_by_token(estimator: Estimator, forward: bool) -> None:
    """In the loss, k2 and rk3 are the KL of each visited token, k3 that of its forward KL; none charges a token for
    what follows it."""
    found = through_the_library(KL(coef=1.0, estimator=estimator, placement="loss"))
    assert torch.allclose(found, visited_kl(forward), rtol=0, atol=1e-12)
    assert (found - whole_answer_kl()).abs().max() > 0.01


# --- rk3 beside a ratio of the whole sequence -------------------------------------------------------------------------

SAMPLER = PrefixPolicy(9)


def kl_where_the_sampler_goes() -> Tensor:
    """Gradient of the tokens' KL(pi || ref) where the sampler goes."""
    return POLICY.gradient(state_kl(POLICY, REFERENCE, SAMPLER.visits()))


def weighted_k3(weight: str, sampler: PrefixPolicy) -> Tensor:
    """E over the sampler's answers of the gradient of sum_t w k3_t, with w the token's own ratio, or one ratio of the
    answer."""
    total = torch.zeros((), dtype=torch.float64)
    for y, p in zip(ALL, sampler.probabilities().detach(), strict=True):
        logp = POLICY.token_logp(y)
        ratio = logp - sampler.token_logp(y).detach()
        w = {
            "token": ratio,
            "sequence_mean": ratio.mean().expand(len(y)),
            "sequence_product": ratio.sum().expand(len(y)),
        }[weight].exp()
        total = total + p * (w * estimate("k3", logp - REFERENCE.token_logp(y).detach())).sum()
    return POLICY.gradient(total)


@pytest.mark.parametrize("ratio", ["token", "sequence_mean", "sequence_token", "sequence_product"])
def test_rk3_takes_the_tokens_own_ratio_whatever_the_push_takes(ratio: str) -> None:
    """Off policy: the library's rk3 is the KL at every prefix the sampler visits, also beside a sequence-level push."""
    a = patch(REINFORCE, f"kl_{ratio}", "-", pull=KL(coef=1.0, estimator="rk3", placement="loss"), ratio=ratio)
    logp = [POLICY.token_logp(y) for y in ALL]
    s = streams_of(
        np.zeros(sum(POLICY.lengths)),
        np.repeat(SAMPLER.probabilities().detach().numpy(), POLICY.lengths),
        np.repeat(np.arange(len(ALL)), POLICY.lengths),
        mu=np.concatenate([SAMPLER.token_logp(y).detach().numpy() for y in ALL]),
        ref=np.concatenate([REFERENCE.token_logp(y).detach().numpy() for y in ALL]),
    )
    found = POLICY.gradient(objective(a, s, TokenScores(torch.cat(logp), None, None)).loss)
    assert torch.allclose(found, weighted_k3("token", SAMPLER), rtol=0, atol=1e-12)
    assert torch.allclose(found, kl_where_the_sampler_goes(), rtol=0, atol=1e-12)


def test_a_mean_ratio_of_the_sequence_makes_another_gradient_of_k3() -> None:
    """TRL multiplies k3 by the ratio of its importance level. The geometric mean of an answer (GSPO's) gives a gradient
    that is no KL's, on policy either: there a token's own term, the one that turns k3 into the KL, has the weight 1 /
    |y|, and terms of other tokens are added. The product of the ratios of an answer gives that of the KL over whole
    answers.
    """
    exact = kl_where_the_sampler_goes()
    off = (weighted_k3("sequence_mean", SAMPLER) - exact).abs().max() / exact.abs().max()
    on = (weighted_k3("sequence_mean", POLICY) - visited_kl(False)).abs().max() / visited_kl(False).abs().max()
    whole = (weighted_k3("sequence_mean", POLICY) - whole_answer_kl()).abs().max() / whole_answer_kl().abs().max()
    # docs/design/algorithms-notes.md
    assert (off.item(), on.item(), whole.item()) == pytest.approx((0.495, 0.173, 0.451), abs=1e-3)
    assert torch.allclose(weighted_k3("token", POLICY), visited_kl(False), rtol=0, atol=1e-12)
    assert torch.allclose(weighted_k3("sequence_product", SAMPLER), whole_answer_kl(), rtol=0, atol=1e-12)
