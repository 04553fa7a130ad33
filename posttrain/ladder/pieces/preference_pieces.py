"""Pieces of preference algorithms beside the link: the statistic of a completion, the divergence, label noise, margins,
and what is added. The mathematics is in `algorithm.preference.preference_link` and
`algorithm.preference.preference_loss`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from posttrain.ladder.pieces.link import PreferencePiece, below_half
from posttrain.ladder.pieces.pair_source import AgainstReference
from posttrain.ladder.pieces.piece import positive, share, times
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.ladder.preference_algorithm import PreferenceAlgorithm


class Statistic(PreferencePiece, begin=True):
    """The statistic by which the tokens of a completion become one number. l is log pi - log ref of a token, or log pi
    without a reference."""


@dataclass(frozen=True, kw_only=True)
class Total(Statistic):
    """The sum over the tokens: the log-prob of the completion."""

    def words(self) -> str:
        return "sum of l"


@dataclass(frozen=True, kw_only=True)
class Average(Statistic):
    """The mean over the tokens."""

    def words(self) -> str:
        return "mean of l"


@dataclass(frozen=True, kw_only=True)
class Desensitized(Statistic):
    """The sum in which tokens beyond the length of the shorter side count alpha (LD-DPO, B02)."""

    alpha: float = 0.5
    """Weight of a token beyond the length of the other side. 1: the sum; 0: those tokens do not count."""

    def __post_init__(self) -> None:
        share("statistic.alpha", self.alpha)
        # Two names for one algorithm would make equal runs look different in a comparison.
        if self.alpha == 1:
            raise ConfigError("statistic.alpha=1.0: every token counts the same, which is statistic=total. Say that")

    def words(self) -> str:
        return f"sum of l, {self.alpha:g} l beyond the length of the shorter side"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        # The tail is the part that is longer than the other side, so it needs a pair.
        if a.rows == "label":
            yield "statistic=desensitized compares two lengths, and rows=label has one completion. Set statistic=total"


@dataclass(frozen=True, kw_only=True)
class LogOdds(Statistic):
    """log(p / (1 - p)) with p = exp(mean of l) (ORPO, B06)."""

    def words(self) -> str:
        return "log(p / (1 - p)), p = exp(mean of l)"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        if a.against == "reference":
            yield (
                "statistic=logodds reads p as a probability, and a ratio to a reference is none. Set against=nothing,"
                " or statistic=average"
            )


class FDivergence(PreferencePiece, begin=True):
    """The divergence that keeps the policy near the reference: h = f'(t), t = exp(sum of l) (2309.16240)."""

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        name = type(self).__name__.lower()
        if a.against == "nothing":
            yield f"divergence={name} is one to the reference, and against=nothing has none. Set divergence=reversekl"
        # f' is a function of the ratio of whole completions. The mean of log-ratios is not the log of that ratio.
        if not isinstance(a.statistic, Total):
            yield (
                f"divergence={name} reads the ratio of whole completions. Set statistic=total, or divergence=reversekl"
            )
        if a.match is not None:
            yield f"match compares log-ratios, not those of divergence={name}. Set divergence=reversekl, or match=none"


@dataclass(frozen=True, kw_only=True)
class ReverseKL(FDivergence):
    """h = log t: KL(pi || ref), as in DPO."""

    def words(self) -> str:
        return "h is the statistic"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        # h is any statistic, also one of log-probs alone. So the refusals of `FDivergence` are not taken over.
        yield from ()


@dataclass(frozen=True, kw_only=True)
class ForwardKL(FDivergence):
    """h = 1 - 1 / t: KL(ref || pi). It is bounded above, so a chosen completion is not pushed without end."""

    def words(self) -> str:
        return "h = 1 - exp(-sum of l)"


@dataclass(frozen=True, kw_only=True)
class JensenShannon(FDivergence):
    """h = log(2 t / (1 + t)): the Jensen-Shannon divergence."""

    def words(self) -> str:
        return "h = log 2 + log sigmoid(sum of l)"


@dataclass(frozen=True, kw_only=True)
class AlphaDivergence(FDivergence):
    """h = (t^(alpha - 1) - 1) / (alpha - 1); alpha = 1 would be the reverse KL, and 0 the forward one."""

    alpha: float = 0.5
    """Which divergence of the family."""

    def __post_init__(self) -> None:
        if self.alpha == 1:
            raise ConfigError("divergence.alpha=1.0: that limit is divergence=reversekl. Say that")

    def words(self) -> str:
        return f"h = (exp({self.alpha - 1:g} sum of l) - 1) / {self.alpha - 1:g}"


class LabelNoise(PreferencePiece, begin=True):
    """The correction for pairs whose sides were swapped by whoever judged them."""


