"""The mathematics of preference pieces: statistics of completions, divergences, links, margins, label noise. Each is a
type in `ladder.pieces.link` or `ladder.pieces.preference_pieces` and a function here, registered for that type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithm.register import missing
from posttrain.ladder.pieces.link import (
    AnchoredDown,
    AnchoredZero,
    Binary,
    Discovered,
    Exact,
    Hinge,
    Link,
    LogSigmoid,
    NoiseContrast,
    Prospect,
    SelfPlay,
    SidedLink,
    Square,
)
from posttrain.ladder.pieces.preference_pieces import (
    AlphaDivergence,
    Average,
    Conservative,
    DataMargin,
    Desensitized,
    FDivergence,
    FixedMargin,
    ForwardKL,
    JensenShannon,
    LabelNoise,
    LogOdds,
    MarginTerm,
    RatioMargin,
    ReverseKL,
    Robust,
    Statistic,
    Total,
)

# --- the score of a completion ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Completions:
    """Tokens of E completions: `l_M` is log pi, less log ref where there is a reference."""

    l_M: Tensor
    sequence_M: Tensor
    """int64: completion of each token."""
    length_E: Tensor
    """Tokens of each completion."""
    shared_E: Tensor
    """Tokens of the shorter completion of its unit."""
    position_M: Tensor
    """int64: position of each token in its completion, from 0."""

    def sum(self, x_M: Tensor) -> Tensor:
        """[M] -> [E]: the sum over each completion."""
        return x_M.new_zeros(len(self.length_E)).index_add(0, self.sequence_M, x_M)

    def mean(self, x_M: Tensor) -> Tensor:
        """[M] -> [E]: the mean over each completion."""
        return self.sum(x_M) / self.length_E


@singledispatch
def statistic(kind: Statistic, of: Completions) -> Tensor:
    """[E]: the log-probs of each completion as one number."""
    raise missing(kind, statistic)


@statistic.register
def _(kind: Total, of: Completions) -> Tensor:
    return of.sum(of.l_M)


@statistic.register
def _(kind: Average, of: Completions) -> Tensor:
    return of.mean(of.l_M)


@statistic.register
def _(kind: Desensitized, of: Completions) -> Tensor:
    # Up to the shorter length both sides have the same number of terms. The tokens after
    # it would decide by length alone, so they count with the factor alpha.
    tail_M = of.position_M >= of.shared_E[of.sequence_M]
    return of.sum(torch.where(tail_M, kind.alpha * of.l_M, of.l_M))


@statistic.register
def _(kind: LogOdds, of: Completions) -> Tensor:
    mean_E = of.mean(of.l_M)
    # log odds = log p - log(1 - p) with log p = mean of l.
    return mean_E - log1mexp(mean_E)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact on both sides of -log 2. An x nearer to 0 than one rounding has no gradient."""
    # At x = 0 the log would be of 0.
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -math.log(2)
    return torch.where(
        near,
        # For x near 0 expm1 keeps the digits of 1 - e^x; far from 0 log1p keeps those of the logarithm. Each form
        # reads -1 where the other one is taken: `where` multiplies its gradient by 0, and 0 * inf would be NaN.
        torch.log(-torch.expm1(torch.where(near, x, torch.full_like(x, -1.0)))),
        torch.log1p(-torch.exp(torch.where(near, torch.full_like(x, -1.0), x))),
    )


LARGEST_EXPONENT = 80.0
"""exp is taken of at most this, so that it is finite in float32."""


@singledispatch
def divergence(kind: FDivergence, log_ratio_E: Tensor) -> Tensor:
    """[E]: f'(t) for the log t of each completion."""
    raise missing(kind, divergence)


@divergence.register
def _(kind: ReverseKL, log_ratio_E: Tensor) -> Tensor:
    # f(t) = t log t, f'(t) = log t + 1. Constants cancel in a
    # difference of two scores, so they are left out, here and below.
    return log_ratio_E


@divergence.register
def _(kind: ForwardKL, log_ratio_E: Tensor) -> Tensor:
    # f(t) = -log t, f'(t) = -1 / t.
    return 1 - torch.exp((-log_ratio_E).clamp(max=LARGEST_EXPONENT))


@divergence.register
def _(kind: JensenShannon, log_ratio_E: Tensor) -> Tensor:
    # log(2 t / (1 + t)) = log 2 + log sigmoid(log t).
    return math.log(2) + logsigmoid(log_ratio_E)


@divergence.register
def _(kind: AlphaDivergence, log_ratio_E: Tensor) -> Tensor:
    power = kind.alpha - 1
    # expm1 goes to power * log t for a small power, so the limit at alpha = 1 is approached without cancellation.
    return torch.expm1((power * log_ratio_E).clamp(max=LARGEST_EXPONENT)) / power


# --- the link ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Margins:
    """The values that a link reads of U pairs: `x_U`, and the rewards u of both sides; `beta` is the algorithm's."""

    x_U: Tensor
    chosen_U: Tensor
    rejected_U: Tensor
    beta: float

    def swapped(self) -> Margins:
        """The pairs as if the other side had been chosen."""
        return replace(self, x_U=-self.x_U, chosen_U=self.rejected_U, rejected_U=self.chosen_U)


@singledispatch
def link(kind: Link, of: Margins) -> Tensor:
    """[U]: the loss of each pair."""
    raise missing(kind, link)


