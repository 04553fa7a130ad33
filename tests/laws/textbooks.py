"""Published objectives, written out episode by episode from the papers: REINFORCE, PPO, GRPO and what credit alone
changes.

Nothing here knows of the library's credit, push or weight. A book is a loss; autograd makes its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import mean, stdev

import torch
from law_world import L_MAX, Book, Ep
from torch import Tensor

# --- siblings ------------------------------------------------------------------------------------------------------


def by_group(
    eps: Sequence[Ep], of: Callable[[Sequence[float], int], float], rewards: Sequence[float] | None = None
) -> list[float]:
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


def step_whitened(credit: Sequence[float]) -> list[float]:
    """Over all samples of the step."""
    return [(x - mean(credit)) / stdev(credit) for x in credit]


def token_whitened(credit: Sequence[Tensor]) -> list[Tensor]:
    """Over all tokens of the step."""
    flat = torch.cat(list(credit))
    return [(x - flat.mean()) / flat.std() for x in credit]


# --- how tokens are averaged ---------------------------------------------------------------------------------------


def sums(terms: Sequence[Tensor]) -> Tensor:
    """Mean over episodes of the sum over tokens."""
    return torch.stack([x.sum() for x in terms]).mean()


def means(terms: Sequence[Tensor]) -> Tensor:
    """Mean over episodes of the mean over tokens."""
    return torch.stack([x.mean() for x in terms]).mean()


def tokens(terms: Sequence[Tensor]) -> Tensor:
    """Mean over all tokens."""
    return torch.cat(list(terms)).mean()


def prompts(eps: Sequence[Ep], terms: Sequence[Tensor]) -> Tensor:
    """Mean over prompts of the mean over their tokens."""
    each = [
        tokens([x for e, x in zip(eps, terms, strict=True) if e.group == g]) for g in sorted({e.group for e in eps})
    ]
    return torch.stack(each).mean()


# --- parts of a term -----------------------------------------------------------------------------------------------


def ppo_min(r: Tensor, a: float | Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.minimum(r * a, torch.clamp(r, 1 - low, 1 + high) * a)


def ratio(e: Ep) -> Tensor:
    return (e.lp - e.old).exp()


def k3(e: Ep) -> Tensor:
    return (e.ref - e.lp).exp() - (e.ref - e.lp) - 1


def clipped(
    eps: Sequence[Ep], adv: Sequence[float] | Sequence[Tensor], low: float = 0.2, high: float = 0.2
) -> list[Tensor]:
    """PPO's term of every token."""
    return [ppo_min(ratio(e), x, low, high) for e, x in zip(eps, adv, strict=True)]


def overlong(e: Ep) -> float:
    """DAPO's rule reward of -1 or 1, and Eq. 13 with a cache of a fifth."""
    cache = 0.2 * L_MAX
    return 2 * e.R - 1 + (0 if len(e) <= L_MAX - cache else (L_MAX - cache - len(e)) / cache)


# --- REINFORCE and its baselines -----------------------------------------------------------------------------------


def scored(eps: Sequence[Ep], adv: Sequence[float]) -> list[Tensor]:
    return [x * e.lp for x, e in zip(adv, eps, strict=True)]


def reinforce(eps: Sequence[Ep]) -> Tensor:
    return -sums(scored(eps, [e.R for e in eps]))


def reinforce_ema(eps: Sequence[Ep]) -> Tensor:
    b, adv = 0.0, []
    for e in eps:
        adv.append(e.R - b)
        b = 0.95 * b + 0.05 * e.R
    return -sums(scored(eps, adv))


def rloo(eps: Sequence[Ep]) -> Tensor:
    with_kl = [e.R - 0.03 * float((e.mu - e.ref).sum()) for e in eps]
    return -sums(scored(eps, by_group(eps, others, with_kl)))


def rloo_k3_both(eps: Sequence[Ep]) -> Tensor:
    with_kl = [e.R - 0.03 * float(((e.ref - e.mu).exp() - 1 - (e.ref - e.mu)).sum()) for e in eps]
    return -sums(scored(eps, by_group(eps, others, with_kl))) + 0.03 * sums([k3(e) for e in eps])


def remax(eps: Sequence[Ep]) -> Tensor:
    return -sums(scored(eps, [e.R - e.greedy for e in eps]))


