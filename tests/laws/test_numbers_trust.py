"""Numbers of the trust regions, corrections and demonstrations: every case names the item of the survey it comes
from."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from law_toys import NOW, look, streams_of
from torch import Tensor

from posttrain.algorithm.loss.distribution_distance import binary_kl, forward_kl, total_variation
from posttrain.algorithm.loss.mismatch_correction import correct
from posttrain.algorithm.loss.policy_loss import objective, shown_push, unsure
from posttrain.algorithm.loss.push_factor import TrustInputs, future, importance, push
from posttrain.algorithm.loss.token_selection import mixing, within_moment
from posttrain.algorithm.loss.torch_streams import discounted
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.streams import ADVANTAGE
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.correction import BinaryKL, Correction, Mask, NegativeMask, Reject, Truncate, Veto
from posttrain.ladder.pieces.trust_region import (
    Cap,
    Clip,
    Divergence,
    FutureKL,
    Geometric,
    Hump,
    Soft,
    Taper,
    TrustRegion,
)
from posttrain.ladder.policy_rows import DECOUPLED, REINFORCE


def tensor(*x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def pushed(region: TrustRegion, ratio: float, advantage: float) -> float:
    """The push of one token alone in its episode."""
    return push(region, look(tensor(ratio), tensor(advantage))).push_M.item()


# --- A06: dual and two-sided clip; A16: SAPO; the push is the slope of the published loss -----------------------------

Loss = Callable[[Tensor, float], Tensor]


def dual(r: Tensor, a: float) -> Tensor:
    plain = torch.maximum(-r * a, -r.clamp(0.8, 1.2) * a)
    return torch.minimum(plain, tensor(-3.0 * a)) if a < 0 else plain


def two_sided(r: Tensor, a: float) -> Tensor:
    return -torch.minimum(r.clamp(max=4.0) * a, r.clamp(0.8, 1.2) * a)


def ppo(r: Tensor, a: float) -> Tensor:
    return torch.maximum(-r * a, -r.clamp(0.8, 1.2) * a)


def sapo(r: Tensor, a: float) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -torch.sigmoid(tau * (r - 1)) * 4 / tau * a


SLOPES: list[tuple[str, Loss, TrustRegion, float, float, float]] = [
    ("A06 ppo (5,-1)", ppo, Clip(), 5, -1, 5),
    ("A06 dual (5,-1)", dual, Clip(cap=3.0), 5, -1, 3),
    ("A06 dual (2.5,-1)", dual, Clip(cap=3.0), 2.5, -1, 2.5),
    ("A06 two-sided (10,-1)", two_sided, Clip(cap=4.0), 10, -1, 4),
    ("A06 two-sided (1.5,-1)", two_sided, Clip(cap=4.0), 1.5, -1, 1.5),
    ("A06 two-sided (10,1)", two_sided, Clip(cap=4.0), 10, 1, -1.2),
    ("A16 (1,+)", sapo, Soft(), 1, 1, -2),
    ("A16 (1.5,+)", sapo, Soft(), 1.5, 1, -2.489837),
    ("A16 (.5,+)", sapo, Soft(), 0.5, 1, -1.510163),
    ("A16 (1,-)", sapo, Soft(), 1, -1, 1.904762),
    ("A16 (1.5,-)", sapo, Soft(), 1.5, -1, 2.393585),
]


@pytest.mark.parametrize(
    ("loss", "region", "ratio", "advantage", "value"), [c[1:] for c in SLOPES], ids=[c[0] for c in SLOPES]
)
def test_the_push_is_the_slope_of_the_published_loss(
    loss: Loss, region: TrustRegion, ratio: float, advantage: float, value: float
) -> None:
    """The published loss has the survey's value; d loss / d log pi is -push * A."""
    log = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    printed = loss(log.exp(), advantage)
    assert printed.item() == pytest.approx(value, abs=1e-6)
    assert torch.autograd.grad(printed.sum(), log)[0].item() == pytest.approx(
        -pushed(region, ratio, advantage) * advantage, abs=1e-12
    )


