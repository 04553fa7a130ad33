"""Laws of the pieces that learn from stale answers: what a correction, a baseline and a step size do with w = pi/mu."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_toys import STAGE, batch_of
from law_world import L_MAX, World, world

from posttrain.algorithm.credit.judged_sample import early_weight
from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.losses import STEP_SHARE, PolicyLoss
from posttrain.algorithm.loss.minibatch_streams import CHOSEN
from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.algorithm.loss.step_scale import ANSWER_RATIO, ANSWER_RATIO_SQUARE, step_share
from posttrain.core.batch import Packed
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.streams import ADVANTAGE, MU, START
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import OffPolicyMean
from posttrain.ladder.pieces.step_size import EffectiveSize
from posttrain.ladder.pieces.token_choice import SecondMoment
from posttrain.ladder.pieces.trust_region import Clip
from posttrain.ladder.policy_rows import (
    DECOUPLED,
    DR_GRPO,
    GRPO,
    GSPO,
    ICEPOP,
    IW_OPD,
    LUSPO,
    M2PO,
    MOPD,
    OPD,
    OTB,
    TIS,
    VCPO,
)
from posttrain.role.pack import pack
from posttrain.system.errors import InvariantError
from posttrain.toy.episodes import PlainEpisode, scored_group

PLAIN = patch(DR_GRPO, "opob", "-", baseline=OffPolicyMean())
laws = settings(max_examples=60)
siblings = st.lists(
    st.tuples(st.integers(0, 8).map(lambda i: i / 4), st.floats(-3, 3), st.floats(0.01, 2)), min_size=2, max_size=7
)


def credit(a: Algorithm, rows: list[tuple[float, float, float]]) -> np.ndarray:
    """Credit of one-token answers of (reward, log w, energy)."""
    plain = [
        PlainEpisode(r, [[1]], np.full(1, -400.0), np.full(1, -400.0 + w), energy=np.full(1, float(e)))
        for r, w, e in rows
    ]
    step = credit_step(a, [scored_group("t", plain)], max_tokens=L_MAX, ema=0.0)
    return np.array([float(e.advantage[0][0]) for e in step.groups[0].episodes])


def test_the_off_policy_baseline_in_numbers() -> None:
    """Rewards 1, 0, 0, w = 2, 1, 1 and energies 1, 1, 2: weights 4, 1, 2, so b = 4/7."""
    found = credit(PLAIN, [(1, math.log(2), 1), (0, 0, 1), (0, 0, 2)])
    assert found == pytest.approx([3 / 7, -4 / 7, -4 / 7])


@laws
@given(siblings, st.floats(-0.5, 0.5))
def test_no_other_baseline_has_less_variance(rows: list[tuple[float, float, float]], off: float) -> None:
    """b of OPOB makes sum_i w_i^2 W_i (R_i - b)^2 least; and a common factor of all w changes nothing."""
    if len({r for r, _, _ in rows}) < 2:
        return
    found = credit(PLAIN, rows)
    weight = np.array([math.exp(2 * w) * e for _, w, e in rows])
    least = float((weight * found**2).sum())
    assert least <= float((weight * (found - off) ** 2).sum()) * (1 + 1e-6)
    assert abs((weight * found).sum()) <= 1e-5 * weight.sum()
    assert credit(PLAIN, [(r, w + 1.5, e) for r, w, e in rows]) == pytest.approx(found, abs=1e-4)


def test_on_policy_it_is_the_energy_s_mean_and_with_equal_ones_the_group_s() -> None:
    rows = [(1.0, 0.0, 1.0), (0.0, 0.0, 3.0), (0.5, 0.0, 2.0)]
    assert credit(PLAIN, rows) == pytest.approx(np.array([1, 0, 0.5]) - 2 / 6)
    even = [(r, 0.0, 0.7) for r, _, _ in rows]
    assert credit(PLAIN, even) == pytest.approx(credit(DR_GRPO, even))
    assert credit(patch(GRPO, "g", "-", pull=None), even) == pytest.approx(credit(replace(VCPO, parent=None), even))


@pytest.mark.parametrize("w", [-399.0, 399.0])
def test_a_ratio_of_any_size_stays_finite(w: float) -> None:
    """One answer with a huge ratio is its own baseline; one with a vanishing ratio does not count."""
    found = credit(PLAIN, [(1, w, 1), (0, 0, 1), (0.5, 0, 1)])
    assert found == pytest.approx([0, -1, -0.5] if w > 0 else [0.75, -0.25, 0.25])
    assert credit(PLAIN, [(1, 0, 0.0), (0, 0, 0.0)]) == pytest.approx([0.5, -0.5])


# --- the step size -------------------------------------------------------------------------------------------------


def ratios(*w: float) -> Gauges:
    return {ANSWER_RATIO: Gauge.of(list(w)), ANSWER_RATIO_SQUARE: Gauge.of([x * x for x in w])}


def test_the_step_size_in_numbers() -> None:
    """w = 4, 1, 1, 1: ESS = 49 / (4 * 19); the authors' sqrt, and their base of .55."""
    assert step_share(EffectiveSize(), ratios(1, 1, 1, 1)) == 1
    assert step_share(EffectiveSize(), ratios(4, 1, 1, 1)) == pytest.approx(math.sqrt(49 / 76))
    assert step_share(EffectiveSize(base=0.55), ratios(4, 1, 1, 1)) == 1
    assert step_share(EffectiveSize(base=0.9), ratios(4, 1, 1, 1)) == pytest.approx(math.sqrt(49 / 76 / 0.9))
    with pytest.raises(InvariantError, match="reads the gauge"):
        step_share(EffectiveSize(), {})


