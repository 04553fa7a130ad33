"""Published effects of learning from preferences, on answers that can all be listed, through the library's own loss.

docs/research/LOG.md (2026-11-23) has what was predicted, written before the first run, with what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import prepared
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.judgements import Pair
from posttrain.core.types import Task
from posttrain.environment.gallery.replies import POLITE, Replies, best_reply, features
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.ladder.preference_rows import CDPO, DPO, IPO, ROBUST_DPO, SIMPO
from posttrain.system.errors import ConfigError
from posttrain.toy.enumerated_policy import PrefixPolicy
from posttrain.toy.pairs import AnswerPair, TablePolicy, TiedPolicy, batch_of_pairs, pair_logp
from tests.laws.best_of import best_of_kl_bound, best_of_mean, best_of_probabilities


def gradients(
    a: PreferenceAlgorithm, policy: TablePolicy, reference: TablePolicy, pairs: Sequence[AnswerPair]
) -> Callable[[], torch.Tensor]:
    """A function that gives the gradient of the loss in the policy's logits as they are."""
    batch, _ = prepared(a, batch_of_pairs(reference, pairs))

    def now() -> torch.Tensor:
        logp_M = pair_logp(policy, pairs)
        loss = PreferenceLoss(a).terms(batch, TokenScores(logp=logp_M, entropy=None, value=None)).loss
        return torch.autograd.grad(loss, policy.logits)[0]

    return now


def move(policy: TablePolicy, by: torch.Tensor) -> None:
    with torch.no_grad():
        policy.logits -= by


# --- 1. DPO lowers both probabilities --------------------------------------------------------------------------------

CHOSEN, REJECTED = (1, 1, 0), (1, 0)


def steps_of_dpo(policy: TablePolicy, reference: TablePolicy, steps: int, lr: float) -> np.ndarray:
    """(log pi of the chosen, of the rejected) before each step and at the end, [steps + 1, 2]."""
    seen: list[list[float]] = []
    pairs = [(CHOSEN, REJECTED)]
    gradient = gradients(DPO, policy, reference, pairs)
    for _ in range(steps + 1):
        logp = pair_logp(policy, pairs).detach()
        seen.append([float(logp[: len(CHOSEN)].sum()), float(logp[len(CHOSEN) :].sum())])
        move(policy, lr * gradient())
    return np.array(seen)


@pytest.mark.parametrize(("b", "chosen", "rejected"), [(0.7, -1, -1), (0.6, 1, -1), (1 / 3, 1, 1)])
def test_dpo_lowers_both_probabilities_where_they_share_their_tokens(b: float, chosen: int, rejected: int) -> None:
    """The signs of the first step are those of 1.5 (1 - b)(2 - 3b) and 1.5 (1 - b)(1 - 2b)."""
    shares = [(1 - b) / 2, b, (1 - b) / 2]
    seen = steps_of_dpo(TiedPolicy(shares), TiedPolicy(shares), 700, 2.0)
    assert np.sign(seen[1] - seen[0]).tolist() == [chosen, rejected]
    margin = seen[:, 0] - seen[:, 1]
    assert (np.diff(margin) > 0).all(), "the margin grows at every step"
    assert (np.diff(seen[200:], axis=0) < 0).all() and (seen[-1] < seen[0]).all(), "and both fall in the end"
    if b == 0.7:
        assert (np.diff(seen, axis=0) < 0).all()


def test_with_nothing_shared_the_chosen_one_rises() -> None:
    seen = steps_of_dpo(PrefixPolicy(0), PrefixPolicy(0), 200, 2.0)
    assert (np.diff(seen[:, 0]) > 0).all() and seen[-1, 1] < seen[0, 1]


# --- 2. IPO stops, DPO does not --------------------------------------------------------------------------------------


def margins(a: PreferenceAlgorithm, pairs: Sequence[AnswerPair], steps: Sequence[int], lr: float) -> list[float]:
    """The margin of log-ratios of the answers (0,) and (1,) after so many steps of gradient descent."""
    policy, start = (PrefixPolicy(0, vocabulary=3, longest=1) for _ in range(2))
    gradient = gradients(a, policy, start, pairs)
    found: list[float] = []
    for step in range(max(steps) + 1):
        moved = (policy.logits - start.logits).detach()[0]
        if step in steps:
            found.append(float(moved[0] - moved[1]))
        move(policy, lr * gradient())
    return found


CLEAN: list[AnswerPair] = [((0,), (1,))]
NOISY: list[AnswerPair] = [((0,), (1,))] * 4 + [((1,), (0,))]


