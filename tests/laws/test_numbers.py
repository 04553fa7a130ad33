"""Numbers computed by hand or from the papers: every case names the item of the survey it comes from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from law_toys import credits, look, streams_of

from posttrain.algorithm.credit.reward_shaping import shaped
from posttrain.algorithm.credit.step_credit import credit_step, whitened
from posttrain.algorithm.credit.value_estimates import gae, value_loss
from posttrain.algorithm.loss import reference_penalty as kl
from posttrain.algorithm.loss.mismatch_correction import effective_share
from posttrain.algorithm.loss.policy_loss import objective
from posttrain.algorithm.loss.push_factor import importance, push
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.gauge import Gauge
from posttrain.core.types import Stop
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.baseline import Ema, GroupMean, Others, Value, Zero
from posttrain.ladder.pieces.pull import KL, SequenceL2
from posttrain.ladder.pieces.shape import DropTruncated, Overlong, Signed
from posttrain.ladder.pieces.trust_region import Clip
from posttrain.ladder.policy_rows import DAPO, DR_GRPO, EMA, GRPO, PPO, REINFORCE, RLOO
from posttrain.system.errors import InvariantError
from posttrain.toy.episodes import PlainEpisode, rewarded, scored_group

CENTRED = patch(REINFORCE, "centred", "-", baseline=GroupMean())


def tensor(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


# --- A01: moving baseline ------------------------------------------------------------------------------------------


def test_ema_is_read_before_it_is_updated() -> None:
    """A01: R = 1, 0, 1, 1 with alpha .95 -> A = 1, -.05, .9525, .904875 and b = .14036875; across groups alike."""
    for groups in (([1, 0, 1, 1],), ([1, 0], [1, 1]), ([1], [0], [1], [1])):
        credit = credit_step(EMA, rewarded(*groups), max_tokens=20, ema=0.0)
        found = [float(e.advantage[0][0]) for g in credit.groups for e in g.episodes]
        assert found == pytest.approx([1, -0.05, 0.9525, 0.904875], abs=1e-12)
        assert credit.ema == pytest.approx(0.14036875, abs=1e-12)


def test_ema_is_not_the_wrong_order() -> None:
    """A01: with alpha .9 the post-update order would give .9, -.09, .819, .7371; ours gives none of them."""
    found = credits(patch(EMA, "e9", "-", baseline=Ema(decay=0.9)), [1, 0, 1, 1])[0]
    assert all(abs(x - y) > 0.005 for x, y in zip(found, [0.9, -0.09, 0.819, 0.7371], strict=True))


def test_other_baselines_hand_the_moving_baseline_back() -> None:
    assert credit_step(GRPO_NO_KL, rewarded([1, 0]), max_tokens=20, ema=0.3).ema == 0.3


GRPO_NO_KL = patch(GRPO, "grpo_no_kl", "-", pull=None)

# --- A02, A07, A09, A11, A12, A17: group credit ----------------------------------------------------------------------

H, T3 = math.sqrt(3) / 2, 1 / 3
CREDIT_CASES = [
    ("A07", GRPO_NO_KL, [[1, 0, 0, 1]], [[H, -H, -H, H]]),
    ("A07", GRPO_NO_KL, [[1, 0, 0, 0]], [[1.5, -0.5, -0.5, -0.5]]),
    ("A07", GRPO_NO_KL, [[1, 1, 1, 0]], [[0.5, 0.5, 0.5, -1.5]]),
    ("A07", GRPO_NO_KL, [[3, 1, 2, 2]], [[1.2247448713915892, -1.2247448713915892, 0, 0]]),
    ("A09", patch(RLOO, "rloo_no_kl", "-", pull=None), [[1, 0, 0, 1]], [[2 / 3, -2 / 3, -2 / 3, 2 / 3]]),
    ("A09", patch(RLOO, "rloo_no_kl", "-", pull=None), [[1, 0, 0, 0]], [[1, -T3, -T3, -T3]]),
    ("A09", patch(RLOO, "rloo_no_kl", "-", pull=None), [[3, 1, 2, 2]], [[4 / 3, -4 / 3, 0, 0]]),
    ("A11", DR_GRPO, [[1, 0, 0, 1]], [[0.5, -0.5, -0.5, 0.5]]),
    ("A11", DR_GRPO, [[1, 0, 0, 0]], [[0.75, -0.25, -0.25, -0.25]]),
    ("A02 global", patch(REINFORCE, "w", "-", whiten="sample"), [[1, 0], [1, 1]], [[0.5, -1.5], [0.5, 0.5]]),
    (
        "A02 baseline",
        patch(CENTRED, "w", "-", whiten="sample"),
        [[1, 0], [1, 1]],
        [[1.2247448713915892, -1.2247448713915892], [0, 0]],
    ),
    ("A12", patch(CENTRED, "b", "-", scale="batch_std"), [[1, 0], [1, 1]], [[1, -1], [0, 0]]),
    ("A17", patch(CENTRED, "m", "-", scale="group_mean"), [[1, 0, 0, 1]], [[1, -1, -1, 1]]),
    ("A17", patch(CENTRED, "m", "-", scale="group_mean"), [[1, 0, 0, 0]], [[3, -1, -1, -1]]),
    ("A17", patch(CENTRED, "m", "-", scale="group_mean"), [[1, 1, 1, 0]], [[T3, T3, T3, -1]]),
    ("A17", patch(CENTRED, "m", "-", scale="group_mean"), [[0, 0, 0, 0]], [[0, 0, 0, 0]]),
    ("mean <= 0 has no scale", patch(CENTRED, "m", "-", scale="group_mean"), [[1, -1], [-1, -2]], [[0, 0], [0, 0]]),
    ("0.4.2 group of one", GRPO_NO_KL, [[1], [1, 0]], [[0], [math.sqrt(0.5), -math.sqrt(0.5)]]),
    ("0.4.2 group of one", patch(RLOO, "rloo_no_kl", "-", pull=None), [[1]], [[0]]),
    ("no spread, zero baseline is not touched", REINFORCE, [[1, 1]], [[1, 1]]),
    ("no spread over the step: no scale", patch(REINFORCE, "b", "-", scale="batch_std"), [[1, 1], [1]], [[0, 0], [0]]),
    (
        "no spread over the step: centred",
        patch(REINFORCE, "w", "-", whiten="token"),
        [[0.1, 0.1], [0.1]],
        [[0, 0], [0]],
    ),
]


@pytest.mark.parametrize(("source", "a", "rewards", "expected"), CREDIT_CASES)
def test_credit(source: str, a, rewards, expected) -> None:
    """Credit equals the published numbers, std with ddof 1 and no epsilon."""
    for found, right in zip(credits(a, *rewards), expected, strict=True):
        assert found == pytest.approx(right, abs=1e-12), source


def test_whitening_counts_tokens_or_samples() -> None:
    """A02: centred credit .5, -.5, 0, 0 over lengths 1, 3, 2, 2 has token mean -.125 and sample mean 0; both
    countings."""
    centred = credits(patch(CENTRED, "w", "-", whiten="token"), [1, 0], [1, 1], lengths=[[1, 3], [2, 2]])
    assert [x for g in centred for x in g] == pytest.approx([1.76776695, -1.06066017, 0.35355339, 0.35355339], abs=1e-8)
    sample = credits(patch(CENTRED, "w", "-", whiten="sample"), [1, 0], [1, 1], lengths=[[1, 3], [2, 2]])
    assert [x for g in sample for x in g] == pytest.approx([1.22474487, -1.22474487, 0, 0], abs=1e-8)


# --- A05: PPO ----------------------------------------------------------------------------------------------------

V3, R3 = np.array([0.5, 0.6, 0.8]), np.array([0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1, 1, [0.5, 0.4, 0.2]),
        (1, 0.95, [0.4705, 0.39, 0.2]),
        (1, 0, [0.1, 0.2, 0.2]),
        (0.9, 0.95, [0.288805, 0.291, 0.2]),
    ],
)
def test_gae(gamma: float, lam: float, expected: list[float]) -> None:
    """A05: V = .5, .6, .8 and reward 1 at the end."""
    advantage, returns = gae(V3, R3, gamma=gamma, gae_lambda=lam)
    assert advantage == pytest.approx(expected, abs=1e-12)
    assert returns == pytest.approx(advantage + V3, abs=1e-12)
    if (gamma, lam) == (1, 0.95):
        assert returns == pytest.approx([0.9705, 0.99, 1], abs=1e-12)
        assert whitened("token", [advantage], [""])[0] == pytest.approx([0.842364, 0.262789, -1.105153], abs=1e-6)


def test_gae_steps_over_observations() -> None:
    """A05, masked: spoken values .5, .6, .8 around an observation give .4705, .39, .2; the naive recursion gives 1.2124
    first."""
    f = np.float32
    for turns in ([[2, 1]], [[2], [1]], [[3]]):
        answer = PlainEpisode(1.0, turns, -np.ones(3, f), -np.ones(3, f), values=np.array([0.5, 0.6, 0.8], f))
        plain = patch(PPO, "unwhitened", "-", whiten=None)
        (g,) = credit_step(plain, [scored_group("t", [answer])], max_tokens=20, ema=0.0).groups
        (e,) = g.episodes
        assert np.concatenate(e.advantage) == pytest.approx([0.4705, 0.39, 0.2], abs=1e-6)
        assert e.returns is not None and np.concatenate(e.returns) == pytest.approx([0.9705, 0.99, 1], abs=1e-6)


@pytest.mark.parametrize(
    ("high", "r", "advantage", "loss"),
    [(0.2, 1.5, 1, -1.2), (0.2, 0.5, 1, -0.5), (0.2, 1.5, -1, 1.5), (0.2, 0.5, -1, 0.8), (0.28, 1.5, 1, -1.28)],
)
def test_clip_is_where_the_published_loss_is_flat(high: float, r: float, advantage: float, loss: float) -> None:
    """A05: the loss has these values; the push is the ratio where it has a slope and 0 where it is flat."""
    x = torch.tensor([r], dtype=torch.float64, requires_grad=True)
    published = -torch.minimum(x * advantage, x.clamp(0.8, 1 + high) * advantage)
    assert published.item() == pytest.approx(loss)
    slope = torch.autograd.grad(published.sum(), x)[0]
    pushed = push(Clip(low=0.2, high=high), look(x.detach(), tensor(advantage)))
    assert (-pushed.push_M * advantage).item() == pytest.approx((slope * x).item())
    assert pushed.high_M.item() == (advantage > 0 and r > 1) and pushed.low_M.item() == (advantage < 0 and r < 1)


def test_value_clip() -> None:
    """A05: V_old .5, V .9, return 1, range .2 -> .045; unclipped .005."""
    v, old, ret = tensor(0.9), tensor(0.5), tensor(1.0)
    assert value_loss(v, old, ret, 0.2).item() == pytest.approx(0.045)
    assert value_loss(v, old, ret, None).item() == pytest.approx(0.005)
    with pytest.raises(InvariantError, match="values at the start"):
        value_loss(v, None, ret, 0.2)


# --- A10, A11: shaping, clip-higher, weights ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "spoken", "penalty"),
    [
        (100, 1, 0),
        (100, 80, 0),
        (100, 85, -0.25),
        (100, 90, -0.5),
        (100, 100, -1),
        (100, 101, -1),
        (20480, 16384, 0),
        (20480, 17408, -0.25),
        (20480, 18432, -0.5),
        (20480, 20480, -1),
    ],
)
def test_overlong(longest: int, spoken: int, penalty: float) -> None:
    """A10, DAPO Eq. 13 with a cache of a fifth, clamped beyond L_max."""
    one = np.full(spoken, -1, np.float32)
    (group,) = [scored_group("t", [PlainEpisode(1.0, [[spoken]], one)])]
    (reward,), (why,) = shaped((Overlong(cache=0.2),), np.ones(1), [group.episodes[0].episode], longest)
    assert reward - 1 == pytest.approx(penalty, abs=1e-9) and why == ""


def test_shaping_is_applied_in_order_and_filters_never_see_it() -> None:
    """A10: DAPO's rule reward is -1 or +1, to which the overlong penalty is added; the raw reward stays."""
    long, short = (
        PlainEpisode(r, [[n]], np.full(n, -1, np.float32), np.full(n, -1, np.float32)) for r, n in ((1.0, 19), (0.0, 4))
    )
    (g,) = credit_step(DAPO, [scored_group("t", [long, short])], max_tokens=20, ema=0.0).groups
    assert [e.shaped for e in g.episodes] == pytest.approx([1 - 0.75, -1])
    assert [e.episode.reward for e in g.episodes] == [1.0, 0.0]