@laws
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(0.1, 10))
def test_the_step_size_is_a_share(w: list[float], factor: float) -> None:
    """Between sqrt(1 / n) and 1; a common factor and an order of the answers change nothing."""
    found = step_share(EffectiveSize(), ratios(*w))
    assert math.sqrt(1 / len(w)) - 1e-9 <= found <= 1
    assert step_share(EffectiveSize(), ratios(*(factor * x for x in w[::-1]))) == pytest.approx(found)


@pytest.mark.parametrize("micro", [24, 60, 10_000])
def test_any_split_has_the_same_share(micro: int) -> None:
    """ESS is over all responses of the minibatch, those without credit too, however it is cut."""
    here = world(VCPO, 0)
    w = [math.exp(float((e.lp.detach() - e.mu).sum())) for e in here.eps]
    right = math.sqrt(sum(w) ** 2 / len(w) / sum(x * x for x in w))
    parts = here.terms(*here.batch.cut(here.batch.bins(micro)))
    found = PolicyLoss(VCPO).gauges(here.batch, [Terms(p.loss.detach(), p.gauges) for p in parts])
    assert found[STEP_SHARE].mean == pytest.approx(right, abs=1e-9) and 0 < right < 1
    assert found[ANSWER_RATIO].count == len(here.eps)


# --- corrections where nothing is stale ------------------------------------------------------------------------------


def fresh(a: Algorithm) -> torch.Tensor:
    """The gradient in a world whose sampler is the learner at the start of the step."""
    here = World(a, 0)
    here.start[:] = here.mu
    for group in here.answers:
        for answer in group:
            answer.start = answer.mu if answer.start is not None else None
    again = [scored_group(str(i), g, greedy=here.greedy[i]) for i, g in enumerate(here.answers)]
    batch = batch_of(a, credit_step(a, again, max_tokens=L_MAX, ema=0.0))
    return here.gradient(here.terms(batch)[0].loss)[0]


@pytest.mark.parametrize("a", [TIS, ICEPOP, DECOUPLED], ids=lambda a: a.name)
def test_a_correction_of_nothing_is_silent(a: Algorithm) -> None:
    """Where start = mu, TIS, IcePop and decoupled PPO are GRPO without KL: only staleness or a mismatch parts them."""
    assert torch.equal(fresh(a), fresh(patch(GRPO, "grpo_no_kl", "-", pull=None)))
    assert not torch.allclose(world(a, 0).library()[0], world(patch(GRPO, "no_kl", "-", pull=None), 0).library()[0])


def test_luspo_is_gspo_times_the_length() -> None:
    """With the same bounds, an answer's gradient is |y| times that of GSPO."""
    wide = Clip(low=0.5, high=0.5)
    long, short = (world(patch(a, f"{a.name}_05", "-", clip=wide), 0) for a in (LUSPO, GSPO))
    length = torch.tensor([len(e) for e in long.eps for _ in range(len(e))], dtype=torch.float64)
    spoken = torch.as_tensor(np.sort((long.batch.target_M - 100) // 12))
    torch.testing.assert_close(long.library()[0][spoken], short.library()[0][spoken] * length[:, None])


def answers(a: Algorithm) -> list[np.ndarray]:
    """Credit per token of every judged episode of the world."""
    return [np.concatenate(e.advantage) for g in world(a, 0).credit.groups for e in g.episodes]


# --- distillation ----------------------------------------------------------------------------------------------------


def test_early_tokens_weigh_more() -> None:
    """IW-OPD in numbers: gaps .2, -.1, .1 and gamma .5."""
    assert early_weight(0.5, np.array([0.2, -0.1, 0.1])) == pytest.approx([1.5, 1.25, 1.125])
    assert early_weight(0.0, np.array([0.2, -0.1])) == pytest.approx([1, 1])
    assert early_weight(0.5, np.zeros(3)) == pytest.approx([1, 1, 1])


@laws
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9), st.floats(0.01, 4))
def test_the_weight_falls_from_its_most_towards_one(gaps: list[float], early: float) -> None:
    found = early_weight(early, np.array(gaps))
    assert np.all(np.diff(found) <= 1e-12) and np.all(found >= 1 - 1e-12) and found[0] <= 1 + early + 1e-12


