"""Law 1: the gradient of the library's loss is that of each textbook objective, in float64, off policy.

The textbook side is written out episode by episode from the papers and knows nothing of credit, push or weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from law_toys import SAMPLING, Answer, batch_of, credits, gradient, scored_group
from torch import Tensor

from posttrain.algorithm.credit import credit_step
from posttrain.algorithm.objective import objective, supervised
from posttrain.algorithm.streams import streams
from posttrain.core.algorithm import Algorithm, patch
from posttrain.core.errors import InvariantError
from posttrain.core.ladder import DAPO, DR_GRPO, EMA, GRPO, LADDER, PPO, REINFORCE, RLOO
from posttrain.core.pieces.baseline import GroupMean, Value
from posttrain.core.pieces.correction import Mask, Truncate
from posttrain.core.pieces.pull import KL, SequenceL2
from posttrain.core.pieces.token import EntropyBonus
from posttrain.core.pieces.trust import Clip
from posttrain.core.ports import TokenScores

L_MAX = SAMPLING.max_tokens


@dataclass
class Ep:
    """One judged episode as a textbook sees it; tensors are per spoken token."""

    group: int
    R: float
    mu: Tensor
    old: Tensor
    ref: Tensor
    v_old: Tensor
    lp: Tensor
    H: Tensor
    v: Tensor

    def __len__(self) -> int:
        return len(self.lp)


Book = Callable[[Sequence[Ep]], Tensor]


class World:
    """Three groups of ragged multi-segment episodes, one of them not judged; sampler, start, reference and policy all differ."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.answers: list[list[Answer]] = []
        shapes = [[[2, 1], [3]], [[1]], [[4]], [[17]]], [[[5]], [[1], [2]], [[3, 2]], [[2]]], [[[6]], [[1, 1], [1]], [[2]]]
        for shape in shapes:
            group: list[Answer] = []
            for turns in shape:
                n = sum(map(sum, turns))
                mu = -rng.gamma(2.0, 0.5, n)
                near = [np.minimum(mu + rng.normal(size=n) * s, -0.01).astype(np.float32) for s in (0.2, 0.4)]
                group.append(
                    Answer(
                        float(rng.integers(0, 2) + rng.random() / 4),
                        turns,
                        mu.astype(np.float32),
                        *near,
                        rng.normal(size=n).astype(np.float32),
                    )
                )
            self.answers.append(group)
        self.answers[1][2].reward = None
        self.groups = [scored_group(str(i), g) for i, g in enumerate(self.answers)]
        judged = [(i, a) for i, g in enumerate(self.answers) for a in g if a.reward is not None]
        start = np.concatenate([a.start for _, a in judged if a.start is not None]).astype(np.float64)
        self.lp = torch.tensor(start + rng.normal(size=len(start)) * 0.3, requires_grad=True)
        self.H = torch.tensor(rng.random(len(start)), requires_grad=True)
        self.v = torch.tensor(rng.normal(size=len(start)), requires_grad=True)
        self.eps: list[Ep] = []
        at = 0
        for i, a in judged:
            here = slice(at, at + a.spoken)
            given = [torch.tensor(np.asarray(x, np.float64)) for x in (a.mu, a.start, a.reference, a.values)]
            self.eps.append(Ep(i, float(a.reward or 0.0), *given, self.lp[here], self.H[here], self.v[here]))
            at += a.spoken

    def library(self, a: Algorithm) -> tuple[Tensor, ...]:
        batch = batch_of(a, credit_step(a, self.groups, max_tokens=L_MAX, ema=0.0))
        return gradient(a, streams(batch, dtype=torch.float64), self.lp, self.H, self.v)[1:]

    def textbook(self, book: Book) -> tuple[Tensor, ...]:
        inputs = (self.lp, self.H, self.v)
        grads = torch.autograd.grad(book(self.eps), inputs, allow_unused=True)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))


# --- the textbook --------------------------------------------------------------------------------------------------


def by_group(eps: Sequence[Ep], of: Callable[[Sequence[float], int], float], rewards: Sequence[float] | None = None) -> list[float]:
    """of(rewards of the group, place in it) for every episode."""
    r = [e.R for e in eps] if rewards is None else rewards
    out: list[float] = []
    for i, e in enumerate(eps):
        mates = [j for j, f in enumerate(eps) if f.group == e.group]
        out.append(of([r[j] for j in mates], mates.index(i)))
    return out