@singledispatch
def side(kind: Link, u_E: Tensor, good: Tensor, beta: float) -> Tensor:
    """[E]: the loss of each completion alone, for links of sides. `good` is bool [E]."""
    raise missing(kind, side)


@link.register
def _(kind: LogSigmoid, of: Margins) -> Tensor:
    return -logsigmoid(of.x_U)


@link.register
def _(kind: Hinge, of: Margins) -> Tensor:
    return torch.relu(kind.delta - of.x_U)


@link.register
def _(kind: Square, of: Margins) -> Tensor:
    # x holds beta already: (x - 1/2) / beta = (h_c - h_r) - 1 / (2 beta).
    return ((of.x_U - 0.5) / of.beta) ** 2


@link.register
def _(kind: Exact, of: Margins) -> Tensor:
    # log q and log(1 - q) by logsigmoid: q itself rounds to 0 or 1 for a large margin, and its log would be infinite.
    up, down = logsigmoid(of.x_U), logsigmoid(-of.x_U)
    return up.exp() * (up - math.log1p(-kind.rate)) + down.exp() * (down - math.log(kind.rate))


@link.register
def _(kind: Discovered, of: Margins) -> Tensor:
    # m is differentiated too, as in the paper.
    m = torch.sigmoid(of.x_U / kind.tau)
    return -(1 - m) * logsigmoid(of.x_U) + m * torch.exp((-of.x_U).clamp(max=LARGEST_EXPONENT))


@link.register
def _(kind: AnchoredDown, of: Margins) -> Tensor:
    # 1 - sigmoid(u_c - u_r) = sigmoid(u_r - u_c), without a difference from 1.
    return torch.sigmoid(of.chosen_U) + torch.sigmoid(of.rejected_U - of.chosen_U)


@link.register
def _(kind: SidedLink, of: Margins) -> Tensor:
    # A pair is two labels: the chosen completion good, the rejected one bad.
    good = torch.ones_like(of.x_U, dtype=torch.bool)
    return side(kind, of.chosen_U, good, of.beta) + side(kind, of.rejected_U, ~good, of.beta)


def _signed(u_E: Tensor, good: Tensor) -> Tensor:
    """u of a good completion, -u of a bad one."""
    return torch.where(good, u_E, -u_E)


@side.register
def _(kind: NoiseContrast, u_E: Tensor, good: Tensor, beta: float) -> Tensor:
    # The first term is the chosen side's alone, the second is both sides', with one half each.
    return -torch.where(good, logsigmoid(u_E), torch.zeros_like(u_E)) - 0.5 * logsigmoid(-u_E)


@side.register
def _(kind: Binary, u_E: Tensor, good: Tensor, beta: float) -> Tensor:
    return -logsigmoid(_signed(u_E, good))


@side.register
def _(kind: SelfPlay, u_E: Tensor, good: Tensor, beta: float) -> Tensor:
    return ((_signed(u_E, good) - 0.5) / beta) ** 2


@side.register
def _(kind: AnchoredZero, u_E: Tensor, good: Tensor, beta: float) -> Tensor:
    # 1 - sigmoid(z) = sigmoid(-z): no gradient is lost where sigmoid(z) rounds to 1.
    return torch.sigmoid(-_signed(u_E, good))


@side.register
def _(kind: Prospect, u_E: Tensor, good: Tensor, beta: float) -> Tensor:
    return torch.sigmoid(-_signed(u_E, good))


# --- the margin -------------------------------------------------------------------------------------------------------


@singledispatch
def owed(kind: MarginTerm, margin_U: Tensor | None, beta: float) -> Tensor | float:
    """[U]: by how much the chosen completion must lead, in units of x. `margin_U` is the data's margin of each pair,
    where the piece reads it (`reads` names "margin")."""
    raise missing(kind, owed)


@owed.register
def _(kind: FixedMargin, margin_U: Tensor | None, beta: float) -> Tensor | float:
    return kind.gamma


@owed.register
def _(kind: RatioMargin, margin_U: Tensor | None, beta: float) -> Tensor | float:
    return kind.ratio * beta


@owed.register
def _(kind: DataMargin, margin_U: Tensor | None, beta: float) -> Tensor | float:
    assert margin_U is not None  # `DataMargin` says that it reads the margin, so the loss gives it.
    return kind.coef * margin_U


# --- label noise ------------------------------------------------------------------------------------------------------


@singledispatch
def noisy(noise: LabelNoise | None, kind: Link, of: Margins) -> Tensor:
    """[U]: the loss of each pair under wrong labels; without noise, the link."""
    if noise is None:
        return link(kind, of)
    raise missing(noise, noisy)


@noisy.register
def _(noise: Conservative, kind: Link, of: Margins) -> Tensor:
    # The expected loss if the label is wrong with this probability. Its minimum is at a finite margin.
    return (1 - noise.rate) * link(kind, of) + noise.rate * link(kind, of.swapped())


@noisy.register
def _(noise: Robust, kind: Link, of: Margins) -> Tensor:
    # With e the rate: (1 - e) [(1 - e) f(x) - e f(-x)] + e [(1 - e) f(-x) - e f(x)] = (1 - 2 e) f(x).
    # So the mean over wrong labels, divided by 1 - 2 e, is the loss of the right ones.
    right = (1 - noise.rate) * link(kind, of) - noise.rate * link(kind, of.swapped())
    return right / (1 - 2 * noise.rate)