def test_truncated_answers_stay_in_the_baseline_only() -> None:
    """A10, overlong filtering: a cut-off answer counts in its group's mean and leaves the batch."""
    a = patch(CENTRED, "filtered", "-", shape=(Signed(), DropTruncated()))
    one = np.full(2, -1, np.float32)
    answers = [
        PlainEpisode(1.0, [[2]], one),
        PlainEpisode(0.0, [[2]], one, stop=Stop.LENGTH),
        PlainEpisode(0.0, [[0]], one[:0]),
    ]
    (g,) = credit_step(a, [scored_group("t", answers)], max_tokens=20, ema=0.0).groups
    assert [e.dropped for e in g.episodes] == ["", "truncated", "said nothing"]
    assert g.episodes[0].advantage[0] == pytest.approx([4 / 3, 4 / 3])


@pytest.mark.parametrize(
    ("p", "n", "kept"), [(0.5, 8, 0.9922), (0.1, 8, 0.5695), (0.95, 16, 0.5599), (0.01, 16, 0.1485)]
)
def test_share_of_groups_with_a_signal(p: float, n: int, kept: float) -> None:
    """A10: the probability that a group is mixed, over all counts of correct siblings; credit is silent on the
    others."""
    groups = rewarded(*[[1.0] * k + [0.0] * (n - k) for k in range(n + 1)])
    credit = credit_step(GRPO_NO_KL, groups, max_tokens=20, ema=0.0)
    mass = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    assert sum(m for m, g in zip(mass, groups, strict=True) if g.group.mixed) == pytest.approx(kept, abs=5e-5)
    assert [g.silent for g in credit.groups] == [not g.group.mixed for g in groups]