def standard(r: Sequence[float], i: int) -> float:
    return (r[i] - mean(r)) / stdev(r)


def centred(r: Sequence[float], i: int) -> float:
    return r[i] - mean(r)


def others(r: Sequence[float], i: int) -> float:
    return r[i] - mean([x for j, x in enumerate(r) if j != i])


def ppo_min(r: Tensor, a: float | Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.minimum(r * a, torch.clamp(r, 1 - low, 1 + high) * a)


def k3(e: Ep) -> Tensor:
    return (e.ref - e.lp).exp() - (e.ref - e.lp) - 1


def reinforce(eps: Sequence[Ep]) -> Tensor:
    return -torch.stack([e.R * e.lp.sum() for e in eps]).mean()


def reinforce_ema(eps: Sequence[Ep]) -> Tensor:
    b, terms = 0.0, []
    for e in eps:
        terms.append((e.R - b) * e.lp.sum())
        b = 0.95 * b + 0.05 * e.R
    return -torch.stack(terms).mean()


def rloo(eps: Sequence[Ep]) -> Tensor:
    with_kl = [e.R - 0.03 * float((e.mu - e.ref).sum()) for e in eps]
    return -torch.stack([x * e.lp.sum() for x, e in zip(by_group(eps, others, with_kl), eps, strict=True)]).mean()


def gae_by_sums(e: Ep, lam: float) -> Tensor:
    """A_t = sum_l lam^l delta_{t+l}, the defining sum, gamma 1."""
    v = [*e.v_old.tolist(), 0.0]
    delta = [(e.R if t == len(e) - 1 else 0.0) + v[t + 1] - v[t] for t in range(len(e))]
    return torch.tensor([sum(lam ** (k - t) * delta[k] for k in range(t, len(e))) for t in range(len(e))], dtype=torch.float64)


def ppo(eps: Sequence[Ep], whiten: bool = True, clip_values: bool = True) -> Tensor:
    raw = [gae_by_sums(e, 0.95) for e in eps]
    flat = torch.cat(raw)
    adv = [(x - flat.mean()) / flat.std() for x in raw] if whiten else raw
    policy = torch.cat([-ppo_min((e.lp - e.old).exp(), x) for e, x in zip(eps, adv, strict=True)]).mean()
    losses: list[Tensor] = []
    for e, x in zip(eps, raw, strict=True):
        ret = x + e.v_old
        near = torch.clamp(e.v, e.v_old - 0.2, e.v_old + 0.2) if clip_values else e.v
        losses.append(0.5 * torch.maximum((e.v - ret) ** 2, (near - ret) ** 2))
    return policy + 0.5 * torch.cat(losses).mean()


def grpo(eps: Sequence[Ep], kl: Callable[[Ep], Tensor] = k3) -> Tensor:
    terms = [(ppo_min((e.lp - e.old).exp(), x) - 0.04 * kl(e)).mean() for e, x in zip(eps, by_group(eps, standard), strict=True)]
    return -torch.stack(terms).mean()


def dapo(eps: Sequence[Ep]) -> Tensor:
    cache = 0.2 * L_MAX
    r = [2 * e.R - 1 + (0 if len(e) <= L_MAX - cache else (L_MAX - cache - len(e)) / cache) for e in eps]
    adv = by_group(eps, standard, r)
    prompts = []
    for g in sorted({e.group for e in eps}):
        mates = [(e, x) for e, x in zip(eps, adv, strict=True) if e.group == g]
        tokens = torch.cat([ppo_min((e.lp - e.old).exp(), x, 0.2, 0.28) for e, x in mates])
        prompts.append(tokens.sum() / len(tokens))
    return -torch.stack(prompts).mean()


def dr_grpo(eps: Sequence[Ep]) -> Tensor:
    return -torch.stack([ppo_min((e.lp - e.old).exp(), x).sum() / L_MAX for e, x in zip(eps, by_group(eps, centred), strict=True)]).mean()


def gspo(eps: Sequence[Ep]) -> Tensor:
    return -torch.stack(
        [ppo_min((e.lp - e.old).mean().exp(), x, 0.03, 0.04) for e, x in zip(eps, by_group(eps, standard), strict=True)]
    ).mean()


def whole_answer(eps: Sequence[Ep]) -> Tensor:
    """REINFORCE with the likelihood ratio of the whole answer against the sampler, clipped."""
    return -torch.stack([ppo_min((e.lp - e.mu).sum().exp(), e.R, 0.5, 0.5) for e in eps]).mean()


def kimi(eps: Sequence[Ep]) -> Tensor:
    adv = by_group(eps, centred)
    return -torch.stack([x * e.lp.sum() - 0.1 / 2 * (e.lp - e.old).sum() ** 2 for e, x in zip(eps, adv, strict=True)]).mean()


def grpo_rk3(eps: Sequence[Ep]) -> Tensor:
    return grpo(eps, kl=lambda e: (e.lp - e.old).exp() * k3(e))


def grpo_k2(eps: Sequence[Ep]) -> Tensor:
    return grpo(eps, kl=lambda e: 0.5 * (e.lp - e.ref) ** 2)


def rloo_k3_both(eps: Sequence[Ep]) -> Tensor:
    with_kl = [e.R - 0.03 * float(((e.ref - e.mu).exp() - 1 - (e.ref - e.mu)).sum()) for e in eps]
    adv = by_group(eps, others, with_kl)
    return -torch.stack([x * e.lp.sum() - 0.03 * k3(e).sum() for e, x in zip(eps, adv, strict=True)]).mean()


def entropy(eps: Sequence[Ep]) -> Tensor:
    return dr_grpo(eps) - 0.01 * torch.stack([e.H.sum() / L_MAX for e in eps]).mean()


def corrected(weight: Callable[[Tensor], Tensor]) -> Book:
    def book(eps: Sequence[Ep]) -> Tensor:
        adv = by_group(eps, centred)
        return -torch.stack(
            [(weight(e.old - e.mu).detach() * ppo_min((e.lp - e.old).exp(), x)).sum() / L_MAX for e, x in zip(eps, adv, strict=True)]
        ).mean()

    return book


def batch_scaled(eps: Sequence[Ep]) -> Tensor:
    everyone = stdev([e.R for e in eps])
    return -torch.cat([x / everyone * e.lp for x, e in zip(by_group(eps, centred), eps, strict=True)]).mean()


def decoupled(eps: Sequence[Ep]) -> Tensor:
    """REINFORCE with an uncapped sampler correction: -(old/mu) R log pi (A26 without its clip)."""
    return -torch.stack([((e.old - e.mu).exp() * e.R * e.lp).sum() for e in eps]).mean()


CENTRED = patch(DR_GRPO, "no_clip", "-", clip=None, ratio="one")
CASES: list[tuple[Algorithm, Book]] = [
    (REINFORCE, reinforce),
    (EMA, reinforce_ema),
    (RLOO, rloo),
    (PPO, ppo),
    (GRPO, grpo),
    (DAPO, dapo),
    (DR_GRPO, dr_grpo),
    (patch(PPO, "ppo_plain", "-", whiten=None, baseline=Value(clip=None)), lambda eps: ppo(eps, False, False)),
    (patch(GRPO, "gspo", "2507.18071", ratio="sequence_mean", clip=Clip(low=0.03, high=0.04), pull=None), gspo),
    (patch(REINFORCE, "whole", "-", ratio="sequence_product", clip=Clip(low=0.5, high=0.5)), whole_answer),
    (patch(REINFORCE, "kimi", "2501.12599", baseline=GroupMean(), anchor="start", pull=SequenceL2(coef=0.1)), kimi),
    (patch(GRPO, "rk3", "2512.02556", pull=KL(coef=0.04, estimator="rk3")), grpo_rk3),
    (patch(GRPO, "k2", "-", pull=KL(coef=0.04, estimator="k2")), grpo_k2),
    (patch(RLOO, "k3_both", "-", pull=KL(coef=0.03, estimator="k3", placement="both")), rloo_k3_both),
    (patch(DR_GRPO, "entropy", "-", entropy=EntropyBonus(coef=0.01)), entropy),
    (patch(DR_GRPO, "tis", "-", correction=(Truncate(cap=1.1),)), corrected(lambda d: d.exp().clamp(max=1.1))),
    (
        patch(DR_GRPO, "seq_tis", "-", correction=(Truncate(cap=1.1, level="sequence"),)),
        corrected(lambda d: d.sum().exp().clamp(max=1.1).expand(len(d))),
    ),
    (
        patch(DR_GRPO, "icepop", "-", correction=(Mask(low=0.8, high=1.2),)),
        corrected(lambda d: d.exp() * ((d.exp() > 0.8) & (d.exp() < 1.2))),
    ),
    (
        patch(DR_GRPO, "mis", "-", correction=(Mask(low=0.7, high=1.4, level="sequence"),)),
        corrected(lambda d: (d.sum().exp() * ((d.sum().exp() > 0.7) & (d.sum().exp() < 1.4))).expand(len(d))),
    ),
    (patch(CENTRED, "batch_std", "2508.08221", scale="batch_std", aggregate="token_mean"), batch_scaled),
    (patch(REINFORCE, "decoupled", "2505.24298", correction=(Truncate(cap=1e9),)), decoupled),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("a", "book"), CASES, ids=[a.name for a, _ in CASES])
def test_gradient_is_the_textbooks(a: Algorithm, book: Book, seed: int) -> None:
    """Law 1: d loss / d log pi, d entropy and d value equal those of the published objective, to 1e-12."""
    world = World(seed)
    for found, right in zip(world.library(a), world.textbook(book), strict=True):
        assert torch.allclose(found, right, rtol=0, atol=1e-12), (found - right).abs().max()
    assert world.library(a)[0].abs().max() > 1e-4


def test_every_algorithm_of_the_ladder_has_a_textbook() -> None:
    """Law 1 covers the whole ladder: a new line there needs a textbook here."""
    assert set(LADDER.values()) <= {a for a, _ in CASES}


def test_the_world_visits_every_branch() -> None:
    """The cases above meet both signs of credit, silenced tokens at both bounds, a moved value clip and a masked correction."""
    world = World(0)
    icepop = next(a for a, _ in CASES if a.name == "icepop")
    batch = batch_of(icepop, credit_step(icepop, world.groups, max_tokens=L_MAX, ema=0.0))
    seen = objective(icepop, streams(batch, dtype=torch.float64), TokenScores(world.lp, world.H, world.v)).gauges
    for name in ("policy/clip_low", "policy/clip_high", "correction/silenced"):
        assert 0 < seen[name].mean < 0.5, name
    assert set(np.sign(batch.advantage_M)) == {-1.0, 1.0}
    assert 0 < int(sum((e.v - e.v_old).abs().lt(0.2).sum() for e in world.eps)) < batch.spoken, "values inside and outside the clip"
    assert any(16 < len(e) <= 20 for e in world.eps), "the overlong ramp is used"
    assert len(world.eps) == 10 and sum(len(g.group.episodes) for g in world.groups) == 11, "one was not judged"


def test_supervised_is_weighted_likelihood() -> None:
    """SFT: -sum w log pi, whose gradient is -w."""
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    w = torch.tensor([0.25, 0.75])
    assert torch.equal(torch.autograd.grad(supervised(w, lp), lp)[0], -w)
    assert supervised(w, lp).item() == pytest.approx(1.75)


def test_objective_names_what_is_missing() -> None:
    """A score or stream that the algorithm reads is never made up."""
    world = World(0)
    for a, name in ((patch(DR_GRPO, "e", "-", entropy=EntropyBonus()), "entropy"), (PPO, "value")):
        s = streams(batch_of(a, credit_step(a, world.groups, max_tokens=L_MAX, ema=0.0)), dtype=torch.float64)
        with pytest.raises(InvariantError, match=name):
            objective(a, s, TokenScores(world.lp, None, None))
    bare = streams(batch_of(DR_GRPO, credit_step(DR_GRPO, [scored_group("t", _pair())], max_tokens=L_MAX, ema=0.0)), dtype=torch.float64)
    with pytest.raises(InvariantError, match="reference"):
        objective(GRPO, bare, TokenScores(torch.zeros(2, dtype=torch.float64), None, None))


def _pair() -> list[Answer]:
    one = np.full(1, -1, np.float32)
    return [Answer(r, [[1]], one, one) for r in (0.0, 1.0)]


def test_a_lost_token_stays_finite() -> None:
    """A token whose ratio overflows is silenced or bounded, and never turns zero credit into NaN."""
    a = patch(REINFORCE, "is", "-", ratio="token")
    s = streams(batch_of(a, credit_step(a, [scored_group("t", _pair())], max_tokens=L_MAX, ema=0.0)), dtype=torch.float32)
    lp = torch.tensor([200.0, 200.0], requires_grad=True)
    (grad,) = torch.autograd.grad(objective(a, s, TokenScores(lp, None, None)).loss, lp)
    assert grad[0] == 0 and math.isfinite(grad[1]) and credits(a, [0, 1])[0] == [0, 1]
