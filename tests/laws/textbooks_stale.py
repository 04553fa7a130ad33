"""Published objectives of lines that learn from stale answers, and of those published in 2026."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

import torch
from law_world import Book, Ep
from textbooks import by_group, centred, clipped, means, standard, tokens
from torch import Tensor


def tis(eps: Sequence[Ep]) -> Tensor:
    """Yao et al. 2025: min(start / mu, 2), constant, times the token's loss."""
    terms = clipped(eps, by_group(eps, standard))
    return -means([(e.old - e.mu).exp().clamp(max=2.0) * x for e, x in zip(eps, terms, strict=True)])


def icepop(eps: Sequence[Ep]) -> Tensor:
    """Ring-1T: a token whose start / mu lies outside [.5, 5] is left out, the others weigh start / mu."""
    terms: list[Tensor] = []
    for e, x in zip(eps, clipped(eps, by_group(eps, standard)), strict=True):
        each = [w if 0.5 <= w <= 5.0 else 0.0 for w in (e.old - e.mu).exp().tolist()]
        terms.append(torch.tensor(each, dtype=torch.float64) * x)
    return -means(terms)


def vcpo(cap: float = 8.0) -> Book:
    """2602.17616: min(pi(y)/mu(y), 8), constant, times (R - b) / std times the mean log-prob; b weighs each sibling by
    its squared ratio and its energy. The step size is no part of the gradient."""

    def book(eps: Sequence[Ep]) -> Tensor:
        terms: list[Tensor] = []
        for e in eps:
            mates = [f for f in eps if f.group == e.group]
            weight = [math.exp(float((f.old - f.mu).sum())) ** 2 * float(f.energy.sum()) for f in mates]
            b = sum(w * f.R for w, f in zip(weight, mates, strict=True)) / sum(weight)
            w = min(math.exp(float((e.lp.detach() - e.mu).sum())), cap)
            terms.append(w * (e.R - b) / stdev([f.R for f in mates]) * e.lp)
        return -means(terms)

    return book


def luspo(low: float, high: float) -> Book:
    """2602.05261: GSPO's clipped term of every answer times its length, averaged over the answers."""

    def book(eps: Sequence[Ep]) -> Tensor:
        terms: list[Tensor] = []
        for e, a in zip(eps, by_group(eps, standard), strict=True):
            s = (e.lp - e.old).mean().exp()
            terms.append(len(e) * torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a))
        return -torch.stack(terms).mean()

    return book


def dro(eps: Sequence[Ep]) -> Tensor:
    """A log pi - beta / 2 (log pi - log start)^2 of every token, beta .05, averaged over tokens."""
    return -tokens(
        [a * e.lp - 0.05 / 2 * (e.lp - e.old) ** 2 for e, a in zip(eps, by_group(eps, centred), strict=True)]
    )


def iw_opd(eps: Sequence[Ep]) -> Tensor:
    """2606.22600, Algorithm 1: A_t = log teacher - log student at sampling, times 1 + gamma (1 - what lies before t of
    sum |A|), gamma .5; the ratio as in opd."""
    terms: list[Tensor] = []
    for e in eps:
        a = (e.ref - e.mu).tolist()
        whole = sum(abs(x) for x in a)
        seen = [sum(abs(x) for x in a[:t]) / whole for t in range(len(a))]
        adv = torch.tensor([(1 + 0.5 * (1 - s)) * x for x, s in zip(a, seen, strict=True)], dtype=torch.float64)
        terms.append((e.lp - e.mu).exp() * adv)
    return -tokens(terms)


def mopd(eps: Sequence[Ep]) -> Tensor:
    """2601.02780, Eq. 8: A_t = log teacher - log start, weighed by start / mu inside [.2, 5], else 0; no ratio."""
    terms: list[Tensor] = []
    for e in eps:
        w = (e.old - e.mu).exp()
        inside = ((w >= 0.2) & (w <= 5.0)).double()
        terms.append(inside * w * (e.ref - e.old) * e.lp)
    return -tokens(terms)


def sdft(eps: Sequence[Ep]) -> Tensor:
    """2601.19897 as in TRL: JSD of teacher and policy at every token, averaged over each answer, then over answers. All
    of this world's vocabulary is among the teacher's 100 most probable tokens."""
    terms: list[Tensor] = []
    for e in eps:
        t, s = e.teacher.exp(), e.near.exp()
        m = (t + s) / 2
        terms.append((t * (t / m).log() / 2 + s * (s / m).log() / 2).sum(1))
    return means(terms)
