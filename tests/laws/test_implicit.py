"""Laws of PRIME: what implicit process rewards do to credit, and how the model that makes them learns outcomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_world import L_MAX
from torch import Tensor

from posttrain.algorithm.credit.process_rewards import OutcomeLoss
from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.checks.learning.credit_by_definition import expected_credit
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.scored import Scored
from posttrain.core.streams import OUTCOME, REFERENCE
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import Others
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.policy_rows import PRIME, PRIME_RL
from posttrain.role.learning.implicit_reward_model import outcome_batch, outcomes
from posttrain.system.errors import DataError, InvariantError
from posttrain.toy.episodes import PlainEpisode, scored_group

RLOO = patch(PRIME, "prime_without_process", "-", baseline=Others())
laws = settings(max_examples=60)
answer = st.tuples(st.integers(0, 8).map(lambda i: i / 8), st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=5))
siblings = st.lists(answer, min_size=2, max_size=6)
Answers = list[tuple[float, list[float]]]


def group(rows: Answers) -> Any:
    """Answers of (outcome, log phi/ref of each token)."""
    return scored_group(
        "t",
        [
            PlainEpisode(
                r,
                [[len(x)]],
                np.full(len(x), -1.0, np.float32),
                np.full(len(x), -1.0, np.float32),
                reference=np.full(len(x), -4.0, np.float32),
                implicit=(np.array(x) - 4.0).astype(np.float32),
            )
            for r, x in rows
        ],
    )


def credit(a: Algorithm, rows: Answers) -> list[np.ndarray]:
    step = credit_step(a, [group(rows)], max_tokens=L_MAX, ema=0.0)
    return [e.advantage[0] for e in step.groups[0].episodes]


def with_beta(beta: float) -> Algorithm:
    return PRIME if beta == 0.05 else patch(PRIME, "prime_beta", "-", baseline=ImplicitOthers(beta=beta))


def test_the_credit_of_prime_in_numbers() -> None:
    """Outcomes 1, 0; process rewards [.2, 0] and [-.1]."""
    found = credit(with_beta(0.1), [(1.0, [2.0, 0.0]), (0.0, [-1.0])])
    assert found[0] == pytest.approx([1.4, 1.1], abs=1e-6) and found[1] == pytest.approx([-1.2], abs=1e-6)


@laws
@given(siblings)
def test_without_beta_it_is_rloo_to_the_digit(rows: Answers) -> None:
    assert all(np.array_equal(x, y) for x, y in zip(credit(with_beta(0.0), rows), credit(RLOO, rows), strict=True))


@laws
@given(siblings, st.floats(0.01, 5))
def test_a_model_that_has_not_moved_adds_nothing(rows: Answers, beta: float) -> None:
    """phi = ref, as before the first step: RLOO to the digit."""
    still = [(r, [0.0] * len(x)) for r, x in rows]
    pairs = zip(credit(with_beta(beta), still), credit(RLOO, still), strict=True)
    assert all(np.array_equal(x, y) for x, y in pairs)


@laws
@given(siblings, st.floats(0.01, 5))
def test_credit_is_the_textbooks_sum(rows: Answers, beta: float) -> None:
    """Eq. 5 token by token; and the check that is computed a second way agrees."""
    found, second = credit(with_beta(beta), rows), expected_credit(with_beta(beta), [group(rows)], max_tokens=9, ema=0)
    assert second is not None
    for i, (outcome, x) in enumerate(rows):
        others = [row for j, row in enumerate(rows) if j != i]
        whole = outcome - sum(r for r, _ in others) / len(others)
        level = sum(float(np.mean(x)) for _, x in others) / len(others)
        want = [whole + beta * sum(z - level for z in x[t:]) for t in range(len(x))]
        spread = len({r for r, _ in rows}) > 1
        assert found[i] == pytest.approx(want if spread else [0.0] * len(x), abs=1e-4 * (1 + beta))
        assert found[i] == pytest.approx(second[i].credit, abs=1e-9)


@laws
@given(siblings, st.floats(-1, 1))
def test_a_constant_in_every_process_reward_changes_nothing(rows: Answers, more: float) -> None:
    moved = [(r, [z + more for z in x]) for r, x in rows]
    for x, y in zip(credit(PRIME, rows), credit(PRIME, moved), strict=True):
        assert x == pytest.approx(y, abs=1e-5)


@laws
@given(siblings)
def test_siblings_may_stand_in_any_order(rows: Answers) -> None:
    turned = credit(PRIME, rows[::-1])[::-1]
    assert all(x == pytest.approx(y, abs=1e-12) for x, y in zip(credit(PRIME, rows), turned, strict=True))


def test_answers_of_equal_outcome_have_no_credit() -> None:
    assert not any(np.any(x) for x in credit(PRIME, [(1.0, [2.0, -1.0]), (1.0, [0.5])]))


# --- how the model learns --------------------------------------------------------------------------------------------


def learned(rows: Answers) -> tuple[list[Scored], Batch]:
    answers = list(group(rows).episodes)
    return answers, outcome_batch(answers, outcomes(answers))


def gradient(beta: float, batch: Batch, logp_M: Tensor) -> tuple[float, Tensor]:
    loss = OutcomeLoss(beta).terms(batch, TokenScores(logp_M, None, None)).loss
    (grad,) = torch.autograd.grad(loss, logp_M)
    return float(loss.detach()), grad


@laws
@given(siblings, st.floats(0, 5), st.integers(0, 99))
def test_the_loss_is_the_textbooks_cross_entropy(rows: Answers, beta: float, seed: int) -> None:
    """-y log sigmoid(h) - (1 - y) log sigmoid(-h), h = beta * sum_t log phi/ref, mean over answers; in float64."""
    _, batch = learned(rows)
    phi = torch.tensor(np.random.default_rng(seed).normal(-4, 1, batch.spoken), requires_grad=True)
    loss, grad = gradient(beta, batch, phi)
    ref = torch.tensor(batch[REFERENCE].astype(np.float64))
    total = torch.zeros((), dtype=torch.float64)
    for e, (outcome, _) in enumerate(rows):
        own = torch.as_tensor(batch.sequence_M == e)
        h = beta * (phi[own] - ref[own]).sum()
        # -log sigmoid(h) = log(1 + e^-h); by sigmoid(h).log() the digits of a sure answer are lost.
        total = total + outcome * torch.log1p((-h).exp()) + (1 - outcome) * torch.log1p(h.exp())
    (want,) = torch.autograd.grad(total / len(rows), phi)
    assert loss == pytest.approx(float(total.detach()) / len(rows), rel=1e-9)
    assert torch.allclose(grad, want, rtol=1e-9, atol=1e-12)


@laws
@given(siblings, st.integers(0, 99))
def test_micro_batches_add_up(rows: Answers, seed: int) -> None:
    _, batch = learned(rows)
    phi = torch.tensor(np.random.default_rng(seed).normal(-4, 1, batch.spoken), requires_grad=True)
    loss, grad = gradient(0.5, batch, phi)
    micros = batch.cut([np.array([e]) for e in range(batch.episodes)])
    each = [gradient(0.5, micro, phi[torch.as_tensor(batch.sequence_M == e)]) for e, micro in enumerate(micros)]
    assert sum(x for x, _ in each) == pytest.approx(loss, rel=1e-9)
    assert torch.allclose(torch.cat([g for _, g in each]), grad, atol=1e-12)


def test_every_answer_is_learned_once_with_its_own_outcome() -> None:
    answers, batch = learned([(1.0, [0.1, 0.2]), (0.0, [0.3]), (0.25, [0.0, 0.0, 0.0])])
    assert batch.episodes == len(answers) == 3
    assert batch[OUTCOME].tolist() == [1.0, 1.0, 0.0, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("outcome", [-1.0, 2.0])
def test_an_outcome_that_is_no_chance_is_refused(outcome: float) -> None:
    with pytest.raises(DataError, match=r"outcomes lie in 0\.\.1. Set the weights"):
        learned([(outcome, [0.1]), (0.0, [0.1])])


def test_a_stage_without_the_model_says_so() -> None:
    from posttrain.role.score import score

    found = group([(1.0, [0.1]), (0.0, [0.1])])

    class Alike:
        def score(self, packed: Any) -> np.ndarray:
            return np.zeros(packed.spoken, np.float32)

    model: Any = Alike()
    with pytest.raises(InvariantError, match="reads an implicit process reward model, and the stage has none"):
        score([found.group], PRIME, model, model, optimizer_steps=1)
    (both,) = score([found.group], PRIME, model, model, optimizer_steps=1, implicit=model)
    assert {s.name for s in both.episodes[0].streams} == {"reference", "implicit"}


def test_it_is_not_the_loss_of_prime_rl() -> None:
    assert "implicit" in PRIME.reads and "implicit" not in PRIME_RL.reads
