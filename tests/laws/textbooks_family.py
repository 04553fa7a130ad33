"""Published objectives of GRPO's children: trust regions, scales, token choices, demonstrations, teachers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import mean, pstdev, stdev

import torch
from law_world import L_MAX, Book, Ep
from textbooks import (
    by_group,
    centred,
    clipped,
    dr_grpo,
    gae_by_sums,
    grpo,
    k3,
    means,
    overlong,
    ppo_min,
    prompts,
    ratio,
    standard,
    step_whitened,
    subsets,
    sums,
    token_whitened,
    tokens,
    value_losses,
)
from torch import Tensor

# --- credit --------------------------------------------------------------------------------------------------------


def grpo_process(eps: Sequence[Ep]) -> Tensor:
    """Process supervision: a token's advantage is the sum of the normalised rewards of the steps that end at or after
    it."""
    adv: list[Tensor] = []
    for e in eps:
        mates = [f for f in eps if f.group == e.group]
        of = {id(f): f.steps if any(m.steps for m in mates) else [(len(f), f.R)] for f in mates}
        everything = [x for f in mates for _, x in of[id(f)]]
        mu, sd = mean(everything), stdev(everything)
        each = [sum((x - mu) / sd for end, x in of[id(e)] if end >= t + 1) for t in range(len(e))]
        adv.append(torch.tensor(each, dtype=torch.float64))
    return -means([x - 0.04 * k3(e) for e, x in zip(eps, clipped(eps, adv), strict=True)])


def prime(beta: float) -> Book:
    """2502.01456, Eq. 5 with gamma 1: at each token the sum over those from it on of r_phi less the mean over the other
    answers of their mean r_phi, plus the outcome less the others' mean one; PPO's clip over all tokens."""

    def book(eps: Sequence[Ep]) -> Tensor:
        adv: list[Tensor] = []
        for e in eps:
            mates = [f for f in eps if f.group == e.group and f is not e]
            r = beta * (e.phi - e.ref)
            level = mean(float((beta * (f.phi - f.ref)).mean()) for f in mates)
            whole = e.R - mean(f.R for f in mates)
            each = [sum(float(r[s]) - level for s in range(t, len(e))) + whole for t in range(len(e))]
            adv.append(torch.tensor(each, dtype=torch.float64))
        return -tokens(clipped(eps, adv))

    return book


def _among(values: Sequence[float], x: float) -> float:
    """Standardised among `values`; 0 where they agree."""
    return (x - mean(values)) / stdev(values) if len(values) > 1 and max(values) != min(values) else 0.0


def mt_grpo(eps: Sequence[Ep]) -> Tensor:
    """Eq. 7 of 2505.11821, lambda 1: a turn's own reward among all k-th turns, plus the terminal reward among all
    answers."""
    adv: list[Tensor] = []
    for e in eps:
        mates = [f for f in eps if f.group == e.group]
        terminal = [f.R - sum(t[3] for t in f.turns) for f in mates]
        whole = _among(terminal, e.R - sum(t[3] for t in e.turns))
        x = torch.zeros(len(e), dtype=torch.float64)
        for k, (begin, end, _, paid) in enumerate(e.turns):
            x[begin:end] = whole + _among([f.turns[k][3] for f in mates if len(f.turns) > k], paid)
        adv.append(x)
    return -means(clipped(eps, adv))


def gigpo(eps: Sequence[Ep]) -> Tensor:
    """2505.10978: episode advantage plus the advantage among all turns of the group after the same observation, gamma
    .95, omega 1."""

    def returns(f: Ep) -> list[float]:
        r = [t[3] for t in f.turns]
        r[-1] += f.R - sum(r)
        return [sum(0.95 ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))]

    adv: list[Tensor] = []
    for e in eps:
        mates = [f for f in eps if f.group == e.group]
        x = torch.full((len(e),), _among([f.R for f in mates], e.R), dtype=torch.float64)
        for k, (begin, end, state, _) in enumerate(e.turns):
            there = [g for f in mates for g, t in zip(returns(f), f.turns, strict=True) if t[2] == state]
            x[begin:end] += _among(there, returns(e)[k])
        adv.append(x)
    return -means(clipped(eps, adv))


def gdpo(eps: Sequence[Ep]) -> Tensor:
    """Every source standardised among the siblings it judged, summed with its weights, standardised over the step."""
    total = [0.0] * len(eps)
    for source in ("right", "form"):
        for g in {e.group for e in eps}:
            judged = [i for i, e in enumerate(eps) if e.group == g and source in e.parts]
            r = [eps[i].parts[source][1] for i in judged]
            if len(set(r)) > 1:
                for place, i in enumerate(judged):
                    total[i] += eps[i].parts[source][0] * standard(r, place)
    adv = step_whitened(total)
    return -means([x - 0.04 * k3(e) for e, x in zip(eps, clipped(eps, adv), strict=True)])


def pass_at_k(k: int) -> Book:
    """A sample's share in all k-subsets: mean best of those that hold it, less the mean over all, over their
    deviation."""

    def credit(r: Sequence[float], i: int) -> float:
        sets = subsets(r, min(k, len(r)))
        best = [x for _, x in sets]
        return (mean(x for s, x in sets if i in s) - mean(best)) / pstdev(best) if len(set(best)) > 1 else 0.0

    def book(eps: Sequence[Ep]) -> Tensor:
        return -means([x - 0.04 * k3(e) for e, x in zip(eps, clipped(eps, by_group(eps, credit)), strict=True)])

    return book


def grpo_passk(eps: Sequence[Ep]) -> Tensor:
    def credit(r: Sequence[float], i: int) -> float:
        return (max(r) - sorted(r)[-2]) / stdev(r) if r[i] == max(r) else 0.0

    return -means(clipped(eps, by_group(eps, credit)))


def lite_ppo(eps: Sequence[Ep]) -> Tensor:
    everyone = stdev([e.R for e in eps])
    return -tokens(clipped(eps, [x / everyone for x in by_group(eps, centred)]))


def maxrl(eps: Sequence[Ep]) -> Tensor:
    return -sums(clipped(eps, by_group(eps, lambda r, i: (r[i] - mean(r)) / mean(r)))) / L_MAX


def dapo(eps: Sequence[Ep]) -> Tensor:
    return -prompts(eps, clipped(eps, by_group(eps, standard, [overlong(e) for e in eps]), 0.2, 0.28))


def magistral(eps: Sequence[Ep]) -> Tensor:
    adv = step_whitened(by_group(eps, centred, [overlong(e) for e in eps]))
    return -prompts(eps, clipped(eps, adv, 0.2, 0.28))


# --- trust regions -------------------------------------------------------------------------------------------------


def each(
    term: Callable[[Ep, float], Tensor], credit: Callable[[Sequence[float], int], float] = standard
) -> Callable[..., list[Tensor]]:
    """term(episode, its advantage) of every episode."""
    return lambda eps: [term(e, x) for e, x in zip(eps, by_group(eps, credit), strict=True)]


def two_sided(eps: Sequence[Ep]) -> Tensor:
    """min(min(r, delta) A, clip(r) A), delta 4; in this world's ratios below 4 it needs a smaller delta to bite
    (`two_sided_at`)."""
    return two_sided_at(4.0)(eps)


def two_sided_at(delta: float) -> Book:
    def term(e: Ep, x: float) -> Tensor:
        r = ratio(e)
        return torch.minimum(r.clamp(max=delta) * x, r.clamp(0.8, 1.2) * x) - 0.001 * k3(e)

    return lambda eps: -means(each(term)(eps))


def gmpo(low: float, high: float) -> Book:
    """The geometric mean of the answer's ratios, each clipped in the direction its credit pushes."""

    def term(e: Ep, x: float) -> Tensor:
        log = e.lp - e.old
        held = log.clamp(max=high) if x > 0 else log.clamp(min=-low)
        return held.exp().prod() ** (1 / len(e)) * x

    return lambda eps: -torch.stack(each(term)(eps)).mean()