@pytest.mark.parametrize(
    ("a", "pairs", "lr", "minimum"),
    [
        (IPO, CLEAN, 0.1, 1 / (2 * 0.1)),
        (IPO, NOISY, 0.1, (1 - 0.4) / (2 * 0.1)),
        (DPO, NOISY, 200.0, math.log(4) / 0.1),
        (CDPO, CLEAN, 200.0, math.log(9) / 0.1),
    ],
    ids=["ipo", "ipo on noisy pairs", "dpo on noisy pairs", "cdpo"],
)
def test_where_a_loss_stops(a: PreferenceAlgorithm, pairs: list[AnswerPair], lr: float, minimum: float) -> None:
    assert margins(a, pairs, [400], lr) == pytest.approx([minimum], abs=1e-3)


@pytest.mark.parametrize("a", [DPO, ROBUST_DPO], ids=["dpo", "robust"])
def test_dpo_has_no_minimum_on_clean_pairs(a: PreferenceAlgorithm) -> None:
    """Ten times the steps add ln 10 / beta."""
    at = margins(a, CLEAN, [20, 200, 2000] if a is DPO else [20, 200], 100.0)
    if a is DPO:
        assert np.diff(at) == pytest.approx([math.log(10) / 0.1] * 2, rel=0.02)
    assert at[0] > 5 and min(np.diff(at)) > 20


# --- 3. best of n ----------------------------------------------------------------------------------------------------


def kl(q: np.ndarray, p: np.ndarray) -> float:
    seen = q > 0
    return float((q[seen] * np.log(q[seen] / p[seen])).sum())


@pytest.mark.parametrize(("n", "bound", "near"), [(4, 0.636294, 0.01), (16, 1.835089, 0.01), (64, 3.174508, 0.02)])
def test_the_divergence_of_best_of_n_is_within_its_bound(n: int, bound: float, near: float) -> None:
    """B10: the bound is .636294, 1.835089, 3.174508 at n = 4, 16, 64."""
    assert best_of_kl_bound(n) == pytest.approx(bound, abs=5e-7)
    rare = np.full(10_000, 1e-4)
    assert bound * (1 - near) < kl(best_of_probabilities(rare, np.arange(10_000.0), n), rare) < best_of_kl_bound(n)
    for seed in range(20):
        policy = PrefixPolicy(seed)
        p = policy.probabilities().detach().numpy()
        for score in (np.random.default_rng(seed).random(len(p)), np.array([float(x) for x in policy.lengths])):
            best = best_of_probabilities(p, score, n)
            assert best.sum() == pytest.approx(1) and 0 <= kl(best, p) < bound
            assert kl(best, p) <= -math.log(p[score == score.max()].sum()) + 1e-12


def test_best_of_n_is_what_drawing_gives() -> None:
    """Over all groups of three samples, with ties: the first of the best is taken."""
    policy = PrefixPolicy(3, longest=2)
    p, score = policy.probabilities().detach().numpy(), np.array([float(n) for n in policy.lengths])
    found = np.zeros(len(p))
    for chosen, chance in policy.groups(3):
        found[chosen[int(np.argmax(score[list(chosen)]))]] += chance
    assert best_of_probabilities(p, score, 3) == pytest.approx(found, abs=1e-12)
    assert best_of_probabilities(p, score, 1) == pytest.approx(p, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_estimate_from_more_samples_is_unbiased_and_varies_less(n: int) -> None:
    """Over all groups of four samples of a policy; the truth is exact. `worth` is not the score, as under a proxy."""
    policy = PrefixPolicy(1, longest=2)
    p, score = policy.probabilities().detach().numpy(), np.array([float(x) for x in policy.lengths])
    worth = np.random.default_rng(0).random(len(p))
    for of in (score, worth):
        truth = float(best_of_probabilities(p, score, n) @ of)
        rows = [
            (chance, best_of_mean(score[list(g)], n, of[list(g)]), of[list(g)][int(np.argmax(score[list(g)][:n]))])
            for g, chance in policy.groups(4)
        ]
        chance, estimate, first = (np.array(x) for x in zip(*rows, strict=True))
        assert chance @ estimate == pytest.approx(truth, abs=1e-12)
        assert chance @ first == pytest.approx(truth, abs=1e-12)
        assert chance @ (estimate - truth) ** 2 <= chance @ (first - truth) ** 2 + 1e-15
        if n in (2, 3):
            assert chance @ (estimate - truth) ** 2 < 0.9 * (chance @ (first - truth) ** 2)


@pytest.mark.parametrize(("n", "mean"), [(1, 0.5), (4, 0.8), (16, 0.941176)])
def test_the_best_of_uniforms(n: int, mean: float) -> None:
    """B10: the uniform maximum of 4 is .8, of 16 .941176."""
    assert best_of_mean(np.arange(1, 1000) / 1000, n) == pytest.approx(mean, abs=5e-7)


def test_a_choice_that_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="draw at least 5"):
        best_of_mean(np.ones(4), 5)
    with pytest.raises(ConfigError, match="at least 1"):
        best_of_kl_bound(0)


