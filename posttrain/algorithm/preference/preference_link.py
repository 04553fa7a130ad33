"""The mathematics of preference pieces: statistics of completions, divergences, links, margins, label noise. Each is a
type in `ladder.pieces.link` or `ladder.pieces.preference_pieces` and a case here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algorithm.register import missing
from posttrain.ladder.pieces import link as links
from posttrain.ladder.pieces import preference_pieces as pieces
from posttrain.ladder.pieces.link import Link, SidedLink


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
def statistic(kind: pieces.Statistic, of: Completions) -> Tensor:
    """[E]: the log-probs of each completion as one number."""
    match kind:
        case pieces.Total():
            return of.sum(of.l_M)
        case pieces.Average():
            return of.mean(of.l_M)
        case pieces.Desensitized():
            # Tokens beyond the shorter length would decide by length alone, so they count with the factor alpha.
            tail_M = of.position_M >= of.shared_E[of.sequence_M]
            return of.sum(torch.where(tail_M, kind.alpha * of.l_M, of.l_M))
        case pieces.LogOdds():
            mean_E = of.mean(of.l_M)
            # log odds = log p - log(1 - p) with log p = mean of l.
            return mean_E - log1mexp(mean_E)
        case _:
            raise missing(kind, statistic)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact on both sides of -log 2. An x nearer to 0 than one rounding has no gradient."""
    # At x = 0 the log would be of 0.
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -math.log(2)
    # For x near 0 expm1 keeps the digits, far from 0 log1p does. Each reads -1 where the other one is taken: `where`
    # multiplies its gradient by 0, and 0 * inf would be NaN.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, torch.full_like(x, -1.0)))),
        torch.log1p(-torch.exp(torch.where(near, torch.full_like(x, -1.0), x))),
    )


LARGEST_EXPONENT = 80.0
"""exp is taken of at most this, so that it is finite in float32."""


@singledispatch
def divergence(kind: pieces.FDivergence, log_ratio_E: Tensor) -> Tensor:
    """[E]: f'(t) for the log t of each completion."""
    # Constants cancel in a difference of two scores, so they are left out.
    match kind:
        case pieces.ReverseKL():
            # f(t) = t log t, f'(t) = log t + 1.
            return log_ratio_E
        case pieces.ForwardKL():
            # f(t) = -log t, f'(t) = -1 / t.
            return 1 - torch.exp((-log_ratio_E).clamp(max=LARGEST_EXPONENT))
        case pieces.JensenShannon():
            # log(2 t / (1 + t)) = log 2 + log sigmoid(log t).
            return math.log(2) + logsigmoid(log_ratio_E)
        case pieces.AlphaDivergence():
            power = kind.alpha - 1
            # expm1 goes to power * log t for a small power: alpha = 1 is approached without cancellation.
            return torch.expm1((power * log_ratio_E).clamp(max=LARGEST_EXPONENT)) / power
        case _:
            raise missing(kind, divergence)


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
    match kind:
        case links.LogSigmoid():
            return -logsigmoid(of.x_U)
        case links.Hinge():
            return torch.relu(kind.delta - of.x_U)
        case links.Square():
            # x holds beta already: (x - 1/2) / beta = (h_c - h_r) - 1 / (2 beta).
            return ((of.x_U - 0.5) / of.beta) ** 2
        case links.Exact():
            # log q and log(1 - q) by logsigmoid: q rounds to 0 or 1 for a large margin, and its log would be infinite.
            up, down = logsigmoid(of.x_U), logsigmoid(-of.x_U)
            return up.exp() * (up - math.log1p(-kind.rate)) + down.exp() * (down - math.log(kind.rate))
        case links.Discovered():
            # m is differentiated too, as in the paper.
            m = torch.sigmoid(of.x_U / kind.tau)
            return -(1 - m) * logsigmoid(of.x_U) + m * torch.exp((-of.x_U).clamp(max=LARGEST_EXPONENT))
        case links.AnchoredDown():
            # 1 - sigmoid(u_c - u_r) = sigmoid(u_r - u_c), without a difference from 1.
            return torch.sigmoid(of.chosen_U) + torch.sigmoid(of.rejected_U - of.chosen_U)
        case SidedLink():
            # A pair is two labels: the chosen completion good, the rejected one bad.
            good = torch.ones_like(of.x_U, dtype=torch.bool)
            return side(kind, of.chosen_U, good, of.beta) + side(kind, of.rejected_U, ~good, of.beta)
        case _:
            raise missing(kind, link)


@singledispatch
def side(kind: Link, u_E: Tensor, good: Tensor, beta: float) -> Tensor:
    """[E]: the loss of each completion alone, for links of sides. `good` is bool [E]."""
    match kind:
        case links.NoiseContrast():
            # The first term is the chosen side's alone, the second is both sides', with one half each.
            return -torch.where(good, logsigmoid(u_E), torch.zeros_like(u_E)) - 0.5 * logsigmoid(-u_E)
        case links.Binary():
            return -logsigmoid(_signed(u_E, good))
        case links.SelfPlay():
            return ((_signed(u_E, good) - 0.5) / beta) ** 2
        case links.AnchoredZero() | links.Prospect():
            # 1 - sigmoid(z) = sigmoid(-z): no gradient is lost where sigmoid(z) rounds to 1.
            return torch.sigmoid(-_signed(u_E, good))
        case _:
            raise missing(kind, side)


def _signed(u_E: Tensor, good: Tensor) -> Tensor:
    """u of a good completion, -u of a bad one."""
    return torch.where(good, u_E, -u_E)


@singledispatch
def owed(kind: pieces.MarginTerm, margin_U: Tensor | None, beta: float) -> Tensor | float:
    """[U]: by how much the chosen completion must lead, in units of x. `margin_U`: the data's, if it is read."""
    match kind:
        case pieces.FixedMargin():
            return kind.gamma
        case pieces.RatioMargin():
            return kind.ratio * beta
        case pieces.DataMargin():
            assert margin_U is not None  # it says that it reads the margin, so the loss gives it
            return kind.coef * margin_U
        case _:
            raise missing(kind, owed)


@singledispatch
def noisy(noise: pieces.LabelNoise | None, kind: Link, of: Margins) -> Tensor:
    """[U]: the loss of each pair under wrong labels; without noise, the link."""
    match noise:
        case None:
            return link(kind, of)
        case pieces.Conservative():
            # The expected loss if the label is wrong with this probability. Its minimum is at a finite margin.
            return (1 - noise.rate) * link(kind, of) + noise.rate * link(kind, of.swapped())
        case pieces.Robust():
            # With e the rate: (1 - e) [(1 - e) f(x) - e f(-x)] + e [(1 - e) f(-x) - e f(x)] = (1 - 2 e) f(x).
            # So the mean over wrong labels, divided by 1 - 2 e, is the loss of the right ones.
            right = (1 - noise.rate) * link(kind, of) - noise.rate * link(kind, of.swapped())
            return right / (1 - 2 * noise.rate)
        case _:
            raise missing(noise, noisy)