@pytest.mark.parametrize(("high", "reach"), [(0.2, 0.012), (0.28, 0.0128)])
def test_clip_higher(high: float, reach: float) -> None:
    """A10: a token of probability .01 is pushed up to .012 (clip .2) or .0128 (.28) and not beyond."""
    ratios = tensor(reach - 1e-6, reach + 1e-6) / 0.01
    assert (push(Clip(low=0.2, high=high), look(ratios, tensor(1, 1))).push_M > 0).tolist() == [True, False]


def test_weight_of_a_token_in_a_long_wrong_answer() -> None:
    """A11: rewards 1 and 0, lengths 4 and 20: GRPO without std +.0625 / -.0125, Dr.GRPO with constant 20 +-.0125."""
    (credit,) = credits(DR_GRPO, [1, 0], lengths=[[4, 20]])
    assert np.array(credit) * weigh("sequence_mean", [4, 20], [0, 0], 20) == pytest.approx([0.0625, -0.0125])
    assert np.array(credit) * weigh("constant", [4, 20], [0, 0], 20) == pytest.approx([0.0125, -0.0125])


# --- A20, A25 -----------------------------------------------------------------------------------------------------


def test_sequence_l2() -> None:
    """A20: R = 1, 0, 0, 1, tau .1, sequence log-ratio .2: every token of the answers moves with .48, -.52, -.52,
    .48."""
    a = patch(CENTRED, "kimi", "2501.12599", pull=SequenceL2(coef=0.1), anchor="start")
    lengths = [1, 2, 4, 5]
    sequence = np.repeat(np.arange(4), lengths)
    per_token = np.repeat(0.2 / np.array(lengths), lengths)
    logp = torch.full((12,), -1.0, dtype=torch.float64, requires_grad=True)
    (credit,) = credits(CENTRED, [1, 0, 0, 1])
    s = streams_of(
        advantage=np.repeat(credit, lengths),
        weight=np.full(12, 0.25),
        sequence=sequence,
        mu=np.full(12, -9.0),
        start=-1 - per_token,
    )
    grad = torch.autograd.grad(objective(a, s, TokenScores(logp, None, None)).loss, logp)[0]
    assert -4 * grad.numpy() == pytest.approx(np.repeat([0.48, -0.52, -0.52, 0.48], lengths), abs=1e-12)


