"""Numbers of baselines, scales, several rewards, pass@k, teachers and token choices: every case names its item of the
survey."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_toys import credits
from torch import Tensor

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState, remember, steered
from posttrain.algorithm.credit.baseline_values import credit_lambda
from posttrain.algorithm.credit.reward_shaping import best_gain, best_of, best_spread
from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.credit.value_estimates import gae, v_trace
from posttrain.algorithm.loss.distribution_distance import jensen_shannon
from posttrain.algorithm.loss.token_selection import covariance, largest, within_moment
from posttrain.algorithm.loss.torch_streams import discounted
from posttrain.core.gauge import Gauge
from posttrain.core.scored import ScoredGroup
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import Others, SoftMean, Value
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.shape import BestOf
from posttrain.ladder.policy_rows import (
    DR_GRPO,
    GDPO,
    GPG,
    GRPO,
    GRPO_PASS_AT_K,
    GRPO_PROCESS,
    LITE_PPO,
    MAXRL_SUCCESS,
    OPD,
    OPMD,
    OPO,
    OTB,
    PASS_AT_K,
    REINFORCE,
    REMAX,
    RLOO,
    SKYWORK,
    VAPO,
)
from posttrain.toy.episodes import PlainEpisode, rewarded, scored_group


def of(a: Algorithm, *groups: ScoredGroup) -> list[list[float]]:
    """Credit of all tokens of every episode."""
    found = credit_step(a, groups, max_tokens=20, ema=0.0)
    return [np.concatenate(e.advantage).tolist() for g in found.groups for e in g.episodes]


# --- A02, A05, A07, A12: what peers with another deviation print ------------------------------------------------------

STD0 = [
    (
        "A02 global std0",
        patch(REINFORCE, "w", "-", whiten="sample"),
        [[1, 0], [1, 1]],
        [0.5774, -1.7321, 0.5774, 0.5774],
    ),
    ("A02 baseline std0", patch(DR_GRPO, "w", "-", whiten="sample"), [[1, 0], [1, 1]], [1.4142, -1.4142, 0, 0]),
    ("A12 Lite-PPO std0", LITE_PPO, [[1, 0], [1, 1]], [1.1547, -1.1547, 0, 0]),
    ("A07 std0 [1,0,0,1]", GRPO, [[1, 0, 0, 1]], [1, -1, -1, 1]),
    ("A07 std0 [1,1,1,0]", GRPO, [[1, 1, 1, 0]], [0.5774, 0.5774, 0.5774, -1.7321]),
]


@pytest.mark.parametrize(("a", "rewards", "peers"), [c[1:] for c in STD0], ids=[c[0] for c in STD0])
def test_ddof_0_is_ours_times_a_constant(a: Algorithm, rewards: list[list[float]], peers: list[float]) -> None:
    """With n samples behind the deviation, ddof 0 gives sqrt(n / (n - 1)) times ours."""
    bare = a if a.pull is None else patch(a, "bare", "-", pull=None)
    assert np.concatenate(credits(bare, *rewards)) * math.sqrt(4 / 3) == pytest.approx(peers, abs=5e-5)


def test_epsilons_of_peers_are_left_out() -> None:
    """A07: TRL's 1e-4 beside the deviation makes .8660 into .865875."""
    ours = credits(patch(GRPO, "bare", "-", pull=None), [1, 0, 0, 1])[0][0]
    assert ours == pytest.approx(math.sqrt(3) / 2, abs=1e-15)
    assert ours * stdev([1, 0, 0, 1]) / (stdev([1, 0, 0, 1]) + 1e-4) == pytest.approx(0.865875, abs=1e-6)