@dataclass(frozen=True, kw_only=True)
class Conservative(LabelNoise):
    """(1 - rate) f(x) + rate f(-x): the loss under labels that are wrong with probability `rate` (cDPO, B02)."""

    rate: float = 0.1
    """The share of wrong labels."""

    def __post_init__(self) -> None:
        below_half("noise.rate", self.rate)

    def words(self) -> str:
        return f"{1 - self.rate:g} f(x) + {self.rate:g} f(-x)"


@dataclass(frozen=True, kw_only=True)
class Robust(LabelNoise):
    """((1 - rate) f(x) - rate f(-x)) / (1 - 2 rate): in expectation over wrong labels the loss of the right ones
    (robust DPO, B02)."""

    rate: float = 0.1
    """The share of wrong labels."""

    def __post_init__(self) -> None:
        below_half("noise.rate", self.rate)

    def words(self) -> str:
        return f"({1 - self.rate:g} f(x) - {self.rate:g} f(-x)) / {1 - 2 * self.rate:g}"


class MarginTerm(PreferencePiece, begin=True):
    """The amount by which the chosen completion must be ahead, subtracted after beta."""

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        if a.match is not None:
            yield "match=... compares sorted values, which belong to no pair's margin. Set margin=none, or match=none"


@dataclass(frozen=True, kw_only=True)
class FixedMargin(MarginTerm):
    """gamma, whatever beta is. It is TRL's `simpo_gamma` and the gamma of the paper's formula."""

    gamma: float = 1.375
    """The margin, in units of beta h."""

    def __post_init__(self) -> None:
        positive("margin.gamma", self.gamma, "margin=none")

    def words(self) -> str:
        return f"{self.gamma:g}"


@dataclass(frozen=True, kw_only=True)
class RatioMargin(MarginTerm):
    """ratio * beta: the margin as `gamma_beta_ratio` gives it."""

    ratio: float = 0.55
    """The margin, in units of h."""

    def __post_init__(self) -> None:
        positive("margin.ratio", self.ratio, "margin=none")

    def words(self) -> str:
        return f"{self.ratio:g} beta"


@dataclass(frozen=True, kw_only=True)
class DataMargin(MarginTerm):
    """coef times the margin that the data gives with each pair (2402.10571)."""

    coef: float = 1.0
    """Factor of the data's margin."""

    def __post_init__(self) -> None:
        positive("margin.coef", self.coef, "margin=none")

    def words(self) -> str:
        return f"{times(self.coef)}the margin of the row"

    def reads(self) -> tuple[str, ...]:
        return ("margin",)


class Added(PreferencePiece, begin=True):
    """A further term of the loss. Terms of likelihood are means over all tokens of the minibatch, so that a split
    changes nothing."""

    of: ClassVar[Literal["chosen", "gold", "opponent"]] = "chosen"
    """The completion whose tokens it reads."""


@dataclass(frozen=True, kw_only=True)
class ChosenNLL(Added):
    """coef * the negative log-likelihood of the chosen completions."""

    coef: float = 1.0
    """Its weight."""
    over: Literal["tokens", "sequences"] = "tokens"
    """tokens: a mean over all chosen tokens of the minibatch. sequences: a mean over completions of their sums."""

    def __post_init__(self) -> None:
        positive("add.chosennll.coef", self.coef, "add=none")

    def words(self) -> str:
        mean_words = "mean of -log pi over the chosen tokens" if self.over == "tokens" else "mean of -log pi(chosen)"
        return times(self.coef) + mean_words


@dataclass(frozen=True, kw_only=True)
class GoldNLL(Added):
    """coef * the negative log-likelihood of a gold completion beside the pair (TPO)."""

    of: ClassVar[Literal["chosen", "gold", "opponent"]] = "gold"

    coef: float = 1.0
    """Its weight."""

    def __post_init__(self) -> None:
        positive("add.goldnll.coef", self.coef, "add=none")

    def words(self) -> str:
        return f"{times(self.coef)}mean of -log pi over the gold tokens"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        if a.rows != "triple":
            yield f"add=goldnll imitates a gold completion, and rows={a.rows} has none. Set rows=triple, or chosennll"


@dataclass(frozen=True, kw_only=True)
class Optimism(Added):
    """coef * log pi of what the reference said, so that the policy leaves what the reference does (XPO, B09)."""

    of: ClassVar[Literal["chosen", "gold", "opponent"]] = "opponent"

    coef: float = 1e-5
    """Its weight."""

    def __post_init__(self) -> None:
        positive("add.optimism.coef", self.coef, "add=none")

    def words(self) -> str:
        return f"{times(self.coef)}log pi of what the reference said"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        if not isinstance(a.draw, AgainstReference):
            yield "add=optimism reads completions of the reference. Set draw=againstreference"