def sapo(eps: Sequence[Ep]) -> Tensor:
    def term(e: Ep, x: float) -> Tensor:
        tau = 1.0 if x > 0 else 1.05
        return torch.sigmoid(tau * (ratio(e) - 1)) * 4 / tau * x

    return -means(each(term)(eps))


def gspo(low: float, high: float) -> Book:
    return lambda eps: -torch.stack(each(lambda e, x: ppo_min((e.lp - e.old).mean().exp(), x, low, high))(eps)).mean()


def gspo_token(low: float, high: float) -> Book:
    """s_t = sg[s] * pi_t / sg[pi_t]."""
    return lambda eps: -means(each(lambda e, x: ppo_min(_bound_to_its_answer(e), x, low, high))(eps))


def _bound_to_its_answer(e: Ep) -> Tensor:
    return (e.lp - e.old).mean().exp().detach() * (e.lp - e.lp.detach()).exp()


def gspo_token_process(eps: Sequence[Ep]) -> Tensor:
    """GSPO-token with credit that varies inside an answer: PPO's whitened GAE."""
    raw = [gae_by_sums(e, 0.95) for e in eps]
    terms = [ppo_min(_bound_to_its_answer(e), x) for e, x in zip(eps, token_whitened(raw), strict=True)]
    return -tokens(terms) + value_losses(eps, [x + e.v_old for x, e in zip(raw, eps, strict=True)])


