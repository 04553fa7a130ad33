"""The small worlds of `posttrain.toy`: their examples are true, and what is drawn is drawn from what is listed."""

from __future__ import annotations

import doctest
from collections import Counter

import numpy as np
import pytest
import torch

from posttrain.core.types import Stop
from posttrain.ladder.policy_rows import DR_GRPO
from posttrain.toy import answers, enumerated_policy, episodes, policies
from posttrain.toy.answers import Answers, ask, groups_of, logp_of, said_logp, siblings
from posttrain.toy.enumerated_policy import PrefixPolicy
from posttrain.toy.policies import NetworkPolicy, TabularPolicy, ToyPolicy
from posttrain.toy.training import ToyTrainer


@pytest.mark.parametrize(
    "module", [answers, episodes, policies, enumerated_policy], ids=lambda m: m.__name__.split(".")[-1]
)
def test_examples_are_true(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def test_a_drawn_group_is_of_listed_responses() -> None:
    """A response is drawn as often as it is probable, with its own log-probs, and ends as it says."""
    policy = PrefixPolicy(0, vocabulary=2, longest=3)
    drawn = policy.draw("a", [1.0] * len(policy.all), 4_000, np.random.default_rng(0)).group.episodes
    said = Counter(tuple(e.segments[0].ids[e.segments[0].mask].tolist()) for e in drawn)
    found = np.array([said[y] for y in policy.all]) / len(drawn)
    assert found == pytest.approx(policy.probabilities().detach().numpy(), abs=0.03)
    for e in drawn[:50]:
        segment = e.segments[0]
        y = tuple(segment.ids[segment.mask].tolist())
        assert segment.logp[segment.mask] == pytest.approx(policy.token_logp(y).detach().numpy(), abs=1e-6)
        assert (e.stop is Stop.SAID) == (y[-1] == 0) and e.spoken == len(y)


def test_a_mean_over_every_group_is_the_mean_over_pairs() -> None:
    """E over groups of two of the better reward, by the list of groups and by the matrix of pairs."""
    policy = PrefixPolicy(3)
    reward = np.random.default_rng(0).random(len(policy.all))
    p = policy.probabilities().detach().numpy()
    listed = sum(mass * max(reward[list(chosen)]) for chosen, mass in policy.groups(2))
    assert listed == pytest.approx(p @ np.maximum.outer(reward, reward) @ p, abs=1e-12)


def test_more_minibatches_than_groups_are_as_many_as_groups() -> None:
    policy = TabularPolicy(torch.zeros(2, 1, 3))
    trainer = ToyTrainer(DR_GRPO, policy, torch.optim.SGD(policy.parameters(), 0.1), g=2, seed=0, minibatches=4)
    trainer.step(
        ask(policy, siblings(torch.arange(2), 2), torch.Generator().manual_seed(0)), np.array([1.0, -1, 1, -1])
    )
    assert trainer.updates == 2


def test_the_exact_gradient_is_the_slope() -> None:
    """The gradient of E[f] is the difference quotient of E[f] in one logit."""
    policy, f = PrefixPolicy(0), torch.arange(31, dtype=torch.float64)
    exact, h = policy.exact(f), 1e-6
    for state, token in ((0, 1), (7, 2), (14, 0)):
        ends: list[float] = []
        for sign in (1, -1):
            with torch.no_grad():
                policy.logits[state, token] += sign * h
                ends.append(float((policy.probabilities() * f).sum()))
                policy.logits[state, token] -= sign * h
        assert exact[state, token].item() == pytest.approx((ends[0] - ends[1]) / (2 * h), abs=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        TabularPolicy(torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))),
        NetworkPolicy(torch.eye(2), 2, 3, 8, 0),
    ],
)
def test_answers_are_drawn_from_what_the_policy_says(policy: ToyPolicy) -> None:
    """All nine answers to a prompt, by frequency and by log-prob; and groups hold them with the rewards that were
    given."""
    prompt_E = torch.zeros(20_000, dtype=torch.int64)
    drawn = ask(policy, prompt_E, torch.Generator().manual_seed(1))
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    logp_9 = said_logp(policy, Answers(torch.zeros(9, dtype=torch.int64), every, torch.zeros(0)))[0].sum(1).detach()
    found = torch.bincount(drawn.tokens_ET[:, 0] * 3 + drawn.tokens_ET[:, 1], minlength=9) / len(prompt_E)
    assert found.numpy() == pytest.approx(logp_9.exp().numpy(), abs=0.015)
    assert torch.allclose(drawn.mu_ET, logp_of(policy, drawn), rtol=0, atol=1e-12)
    (group,) = groups_of(
        drawn.subset(torch.arange(4)), np.array([[[1, 0], [0, 0], [0, 2], [1, 2]]]), start_ET=drawn.mu_ET
    )
    assert group.group.rewards.tolist() == [1, 0, 2, 3]
    assert [len(e.episode.verdicts) for e in group.episodes] == [2] * 4