def test_effective_sample_size() -> None:
    """Weights 1, 1, 1, 1 are worth all four; 4, 0, 0, 0 one of four; 1, 3 are worth 16 / 20 of two."""
    for w, share in (([1, 1, 1, 1], 1.0), ([4, 0, 0, 0], 0.25), ([1, 3], 0.8)):
        assert effective_share(Gauge.of(w), Gauge.of(np.square(w))) == pytest.approx(share)
    assert math.isnan(effective_share(Gauge.of([0, 0]), Gauge.of([0, 0])))


def test_ratio_of_a_sequence() -> None:
    """A13: log-ratios .02, -.01, .05, 0: exp of the mean 1.015113, of the sum 1.061837."""
    s = streams_of(np.zeros(4), np.zeros(4), np.zeros(4, int), mu=np.zeros(4))
    x = tensor(0.02, -0.01, 0.05, 0)
    assert importance("sequence_mean", x, s).numpy() == pytest.approx([1.015113] * 4, abs=1e-6)
    assert importance("sequence_product", x, s).numpy() == pytest.approx([1.061837] * 4, abs=1e-6)
    assert importance("token", x, s).numpy() == pytest.approx(np.exp(x.numpy()))
    assert importance("one", x, s).tolist() == [1.0] * 4


# --- A34, A35 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "gap", "expected"),
    [
        ("k1", 0.1, 0.1),
        ("k2", 0.1, 0.005),
        ("k3", 0.1, 0.004837),
        ("k3", -0.1, 0.005171),
        ("k2", math.log(2), 0.240227),
        ("k3", math.log(2), 0.193147),
        ("k3", -math.log(2), 0.306853),
    ],
)
def test_kl_estimators_pointwise(estimator, gap: float, expected: float) -> None:
    """A34, pointwise."""
    assert kl.estimate(estimator, tensor(gap)).item() == pytest.approx(expected, abs=5e-7)