def test_iw_opd_is_opd_with_weights_and_mopd_its_credit() -> None:
    """Credit of IW-OPD is OPD's times the weight; MOPD's is OPD's, taken of the start of the step."""
    for plain, early, e in zip(answers(OPD), answers(IW_OPD), world(OPD, 0).eps, strict=True):
        assert early == pytest.approx(plain * early_weight(0.5, (e.mu - e.ref).numpy()))
    for gated, e in zip(answers(MOPD), world(MOPD, 0).eps, strict=True):
        assert gated == pytest.approx((e.ref - e.old).numpy())


def test_the_token_baseline_of_several_turns_is_otb() -> None:
    """verl's TIR_OPTIMAL_TOKEN_BASELINE compares the k-th spoken tokens of all turns, energies summed over the turns
    before; otb counts spoken tokens alone, so it is that, except where one sibling speaks on alone."""
    here = world(OTB, 0)
    for e, found in zip(here.eps, answers(OTB), strict=True):
        mates = [f for f in here.eps if f.group == e.group]
        width = max(len(f) for f in mates)
        w, r = np.zeros((len(mates), width)), np.zeros((len(mates), width))
        for i, f in enumerate(mates):  # over the concatenated turns, as verl fills all_w_values and all_returns
            w[i, : len(f)], r[i, : len(f)] = np.cumsum(f.energy.numpy()), f.R
        b = (w * r).sum(0) / w.sum(0)
        second = sorted(len(f) for f in mates)[-2]
        shared = min(len(e), second)
        assert found[:shared] == pytest.approx((e.R - b)[:shared])
        assert not np.any(found[second:])
    assert any(len(e.turns) > 1 for e in here.eps)


# --- the mask of m2po ------------------------------------------------------------------------------------------------

LIMIT = 0.04


def outward(gap: np.ndarray, advantage: np.ndarray) -> np.ndarray:
    """M2PO's mask by its definition: of the tokens that are pushed away from mu, the largest are masked one by one."""
    kept = np.ones(len(gap), bool)
    away = [i for i in range(len(gap)) if gap[i] * advantage[i] > 0]
    while (left := [i for i in away if kept[i]]) and np.mean(gap[left] ** 2) > LIMIT:
        kept[max(left, key=lambda i: abs(gap[i]))] = False
    return kept


@laws
@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.integers(1, 3))
def test_m2po_masks_by_the_policy_of_each_update(seed: int, minibatches: int, epochs: int) -> None:
    """Each update's mask is that of its own policy, over its whole minibatch; the first one's is that of the start."""
    rng = np.random.default_rng(seed)
    step = [scored_group(f"t{i}", [_answer(rng, 1.0), _answer(rng, 0.0)]) for i in range(2)]
    made = credit_step(M2PO, step, max_tokens=L_MAX, ema=0.0)
    stage = replace(STAGE, algorithm=M2PO, prompts=2, siblings=2, minibatches=minibatches, epochs=epochs)
    moved = list[np.ndarray]()

    def now(packed: Packed) -> np.ndarray:
        moved.append(rng.normal(-2, 0.4, packed.spoken).astype(np.float32))
        return moved[-1]

    for update, minibatch in enumerate(pack(made, M2PO, stage, seed=0, step=1, now=now)):
        assert len(moved) == update, "a minibatch is made after the update before it, and the first needs no scores"
        batch = minibatch.batch
        assert batch is not None
        before = (moved[-1] if update else batch[START]).astype(np.float64)
        assert batch[CHOSEN].tolist() == outward(before - batch[MU], batch[ADVANTAGE]).tolist()
    assert len(moved) == minibatches * epochs - 1


def _answer(rng: np.random.Generator, reward: float) -> PlainEpisode:
    mu, start = rng.normal(-2, 0.4, (2, 5)).astype(np.float32)
    return PlainEpisode(reward, [[5]], mu, start)


def test_what_a_choice_masks_is_counted() -> None:
    """`policy/masked` is the number of tokens that the choice leaves out; algorithms without one do not have it."""
    here = world(patch(M2PO, "m2po_tight", "-", tokens=SecondMoment(limit=0.01)), 0)
    masked = int((~here.batch[CHOSEN]).sum())
    (told,) = here.terms(here.batch)
    assert masked and told.gauges["policy/masked"] == Gauge(masked, here.batch.spoken)
    (other,) = world(TIS, 0).terms(world(TIS, 0).batch)
    assert "policy/masked" not in other.gauges


def test_m2po_alone_asks_for_scores_between_updates() -> None:
    rng = np.random.default_rng(0)
    made = credit_step(GRPO, [scored_group("t", [_answer(rng, r) for r in (0.0, 1.0)])], max_tokens=L_MAX, ema=0.0)
    stage = replace(STAGE, prompts=1, siblings=2, epochs=3)
    assert len(list(pack(made, patch(GRPO, "g", "-", pull=None), stage, seed=0, step=1, now=_nobody_asks))) == 3
    with pytest.raises(AssertionError, match="nobody asks"):
        list(pack(made, M2PO, stage, seed=0, step=1, now=_nobody_asks))


def _nobody_asks(packed: Packed) -> np.ndarray:
    raise AssertionError("nobody asks for this")