PUSHES: list[tuple[str, TrustRegion, float, float, float]] = [
    ("A16 weight (1,+)", Soft(), 1.0, 1, 1.0),
    ("A16 weight (1.5,+)", Soft(), 1.5, 1, 1.410022),
    ("A16 weight (.5,+)", Soft(), 0.5, 1, 0.5 * 0.940015),
    ("A16 weight (1.5,-)", Soft(), 1.5, -1, 1.5 * 0.934140),
    *[(f"A15 cap 5 at {r}", Cap(), r, a, w) for a in (1, -1) for r, w in ((0.1, 0.1), (1, 1), (3, 3), (6, 5))],
    *[
        (f"A15 verl's .2/.28 at {r}", Cap(low=0.8, high=1.28), r, 1, w)
        for r, w in ((0.1, 0.8), (1, 1), (3, 1.28), (6, 1.28))
    ],
    ("A22 negative .7", Taper(), 0.7, -1, 0.7),
    ("A22 negative 1.8", Taper(), 1.8, -1, 1.0),
    ("A22 positive .1", Taper(), 0.1, 1, 1.0),
    ("A22 positive 9", Taper(), 9.0, 1, 1.0),
    ("A29 vespo W=1.5 +", Hump(), 1.5, 1, 0.502043),
    ("A29 vespo W=1.5 -", Hump(), 1.5, -1, 1.241593),
    ("A29 vespo W=1 +", Hump(), 1.0, 1, 1.0),
    ("A29 vespo W=1 -", Hump(), 1.0, -1, 1.0),
    ("a power beyond the dtype has faded", Hump(k=40.0), 4e8, 1, 0.0),
]


@pytest.mark.parametrize(("region", "ratio", "advantage", "value"), [c[1:] for c in PUSHES], ids=[c[0] for c in PUSHES])
def test_push(region: TrustRegion, ratio: float, advantage: float, value: float) -> None:
    assert pushed(region, ratio, advantage) == pytest.approx(value, abs=1e-6)


# --- A13, A14: sequences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "silent"), [(1.0, True), (-1.0, False)], ids=["A13 clipped at 1.0004", "A13 free where A < 0"]
)
def test_gspo_clips_the_whole_answer(advantage: float, silent: bool) -> None:
    """A13: log-ratios .02, -.01, .05, 0: s = 1.015113 lies above 1.0004, so no token speaks where A > 0."""
    log = tensor(0.02, -0.01, 0.05, 0)
    s = streams_of(np.full(4, advantage), np.ones(4), np.zeros(4, int), mu=np.full(4, -1.0))
    ratio = importance("sequence_mean", log, s)
    found = push(Clip(low=3e-4, high=4e-4), TrustInputs(ratio, log, s[ADVANTAGE], log - 1, s))
    assert (
        found.push_M.tolist() == pytest.approx([0.0 if silent else 1.015113] * 4, abs=1e-6)
        and found.high_M.all() == silent
    )


@pytest.mark.parametrize(
    ("advantage", "weight", "silent"),
    [(1.0, 0.904837, [True, False, False]), (-1.0, 1.262802, [False, False, True])],
    ids=["A14 A>0", "A14 A<0"],
)
def test_gmpo_weighs_an_answer_by_its_geometric_mean(advantage: float, weight: float, silent: list[bool]) -> None:
    """A14: log-ratios 1, .1, -.8 with eps .4: exp(-.1) or exp(.2333); the arithmetic mean would be 1.424260."""
    ratio = tensor(1, 0.1, -0.8).exp()
    assert ratio.mean().item() == pytest.approx(1.424260, abs=1e-6)
    found = push(Geometric(), look(ratio, torch.full((3,), advantage, dtype=torch.float64), np.zeros(3, int))).push_M
    assert found.tolist() == pytest.approx([0.0 if gone else weight for gone in silent], abs=1e-6)


# --- A18: DPPO -------------------------------------------------------------------------------------------------------

DPPO = [
    ("A18 (1e-5,1e-3,+)", 1e-5, 1e-3, 1, 0.00099, 0.000944, True, True),
    ("A18 (.99,.8,-)", 0.99, 0.8, -1, 0.19, 0.181, False, False),
    ("A18 (.99,.8,+)", 0.99, 0.8, 1, 0.19, 0.181, True, True),
    ("A18 (.5,.62,+)", 0.5, 0.62, 1, 0.12, 0.0297, True, True),
    ("A18 (.5,.7,+)", 0.5, 0.7, 1, 0.2, 0.0872, False, False),
    ("A18 (.02,.01,-)", 0.02, 0.01, -1, 0.01, None, True, True),
]