def test_kl_in_the_reward_enters_the_baseline() -> None:
    """A09, A34: R - coef * sum of gaps over the episode is what siblings compare, under mu when anchor is behaviour."""
    f = np.float32
    ref = [np.array([-1.0, -1.5], f), np.array([-2.0], f)]
    answers = [
        PlainEpisode(1.0, [[2]], np.array([-0.5, -1.0], f), reference=ref[0]),
        PlainEpisode(0.0, [[1]], np.array([-1.0], f), reference=ref[1]),
    ]
    a = patch(RLOO, "r", "-", pull=KL(coef=0.1, estimator="k1", placement="reward"))
    (g,) = credit_step(a, [scored_group("t", answers)], max_tokens=20, ema=0.0).groups
    compared = [1 - 0.1 * (0.5 + 0.5), 0 - 0.1 * 1.0]
    assert [float(e.advantage[0][0]) for e in g.episodes] == pytest.approx(
        [compared[0] - compared[1], compared[1] - compared[0]], abs=1e-7
    )
    assert [e.shaped for e in g.episodes] == [1.0, 0.0]


def test_kl_in_the_reward_of_values_is_paid_token_by_token() -> None:
    """A05: with a value baseline the reward of token t is -coef * gap_t, plus R at the last one; start is the anchor's
    log-prob."""
    f = np.float32
    one = PlainEpisode(
        1.0, [[1], [2]], np.full(3, -9, f), np.array([-1, -2, -3], f), np.array([-1.5, -2, -2], f), np.zeros(3, f)
    )
    a = patch(
        PPO,
        "p",
        "-",
        whiten=None,
        pull=KL(coef=0.1, estimator="k1", placement="reward"),
        baseline=Value(gae_lambda=0.0),
    )
    (g,) = credit_step(a, [scored_group("t", [one])], max_tokens=20, ema=0.0).groups
    assert np.concatenate(g.episodes[0].advantage) == pytest.approx([-0.05, 0, 1 + 0.1], abs=1e-7)