@pytest.mark.parametrize("rewards", [[1, 0, 0, 1], [1, 0, 0, 0], [3, 1, 2, 2]], ids=lambda r: f"A07 NeMo {r}")
def test_nemo_leaves_the_sample_out_of_the_deviation_too(rewards: list[float]) -> None:
    """A07: +-1.1547; 1 and -.5774 (no deviation: not scaled); 2.3094. Ours, with the mean of the others, divides by the
    group's."""
    peers: list[float] = []
    for i, r in enumerate(rewards):
        rest = [x for j, x in enumerate(rewards) if j != i]
        peers.append((r - sum(rest) / 3) / (stdev(rest) or 1.0))
    right = {
        2.0: [1.1547, -1.1547, -1.1547, 1.1547],
        1.0: [1, -0.5774, -0.5774, -0.5774],
        8.0: [2.3094, -2.3094, 0, 0],
    }[sum(rewards)]
    assert peers == pytest.approx(right, abs=5e-5)
    ours = credits(patch(GRPO, "loo", "-", baseline=Others(), pull=None), rewards)[0]
    others = credits(patch(RLOO, "loo", "-", pull=None), rewards)[0]
    assert ours == pytest.approx(np.array(others) / stdev(rewards), abs=1e-12)


def test_naive_gae_runs_through_observations() -> None:
    """A05: values .5, .6, 9, 9, .8 with two observed ones: a recursion over them gives 1.2124, 1.1710, -7.6095, -8.01,
    .2."""
    naive, _ = gae(np.array([0.5, 0.6, 9, 9, 0.8]), np.array([0, 0, 0, 0, 1.0]), gamma=1.0, gae_lambda=0.95)
    assert naive == pytest.approx([1.2124, 1.1710, -7.6095, -8.01, 0.2], abs=5e-5)
    advantage, _ = gae(np.array([0.5, 0.6, 0.8]), np.array([0, 0, 1.0]), gamma=1.0, gae_lambda=0.95)
    std0 = (advantage - advantage.mean()) / advantage.std()
    assert std0 == pytest.approx([1.031682, 0.321849, -1.353531], abs=1e-6), "A05, whitened with ddof 0"


# --- A03, A04, A12, A20, A21: baselines -------------------------------------------------------------------------------


def test_remax() -> None:
    """A03: R 1 and greedy .4: .6 on every token; a prompt whose greedy answer was not judged teaches nobody."""
    answers = [PlainEpisode(1.0, [[3]], np.full(3, -1.0)), PlainEpisode(0.0, [[1]], np.full(1, -1.0))]
    assert of(REMAX, scored_group("t", answers, greedy=0.4)) == [pytest.approx([0.6] * 3), pytest.approx([-0.4])]
    (g,) = credit_step(REMAX, [scored_group("t", answers)], max_tokens=20, ema=0.0).groups
    assert all("greedy" in e.dropped for e in g.episodes)


def test_opo() -> None:
    """A04: lengths 10, 20, 30, R 1, 0, 1: b = 2/3, A = 1/3, -2/3, 1/3."""
    assert credits(OPO, [1, 0, 1], lengths=[[10, 20, 30]])[0] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def answer(reward: float, *energy: float) -> PlainEpisode:
    n = len(energy)
    return PlainEpisode(reward, [[n]], np.full(n, -1.0), energy=np.array(energy, np.float32))


def test_otb() -> None:
    """A04: R 1, 0 with W = .5, 1, 1.5 and 1.5, 2: B = 1/4, 1/3, and a token that only one says is compared with
    nothing."""
    found = of(OTB, scored_group("t", [answer(1, 0.5, 0.5, 0.5), answer(0, 1.5, 0.5)]))
    assert found == [pytest.approx([3 / 4, 2 / 3, 0]), pytest.approx([-1 / 4, -1 / 3])]
    certain = of(OTB, scored_group("t", [answer(1, 0.0, 0.5), answer(0, 0.0, 0.5)]))
    assert certain == [pytest.approx([0, 1 / 2]), pytest.approx([0, -1 / 2])], "no energy, no gradient, no comparison"
    alike = of(OTB, scored_group("t", [answer(r, *[0.7] * 3) for r in (1, 0, 0, 1)]))
    assert np.allclose(alike, np.array([[0.5], [-0.5], [-0.5], [0.5]])), "equal energies: the mean of the group"