def remax_kl(eps: Sequence[Ep]) -> Tensor:
    """With KL in the reward: R less what is paid from the token on, less the greedy answer's R."""
    return -sums([(e.R - e.greedy - to_go(0.1 * (e.mu - e.ref))) * e.lp for e in eps])


def to_go(x: Tensor) -> Tensor:
    return torch.tensor([float(x[t:].sum()) for t in range(len(x))], dtype=torch.float64)


def opo(eps: Sequence[Ep]) -> Tensor:
    adv: list[float] = []
    for e in eps:
        mates = [f for f in eps if f.group == e.group]
        adv.append(e.R - sum(len(f) * f.R for f in mates) / sum(len(f) for f in mates))
    return -sums(scored(eps, adv))


def otb(eps: Sequence[Ep]) -> Tensor:
    """B_t = sum R W_t / sum W_t over the answers that have a token t, W_t their energy so far; an answer alone there is
    not compared."""
    terms: list[Tensor] = []
    for e in eps:
        mates = [f for f in eps if f.group == e.group]
        adv: list[float] = []
        for t in range(len(e)):
            there = [(float(f.energy[: t + 1].sum()), f.R) for f in mates if len(f) > t]
            adv.append(e.R - sum(w * r for w, r in there) / sum(w for w, _ in there) if len(there) > 1 else 0.0)
        terms.append(torch.tensor(adv, dtype=torch.float64) * e.lp)
    return -sums(terms)


def gpg(eps: Sequence[Ep]) -> Tensor:
    """alpha = samples of the step over samples of groups whose rewards differ."""
    valid = [e for e in eps if len({f.R for f in eps if f.group == e.group}) > 1]
    return -len(eps) / len(valid) * tokens(scored(eps, by_group(eps, centred)))


def opmd(eps: Sequence[Ep], tau: float = 1.0) -> Tensor:
    def soft(r: Sequence[float], i: int) -> float:
        return r[i] - tau * math.log(mean(math.exp(x / tau) for x in r))

    return -sums(scored(eps, by_group(eps, soft))) / (1 + tau)


def subsets(r: Sequence[float], k: int) -> list[tuple[tuple[int, ...], float]]:
    """All k-subsets of siblings with their best reward."""
    return [(s, max(r[j] for j in s)) for s in combinations(range(len(r)), k)]


def pkpo(eps: Sequence[Ep], k: int = 4) -> Tensor:
    """Eq. 33: over all k-subsets that hold the sample, what it adds to the best of the others; summed, not averaged,
    over siblings."""

    def gain(r: Sequence[float], i: int) -> float:
        size = min(k, len(r))
        sets = [s for s, _ in subsets(r, size) if i in s]
        return (
            len(r) * sum(max(r[j] for j in s) - max(r[j] for j in s if j != i) for s in sets) / math.comb(len(r), size)
        )

    return -sums(scored(eps, by_group(eps, gain)))


def maxrl_success(eps: Sequence[Ep]) -> Tensor:
    """The mean score of the successes; rewards between 0 and 1 count in part."""
    return -sums(scored(eps, by_group(eps, lambda r, i: len(r) * r[i] / sum(r))))


def kimi(eps: Sequence[Ep]) -> Tensor:
    terms = zip(eps, by_group(eps, centred), strict=True)
    return -torch.stack([x * e.lp.sum() - 0.1 / 2 * (e.lp - e.old).sum() ** 2 for e, x in terms]).mean()


def topr(eps: Sequence[Ep]) -> Tensor:
    """Failures by the taper x where x < 1, else 1 + log x, of the answer's ratio: its gradient is clip(x, 0, 1) grad
    log pi."""
    terms: list[Tensor] = []
    for e in eps:
        reward, x = 2 * e.R - 1, (e.lp - e.mu).sum().exp()
        terms.append(reward * (e.lp.sum() if reward >= 0 else x if x < 1 else 1 + x.log()))
    return -torch.stack(terms).mean()


# --- PPO and learned values ----------------------------------------------------------------------------------------


def gae_by_sums(e: Ep, lam: float, rewards: Tensor | None = None) -> Tensor:
    """A_t = sum_l lam^l delta_{t+l}, the defining sum, gamma 1."""
    v, n = [*e.v_old.tolist(), 0.0], len(e)
    r = [0.0] * (n - 1) + [e.R] if rewards is None else rewards.tolist()
    delta = [r[t] + v[t + 1] - v[t] for t in range(n)]
    return torch.tensor([sum(lam ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)], dtype=torch.float64)