@pytest.mark.parametrize(
    ("mu", "pi", "advantage", "tv", "kl", "by_tv", "by_kl"), [c[1:] for c in DPPO], ids=[c[0] for c in DPPO]
)
def test_dppo_masks_where_the_distributions_part(
    mu: float, pi: float, advantage: float, tv: float, kl: float | None, by_tv: bool, by_kl: bool
) -> None:
    """A18: distances of {said, any other}, and who is kept at TV .15 and KL .05; a kept push is min(ratio, 20)."""
    p, q = tensor(math.log(mu)), tensor(math.log(pi))
    assert total_variation(p[:, None], q[:, None]).item() == pytest.approx(tv, abs=1e-9)
    assert kl is None or binary_kl(p, q).item() == pytest.approx(kl, abs=6e-5)
    s = streams_of(np.full(1, advantage), np.ones(1), np.zeros(1, int), mu=p.numpy())
    seen = TrustInputs((q - p).exp(), q - p, s[ADVANTAGE], q, s)
    for region, kept in ((Divergence(), by_tv), (Divergence(measure="kl", delta=0.05), by_kl)):
        assert push(region, seen).push_M.item() == pytest.approx(min(pi / mu, 20.0) if kept else 0.0)
    if (mu, pi) == (0.99, 0.8):
        assert push(Divergence(delta=0.2), seen).push_M.item() > 0, "kept at .2"
    clipped = push(Clip(), seen)
    assert bool(clipped.low_M | clipped.high_M) == (advantage * (pi / mu - 1) > 0.2), "what PPO would do"


@pytest.mark.parametrize("k", [2, 5], ids=["A18 top-2", "A18 full"])
def test_dppo_top(k: int) -> None:
    """A18: mu [.5, .3, .1, .06, .04], pi [.4, .35, .12, .05, .08]: TV .10 (full .11), KL .020698 (full .030308)."""
    mu, pi = (
        torch.log(torch.tensor([x], dtype=torch.float64))
        for x in ([0.5, 0.3, 0.1, 0.06, 0.04], [0.4, 0.35, 0.12, 0.05, 0.08])
    )
    assert total_variation(mu[:, :k], pi[:, :k]).item() == pytest.approx({2: 0.10, 5: 0.11}[k], abs=1e-9)
    assert forward_kl(mu[:, :k], pi[:, :k]).item() == pytest.approx({2: 0.020698, 5: 0.030308}[k], abs=1e-6)


# --- A08, A25: corrections -------------------------------------------------------------------------------------------

W5, W4 = np.log([0.3, 0.9, 1.5, 4, 0.1]), np.log([1.1, 0.95, 1.02, 0.9])
KPOP = np.array([math.log(0.4 / 0.5), 0.0])


def corrected(
    piece: Correction, log_ratio: np.ndarray, mu: np.ndarray, advantage: float = 1.0, now: np.ndarray | None = None
) -> np.ndarray:
    """What one piece multiplies the push of one episode with; a neighbour episode changes nothing."""
    n = len(mu)
    s = streams_of(np.full(n + 1, advantage), np.ones(n + 1), np.array([0] * n + [1]), mu=np.append(mu, -3.0))
    start = torch.as_tensor(np.append(mu + log_ratio, -9.0))
    found = correct((piece,), start, start if now is None else torch.as_tensor(np.append(now, -9.0)), s)
    return found.used_M[:n].numpy()


CORRECTIONS: list[tuple[str, Correction, np.ndarray, np.ndarray, list[float]]] = [
    ("A25 TIS(2)", Truncate(cap=2.0), W5, np.full(5, -3.0), [0.3, 0.9, 1.5, 2, 0.1]),
    ("A25 IcePop(.5,5)", Mask(), W5, np.full(5, -3.0), [0, 0.9, 1.5, 4, 0]),
    ("A25 product .162", Truncate(cap=2.0, level="sequence"), W5, np.full(5, -3.0), [0.162] * 5),
    ("A25 geo mean .694869 leaves [.99,1.01]", Reject(), W5, np.full(5, -3.0), [0.0] * 5),
    ("A25 geo mean .694869 lies in [.69,.70]", Reject(low=0.69, high=0.70), W5, np.full(5, -3.0), [1.0] * 5),
    ("A25 product .95931", Truncate(cap=None, level="sequence"), W4, np.full(4, -3.0), [0.959310] * 4),
    ("A25 geo .989669 rejected by .99", Reject(low=0.99), W4, np.full(4, -3.0), [0.0] * 4),
    ("A25 geo .989669 accepted by .98", Reject(low=0.98), W4, np.full(4, -3.0), [1.0] * 4),
    ("A25 KPop .4/.5 kept for .1", BinaryKL(phi=0.1), KPOP, np.log([0.5, 0.5]), [0.8, 1.0]),
    ("A25 KPop .4/.5 kept for .0205", BinaryKL(phi=0.0205), KPOP, np.log([0.5, 0.5]), [0.8, 1.0]),
    ("A25 KPop .4/.5 masked for .0203", BinaryKL(phi=0.0203), KPOP, np.log([0.5, 0.5]), [0.0, 1.0]),
    ("A25 KPop .5/.4 masked for .0203, the other way", BinaryKL(phi=0.0203), -KPOP, np.log([0.4, 0.5]), [0.0, 1.0]),
    ("A25 veto", Veto(below=0.2), W5, np.full(5, -3.0), [0.0] * 5),
    ("A25 veto spares", Veto(below=0.05), W5, np.full(5, -3.0), [1.0] * 5),
]