def vespo(eps: Sequence[Ep]) -> Tensor:
    def term(e: Ep, x: float) -> Tensor:
        w = (e.lp - e.old).sum().exp().detach()
        return (w**2 * torch.exp(3 * (1 - w)) if x > 0 else w**3 * torch.exp(2 * (1 - w))) * x * e.lp

    return -means(each(term)(eps))


def cispo(cap: float) -> Book:
    return lambda eps: -prompts(eps, each(lambda e, x: ratio(e).clamp(0, cap).detach() * x * e.lp)(eps))


def aipo(cap: float) -> Book:
    return lambda eps: -tokens(each(lambda e, x: (e.lp - e.mu).exp().clamp(max=cap).detach() * x * e.lp, centred)(eps))


def scalerl(eps: Sequence[Ep]) -> Tensor:
    """CISPO against the sampler; centred advantages over the standard deviation of all advantages of the step."""
    adv = by_group(eps, centred)
    terms = [(e.lp - e.mu).exp().clamp(max=5).detach() * x / stdev(adv) * e.lp for e, x in zip(eps, adv, strict=True)]
    return -prompts(eps, terms)


def dppo(far: Callable[[Ep], Tensor], cap: float | None = 20.0) -> Book:
    """M_t r_t A_t with r = pi/mu, masked where it is `far` and moves further; a cap is detached and multiplies log
    pi."""

    def term(e: Ep, x: float) -> Tensor:
        r = (e.lp - e.mu).exp()
        masked = far(e) & ((r > 1) if x > 0 else (r < 1))
        kept = (~masked).to(r.dtype)
        return kept * r * x if cap is None else kept * r.detach().clamp(max=cap) * x * e.lp

    return lambda eps: -sums(each(term, centred)(eps)) / L_MAX


def prime_rl(eps: Sequence[Ep]) -> Tensor:
    """r_t A_t - 1e-3 (log r_t)^2 over all tokens, the first term masked where |pi - mu| > .2 and it moves further; r is
    differentiated."""

    def term(e: Ep, x: float) -> Tensor:
        d = e.lp - e.mu
        kept = ~(((e.lp.exp() - e.mu.exp()).abs() > 0.2) & ((d > 0) if x > 0 else (d < 0)))
        return kept * d.exp() * x - 1e-3 * d**2

    return -torch.cat(each(term, centred)(eps)).mean()


def far_tv(e: Ep) -> Tensor:
    return (e.lp.exp() - e.mu.exp()).abs() > 0.15


def far_kl(e: Ep) -> Tensor:
    p, q = e.mu.exp(), e.lp.exp()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log() > 0.05


def far_top(k: int, measure: str, delta: float) -> Callable[[Ep], Tensor]:
    """Over the sampler's k most probable tokens, the said one, and all others as one."""

    def far(e: Ep) -> Tensor:
        out: list[bool] = []
        for t in range(len(e)):
            order = sorted(range(e.mu_near.shape[1]), key=lambda j: -float(e.mu_near[t, j]))
            chosen = sorted({*order[:k], int(e.said[t])})
            p, q = (x[t, chosen].exp().tolist() for x in (e.mu_near, e.near))
            p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
            tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
            kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 1e-9)
            out.append((tv if measure == "tv" else kl) > delta)
        return torch.tensor(out)

    return far