WEIGHTS = [
    ("sequence_mean", [0.125, 1 / 14]),
    ("token_mean", [1 / 11, 1 / 11]),
    ("sequence_sum", [0.5, 0.5]),
    ("constant", [0.05, 0.05]),
    ("prompt_mean", [0.125, 1 / 14]),
]


@pytest.mark.parametrize(("aggregate", "expected"), WEIGHTS)
def test_weights(aggregate, expected: list[float]) -> None:
    """A35: lengths 4 and 7, constant 10; each a prompt of its own."""
    assert weigh(aggregate, [4, 7], [0, 1], 10) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("aggregate", "loss"), [("sequence_mean", 1.75), ("token_mean", 17 / 11), ("sequence_sum", 8.5), ("constant", 0.85)]
)
def test_aggregated_loss(aggregate, loss: float) -> None:
    """A35: token losses 1, 2, 3, 4 and seven ones: 1.75, 1.545455, 8.5, .85."""
    w = np.repeat(weigh(aggregate, [4, 7], [0, 1], 10), [4, 7])
    assert w @ np.array([1, 2, 3, 4] + [1] * 7) == pytest.approx(loss)


def test_prompt_mean_is_a_token_mean_inside_each_prompt() -> None:
    """A35, A10: tokens 1 + 3 in one prompt and 4 in the other: every token of both weighs 1/8; labels need not be 0,
    1."""
    assert weigh("prompt_mean", [1, 3, 4], [5, 5, 2], 10) == pytest.approx([1 / 8] * 3)
    assert weigh("prompt_mean", [1, 3, 2], [5, 5, 2], 10) == pytest.approx([1 / 8, 1 / 8, 1 / 4])


@pytest.mark.parametrize(("tokens", "groups", "longest"), [([0, 1], [0, 0], 5), ([1], [0, 1], 5), ([1], [0], 0)])
def test_weights_are_checked(tokens: list[int], groups: list[int], longest: int) -> None:
    with pytest.raises(InvariantError, match="weigh"):
        weigh("token_mean", tokens, groups, longest)


def test_credit_names_the_stream_that_is_missing() -> None:
    """An algorithm that reads a score which was not made stops, and says which."""
    nothing = [scored_group("t", [PlainEpisode(r, [[1]], np.full(1, -1, np.float32)) for r in (0.0, 1.0)])]
    for a, name in ((RLOO, "reference"), (PPO, "values")):
        with pytest.raises(InvariantError, match=name):
            credit_step(a, nothing, max_tokens=20, ema=0.0)


def test_group_without_judged_episodes_is_silent() -> None:
    """An outage leaves the baseline: the failed sibling is not there, and nobody left means no credit and no error."""
    one = np.full(1, -1, np.float32)
    groups = [
        scored_group("a", [PlainEpisode(None, [[1]], one)] * 2),
        scored_group("b", [PlainEpisode(r, [[1]], one, one) for r in (1.0, None, 0.0)]),
    ]
    for a in (
        GRPO_NO_KL,
        patch(GRPO_NO_KL, "w", "-", scale="batch_std"),
        patch(GRPO_NO_KL, "m", "-", scale="group_mean"),
    ):
        credit = credit_step(a, groups, max_tokens=20, ema=0.0)
        assert credit.groups[0].silent and not credit.groups[0].episodes and not credit.groups[1].silent
        assert sum(float(e.advantage[0][0]) for e in credit.groups[1].episodes) == pytest.approx(0)


def test_zero_and_others_are_what_they_say() -> None:
    assert credits(REINFORCE, [1, 0, 3])[0] == [1, 0, 3] and isinstance(REINFORCE.baseline, Zero)
    assert credits(patch(REINFORCE, "o", "-", baseline=Others()), [1, 0, 3])[0] == pytest.approx([1 - 1.5, -2, 2.5])