@pytest.mark.parametrize(
    ("piece", "log_ratio", "mu", "used"), [c[1:] for c in CORRECTIONS], ids=[c[0] for c in CORRECTIONS]
)
def test_correction(piece: Correction, log_ratio: np.ndarray, mu: np.ndarray, used: list[float]) -> None:
    assert corrected(piece, log_ratio, mu) == pytest.approx(used, abs=1e-6)


def test_binary_kl_of_kpop() -> None:
    """A25: train .4, infer .5: .020136 one way, .020411 the other."""
    assert binary_kl(tensor(math.log(0.4)), tensor(math.log(0.5))).item() == pytest.approx(0.020136, abs=1e-6)
    assert binary_kl(tensor(math.log(0.5)), tensor(math.log(0.4))).item() == pytest.approx(0.020411, abs=1e-6)


@pytest.mark.parametrize(("advantage", "kept"), [(-1.0, 0.0), (1.0, 1.0)], ids=["A08 mask A<0", "A08 mask A>0"])
def test_negative_mask(advantage: float, kept: float) -> None:
    """A08: sampler -1, -.5, -.7, policy -1.9, -1.2, -1.6: a mean of .8333 above .5; the start is not read."""
    mu, now = np.array([-1, -0.5, -0.7]), np.array([-1.9, -1.2, -1.6])
    assert (mu - now).mean() == pytest.approx(0.8333, abs=4e-5)
    assert corrected(NegativeMask(delta=0.5), np.zeros(3), mu, advantage, now).tolist() == [kept] * 3
    assert corrected(NegativeMask(delta=0.84), np.zeros(3), mu, advantage, now).tolist() == [1.0] * 3


# --- A26: decoupled, A-3PO, M2PO --------------------------------------------------------------------------------------


def loudness(a: Algorithm, mu: float, prox: float, pi: float, advantage: float) -> float:
    """sg[c push] A of one token, from d loss / d log pi."""
    s = streams_of(np.full(1, advantage), np.ones(1), np.zeros(1, int), mu=np.log([mu]), start=np.log([prox]))
    lp = torch.tensor([math.log(pi)], dtype=torch.float64, requires_grad=True)
    return -torch.autograd.grad(objective(a, s, TokenScores(lp, None, None)).loss, lp)[0].item()


@pytest.mark.parametrize(("pi", "value"), [(0.44, 0.88), (0.52, 0.96)], ids=["A26 (.44)", "A26 (.52)"])
def test_decoupled(pi: float, value: float) -> None:
    """A26: mu .5, prox .4, A 1, eps .2: .8 * 1.1 = .88; at ratio 1.3 the value is .8 * 1.2 = .96 and there is no
    slope."""
    r = pi / 0.4
    assert 0.8 * min(r, min(max(r, 0.8), 1.2)) == pytest.approx(value)
    assert loudness(patch(DECOUPLED, "one", "-", scale="one"), 0.5, 0.4, pi, 1.0) == pytest.approx(
        value if r < 1.2 else 0.0
    )
    naive = patch(REINFORCE, "naive", "-", ratio="token", clip=Clip())
    assert loudness(naive, 0.5, 0.4, pi, 1.0) == pytest.approx(pi / 0.5), "PPO against mu is not clipped: 1.04"


