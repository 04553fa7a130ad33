"""The second computation of credit and loss agrees with the first, and notices where the first is off."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss import policy_loss
from posttrain.algorithm.loss.losses import PolicyLoss
from posttrain.algorithm.loss.push_factor import Push
from posttrain.checks.learning import loss_checks as synthetic_loss
from posttrain.checks.learning.credit_by_definition import expected_credit, uncovered_credit
from posttrain.checks.learning.gradient_by_definition import computed_once, demand, uncovered
from posttrain.checks.learning.loss_checks import agrees_on_synthetic_batch, loss_agrees
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.scored import ScoredGroup
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, START
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import LADDER
from posttrain.role.learner_passes import Needs, Passes
from posttrain.system.errors import InvariantError
from posttrain.toy.episodes import PlainEpisode, scored_group

ONCE = {
    "loss": "dppo_top echo gkd sdft sdpo",
    "credit": "chord gdpo gigpo gkd grpo_process iw_opd luffy mopd mt_grpo opd otb pass_at_k pkpo rae sdft sdpo v_trace"
    " vapo vcpo",
}
"""What is computed once. A name that leaves this list is a gain; one that comes to it says so in its runs."""
COVERED = [a for a in LADDER.values() if not uncovered(a)]


def test_what_is_computed_once_is_named() -> None:
    assert {a.name for a in LADDER.values() if uncovered(a)} == set(ONCE["loss"].split())
    assert {a.name for a in LADDER.values() if uncovered_credit(a)} == set(ONCE["credit"].split())
    assert computed_once(LADDER["dppo_top"]) == "no second computation checks loss (clip)"
    assert computed_once(LADDER["sdft"]) == "no second computation checks loss (distill) or credit (rewards, hint)"
    assert computed_once(LADDER["grpo"]) == ""


@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.5, 2, 6, 12]), st.sampled_from([0, 1e-6, 1e-3, 0.05, 0.5, 3]))
@settings(max_examples=8)
def test_losses_agree_near_and_far_off_policy(seed: int, surprise: float, apart: float) -> None:
    """Log-probs near 0 and far below it; policies that differ by rounding, and by many nats."""
    rng, (batch, _, _) = np.random.default_rng(seed), synthetic_loss._synthetic()
    count = batch.spoken
    logp = -rng.exponential(surprise, count).astype(np.float32)

    def near(by: float) -> np.ndarray:
        return np.minimum(logp + rng.normal(0, by, count), 0).astype(np.float32)

    credit = rng.normal(size=count) * (rng.random(count) < 0.8)
    batch = batch.having({MU: near(apart), START: near(apart), REFERENCE: near(1.0), ADVANTAGE: credit})
    for a in COVERED:
        _agrees(a, batch, logp)


def _agrees(a: Algorithm, batch: Batch, logp_M: np.ndarray) -> None:
    logp, value, entropy = (torch.from_numpy(x).requires_grad_() for x in (logp_M, 0 * logp_M, 0 * logp_M + 1))
    PolicyLoss(a).terms(batch, TokenScores(logp, entropy, value)).loss.backward()
    assert logp.grad is not None and demand(a, batch, logp_M.astype(float)) is not None
    gradient, everything = logp.grad.double().numpy(), [np.arange(batch.episodes)]
    loss_agrees(a, batch, Passes(Needs(), episodes=everything, logp=[logp_M.astype(float)], logp_grad=[gradient]))


def test_what_credit_drops_is_expected_to_be_dropped() -> None:
    """A prompt without a judged greedy answer under remax, and an answer that was not scored behind its hint."""
    answers = [PlainEpisode(1.0, [[3]], np.full(3, -1.0)), PlainEpisode(0.0, [[1]], np.full(1, -1.0))]
    first, whole = scored_group("a", answers), scored_group("b", answers, greedy=0.4)
    hinted = replace(whole, episodes=(replace(whole.episodes[0], unhinted="too long"), *whole.episodes[1:]))
    for name, groups in (("remax", [first, whole]), ("grpo", [hinted])):
        credit = credit_step(LADDER[name], groups, max_tokens=20, ema=0.0)
        expected = expected_credit(LADDER[name], groups, max_tokens=20, ema=0.0)
        dropped = [bool(e.dropped) for g in credit.groups for e in g.episodes]
        assert expected is not None and [o.dropped for o in expected] == dropped and any(dropped)


@pytest.mark.parametrize("a", [a for a in COVERED if a.clip is not None], ids=lambda a: a.name)
def test_a_push_that_is_a_thousandth_off_is_noticed(a: Algorithm) -> None:
    def off(*given: object) -> Push:
        made = push(*given)  # type: ignore[arg-type]
        return Push(made.push_M * 1.001, made.low_M, made.high_M)

    push = policy_loss.push
    with patch.object(policy_loss, "push", off), pytest.raises(InvariantError, match="the gradient is not that of"):
        agrees_on_synthetic_batch(a)


@pytest.mark.parametrize("a", [a for a in LADDER.values() if not uncovered_credit(a)], ids=lambda a: a.name)
def test_credit_agrees_token_by_token(a: Algorithm) -> None:
    """Answers of several lengths, policies apart from the reference by much, so that a KL in the reward has a size."""
    rng = np.random.default_rng(5)
    for _ in range(4):
        groups = list[ScoredGroup]()
        for name in "ab":
            plain = list[PlainEpisode]()
            for n in (3, 1, 5, 2):
                mu, near, far, values = rng.uniform(-2.5, -1, n), *rng.normal(0, 0.5, (3, n))
                one = PlainEpisode(float(rng.integers(0, 3)), [[n]], mu, mu + near, mu + far, values, implicit=mu - far)
                plain.append(one)
            groups.append(scored_group(name, plain, greedy=1.0))
        other = expected_credit(a, groups, max_tokens=8, ema=0.25)
        credit = credit_step(a, groups, max_tokens=8, ema=0.25)
        assert other is not None
        for x, o in zip([e.advantage[0] for g in credit.groups for e in g.episodes], other, strict=True):
            np.testing.assert_allclose(x, o.credit, rtol=1e-9, atol=1e-9)