def test_otb_is_the_least_of_squares() -> None:
    """A04: at every token, sum over siblings of W_t (R - b)^2 is least at b = B_t: what the baseline is for."""
    rng = np.random.default_rng(0)
    rewards, energy = rng.random(5), rng.uniform(0.1, 1.9, (5, 7)).astype(np.float32)
    found = np.array(of(OTB, scored_group("t", [answer(r, *e) for r, e in zip(rewards, energy, strict=True)])))
    weight = np.cumsum(energy.astype(np.float64), 1)

    def spent(shift: float) -> np.ndarray:
        return (weight * (found + shift) ** 2).sum(0)

    assert all((spent(shift) > spent(0.0)).all() for shift in (-0.01, 0.01))
    assert not np.allclose(found, (rewards - rewards.mean())[:, None], atol=0.01)


@pytest.mark.parametrize(("tau", "log_z"), [(0.1, 0.930690), (1.0, 0.620115)], ids=["A20 tau .1", "A20 tau 1"])
def test_soft_mean(tau: float, log_z: float) -> None:
    """A20: R 1, 0, 0, 1: tau log Z = .930690 (tau .1), .620115 (tau 1), mean .5."""
    a = patch(OPMD, "soft", "-", baseline=SoftMean(tau=tau)) if tau != 1 else OPMD
    assert [r - x for r, x in zip([1, 0, 0, 1], credits(a, [1, 0, 0, 1])[0], strict=True)] == pytest.approx(
        [log_z] * 4, abs=1e-6
    )


def test_opmd() -> None:
    """A21: logavgexp .379885, -.620115; with the mean and the paper's 1 / (1 + tau): +-.25."""
    assert credits(OPMD, [1, 0, 0, 1])[0] == pytest.approx([0.379885, -0.620115, -0.620115, 0.379885], abs=1e-6)
    assert np.array(credits(DR_GRPO, [1, 0, 0, 1])[0]) / (1 + 1.0) == pytest.approx([0.25, -0.25, -0.25, 0.25])


@pytest.mark.parametrize(
    ("groups", "alpha"),
    [([[1, 0], [1, 1]], 2.0), ([[1, 0], [0, 1]], 1.0), ([[1, -1], [-1, -1], [1, 1], [1, -1]], 2.0)],
    ids=["A12 GPG half", "A12 GPG all", "A12 GPG +-1"],
)
def test_gpg(groups: list[list[float]], alpha: float) -> None:
    """A12: alpha is samples over samples of groups with spread, whatever the rewards are called."""
    found = np.concatenate(credits(GPG, *groups))
    assert found == pytest.approx(alpha * np.concatenate([np.array(g) - np.mean(g) for g in groups]))


# --- A07 (process), A31: several numbers an answer --------------------------------------------------------------------


def judged(*steps: tuple[int, float]) -> tuple[Judged, ...]:
    return (Judged("out", 1.0, Verdict.value(1.0)), *(Judged("step", 1.0, Verdict.value(v), end=e) for e, v in steps))


def test_process_supervision() -> None:
    """A07, process form: steps 1, 0 | 0, 0 of two answers have mean .25 and std .5: 1.5, -.5 | -.5, -.5; sums from the
    end."""
    answers = [
        PlainEpisode(1.0, [[1], [2]], np.full(3, -1.0), verdicts=judged((1, 1.0), (3, 0.0))),
        PlainEpisode(1.0, [[2]], np.full(2, -1.0), verdicts=judged((1, 0.0), (2, 0.0))),
    ]
    assert of(GRPO_PROCESS, scored_group("t", answers)) == [
        pytest.approx([1.0, -0.5, -0.5]),
        pytest.approx([-1.0, -0.5]),
    ]
    alone = [PlainEpisode(r, [[2]], np.full(2, -1.0)) for r in (1.0, 0.0, 0.0, 1.0)]
    half = math.sqrt(3) / 2
    assert [x[0] for x in of(GRPO_PROCESS, scored_group("t", alone))] == pytest.approx([half, -half, -half, half]), (
        "no steps: grpo"
    )