# --- 4. SimPO and DPO on pairs with a length bias --------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Answers drawn token by token with these shares (end, 1, 2) up to a length. The truth is the share of 1."""

    shares: tuple[float, float, float]
    longest: int

    def answer(self, rng: np.random.Generator) -> tuple[int, ...]:
        y = rng.choice(3, size=self.longest, p=self.shares)
        return tuple(int(t) for t in (y[: int(np.argmax(y == 0)) + 1] if (y == 0).any() else y))

    def pairs(self, longer: float, count: int, seed: int) -> list[AnswerPair]:
        """Pairs of different lengths and shares of 1. The preferred one is the longer one in this part of them."""
        rng, kept = np.random.default_rng(seed), list[AnswerPair]()
        while len(kept) < count:
            b, a = sorted((self.answer(rng), self.answer(rng)), key=share)
            if share(a) > share(b) and len(a) != len(b) and (len(a) > len(b)) == (len(kept) < longer * count):
                kept.append((a, b))
        return kept


def share(y: Sequence[int]) -> float:
    return y.count(1) / max(1, len(y) - y.count(0))


SHORT, LONG = World((0.2, 0.4, 0.4), 12), World((0.02, 0.49, 0.49), 200)


@dataclass(frozen=True)
class Reached:
    """A policy at a given divergence from the start, as exact numbers."""

    kl: float
    length: float
    share: float


def numbers(policy: TiedPolicy, world: World) -> Reached:
    p, q = policy.shares(), np.array(world.shares)
    tokens = (1 - (1 - p[0]) ** world.longest) / p[0]
    return Reached(float(tokens * (p * np.log(p / q)).sum()), float(tokens), float(p[1] / (p[1] + p[2])))


def at_divergence(a: PreferenceAlgorithm, world: World, pairs: Sequence[AnswerPair], nats: float = 0.5) -> Reached:
    """Where the path of gradient descent, in steps of equal length, reaches this KL an answer: of the step that crosses
    it the part that ends there."""
    policy = TiedPolicy(world.shares)
    gradient = gradients(a, policy, TiedPolicy(world.shares), pairs)
    for _ in range(400):
        step = gradient()
        step *= 0.02 / step.norm()
        move(policy, step)
        if numbers(policy, world).kl >= nats:
            for _ in range(30):
                step = step / 2
                move(policy, -step if numbers(policy, world).kl >= nats else step)
            return numbers(policy, world)
    raise AssertionError(f"{a.name} stopped at {numbers(policy, world)}")


def both(world: World, longer: float, seed: int) -> tuple[Reached, Reached]:
    """DPO and SimPO on the same pairs."""
    pairs = world.pairs(longer, 200, seed)
    dpo, simpo = (at_divergence(a, world, pairs) for a in (DPO, SIMPO))
    print(f"longer {longer} seed {seed}: dpo {dpo} simpo {simpo}")
    return dpo, simpo


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_dpo_grows_longer_than_simpo_with_a_length_bias_and_without(seed: int) -> None:
    """At equal KL SimPO's answers are shorter and have more of the true quality. Both hold without the bias as well, so
    the bias is not the reason here (docs/research/LOG.md: predicted otherwise)."""
    start = numbers(TiedPolicy(LONG.shares), LONG).length
    for longer in (0.8, 0.5):
        dpo, simpo = both(LONG, longer, seed)
        assert dpo.kl == pytest.approx(0.5, abs=1e-6) and simpo.kl == pytest.approx(0.5, abs=1e-6)
        assert dpo.length > simpo.length + 1 and simpo.share > dpo.share
        if longer == 0.8:
            assert dpo.length - start > 1.5 * (simpo.length - start) > 0
        else:
            assert dpo.length == pytest.approx(start, rel=0.04)


def test_in_short_answers_a_mean_wants_length_as_a_sum_does() -> None:
    """Not what was predicted: the end is a large part of the mean there."""
    dpo, simpo = both(SHORT, 0.8, 0)
    start = numbers(TiedPolicy(SHORT.shares), SHORT).length
    assert min(dpo.length, simpo.length) > 1.3 * start and simpo.length == pytest.approx(dpo.length, rel=0.1)


# --- 5. STaR and RFT -------------------------------------------------------------------------------------------------

EASY, HARD, SAMPLES = (0.25, 0.05), (0.001, 0.001), 8
"""Probability of the right rationale, and of a wrong one that leads to the right answer as well."""


