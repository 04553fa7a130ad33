"""Statistical rejection sampling (B07's RSO; 2309.06657, algorithm 1): what is kept is what the optimal policy says."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.stages.preference.online_checks import kept_again
from posttrain.stages.preference.sampled_pairs import rejection_sampled

REF = np.array([0.5, 0.3, 0.2])
REWARD = np.array([0.0, 0.5, 1.0])
TEMPERATURE = 0.5
FAR = 27.6
"""Chi square with two degrees of freedom: larger with probability 1e-6."""


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_what_is_kept_is_distributed_as_the_optimal_policy() -> None:
    """Of three answers, 64 drawn from ref and 8 kept: ref * exp(R / T) / Z. Fewer than 8 of the first round, or a best
    answer that was not drawn, would change that, and have probabilities below 1e-4 here."""
    rng = np.random.default_rng(0)
    counts = np.zeros(3)
    for _ in range(1500):
        said = rng.choice(3, 64, p=REF)
        for i in rejection_sampled(REWARD[said], 8, TEMPERATURE, rng):
            counts[said[i]] += 1
    optimal = REF * np.exp(REWARD / TEMPERATURE)
    assert counts.sum() == 1500 * 8
    assert chi_square(counts, counts.sum() * optimal / optimal.sum()) < FAR
    assert chi_square(counts, counts.sum() * REF) > 1000


def kept_exactly(left: tuple[int, ...], keep: int) -> dict[frozenset[int], float]:
    """The probability of each set that is kept of `left`, by going through who passes in each round."""
    if keep == 0 or not left:
        return {frozenset(): 1.0}
    most = max(REWARD[i] for i in left)
    chance = {i: math.exp((REWARD[i] - most) / TEMPERATURE) for i in left}
    out: defaultdict[frozenset[int], float] = defaultdict(float)
    for passes in itertools.product((False, True), repeat=len(left)):
        p = math.prod(chance[i] if yes else 1 - chance[i] for i, yes in zip(left, passes, strict=True))
        if p:
            passed = [i for i, yes in zip(left, passes, strict=True) if yes][:keep]
            rest = tuple(i for i in left if i not in passed)
            for others, q in kept_exactly(rest, keep - len(passed)).items():
                out[frozenset(passed) | others] += p * q
    return out


def test_each_round_has_the_largest_reward_of_those_left() -> None:
    """Two of three candidates, by all ways in which they can pass: the rounds after the first count, too."""
    rng, runs = np.random.default_rng(1), 20_000
    found = Counter(frozenset(rejection_sampled(REWARD, 2, TEMPERATURE, rng)) for _ in range(runs))
    exact = kept_exactly((0, 1, 2), 2)
    assert math.fsum(exact.values()) == pytest.approx(1) and len(exact) == 3
    assert chi_square(np.array([found[s] for s in exact]), runs * np.array(list(exact.values()))) < FAR


def test_a_cold_one_keeps_the_best_and_a_hot_one_keeps_all_alike() -> None:
    rng = np.random.default_rng(2)
    rewards = rng.permutation(16).astype(np.float64)
    assert rejection_sampled(rewards, 4, 1e-3, rng) == [int(np.flatnonzero(rewards == r)[0]) for r in (15, 14, 13, 12)]
    assert rejection_sampled(rewards, 4, 1e12, rng) == [0, 1, 2, 3]
    assert sorted(rejection_sampled(rewards[:3], 8, 0.5, rng)) == [0, 1, 2]


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=12),
    st.integers(1, 12),
    st.floats(0.01, 100),
    st.integers(0, 2**32 - 1),
)
def test_the_check_of_every_run_keeps_the_same(rewards: list[float], keep: int, temperature: float, seed: int) -> None:
    """Two programs of one definition, on the same uniforms: as many as there are, none twice."""
    reward_C = np.array(rewards)
    one, other = np.random.default_rng(seed), np.random.default_rng(seed)
    kept = rejection_sampled(reward_C, keep, temperature, one)
    assert kept == kept_again(reward_C, keep, temperature, other).tolist()
    assert len(set(kept)) == len(kept) == min(keep, len(rewards))
    assert one.random() == other.random(), "and what is drawn next is the same, too"