def sources(*rows: tuple[float | None, ...]) -> list[PlainEpisode]:
    """One answer a row, one source a column; None abstains."""
    out: list[PlainEpisode] = []
    for row in rows:
        verdicts = [Verdict.abstain() if x is None else Verdict.value(x) for x in row]
        out.append(
            PlainEpisode(
                0.0, [[1]], np.full(1, -1.0), verdicts=tuple(Judged(f"s{i}", 1.0, v) for i, v in enumerate(verdicts))
            )
        )
    return out


def test_gdpo() -> None:
    """A31: format 1, 1, 0, 1 and correct 1, 0, 0, 0: [.5, .5, -1.5, .5] + [1.5, -.5, -.5, -.5] = [2, 0, -2, 0] ->
    +-1.2247."""
    rows = scored_group("t", sources((1, 1), (1, 0), (0, 0), (1, 0)))
    raw = patch(GDPO, "raw", "-", whiten=None, pull=None)
    assert np.concatenate(of(raw, rows)) == pytest.approx([2, 0, -2, 0])
    assert np.concatenate(of(GDPO, rows)) == pytest.approx([1.2247, 0, -1.2247, 0], abs=5e-5)
    assert np.concatenate(of(patch(GRPO, "g", "-", pull=None), rows)) == pytest.approx(
        [1.2247, 0, -1.2247, 0], abs=5e-5
    )


def test_gdpo_keeps_what_a_sum_collapses() -> None:
    """A31, collapse: sums (0, 1) and (0, 2) both give GRPO +-.7071; GDPO before the step's scale +-.7071 and
    +-1.4142."""
    one, two = (scored_group(str(i), sources((0, 0), row)) for i, row in enumerate(((1, 0), (1, 1))))
    grpo = np.concatenate(of(patch(GRPO, "g", "-", pull=None), one, two))
    gdpo = np.concatenate(of(patch(GDPO, "raw", "-", whiten=None, pull=None), one, two))
    assert grpo == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=5e-5)
    assert gdpo == pytest.approx([-0.7071, 0.7071, -1.4142, 1.4142], abs=5e-5)


def test_an_abstention_leaves_its_comparison() -> None:
    """A31: a source compares only those it judged: 1, 0 and an abstention are +-.7071 and 0."""
    found = of(patch(GDPO, "raw", "-", whiten=None, pull=None), scored_group("t", sources((1, 1), (0, 1), (None, 1))))
    assert np.concatenate(found) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0])


# --- A32, A17: pass@k -------------------------------------------------------------------------------------------------

PASS = [
    ("A32 (4,2,2)", 4, 2, 2, 0.4472, -0.4472),
    ("A32 (4,1,2)", 4, 1, 2, 1.0, -0.3333),
    ("A32 (8,2,4)", 8, 2, 4, 0.5222, -0.1741),
    ("A32 (8,4,4)", 8, 4, 4, 0.1204, -0.1204),
    ("A32 (4,2,1)", 4, 2, 1, 1.0, -1.0),
]


@pytest.mark.parametrize(("n", "c", "k", "up", "down"), [x[1:] for x in PASS], ids=[x[0] for x in PASS])
def test_pass_at_k(n: int, c: int, k: int, up: float, down: float) -> None:
    """A32: (samples, successes, k) -> credit of a success and of a failure."""
    a = patch(PASS_AT_K, "p", "-", shape=(BestOf(k=k),)) if k != 4 else PASS_AT_K
    assert credits(a, [1.0] * c + [0.0] * (n - c))[0] == pytest.approx([up] * c + [down] * (n - c), abs=5e-5)
    mean = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert best_spread(np.array([1.0] * c + [0.0] * (n - c)), k) == pytest.approx(math.sqrt(mean * (1 - mean)))