def rft(rng: np.random.Generator, right: float, wrong: float) -> tuple[float, float]:
    """(right answer, right rationale) after imitating the distinct right samples; as before without any."""
    drawn = rng.choice(3, size=SAMPLES, p=[right, wrong, 1 - right - wrong])
    kept = [r for r in (0, 1) if (drawn == r).any()]
    return (1.0, kept.count(0) / len(kept)) if kept else (right + wrong, right)


def star(rng: np.random.Generator, right: float, wrong: float) -> tuple[float, float]:
    """The same after one sample, and where it is wrong a second one that has seen the answer."""
    drawn = int(rng.choice(3, p=[right, wrong, 1 - right - wrong]))
    if drawn == 2:
        drawn = int(rng.random() >= right / (right + wrong))
    return 1.0, float(drawn == 0)


def outcome(learn: Callable[[np.random.Generator, float, float], tuple[float, float]]) -> np.ndarray:
    """[easy and hard, answer and rationale]: means over 4,000 prompts of each."""
    rng = np.random.default_rng(0)
    return np.array([np.mean([learn(rng, *of) for _ in range(4000)], axis=0) for of in (EASY, HARD)])


def test_star_reaches_hard_prompts_and_half_of_them_for_the_wrong_reason() -> None:
    kept, hinted = outcome(rft), outcome(star)
    print(f"rft {kept.tolist()} star {hinted.tolist()}")
    assert kept[:, 0].mean() == pytest.approx(0.489, abs=0.01)
    assert hinted[:, 0].tolist() == [1.0, 1.0]
    assert hinted[1, 1] == pytest.approx(0.5, abs=0.02) and kept[1, 1] == pytest.approx(0.01, abs=0.005)
    assert hinted[0, 1] == pytest.approx(EASY[0] / sum(EASY), abs=0.02)


# --- 6. best of n by a proxy that learned from judgements ------------------------------------------------------------

NS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def described(task: Task, text: str) -> list[float]:
    """What the proxy sees: right or not, polite words, characters over those of the best reply."""
    found = features(task, text)
    polite = sum(word in POLITE for word in text.split())
    return [found["correctness"], float(polite), float(len(text) - len(best_reply(task)))]


def fitted(x_PK: np.ndarray) -> np.ndarray:
    """Bradley-Terry weights from differences chosen - rejected, with a little ridge, by Newton's method."""
    w = np.zeros(x_PK.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(x_PK @ w))
        hessian = (x_PK * (p * (1 - p))[:, None]).T @ x_PK + 0.1 * np.eye(len(w))
        w = w + np.linalg.solve(hessian, x_PK.T @ p - 0.1 * w)
    return w


def freely_written(task: Task, rng: np.random.Generator) -> str:
    numbers = sorted(task.info["numbers"])
    said = numbers[-1] if rng.random() < 0.5 else numbers[0]
    words = [POLITE[int(i)] for i in rng.integers(0, len(POLITE), min(8, int(rng.geometric(0.5)) - 1))]
    return " ".join([*words[:1], str(said), *words[1:]])


def test_the_best_of_n_by_a_proxy_gets_worse_after_its_peak() -> None:
    env, rng = Replies(heldout_count=20), np.random.default_rng(0)
    judged = env.judgements
    drawn = [judged.draw(env.train.task(i), "pair", rng) for i in range(1000)]
    pairs = [p for p in drawn if isinstance(p, Pair)]
    weights = fitted(np.array([np.subtract(described(p.task, p.chosen), described(p.task, p.rejected)) for p in pairs]))
    curves: list[list[tuple[float, float, float]]] = []
    for task in env.heldout:
        texts = [freely_written(task, rng) for _ in range(512)]
        proxy = np.array([described(task, t) for t in texts]) @ weights
        gold = np.array([env.taste.utility(task, t) for t in texts])
        curves.append([(best_of_mean(proxy, n), best_of_mean(proxy, n, gold), best_of_mean(gold, n)) for n in NS])
    proxy, gold, by_gold = np.array(curves).mean(0).T
    d = np.sqrt([best_of_kl_bound(n) for n in NS])[:7]
    alpha, minus_beta = np.linalg.lstsq(np.stack([d, d**2], 1), gold[:7] - gold[0], rcond=None)[0]
    print(f"weights {weights.round(2)} proxy {proxy.round(2)} gold {gold.round(3)} by gold {by_gold.round(3)}")
    print(f"alpha {alpha:.3f} beta {-minus_beta:.3f}")
    assert weights[1] > 0 and (np.diff(proxy) > 0).all() and (np.diff(by_gold) > 0).all()
    assert 2 <= NS[int(gold.argmax())] <= 16 and gold[-1] < gold.max() - 0.1
    assert alpha > 0 > minus_beta