def test_a3po_interpolates_by_version() -> None:
    """A26: versions (3, 6, 7): alpha .75, p = exp(log .5 + .75 (log .4 - log .5)) = .422949; a token of the start
    itself has 0."""
    alpha = mixing(np.array([3, 6, 5, 0], np.int32), 6, 7)
    assert alpha.tolist() == pytest.approx([0.75, 0.0, 0.5, 6 / 7])
    assert math.exp(math.log(0.5) + alpha[0] * (math.log(0.4) - math.log(0.5))) == pytest.approx(0.422949, abs=1e-6)
    assert mixing(np.array([NOW + 1], np.int32), NOW, NOW + 1).tolist() == [0.0], (
        "said while the step was made: as new as the start"
    )


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (0.1, [1, 1, 1]),
        (0.0999, [1, 1, 0]),
        (0.025, [1, 1, 0]),
        (0.0249, [1, 0, 0]),
        (0.01, [1, 0, 0]),
        (0.0099, [0, 0, 0]),
    ],
    ids=[f"A26 M2 {x}" for x in (0.1, 0.0999, 0.025, 0.0249, 0.01, 0.0099)],
)
def test_second_moment(limit: float, kept: list[int]) -> None:
    """A26: log-ratios .1, -.2, .5 have mean square .1; without the largest .025, then .01."""
    x = np.array([0.1, -0.2, 0.5])
    assert (x**2).mean() == pytest.approx(0.1)
    assert within_moment(x, limit + 1e-12).tolist() == [bool(k) for k in kept]


# --- A24: demonstrations; A29: FIPO -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "f", "slope"),
    [(0.01, 0.0909, 0.0826), (0.1, 0.5, 0.25), (0.5, 0.8333, 0.1389), (0.9, 0.9, 0.09)],
    ids=["A24 f(.01)", "A24 f(.1)", "A24 f(.5)", "A24 f(.9)"],
)
def test_shown_tokens_follow_p_over_p_plus_gamma(p: float, f: float, slope: float) -> None:
    lp = torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True)
    value = lp.exp() / (lp.exp() + 0.1)
    assert value.item() == pytest.approx(f, abs=5e-5)
    assert torch.autograd.grad(value.sum(), lp)[0].item() == pytest.approx(slope, abs=5e-5)
    assert shown_push(lp.detach(), 0.1).item() == pytest.approx(slope, abs=5e-5)


@pytest.mark.parametrize(
    ("p", "phi"), [(0.01, 0.0099), (0.5, 0.25), (0.99, 0.0099)], ids=["A24 phi(.01)", "A24 phi(.5)", "A24 phi(.99)"]
)
def test_unsure_tokens_weigh_most(p: float, phi: float) -> None:
    assert unsure(tensor(math.log(p))).item() == pytest.approx(phi)


def test_unsure_tokens_are_exact_near_certainty() -> None:
    """In float32 too, where 1 - p keeps few digits: the check of the gradient stopped a healthy run."""
    near = torch.tensor([-1e-3, -1e-5, -1e-7])
    exact = -np.exp(near.double().numpy()) * np.expm1(near.double().numpy())
    assert unsure(near).numpy() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("band", "f"),
    [((0.2, 0.2), [1.2, 1.107542, 0.904837]), ((0.0, 0.2), [1.2, 1.107542, 1.0])],
    ids=["A29 fipo", "A29 fipo high only"],
)
def test_future_kl(band: tuple[float, float], f: list[float]) -> None:
    """A29: log-ratios .1, .2, -.1, gamma 2^(-1/32) = .978572: sums .199954, .102143, -.1."""
    gamma = 2 ** (-1 / 32)
    assert gamma == pytest.approx(0.978572, abs=1e-6)
    log, sequence = tensor(0.1, 0.2, -0.1), np.zeros(3, int)
    sums = discounted(log, torch.as_tensor(sequence), gamma)
    assert sums.tolist() == pytest.approx([0.199954, 0.102143, -0.1], abs=1e-6)
    seen = look(log.exp(), torch.ones(3, dtype=torch.float64), sequence)
    assert future(FutureKL(band_low=band[0], band_high=band[1]), seen).tolist() == pytest.approx(f, abs=1e-6)


def test_future_kl_safety() -> None:
    """A29: a token with A < 0 and a ratio above 4 is not amplified; log-ratios of tokens above 10 do not count."""
    log = tensor(math.log(5), 0.5, math.log(11), 0.1)
    for sign, first in ((-1.0, 1.0), (1.0, 1.2)):
        seen = look(log.exp(), torch.full((4,), sign, dtype=torch.float64), np.zeros(4, int))
        assert future(FutureKL(), seen)[0].item() == pytest.approx(first)
    alone = look(tensor(11.0), tensor(1.0), np.zeros(1, int))
    assert future(FutureKL(), alone).tolist() == [1.0]
