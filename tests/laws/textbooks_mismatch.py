"""Published corrections of the mismatch between sampler and learner, on Dr.GRPO and in combination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import stdev

import torch
from law_world import L_MAX, Book, Ep
from textbooks import by_group, centred, clipped, means, overlong, ppo_min, prompts, ratio, standard, sums, tokens
from torch import Tensor

Weight = Callable[[Ep], Tensor]
"""What a correction multiplies an episode's terms with: a number or [n], detached."""


def w(e: Ep) -> Tensor:
    return (e.old - e.mu).exp()


def product(e: Ep) -> Tensor:
    return w(e).prod()


def tis(cap: float) -> Weight:
    return lambda e: torch.minimum(w(e), torch.tensor(cap, dtype=torch.float64))


def sequence_tis(cap: float) -> Weight:
    return lambda e: product(e).clamp(max=cap)


def icepop(low: float, high: float) -> Weight:
    return lambda e: torch.where((low <= w(e)) & (w(e) <= high), w(e), 0.0)


def sequence_mis(low: float, high: float) -> Weight:
    return lambda e: product(e) if low <= product(e) <= high else torch.zeros(())


def binary(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def kpop(phi: float) -> Weight:
    def weight(e: Ep) -> Tensor:
        train, infer = e.old.exp(), e.mu.exp()
        return torch.where((binary(train, infer) <= phi) & (binary(infer, train) <= phi), w(e), 0.0)

    return weight


def geo_rs(low: float, high: float) -> Weight:
    return lambda e: torch.tensor(float(low <= product(e) ** (1 / len(e)) <= high))


def veto(below: float) -> Weight:
    return lambda e: torch.tensor(float(w(e).min() >= below))


def corrected(*weights: Weight) -> Book:
    """Dr.GRPO with detached weights on its terms."""

    def book(eps: Sequence[Ep]) -> Tensor:
        terms = clipped(eps, by_group(eps, centred))
        for weight in weights:
            terms = [weight(e).detach() * x for e, x in zip(eps, terms, strict=True)]
        return -sums(terms) / L_MAX

    return book


def negative_mask(delta: float) -> Book:
    def book(eps: Sequence[Ep]) -> Tensor:
        adv = by_group(eps, centred)
        left = [x < 0 and (e.mu - e.lp).mean().item() > delta for e, x in zip(eps, adv, strict=True)]
        return -sums([0 * x if gone else x for gone, x in zip(left, clipped(eps, adv), strict=True)]) / L_MAX

    return book


def decoupled(eps: Sequence[Ep]) -> Tensor:
    """-sg[prox/mu] min(r A, clip(r) A), r = pi/prox, prox recomputed at the start of the step."""
    terms = clipped(eps, by_group(eps, standard))
    return -means([w(e).detach() * x for e, x in zip(eps, terms, strict=True)])


def a3po(start: int) -> Book:
    """The same with log prox = log mu + alpha (log pi - log mu), alpha = (v_prox - v_behaviour) / (v_theta -
    v_behaviour), a constant."""

    def book(eps: Sequence[Ep]) -> Tensor:
        terms: list[Tensor] = []
        for e, x in zip(eps, by_group(eps, standard), strict=True):
            alpha = (start - e.version) / (start + 1 - e.version)
            prox = e.mu + alpha * (e.lp.detach() - e.mu)
            terms.append((prox - e.mu).exp() * ppo_min((e.lp - prox).exp(), x))
        return -means(terms)

    return book


def uncapped_reinforce(eps: Sequence[Ep]) -> Tensor:
    return -sums([w(e) * e.R * e.lp for e in eps])


def batch_scaled_mean(eps: Sequence[Ep]) -> Tensor:
    everyone = stdev([e.R for e in eps])
    return -tokens([x / everyone * e.lp for x, e in zip(by_group(eps, centred), eps, strict=True)])


# --- combinations --------------------------------------------------------------------------------------------------


def gspo_sequence_tis(eps: Sequence[Ep]) -> Tensor:
    adv = by_group(eps, standard)
    terms = [
        sequence_tis(1.1)(e) * ppo_min((e.lp - e.old).mean().exp(), x, 0.03, 0.04)
        for e, x in zip(eps, adv, strict=True)
    ]
    return -torch.stack(terms).mean()


def sapo_icepop_veto(eps: Sequence[Ep]) -> Tensor:
    terms: list[Tensor] = []
    for e, x in zip(eps, by_group(eps, standard), strict=True):
        tau = 1.0 if x > 0 else 1.05
        soft = torch.sigmoid(tau * (ratio(e) - 1)) * 4 / tau * x
        terms.append(icepop(0.8, 1.2)(e) * veto(0.7)(e) * soft)
    return -means(terms)


def dapo_geo_rs_negative(eps: Sequence[Ep]) -> Tensor:
    adv = by_group(eps, standard, [overlong(e) for e in eps])
    terms: list[Tensor] = []
    for e, x, term in zip(eps, adv, clipped(eps, adv, 0.2, 0.28), strict=True):
        left = x < 0 and (e.mu - e.lp).mean().item() > 0.1
        terms.append((0.0 if left else 1.0) * geo_rs(0.9, 1.1)(e) * term)
    return -prompts(eps, terms)


def cispo_tis_entropy(eps: Sequence[Ep]) -> Tensor:
    adv = by_group(eps, standard)
    terms = [
        tis(1.1)(e) * ratio(e).clamp(0, 1.2).detach() * x * e.lp + 0.01 * e.H for e, x in zip(eps, adv, strict=True)
    ]
    return -prompts(eps, terms)


def kimi_in_band(eps: Sequence[Ep]) -> Tensor:
    """Kimi's surrogate where the correction masks the score term alone: the squared log-ratio is a regulariser and
    stays."""
    terms: list[Tensor] = []
    for e, x in zip(eps, by_group(eps, centred), strict=True):
        terms.append(sequence_mis(0.7, 1.4)(e) * x * e.lp.sum() - 0.05 * (e.lp - e.old).sum() ** 2)
    return -torch.stack(terms).mean()