@pytest.mark.parametrize(
    ("n", "c", "k", "up", "down"),
    [(4, 2, 2, 0.5, 0.3333), (8, 2, 4, 0.5, 0.3571)],
    ids=["A32 PKPO (4,2,2)", "A32 PKPO (8,2,4)"],
)
def test_pkpo_weights(n: int, c: int, k: int, up: float, down: float) -> None:
    """A32: s of a success k / n, of a failure [C(n-1, k-1) - C(n-1-c, k-1)] / C(n, k); the group's mean takes n s."""
    s = np.array([1.0] * c + [0.0] * (n - c))
    shaped = k * best_of(s, k) / n
    assert shaped == pytest.approx([up] * c + [down] * (n - c), abs=5e-5)
    found = credits(patch(REINFORCE, "s", "-", shape=(BestOf(k=k),)), s.tolist())[0]
    assert np.array(found) / n == pytest.approx(shaped)


def test_pass_at_k_estimator() -> None:
    """A32: (10, 3, 5) = .916667: the mean over all of k * best_of is k times the estimate."""
    assert best_of(np.array([1.0] * 3 + [0.0] * 7), 5).mean() == pytest.approx(0.916667, abs=1e-6)


def test_grpo_passk() -> None:
    """A32: .9, .2, .5, .1: (.9 - .5) / .359398 = 1.112973 for the best, 0 for the others; two best have none."""
    assert credits(GRPO_PASS_AT_K, [0.9, 0.2, 0.5, 0.1])[0] == pytest.approx([1.112973, 0, 0, 0], abs=1e-6)
    assert credits(GRPO_PASS_AT_K, [0.9, 0.2, 0.9])[0] == [0, 0, 0]


MAXRL_WEIGHTS = [
    *[(f"A17 p=.1 T={t}", 0.1, t, w) for t, w in ((1, 1), (4, 3.439), (16, 8.147))],
    *[(f"A17 p=.5 T={t}", 0.5, t, w) for t, w in ((1, 1), (4, 1.875), (16, 2.0))],
    *[(f"A17 p=.9 T={t}", 0.9, t, w) for t, w in ((1, 1), (4, 1.111), (16, 1.1111))],
]


@pytest.mark.parametrize(("p", "g", "weight"), [x[1:] for x in MAXRL_WEIGHTS], ids=[x[0] for x in MAXRL_WEIGHTS])
def test_weight_of_a_prompt_under_maximum_likelihood(p: float, g: int, weight: float) -> None:
    """A17: the success-only form multiplies grad p with (1 - (1 - p)^T) / p; a score has mean grad p / p over
    successes."""
    groups = rewarded(*[[1.0] * c + [0.0] * (g - c) for c in range(g + 1)])
    credit = credit_step(MAXRL_SUCCESS, groups, max_tokens=1, ema=0.0)
    total = 0.0
    for c, found in enumerate(credit.groups):
        each = [float(e.advantage[0][0]) for e in found.episodes]
        total += math.comb(g, c) * p**c * (1 - p) ** (g - c) / g * (sum(each[:c]) / p - sum(each[c:]) / (1 - p))
    assert total == pytest.approx(weight, abs=6e-4)
    assert total == pytest.approx((1 - (1 - p) ** g) / p, abs=1e-12)


siblings = st.lists(st.integers(-8, 8).map(lambda i: i / 4), min_size=1, max_size=7)


@settings(max_examples=60)
@given(siblings, st.integers(1, 7))
def test_best_of_is_what_the_subsets_say(r: list[float], k: int) -> None:
    """A32: means over all k-subsets that hold a sample, the gain in them, and the deviation of the best over all, by
    brute force."""
    k = min(k, len(r))
    sets = [(s, max(r[i] for i in s)) for s in combinations(range(len(r)), k)]
    holding = [[(s, best) for s, best in sets if i in s] for i in range(len(r))]
    assert best_of(np.array(r), k) == pytest.approx([np.mean([b for _, b in h]) for h in holding])
    gains = [np.mean([b - max((r[j] for j in s if j != i), default=0.0) for s, b in h]) for i, h in enumerate(holding)]
    assert best_gain(np.array(r), k) == pytest.approx(gains, abs=1e-12)
    assert best_spread(np.array(r), k) == pytest.approx(np.std([b for _, b in sets]), abs=1e-7)


