"""The second computation of credit and loss agrees with the first, and notices where the first is off."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState, of_step
from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss import policy_loss
from posttrain.algorithm.loss.losses import PolicyLoss
from posttrain.algorithm.loss.push_factor import Push
from posttrain.checks.learning import loss_checks as synthetic_loss
from posttrain.checks.learning.credit_by_definition import expected_credit, uncovered_credit
from posttrain.checks.learning.gradient_by_definition import computed_once, demand, uncovered
from posttrain.checks.learning.loss_checks import LossCheck, agrees_on_synthetic_batch, loss_agrees
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, START, WEIGHT
from posttrain.core.types import Episode, Group, Stop
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.algorithm import patch as patched
from posttrain.ladder.pieces.baseline import Baseline, EnergyMean, StepMean, Value
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.token_choice import EntropyBonus
from posttrain.ladder.policy_rows import LADDER
from posttrain.role.events import LearnedEvent, PackedEvent
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


def test_a_step_is_held_to_the_coefficients_that_it_learned_with() -> None:
    """A KL coefficient that adapts, and a warm-up of values, in which nothing pulls."""
    batch, logp_M, value_M = synthetic_loss._synthetic()
    kl, state = KL(coef=0.1, target=0.05), AdaptiveState(pull=0.3)
    warm = patched(LADDER["ppo"], "warm", "-", baseline=Value(warmup=2), pull=kl)
    for a, index in ((patched(LADDER["grpo"], "adapted", "-", pull=kl), 4), (warm, 2), (warm, 4)):
        logp, value = (torch.from_numpy(x.copy()).requires_grad_() for x in (logp_M, value_M))
        PolicyLoss(of_step(a, state, index)[0]).terms(batch, TokenScores(logp, None, value)).loss.backward()
        assert logp.grad is not None
        learned = Passes(Needs(), episodes=[np.arange(batch.episodes)], logp=[logp_M], logp_grad=[logp.grad.numpy()])
        roles = SimpleNamespace(stage=SimpleNamespace(algorithm=a), adaptive=state)
        event = LearnedEvent(PackedEvent(index, batch, True, 0), learned, 0.1)
        report = LossCheck().on_event(roles, event)  # type: ignore[arg-type]
        assert report is not None and "canary/loss_gap" in report.gauges
        other = SimpleNamespace(stage=roles.stage, adaptive=AdaptiveState(pull=0.1))
        # In a warm-up no coefficient counts.
        with nullcontext() if index == 2 else pytest.raises(InvariantError, match="the gradient is not that of"):
            LossCheck().on_event(other, event)  # type: ignore[arg-type]


@pytest.mark.parametrize("sign", [-1.0, 1.0, np.nan])
def test_an_entropy_bonus_of_the_wrong_sign_is_noticed(sign: float) -> None:
    batch, _, _ = synthetic_loss._synthetic()
    for parent in ("grpo", "top_entropy"):
        a = patched(LADDER[parent], "bonus", "-", entropy=EntropyBonus(coef=0.1))
        passes = Passes(Needs(), episodes=[np.arange(batch.episodes)], entropy_grad=[sign * 0.1 * batch[WEIGHT]])
        with nullcontext() if sign == -1 else pytest.raises(InvariantError, match="the wrong thing of the entropy"):
            synthetic_loss.entropy_and_value_agree(a, batch, passes)
    values = Passes(Needs(), episodes=passes.episodes, value=[(np.zeros(batch.spoken), np.full(batch.spoken, np.nan))])
    with pytest.raises(InvariantError, match="the wrong thing of the value"):
        synthetic_loss.entropy_and_value_agree(LADDER["ppo"], batch, values)


def test_a_step_that_nobody_judged_has_no_credit() -> None:
    group = replace(scored_group("a", [PlainEpisode(1.0, [[1]], np.full(1, -1.0))]), episodes=())
    assert expected_credit(LADDER["grpo"], [group], max_tokens=20, ema=0.0) == []
    task = group.group.task
    empty = Episode(task, 0, 0, (), Stop.SAID, (Judged("v", 1.0, Verdict.value(1.0)),))
    said_nothing = ScoredGroup(Group(task, 0, (empty,)), (Scored(empty),))
    [made] = credit_step(LADDER["reinforce"], [said_nothing], max_tokens=20, ema=0.0).groups[0].episodes
    assert made.advantage == () and made.dropped


@pytest.mark.parametrize(
    "baseline", [EnergyMean(), StepMean(), ImplicitOthers(beta=0.0)], ids=lambda b: type(b).__name__
)
def test_a_token_pays_its_kl_once(baseline: Baseline) -> None:
    """Two answers of one reward; the tokens of the first have a KL of 1 each."""
    a = patched(LADDER["reinforce"], "x", "-", baseline=baseline, pull=KL(coef=1.0, estimator="k1", placement="token"))
    mu, one = np.full(2, -1.0), np.ones(2)
    plain = [PlainEpisode(1.0, [[2]], mu, reference=mu - x, energy=one, implicit=mu) for x in (1.0, 0.0)]
    [group] = credit_step(a, [scored_group("a", plain)], max_tokens=20, ema=0.0).groups
    assert [e.advantage[0].tolist() for e in group.episodes] == [[-1.0, -1.0], [0.0, 0.0]]


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