def fipo(eps: Sequence[Ep], band: tuple[float, float] = (0.2, 0.2), loud: float = 4.0, ignore: float = 10.0) -> Tensor:
    """DAPO with A_t f_t, f_t = clip(exp(sum_{k >= t} 2^(-(k - t) / 32) M_k log r_k)), a constant."""
    adv = by_group(eps, standard, [overlong(e) for e in eps])
    terms: list[Tensor] = []
    for e, x in zip(eps, adv, strict=True):
        log, r = (e.lp - e.old).tolist(), ratio(e)
        f: list[float] = []
        for t in range(len(e)):
            future = sum(2 ** (-(k - t) / 32) * log[k] * (math.exp(log[k]) <= ignore) for k in range(t, len(e)))
            top = 1.0 if x < 0 and r[t].item() > loud else 1 + band[1]
            f.append(min(max(math.exp(future), 1 - band[0]), top))
        terms.append(ppo_min(r, x * torch.tensor(f, dtype=torch.float64), 0.2, 0.28))
    return -prompts(eps, terms)


# --- token choices -------------------------------------------------------------------------------------------------


def cut(flat: Tensor, eps: Sequence[Ep]) -> list[Tensor]:
    ends = list(accumulate(len(e) for e in eps))
    return [flat[end - len(e) : end] for e, end in zip(eps, ends, strict=True)]


def covariances(eps: Sequence[Ep]) -> Tensor:
    """(A - mean A)(log pi - mean log pi) of all tokens, with the log-probs before the step."""
    a = torch.cat(
        [torch.full((len(e),), x, dtype=torch.float64) for e, x in zip(eps, by_group(eps, standard), strict=True)]
    )
    lp = torch.cat([e.old for e in eps])
    return (a - a.mean()) * (lp - lp.mean())


def clip_cov(low: float, high: float) -> Book:
    """Given the chosen set: here all tokens inside the band."""

    def book(eps: Sequence[Ep]) -> Tensor:
        cov = covariances(eps)
        spared = cut((~((cov > low) & (cov < high))).to(torch.float64), eps)
        return -tokens([x * m for x, m in zip(clipped(eps, by_group(eps, standard)), spared, strict=True)])

    return book


def kl_cov(share: float) -> Book:
    """-r A, and |log pi - log start| beside it on the tokens of largest covariance."""

    def book(eps: Sequence[Ep]) -> Tensor:
        cov = covariances(eps)
        top = torch.zeros(len(cov), dtype=torch.float64)
        top[cov.topk(math.ceil(share * len(cov))).indices] = 1.0
        adv = by_group(eps, standard)
        return tokens(
            [-ratio(e) * x + m * (e.lp - e.old).abs() for e, x, m in zip(eps, adv, cut(top, eps), strict=True)]
        )

    return book


def top_entropy(eps: Sequence[Ep]) -> Tensor:
    """Only tokens of the largest fifth of entropies at the start keep their term; the denominators stay."""
    h = torch.cat([e.entropy_old for e in eps])
    loud = cut((h >= h.topk(math.ceil(0.2 * len(h))).values[-1]).to(torch.float64), eps)
    return -means([x * m for x, m in zip(clipped(eps, by_group(eps, standard)), loud, strict=True)])


def m2po(limit: float, outward: bool = True) -> Book:
    """r = pi/mu without a clip, prompts averaged; of the tokens with A > 0 and r > 1 or A < 0 and r < 1 (or of all) the
    fewest are masked, largest |log start/mu| first, whose rest has a mean square of at most `limit`."""

    def book(eps: Sequence[Ep]) -> Tensor:
        gap = torch.cat([(e.old - e.mu) ** 2 for e in eps])
        away = torch.cat(each(lambda e, x: (e.old > e.mu) == (x > 0) if x else torch.zeros(len(e)) > 0)(eps))
        left = sorted((i for i in range(len(gap)) if away[i] or not outward), key=lambda i: float(gap[i]))
        kept = torch.tensor([0.0 if i in left else 1.0 for i in range(len(gap))], dtype=torch.float64)
        while left and mean(float(gap[i]) for i in left) > limit:
            left.pop()
        kept[left] = 1.0
        terms = each(lambda e, x: (e.lp - e.mu).exp() * x)(eps)
        return -prompts(eps, [x * m for x, m in zip(terms, cut(kept, eps), strict=True)])

    return book