# --- A19, values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "lam"),
    [(100, 0.8), (1000, 0.98), (10000, 0.998), (20, 0.0), (10, 0.0), (0, 0.0)],
    ids=["A19 100", "A19 1000", "A19 10000", "A19 20", "A19 10 (-1 clamped)", "A19 said nothing"],
)
def test_length_adaptive_lambda(length: int, lam: float) -> None:
    """A19: 1 - 1 / (.05 l), not below 0; .95^100 = .0059 is what it avoids."""
    assert VAPO.learns_values is not None
    assert credit_lambda(VAPO.learns_values, length) == pytest.approx(lam)
    assert pytest.approx(0.0059, abs=5e-5) == 0.95**100


floats = st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=1, max_size=9)


@settings(max_examples=60)
@given(floats, st.integers(0, 2**31 - 1), st.floats(0, 1), st.floats(1, 3))
def test_v_trace_on_policy_is_gae(values: list[float], seed: int, gamma: float, cap: float) -> None:
    """With ratio 1 and lambda 1 V-trace's targets and credit are GAE's; with ratio 0 nothing is learned of the
    values."""
    rng = np.random.default_rng(seed)
    v, r = np.array(values), rng.normal(size=len(values))
    advantage, returns = v_trace(v, r, np.ones(len(v)), gamma=gamma, gae_lambda=1.0, cap=cap)
    right, targets = gae(v, r, gamma=gamma, gae_lambda=1.0)
    assert advantage == pytest.approx(right, abs=1e-9) and returns == pytest.approx(targets, abs=1e-9)
    assert v_trace(v, r, np.zeros(len(v)), gamma=gamma, gae_lambda=1.0, cap=cap)[1] == pytest.approx(v)


