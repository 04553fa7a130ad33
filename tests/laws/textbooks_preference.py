"""Preference losses as their papers print them, for one minibatch of rows in float64. Nothing here is the package's.

A side is (log-probs of its tokens under the policy, the same under the reference). Every loss is a mean over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Side = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Row:
    """One row. Of a labelled completion `chosen` or `rejected` is None."""

    chosen: Side | None
    rejected: Side | None
    gold: Side | None = None
    margin: float = 0.0
    squares: tuple[Tensor, Tensor] | None = None
    """sum over the vocabulary of pi^2 at each token of the two sides."""
    chosen_is_own: bool = True
    """Whether the policy said the chosen one, and its opponent the other."""

    @property
    def both(self) -> tuple[Side, Side]:
        assert self.chosen is not None and self.rejected is not None
        return self.chosen, self.rejected


Textbook = Callable[[Sequence[Row]], Tensor]


def s(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def logs(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def ratio(side: Side) -> Tensor:
    """log pi(y) / ref(y)."""
    return side[0].sum() - side[1].sum()


def mean(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(terms)).mean()


def of_ratios(f: Callable[[Tensor, Tensor], Tensor]) -> Textbook:
    """A loss of the two log-ratios of each pair."""
    return lambda rows: mean([f(*(ratio(x) for x in row.both)) for row in rows])


dpo = of_ratios(lambda c, r: -logs(0.1 * (c - r)))
cdpo = of_ratios(lambda c, r: -0.9 * logs(0.1 * (c - r)) - 0.1 * logs(-0.1 * (c - r)))
robust = of_ratios(lambda c, r: (-0.9 * logs(0.1 * (c - r)) + 0.1 * logs(-0.1 * (c - r))) / 0.8)
ipo = of_ratios(lambda c, r: (c - r - 5) ** 2)
hinge = of_ratios(lambda c, r: torch.clamp(1 - 0.1 * (c - r), min=0))
nca = of_ratios(lambda c, r: -logs(0.1 * c) - 0.5 * logs(-0.1 * c) - 0.5 * logs(-0.1 * r))
bco_pair = of_ratios(lambda c, r: -logs(0.1 * c) - logs(-0.1 * r))
sppo = of_ratios(lambda c, r: (c - 5) ** 2 + (r + 5) ** 2)
apo_zero = of_ratios(lambda c, r: 1 - s(0.1 * c) + s(0.1 * r))
apo_down = of_ratios(lambda c, r: s(0.1 * c) + 1 - s(0.1 * (c - r)))


def _exo(c: Tensor, r: Tensor) -> Tensor:
    q = s(0.1 * (c - r))
    return q * (torch.log(q) - torch.log(torch.tensor(0.999, dtype=q.dtype))) + (1 - q) * (
        torch.log(1 - q) - torch.log(torch.tensor(0.001, dtype=q.dtype))
    )


def _discopop(c: Tensor, r: Tensor) -> Tensor:
    rho = 0.1 * (c - r)
    return (1 - s(rho / 0.05)) * torch.log(1 + torch.exp(-rho)) + s(rho / 0.05) * torch.exp(-rho)


exo, discopop = of_ratios(_exo), of_ratios(_discopop)


def divergent(f: Callable[[Tensor], Tensor]) -> Textbook:
    """f-DPO: -log sigmoid(beta f'(t_c) - beta f'(t_r)) with the derivative f' of the divergence's generator."""
    return of_ratios(lambda c, r: -logs(0.1 * f(torch.exp(c)) - 0.1 * f(torch.exp(r))))


forward_kl = divergent(lambda t: 1 - 1 / t)
jensen_shannon = divergent(lambda t: torch.log(2 * t / (1 + t)))
alpha_half = divergent(lambda t: (t**-0.5 - 1) / -0.5)


def odpo(rows: Sequence[Row]) -> Tensor:
    return mean([-logs(0.1 * (ratio(row.both[0]) - ratio(row.both[1])) - row.margin) for row in rows])


def average(side: Side) -> Tensor:
    return (side[0] - side[1]).mean()


def ipo_mean(rows: Sequence[Row]) -> Tensor:
    return mean([(average(row.both[0]) - average(row.both[1]) - 5) ** 2 for row in rows])


def dpo_norm(rows: Sequence[Row]) -> Tensor:
    return mean([-logs(5 * ratio(c) / len(c[0]) - 5 * ratio(r) / len(r[0])) for c, r in (x.both for x in rows)])


def ld_dpo(rows: Sequence[Row]) -> Tensor:
    def reduced(x: Tensor, shared: int) -> Tensor:
        return x[:shared].sum() + 0.5 * x[shared:].sum()

    out = list[Tensor]()
    for c, r in (row.both for row in rows):
        n = min(len(c[0]), len(r[0]))
        d = reduced(c[0], n) - reduced(c[1], n) - reduced(r[0], n) + reduced(r[1], n)
        out.append(-logs(0.1 * d))
    return mean(out)


def wpo(rows: Sequence[Row]) -> Tensor:
    out = list[Tensor]()
    for row in rows:
        c, r = row.both
        assert row.squares is not None
        weights = [torch.exp((x[0] - torch.log(q)).sum() / len(x[0])) for x, q in zip((c, r), row.squares, strict=True)]
        out.append((weights[0] * weights[1]).detach() * -logs(0.1 * (ratio(c) - ratio(r))))
    return mean(out)


def nll_of_tokens(sides: Sequence[Side | None]) -> Tensor:
    return -torch.cat([x[0] for x in sides if x is not None]).mean()


def slic_hf(rows: Sequence[Row]) -> Tensor:
    hinged = [torch.clamp(1 - c[0].sum() + r[0].sum(), min=0) for c, r in (x.both for x in rows)]
    return mean(hinged) + 0.1 * nll_of_tokens([x.chosen for x in rows])


def aot(rows: Sequence[Row]) -> Tensor:
    policy = torch.sort(torch.stack([c[0].sum() - r[0].sum() for c, r in (x.both for x in rows)])).values
    reference = torch.sort(torch.stack([c[1].sum() - r[1].sum() for c, r in (x.both for x in rows)])).values
    return mean([-logs(0.1 * x) for x in policy - reference])


def aot_unpaired(rows: Sequence[Row]) -> Tensor:
    chosen = torch.sort(torch.stack([ratio(x.both[0]) for x in rows])).values
    rejected = torch.sort(torch.stack([ratio(x.both[1]) for x in rows])).values
    return mean([-logs(0.1 * x) for x in chosen - rejected])


def labelled(f: Callable[[Tensor, bool], Tensor]) -> Textbook:
    """A loss of the log-ratio of each labelled completion."""

    def of(rows: Sequence[Row]) -> Tensor:
        return mean([f(ratio(x.chosen or x.both[1]), True) if x.chosen else _bad(f, x) for x in rows])

    return of


def _bad(f: Callable[[Tensor, bool], Tensor], row: Row) -> Tensor:
    assert row.rejected is not None
    return f(ratio(row.rejected), False)


def kto(z: float) -> Textbook:
    return labelled(lambda d, good: 1 - (s(0.1 * (d - z)) if good else s(0.1 * (z - d))))


apo_zero_unpaired = labelled(lambda d, good: 1 - s(0.1 * d) if good else s(0.1 * d))


def bco(rows: Sequence[Row]) -> Tensor:
    """With the first minibatch alone behind delta."""
    ratios = [ratio(x.chosen) if x.chosen else ratio(x.rejected) for x in rows if x.chosen or x.rejected]  # type: ignore[arg-type]
    delta = (0.1 * torch.stack(ratios)).mean().detach()
    return labelled(lambda d, good: -logs(0.1 * d - delta) if good else -logs(delta - 0.1 * d))(rows)


def cpo(rows: Sequence[Row]) -> Tensor:
    linked = [-logs(0.1 * (c[0].sum() - r[0].sum())) for c, r in (x.both for x in rows)]
    return mean(linked) + nll_of_tokens([x.chosen for x in rows])


def simpo(rows: Sequence[Row]) -> Tensor:
    return mean([-logs(2.5 * (c[0].mean() - r[0].mean()) - 1.375) for c, r in (x.both for x in rows)])


def cpo_simpo(rows: Sequence[Row]) -> Tensor:
    return simpo(rows) + nll_of_tokens([x.chosen for x in rows])


def orpo(rows: Sequence[Row]) -> Tensor:
    def log_odds(side: Side) -> Tensor:
        p = torch.exp(side[0].mean())
        return torch.log(p / (1 - p))

    linked = [-logs(log_odds(c) - log_odds(r)) for c, r in (x.both for x in rows)]
    return nll_of_tokens([x.chosen for x in rows]) + 0.1 * mean(linked)


def tpo(rows: Sequence[Row]) -> Tensor:
    linked = [-logs(0.01 * (c[0].sum() - r[0].sum())) for c, r in (x.both for x in rows)]
    return mean(linked) + nll_of_tokens([x.gold for x in rows])


def xpo(rows: Sequence[Row]) -> Tensor:
    said = [row.both[1 if row.chosen_is_own else 0] for row in rows]
    return dpo(rows) + 1e-5 * mean([x[0].sum() for x in said])


def nash_md(rows: Sequence[Row]) -> Tensor:
    out = list[Tensor]()
    for row in rows:
        own = row.both[0 if row.chosen_is_own else 1]
        preferred = row.margin if row.chosen_is_own else 1 - row.margin
        kl = ((own[0] - own[1]).detach() * own[0]).sum()
        out.append(0.1 * kl - (preferred - 0.5) * own[0].sum())
    return mean(out)


BOOKS: dict[str, Textbook] = {
    "dpo": dpo,
    "cdpo": cdpo,
    "robust_dpo": robust,
    "odpo": odpo,
    "dpo_norm": dpo_norm,
    "ld_dpo": ld_dpo,
    "wpo": wpo,
    "ipo": ipo,
    "ipo_mean": ipo_mean,
    "slic": hinge,
    "slic_hf": slic_hf,
    "rso": hinge,
    "exo": exo,
    "discopop": discopop,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "nca": nca,
    "sppo": sppo,
    "apo_zero": apo_zero,
    "apo_zero_unpaired": apo_zero_unpaired,
    "apo_down": apo_down,
    "bco_pair": bco_pair,
    "bco": bco,
    "kto": kto(0.5),
    "cpo": cpo,
    "simpo": simpo,
    "cpo_simpo": cpo_simpo,
    "orpo": orpo,
    "tpo": tpo,
    "oaif": dpo,
    "iterative_dpo": dpo,
    "xpo": xpo,
    "nash_md": nash_md,
}
"""Every row of the ladder. kto's z is 0.5."""
