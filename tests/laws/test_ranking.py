"""Losses of reward models against the textbook in float64, and that no split of a minibatch changes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.algorithm.preference.reward_model_loss import RankingLoss
from posttrain.config.stages.reward_model_settings import HeadShape, Regulariser
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import Rewards, TokenScores
from posttrain.core.gauge import merge
from posttrain.core.sampling import Sampling
from posttrain.core.streams import MARGIN, RATING, REFERENCE, SIDE, STEP, WEIGHT
from posttrain.core.types import SHOWN, Segment
from posttrain.system.errors import InvariantError


def batch(sizes: list[int], sides: list[int], weights: list[float], **more: Any) -> Batch:
    """Units of these sizes, of completions of 1, 2, 3, 1, ... tokens after a prompt of two."""
    spoken = [1 + i % 3 for i in range(sum(sizes))]
    made = [
        Segment(
            np.arange(2 + n, dtype=np.int32),
            np.arange(2 + n) >= 2,
            np.where(np.arange(2 + n) >= 2, 0.0, np.nan).astype(np.float32),
            np.where(np.arange(2 + n) >= 2, SHOWN, -1).astype(np.int32),
            Sampling(),
        )
        for n in spoken
    ]
    each = np.repeat(np.array(weights), sizes)
    streams = {
        SIDE: np.repeat(np.array(sides, np.int32), spoken),
        WEIGHT: np.repeat(each, spoken),
        **{
            stream: np.repeat(np.asarray(x, np.float64), spoken, axis=0)
            for stream, x in more.get("streams", {}).items()
        },
    }
    return Batch.of(made, unit_E=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), streams=streams)


def scored(loss: RankingLoss, micro: Batch, score_S: Tensor, outputs: Tensor | None = None) -> Terms:
    outputs = score_S[:, None] if outputs is None else outputs
    return loss.terms(micro, TokenScores(None, None, None, rewards=Rewards(score_S, outputs)))


def one_pair(chosen: float, rejected: float, loss: RankingLoss, **streams: Any) -> float:
    made = batch([2], [1, 0], [1.0], **streams)
    return float(scored(loss, made, torch.tensor([chosen, rejected], dtype=torch.float64)).loss)


def test_the_cases_of_the_survey() -> None:
    """B01: 1.5 against .5 is .313262, with a margin of 1 .693147, and centring with .01 adds .04."""
    assert one_pair(1.5, 0.5, RankingLoss()) == pytest.approx(0.313262, abs=1e-6)
    margin = {"streams": {MARGIN: [1.0, 1.0]}}
    assert one_pair(1.5, 0.5, RankingLoss(), **margin) == pytest.approx(0.693147, abs=1e-6)
    assert one_pair(1.5, 0.5, RankingLoss(margin=False), **margin) == pytest.approx(0.313262, abs=1e-6)
    centred = one_pair(1.5, 0.5, RankingLoss(centre=0.01)) - one_pair(1.5, 0.5, RankingLoss())
    assert centred == pytest.approx(0.04, abs=1e-12)


def bradley_terry(x: Tensor, w: Tensor, margin: Tensor, centre: float) -> Tensor:
    total = x.new_zeros(())
    for u in range(len(w)):
        c, r = x[2 * u], x[2 * u + 1]
        total = total + w[u] * (-torch.log(1 / (1 + torch.exp(-(c - r - margin[u])))) + centre * (c + r) ** 2)
    return total


def plackett_luce(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    total, at = x.new_zeros(()), 0
    for u, size in enumerate(sizes):
        own = x[at : at + size]
        for k in range(size - 1):
            total = total - w[u] * torch.log(torch.exp(own[k]) / torch.exp(own[k:]).sum())
        at += size
    return total


def all_pairs(x: Tensor, w: Tensor, sizes: list[int]) -> Tensor:
    total, at = x.new_zeros(()), 0
    for u, size in enumerate(sizes):
        for i in range(size):
            for j in range(i + 1, size):
                each = -torch.log(torch.sigmoid(x[at + i] - x[at + j]))
                total = total + w[u] * each / math.comb(size, 2)
        at += size
    return total


RNG = np.random.default_rng(3)
SIZES = [3, 2, 4, 2, 3]
LISTED = [n - 1 - i for n in SIZES for i in range(n)]
WEIGHTS = (RNG.random(5) + 0.1).tolist()
X = torch.tensor(RNG.normal(size=14) * 2)
MARGINS = RNG.random(7)
W7 = (RNG.random(7) + 0.1).tolist()
RATINGS = np.where(RNG.random((14, 2)) < 0.3, np.nan, RNG.normal(size=(14, 2)))
RATINGS[:, 0] = np.where(np.isnan(RATINGS).all(1), 0.5, RATINGS[:, 0])
OUT = torch.tensor(RNG.normal(size=(14, 2)))
W14 = (RNG.random(14) + 0.1).tolist()
GOOD = [int(g) for g in RNG.random(14) < 0.5]


def rated(x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for s in range(14):
        known = [k for k in range(2) if not math.isnan(RATINGS[s, k])]
        total = total + W14[s] * sum((x[s, k] - RATINGS[s, k]) ** 2 for k in known) / len(known)
    return total


Case = tuple[RankingLoss, Batch, Tensor, Callable[[Tensor], Tensor]]

CASES: dict[str, Case] = {
    "pairs": (
        RankingLoss(centre=0.02),
        batch([2] * 7, [1, 0] * 7, W7, streams={MARGIN: np.repeat(MARGINS, 2)}),
        X,
        lambda x: bradley_terry(x, torch.tensor(W7, dtype=torch.float64), torch.tensor(MARGINS), 0.02),
    ),
    "ranking": (
        RankingLoss(judged="ranking"),
        batch(SIZES, LISTED, WEIGHTS),
        X,
        lambda x: plackett_luce(x, torch.tensor(WEIGHTS, dtype=torch.float64), SIZES),
    ),
    "ranking as pairs": (
        RankingLoss(judged="ranking", pairs=True),
        batch(SIZES, LISTED, WEIGHTS),
        X,
        lambda x: all_pairs(x, torch.tensor(WEIGHTS, dtype=torch.float64), SIZES),
    ),
    "labels": (
        RankingLoss(judged="label"),
        batch([1] * 14, GOOD, W14),
        X,
        lambda x: sum(
            (W14[s] * -torch.log(torch.sigmoid(x[s] if GOOD[s] else -x[s])) for s in range(14)), x.new_zeros(())
        ),
    ),
    "ratings": (
        RankingLoss(judged="rating", shape=HeadShape(outputs=("a", "b"))),
        batch([1] * 14, [1] * 14, W14, streams={RATING: RATINGS}),
        OUT,
        rated,
    ),
    "classes": (
        RankingLoss(judged="rating", shape=HeadShape(outputs=("a",), classes=2)),
        batch([1] * 14, [1] * 14, W14, streams={RATING: np.array(GOOD, float)[:, None]}),
        OUT,
        lambda x: sum(
            (W14[s] * -torch.log(torch.exp(x[s, GOOD[s]]) / torch.exp(x[s]).sum()) for s in range(14)), x.new_zeros(())
        ),
    ),
}


def value(loss: RankingLoss, micro: Batch, x: Tensor) -> Terms:
    return scored(loss, micro, x if x.ndim == 1 else x.mean(-1), x if x.ndim > 1 else None)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_textbooks(name: str) -> None:
    loss, made, x, textbook = CASES[name]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = value(loss, made, ours).loss, textbook(theirs)
    found.backward()
    wanted.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [1, 12, 20])
def test_any_split_of_a_minibatch_adds_up(name: str, tokens: int) -> None:
    loss, made, x, _ = CASES[name]
    whole_x, parts_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole = value(loss, made, whole_x)
    bins = made.bins(tokens)
    assert len(bins) > 1
    parts = [value(loss, micro, parts_x[np.sort(b)]) for b, micro in zip(bins, made.cut(bins), strict=True)]
    whole.loss.backward()
    sum((p.loss for p in parts), x.new_zeros(())).backward()
    torch.testing.assert_close(parts_x.grad, whole_x.grad, rtol=1e-12, atol=1e-14)
    found, wanted = loss.gauges(made, parts), loss.gauges(made, [whole])
    assert found.keys() == wanted.keys() and merge(found)
    for gauge, right in wanted.items():
        assert found[gauge].sum == pytest.approx(right.sum, abs=1e-10) and found[gauge].count == right.count


# --- what the language head learns meanwhile --------------------------------------------------------------------------

FORMS: tuple[Regulariser, ...] = ("sft", "dpo", "dpo_free")
PAIRS = batch([2] * 7, [1, 0] * 7, W7, streams={MARGIN: np.repeat(MARGINS, 2), REFERENCE: RNG.normal(size=14) - 1})
LOGP = torch.tensor(RNG.normal(size=PAIRS.spoken) - 1)


def regularised(form: Regulariser) -> RankingLoss:
    return RankingLoss(centre=0.02, regularise=form, alpha=0.3, beta=0.7)


def both_heads(loss: RankingLoss, micro: Batch, score_S: Tensor, logp_M: Tensor) -> Terms:
    return loss.terms(micro, TokenScores(logp_M, None, None, rewards=Rewards(score_S, score_S[:, None])))


def generalizable(form: Regulariser, score_S: Tensor, logp_M: Tensor) -> Tensor:
    """2406.10216, equations of its section 3.2, with the sums written out."""
    w, margin = torch.tensor(W7, dtype=torch.float64), torch.tensor(MARGINS)
    total = 0.7 * bradley_terry(score_S, w, margin, 0.02)
    for u in range(7):
        sums = [logp_M.new_zeros(()), logp_M.new_zeros(())]
        for m in range(PAIRS.spoken):
            s = int(PAIRS.segment_M[m])
            if s // 2 == u:
                sums[s % 2] = sums[s % 2] + logp_M[m] - (float(PAIRS[REFERENCE][m]) if form == "dpo" else 0.0)
        x = sums[0] if form == "sft" else sums[0] - sums[1]
        total = total + 0.3 * w[u] * torch.log(1 + torch.exp(-0.7 * x))
    return total


@pytest.mark.parametrize("form", FORMS)
def test_value_and_both_gradients_of_a_regularised_reward_model_are_the_textbooks(form: Regulariser) -> None:
    ours, theirs = ([t.clone().requires_grad_() for t in (X, LOGP)] for _ in range(2))
    found, wanted = both_heads(regularised(form), PAIRS, *ours).loss, generalizable(form, *theirs)
    found.backward()
    wanted.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=1e-12)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and bool(one.grad.any())
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
    assert regularised(form).reads(PAIRS).logp and not RankingLoss().reads(PAIRS).logp


@pytest.mark.parametrize("form", FORMS)
def test_any_split_of_a_regularised_minibatch_adds_up(form: Regulariser) -> None:
    loss, logp_M = regularised(form), LOGP.clone().requires_grad_()
    whole = both_heads(loss, PAIRS, X, logp_M)
    bins = PAIRS.bins(12)
    parts: list[Terms] = []
    for b, micro in zip(bins, PAIRS.cut(bins), strict=True):
        own = np.flatnonzero(np.isin(PAIRS.segment_M, b))
        parts.append(both_heads(loss, micro, X[np.sort(b)], logp_M[own]))
    assert len(parts) > 1
    one = torch.autograd.grad(whole.loss, logp_M)[0]
    other = torch.autograd.grad(sum((p.loss for p in parts), X.new_zeros(())), logp_M)[0]
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    found, wanted = loss.gauges(PAIRS, parts), loss.gauges(PAIRS, [whole])
    assert found["ranking/regulariser"].sum == pytest.approx(wanted["ranking/regulariser"].sum, abs=1e-10)


def test_the_numbers_of_a_regularised_pair() -> None:
    """.99 of B01's .313262, and .01 of B02's .554355 (beta .1, a difference of 3) or of the chosen one alone."""
    made, x = batch([2], [1, 0], [1.0], streams={REFERENCE: [0.0, 0.0]}), torch.tensor([1.5, 0.5], dtype=torch.float64)
    logp_M = torch.tensor([-1.0, -2.0, -2.0], dtype=torch.float64)  # one token, then two
    assert made.segment_M.tolist() == [0, 1, 1]
    for form in FORMS:
        second = 0.744397 if form == "sft" else 0.554355
        found = both_heads(RankingLoss(regularise=form), made, x, logp_M)
        assert float(found.loss) == pytest.approx(0.99 * 0.313262 + 0.01 * second, abs=1e-6)


def test_a_ranking_of_two_is_a_pair() -> None:
    x = torch.tensor([0.3, -0.9], dtype=torch.float64)
    made = batch([2], [1, 0], [1.0])
    each = [
        float(scored(RankingLoss(judged=j, pairs=p), made, x).loss)
        for j, p in (("pair", False), ("ranking", False), ("ranking", True))
    ]
    assert each[0] == pytest.approx(each[1], abs=1e-14) and each[0] == pytest.approx(each[2], abs=1e-14)


def test_the_side_decides_and_not_the_order() -> None:
    """A swap of the two sides with their labels changes nothing; a shift of both scores neither."""
    x = torch.tensor([1.5, 0.5], dtype=torch.float64)
    here = scored(RankingLoss(), batch([2], [1, 0], [1.0]), x)
    there = scored(RankingLoss(), batch([2], [0, 1], [1.0]), x.flip(0))
    moved = scored(RankingLoss(), batch([2], [1, 0], [1.0]), x + 7)
    assert float(here.loss) == float(there.loss) == pytest.approx(float(moved.loss), abs=1e-14)
    assert (
        here.gauges["ranking/accuracy"] == there.gauges["ranking/accuracy"] and here.gauges["ranking/margin"].sum == 1
    )
    with pytest.raises(InvariantError, match="the sides of a judgement are \\[1, 1\\]"):
        scored(RankingLoss(), batch([2], [1, 1], [1.0]), x)


def test_a_head_of_every_token_learns_the_label_at_each() -> None:
    made = batch([1] * 3, [1, 0, 1], [0.5, 0.25, 0.25])
    x = torch.tensor(RNG.normal(size=(made.spoken, 1)), requires_grad=True)
    loss = RankingLoss(judged="label", shape=HeadShape(pool="token"))
    ends = np.cumsum(np.bincount(made.segment_M)) - 1
    found = scored(loss, made, x[ends, 0], x).loss
    wanted = 0.0
    for s, (good, weight) in enumerate([(1, 0.5), (0, 0.25), (1, 0.25)]):
        own = [float(x[m, 0]) for m in np.flatnonzero(made.segment_M == s)]
        wanted += weight * np.mean([math.log1p(math.exp(-v if good else v)) for v in own])
    assert float(found) == pytest.approx(wanted, abs=1e-12)


def test_labels_of_steps_are_learned_at_their_ends_and_nowhere_else() -> None:
    """The textbook's binary cross entropy, soft labels included: a completion counts once, however many steps it has;
    tokens without a label have no gradient. Any split of the minibatch adds up."""
    made = batch([1] * 4, [0, 1, 0, 1], [0.1, 0.2, 0.3, 0.4])
    label_M = np.full(made.spoken, np.nan)
    at = {1: 0.25, 2: 1.0, 5: 0.0, 0: 0.5, 6: 0.75}  # tokens of completions 0; 1, 1; 2; 3
    for m, y in at.items():
        label_M[m] = y
    made = made.having({STEP: label_M})
    torch.manual_seed(0)
    score_M = torch.randn(made.spoken, 1, dtype=torch.float64, requires_grad=True)
    loss = RankingLoss(judged="steps", shape=HeadShape(pool="token", separator=";"))
    ends = np.cumsum(np.bincount(made.segment_M)) - 1

    def textbook(x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for s in range(4):
            own = [m for m in at if made.segment_M[m] == s]
            each = [
                -(at[m] * torch.log(torch.sigmoid(x[m, 0])) + (1 - at[m]) * torch.log(1 - torch.sigmoid(x[m, 0])))
                for m in own
            ]
            total = total + made[WEIGHT][made.segment_M == s][0] * sum(each) / len(each)
        return total

    terms = scored(loss, made, score_M[ends, 0], score_M)
    assert float(terms.loss.detach()) == pytest.approx(float(textbook(score_M).detach()), abs=1e-12)
    (mine,) = torch.autograd.grad(terms.loss, score_M)
    (theirs,) = torch.autograd.grad(textbook(score_M), score_M)
    assert torch.allclose(mine, theirs, atol=1e-12)
    assert not mine[np.isnan(label_M)].any()
    halves = [made.select(np.array([0, 1])), made.select(np.array([2, 3]))]
    parts = [score_M[: halves[0].spoken], score_M[halves[0].spoken :]]
    split = [
        scored(loss, h, x[np.cumsum(np.bincount(h.segment_M)) - 1, 0], x).loss
        for h, x in zip(halves, parts, strict=True)
    ]
    assert sum(float(x.detach()) for x in split) == pytest.approx(float(terms.loss.detach()), abs=1e-12)
    with pytest.raises(InvariantError, match="no labelled step"):
        scored(loss, made.having({STEP: np.full(made.spoken, np.nan)}), score_M[ends, 0], score_M)