def test_v_trace_says_what_it_computes() -> None:
    """Its credit reads the target of the next token, whatever lambda those targets have; no sum of GAE is in it."""
    value = Value(gamma=0.5, gae_lambda=0.5, clip=None, trace=2.0)
    assert value.words() == "r_t + 0.5 target_(t+1) - V_t; targets of V-trace, start/mu up to 2"
    target = "V_t + min(start/mu, 2) (r_t + 0.5 V_(t+1) - V_t + 0.25 (target_(t+1) - V_(t+1)))"
    assert value.loss_words() == f"0.5 * 1/2 (V - target)^2; target = {target}"
    # The same words in numbers: r, V, start/mu and the target of two tokens.
    last = 0.1 + 1.5 * (0.7 - 0.1)
    first = 0.2 + 2 * (0.3 + 0.5 * 0.1 - 0.2 + 0.25 * (last - 0.1))
    credit, targets = v_trace(
        np.array([0.2, 0.1]), np.array([0.3, 0.7]), np.array([3.0, 1.5]), gamma=0.5, gae_lambda=0.5, cap=2.0
    )
    assert targets == pytest.approx([first, last])
    assert credit == pytest.approx([0.3 + 0.5 * last - 0.2, 0.7 - 0.1])


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(0, 2**31 - 1),
    st.sampled_from([0.0, 0.5, 0.97, 1.0]),
)
def test_discounted_sums_are_a_loop(lengths: list[int], seed: int, discount: float) -> None:
    """Doubling gives what a loop over each episode gives."""
    x = np.random.default_rng(seed).normal(size=sum(lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    right = [
        sum(discount ** (k - t) * x[k] for k in range(t, len(x)) if sequence[k] == sequence[t]) for t in range(len(x))
    ]
    assert discounted(torch.as_tensor(x), torch.as_tensor(sequence), discount).numpy() == pytest.approx(
        np.array(right, float), abs=1e-12
    )


# --- A30, A33, M2: teachers and token choices -------------------------------------------------------------------------


def logs(*p: float) -> Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("beta", "value"),
    [(1.0, 0.223144), (0.0, 0.192745), (0.5, 0.050672)],
    ids=["A30 KL(S||T)", "A30 KL(T||S)", "A30 JSD .5"],
)
def test_generalised_jsd(beta: float, value: float) -> None:
    """A30: teacher .8, .2, student .5, .5, whole or as one candidate and the rest."""
    assert jensen_shannon(logs(0.8, 0.2), logs(0.5, 0.5), beta).item() == pytest.approx(value, abs=1e-6)
    assert jensen_shannon(logs(0.8), logs(0.5), beta).item() == pytest.approx(value, abs=1e-6)


def test_on_policy_distillation() -> None:
    """A30: the advantage of token 0 is log .8 - log .5 = +.470004, of token 1 -.916291; their mean under the student
    -KL(S||T)."""
    f = np.float32
    both = [PlainEpisode(0.0, [[1]], np.log([0.5]).astype(f), reference=np.log([q]).astype(f)) for q in (0.8, 0.2)]
    found = np.concatenate(of(OPD, *(scored_group(str(i), [x]) for i, x in enumerate(both))))
    assert found == pytest.approx([0.470004, -0.916291], abs=1e-6)
    assert found.mean() == pytest.approx(-0.223144, abs=1e-6)


def test_covariance() -> None:
    """A33: p .9, .1, .5, .3 and A 1, 1, -1, -1: .970906, -1.226319, -.383119, .127706; the top one is index 0."""
    cov = covariance(np.array([1.0, 1, -1, -1]), np.log([0.9, 0.1, 0.5, 0.3]))
    assert cov == pytest.approx([0.970906, -1.226319, -0.383119, 0.127706], abs=1e-6)
    assert largest(cov, 0.25).tolist() == [True, False, False, False]


def test_adaptive_entropy() -> None:
    """A33, Skywork: +.005 a step below .2, -.005 above, not below 0; the bonus is applied only below the target."""
    memory, coefs = AdaptiveState(), []
    for entropy in (0.1, 0.1, 0.3, 0.1, 0.3, 0.3, 0.3):
        memory = remember(SKYWORK, memory, {"policy/entropy": Gauge(entropy, 1.0)}, episodes=8)
        entropy_now = steered(SKYWORK, memory).entropy
        assert entropy_now is not None
        coefs.append(entropy_now.coef)
    assert coefs == pytest.approx([0.005, 0.01, 0.0, 0.01, 0.0, 0.0, 0.0])
    assert memory.entropy == pytest.approx(0.0)


def test_adaptive_kl() -> None:
    """A05: coef *= 1 + clip(KL / target - 1, +-.2) n / horizon: far above the target .2 * 256 / 10000 of it a step."""
    a = patch(GRPO, "adaptive", "-", pull=KL(coef=0.1, target=0.05))
    for kl, factor in (
        (1.0, 1 + 0.2 * 256 / 1e4),
        (0.0, 1 - 0.2 * 256 / 1e4),
        (0.05, 1.0),
        (0.055, 1 + 0.1 * 256 / 1e4),
    ):
        memory = remember(a, AdaptiveState(), {"policy/kl_reference": Gauge(kl, 1.0)}, episodes=256)
        now = steered(a, memory).pull
        assert isinstance(now, KL) and now.coef == pytest.approx(0.1 * factor)


@settings(max_examples=60)
@given(st.lists(st.integers(-20, 20).map(lambda i: i / 10), min_size=1, max_size=12), st.floats(0.001, 4))
def test_within_moment_masks_no_more_than_it_must(x: list[float], limit: float) -> None:
    """A26 M2PO: what is kept has a mean square of at most the limit, what is silent is larger, and one more would be
    too many."""
    log = np.array(x)
    kept = within_moment(log, limit)
    assert not kept.any() or (log[kept] ** 2).mean() <= limit * (1 + 1e-9)
    if not kept.all():
        assert not kept.any() or np.abs(log[~kept]).min() >= np.abs(log[kept]).max()
        one_more = np.append(log[kept], log[~kept][np.abs(log[~kept]).argmin()])
        assert (one_more**2).mean() > limit * (1 - 1e-9)