def skywork(coef: float) -> Book:
    """With the entropy bonus as steered."""
    return lambda eps: (
        -tokens([x + coef * e.H for e, x in zip(eps, clipped(eps, by_group(eps, standard)), strict=True)])
    )


# --- demonstrations and teachers -----------------------------------------------------------------------------------


def luffy(eps: Sequence[Ep]) -> Tensor:
    """One advantage over said and shown answers; shown tokens by f(p) = p / (p + .1), never clipped."""

    def term(e: Ep, x: float) -> Tensor:
        p = e.lp.exp()
        return p / (p + 0.1) * x if e.shown else ppo_min(ratio(e), x)

    return -means(each(term)(eps))


def chord(mu: float) -> Book:
    """(1 - mu) L_GRPO + mu L_SFT, each shown token weighed by the constant p (1 - p)."""

    def book(eps: Sequence[Ep]) -> Tensor:
        policy = means(each(lambda e, x: 0 * e.lp if e.shown else ppo_min(ratio(e), x))(eps))
        expert = tokens([(e.lp.exp() * (1 - e.lp.exp())).detach() * e.lp for e in eps if e.shown])
        return -(1 - mu) * policy - mu * expert

    return book


def opd(eps: Sequence[Ep]) -> Tensor:
    """Importance sampling with the advantage -(log mu - log teacher) of each token."""
    return -tokens([(e.lp - e.mu).exp() * (e.ref - e.mu) for e in eps])


def gkd(beta: float, top: int = 0) -> Book:
    """Generalised JSD of the whole distribution, or of the teacher's most probable tokens and the rest as one."""

    def book(eps: Sequence[Ep]) -> Tensor:
        terms: list[Tensor] = []
        for e in eps:
            rows: list[Tensor] = []
            for teacher, student in zip(e.teacher.exp(), e.near.exp(), strict=True):
                t, s = teacher, student
                if top:
                    at = teacher.topk(top).indices
                    t, s = (torch.cat([x[at], 1 - x[at].sum()[None]]) for x in (teacher, student))
                m = beta * t + (1 - beta) * s
                forward, reverse = (t * (t / s).log()).sum(), (s * (s / t).log()).sum()
                mixed = beta * (t * (t / m).log()).sum() + (1 - beta) * (s * (s / m).log()).sum()
                rows.append(forward if beta == 0 else reverse if beta == 1 else mixed)
            terms.append(torch.stack(rows))
        return tokens(terms)

    return book


# --- regularisers --------------------------------------------------------------------------------------------------


def grpo_rk3(eps: Sequence[Ep]) -> Tensor:
    return grpo(eps, kl=lambda e: ratio(e) * k3(e))


def grpo_k2(eps: Sequence[Ep]) -> Tensor:
    return grpo(eps, kl=lambda e: 0.5 * (e.lp - e.ref) ** 2)


def deepseek_v32(delta: float) -> Book:
    """Failures that the policy has left fall silent; the KL is weighted by the differentiated ratio."""

    def term(e: Ep, x: float) -> Tensor:
        left = x < 0 and (e.mu - e.lp).mean().item() > delta
        return (0.0 if left else 1.0) * ppo_min(ratio(e), x) - 0.04 * ratio(e) * k3(e)

    return lambda eps: -means(each(term)(eps))


def whole_answer(eps: Sequence[Ep]) -> Tensor:
    """REINFORCE with the likelihood ratio of the whole answer against the sampler, clipped."""
    return -torch.stack([ppo_min((e.lp - e.mu).sum().exp(), e.R, 0.5, 0.5) for e in eps]).mean()


def entropy_bonus(eps: Sequence[Ep]) -> Tensor:
    return dr_grpo(eps) - 0.01 * sums([e.H for e in eps]) / L_MAX