def value_losses(eps: Sequence[Ep], returns: Sequence[Tensor], clip: float | None = 0.2) -> Tensor:
    losses: list[Tensor] = []
    for e, ret in zip(eps, returns, strict=True):
        near = e.v if clip is None else torch.clamp(e.v, e.v_old - clip, e.v_old + clip)
        losses.append(0.5 * torch.maximum((e.v - ret) ** 2, (near - ret) ** 2))
    return 0.5 * tokens(losses)


def ppo(eps: Sequence[Ep], whiten: bool = True, clip: float | None = 0.2) -> Tensor:
    raw = [gae_by_sums(e, 0.95) for e in eps]
    adv = token_whitened(raw) if whiten else raw
    return -tokens(clipped(eps, adv)) + value_losses(eps, [x + e.v_old for x, e in zip(raw, eps, strict=True)], clip)


def dual_clip(eps: Sequence[Ep], c: float = 3.0) -> Tensor:
    """A < 0: max(min(r A, clip(r) A), c A)."""
    raw = [gae_by_sums(e, 0.95) for e in eps]
    terms: list[Tensor] = []
    for e, x in zip(eps, token_whitened(raw), strict=True):
        low = ppo_min(ratio(e), x)
        terms.append(torch.where(x < 0, torch.maximum(low, c * x), low))
    return -tokens(terms) + value_losses(eps, [x + e.v_old for x, e in zip(raw, eps, strict=True)])


def vapo(alpha: float = 0.05) -> Book:
    """Decoupled, length-adaptive GAE; clip-higher; positive likelihood over the tokens of the solved answers."""

    def book(eps: Sequence[Ep]) -> Tensor:
        adv = token_whitened([gae_by_sums(e, max(0.0, 1 - 1 / (alpha * len(e)))) for e in eps])
        returns = [gae_by_sums(e, 1.0) + e.v_old for e in eps]
        likelihood = tokens([e.lp for e in eps if e.R >= 1])
        return -tokens(clipped(eps, adv, 0.2, 0.28)) + value_losses(eps, returns) - 0.1 * likelihood

    return book


def v_trace(lam: float) -> Book:
    """Eq. 1 of 1802.01561 as sums, rho and c cut at 1; the policy gradient's rho multiplies PPO's term."""

    def book(eps: Sequence[Ep]) -> Tensor:
        terms: list[Tensor] = []
        returns: list[Tensor] = []
        for e in eps:
            n, v = len(e), [*e.v_old.tolist(), 0.0]
            rho = (e.old - e.mu).exp().clamp(max=1.0)
            r = [0.0] * (n - 1) + [e.R]
            delta = [float(rho[t]) * (r[t] + v[t + 1] - v[t]) for t in range(n)]
            target = [
                v[s] + sum(math.prod(lam * float(x) for x in rho[s:t]) * delta[t] for t in range(s, n))
                for s in range(n)
            ]
            adv = [r[s] + (target[s + 1] if s + 1 < n else 0.0) - v[s] for s in range(n)]
            returns.append(torch.tensor(target, dtype=torch.float64))
            terms.append(rho * ppo_min(ratio(e), torch.tensor(adv, dtype=torch.float64)))
        return -tokens(terms) + value_losses(eps, returns, None)

    return book


def reinforce_pp(eps: Sequence[Ep]) -> Tensor:
    """Token rewards -beta (log start - log ref), R at the last; returns to go, whitened over tokens."""
    adv = token_whitened([e.R - to_go(0.001 * (e.old - e.ref)) for e in eps])
    return -tokens(clipped(eps, adv))


def reinforce_pp_baseline(eps: Sequence[Ep]) -> Tensor:
    adv = token_whitened(
        [torch.full((len(e),), x, dtype=torch.float64) for e, x in zip(eps, by_group(eps, centred), strict=True)]
    )
    return -tokens(clipped(eps, adv)) + 0.001 * tokens([0.5 * (e.lp - e.ref) ** 2 for e in eps])


# --- GRPO ----------------------------------------------------------------------------------------------------------


def grpo(eps: Sequence[Ep], kl: Callable[[Ep], Tensor] = k3) -> Tensor:
    return -means([x - 0.04 * kl(e) for e, x in zip(eps, clipped(eps, by_group(eps, standard)), strict=True)])


def dr_grpo(eps: Sequence[Ep]) -> Tensor:
    return -sums(clipped(eps, by_group(eps, centred))) / L_MAX
