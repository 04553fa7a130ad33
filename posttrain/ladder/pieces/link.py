"""Links of preference losses: the function of a pair's margin, or of the reward of each side. Each is a type that owns
its numbers; its mathematics is in `algorithm.preference.preference_link`.

    h     score of a completion: its log-probs in one number, against the reference where there is one
    x     beta h_chosen - beta h_rejected - margin            what a link of differences reads
    u     beta h - shift, of one completion                   what a link of sides reads

A link of sides also learns from single completions with a label; a link of differences needs pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from posttrain.ladder.pieces.piece import positive
from posttrain.system.errors import ConfigError
from posttrain.system.subclass_registry import Open

if TYPE_CHECKING:
    from posttrain.ladder.preference_algorithm import PreferenceAlgorithm


class PreferencePiece(Open, ABC):
    """One form of one choice of a preference algorithm. The defaults here mean that it needs nothing special."""

    absent: ClassVar[bool] = False
    """Whether this is the record of a piece whose class this program does not have."""

    @abstractmethod
    def words(self) -> str:
        """Its formula, one line."""

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        """Yields the reasons why the piece means nothing in `a`, with what to change."""
        yield from ()

    def reads(self) -> tuple[str, ...]:
        """The streams that must be scored for it before the loss."""
        return ()


def below_half(path: str, value: float) -> None:
    """ConfigError unless the value lies between 0 and 0.5."""
    if not 0 < value < 0.5:
        raise ConfigError(
            f"{path}={value}: must lie between 0 and 0.5. It is the share of swapped labels, and at one half the labels"
            " say nothing"
        )


class Link(PreferencePiece, begin=True):
    """The function by which a margin, or the reward of a side, becomes a loss."""

    of: ClassVar[Literal["difference", "sides", "both", "own"]] = "difference"
    """What it reads. difference: x alone. sides: u of each completion alone. both: the two of a pair. own: what the
    policy itself said."""

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        # In a difference of two rewards of one prompt everything cancels that depends on the prompt alone. Other links
        # have no such difference, so choices that rely on it are refused.
        if self.of == "difference":
            return
        name = type(self).__name__.lower()
        if a.noise is not None:
            yield (
                f"noise mixes a margin with its swap, and link={name} reads no margin. Set noise=none, or"
                " link=logsigmoid"
            )
        if a.margin is not None:
            yield f"margin is subtracted from a difference, and link={name} reads none. Set margin=none"
        # By name, because `preference_pieces` imports this file.
        if type(a.divergence).__name__ != "ReverseKL":
            yield (
                f"divergence={type(a.divergence).__name__.lower()} gives a reward up to a constant of the prompt, which"
                f" only a difference cancels, and link={name} reads none. Set divergence=reversekl, or link=logsigmoid"
            )


class SidedLink(Link, begin=False):
    """A link of the reward of each completion alone, which needs no pair."""

    of: ClassVar[Literal["difference", "sides", "both", "own"]] = "sides"

    def words(self) -> str:
        return "a link of sides"


# The base class of some links is no link that can be chosen itself.
SidedLink.withdraw()


@dataclass(frozen=True, kw_only=True)
class LogSigmoid(Link):
    """-log sigmoid(x): the likelihood of the preference under Bradley and Terry (DPO, B02)."""

    def words(self) -> str:
        return "-log sigmoid(x)"


@dataclass(frozen=True, kw_only=True)
class Hinge(Link):
    """max(0, delta - x): nothing is learned from a pair whose margin exceeds delta (SLiC, B07)."""

    delta: float = 1.0
    """The margin beyond which a pair has no gradient."""

    def __post_init__(self) -> None:
        positive("link.delta", self.delta)

    def words(self) -> str:
        return f"max(0, {self.delta:g} - x)"


@dataclass(frozen=True, kw_only=True)
class Square(Link):
    """(x / beta - 1 / (2 beta))^2: the margin is drawn to 1 / (2 beta) and not beyond (IPO, B03)."""

    def words(self) -> str:
        return "(x / beta - 1 / (2 beta))^2"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        yield from super().refuses(a)
        if a.margin is not None:
            yield "link=square draws the margin to 1 / (2 beta), so a second target means nothing. Set margin=none"


@dataclass(frozen=True, kw_only=True)
class Exact(Link):
    """KL(q || (1 - rate, rate)) with q = sigmoid(x): the reverse KL to the judgement (EXO, B08)."""

    rate: float = 1e-3
    """The probability that the label is wrong."""

    def __post_init__(self) -> None:
        below_half("link.rate", self.rate)

    def words(self) -> str:
        return f"q log(q / {1 - self.rate:g}) + (1 - q) log((1 - q) / {self.rate:g}), q = sigmoid(x)"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        yield from super().refuses(a)
        if a.noise is not None:
            yield "link=exact has the share of wrong labels as link.rate; noise would count it twice. Set noise=none"


@dataclass(frozen=True, kw_only=True)
class Discovered(Link):
    """-log sigmoid(x) and exp(-x), mixed by m = sigmoid(x / tau) (DiscoPOP, B08)."""

    tau: float = 0.05
    """Temperature of the mixture."""

    def __post_init__(self) -> None:
        positive("link.tau", self.tau)

    def words(self) -> str:
        return f"-(1 - m) log sigmoid(x) + m exp(-x), m = sigmoid(x / {self.tau:g})"


@dataclass(frozen=True, kw_only=True)
class NoiseContrast(SidedLink):
    """-log sigmoid(u) of the chosen one, and -log sigmoid(-u) / 2 of both (NCA, B08)."""

    def words(self) -> str:
        return "-log sigmoid(u_c) - log sigmoid(-u_c) / 2 - log sigmoid(-u_r) / 2"


@dataclass(frozen=True, kw_only=True)
class Binary(SidedLink):
    """-log sigmoid(+-u): a classifier of good and bad whose logit is the reward (BCO, B08)."""

    def words(self) -> str:
        return "-log sigmoid(u) where good, -log sigmoid(-u) where bad"


@dataclass(frozen=True, kw_only=True)
class SelfPlay(SidedLink):
    """(u / beta -+ 1 / (2 beta))^2: each reward is drawn to its own target (SPPO with hard labels, B08)."""

    def words(self) -> str:
        return "(u / beta - 1 / (2 beta))^2 where good, (u / beta + 1 / (2 beta))^2 where bad"


@dataclass(frozen=True, kw_only=True)
class AnchoredZero(SidedLink):
    """1 - sigmoid(+-u): the good ones become more likely than under the reference, the bad ones less (APO zero)."""

    def words(self) -> str:
        return "1 - sigmoid(u) where good, sigmoid(u) where bad"


@dataclass(frozen=True, kw_only=True)
class AnchoredDown(Link):
    """sigmoid(u_c) + 1 - sigmoid(u_c - u_r): both become less likely, the rejected one more so (APO down)."""

    of: ClassVar[Literal["difference", "sides", "both", "own"]] = "both"

    def words(self) -> str:
        return "sigmoid(u_c) + 1 - sigmoid(u_c - u_r)"


@dataclass(frozen=True, kw_only=True)
class Prospect(SidedLink):
    """1 - sigmoid(+-u): the value of prospect theory against the point that `shift` gives (KTO, B04)."""

    def words(self) -> str:
        return "1 - sigmoid(u) where good, 1 - sigmoid(-u) where bad"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        yield from super().refuses(a)
        if a.shift is None:
            yield (
                "link=prospect compares with a point of reference, and shift=none has none: that is anchoredzero. Set"
                " shift=mismatched, or link=anchoredzero"
            )


@dataclass(frozen=True, kw_only=True)
class Nash(Link):
    """-(P - 1/2) log pi(y) + beta sum_t sg[log pi_t - log ref_t] log pi_t, of the policy's own y, where P is the
    probability that y is preferred (Nash-MD, B09)."""

    of: ClassVar[Literal["difference", "sides", "both", "own"]] = "own"

    def words(self) -> str:
        return "-(P - 1/2) log pi(y) + beta sum_t sg[log pi_t - log ref_t] log pi_t, y the policy's own"

    def refuses(self, a: PreferenceAlgorithm) -> Iterator[str]:
        yield from super().refuses(a)
        if a.against == "nothing":
            yield "link=nash pays a KL to the reference, and against=nothing has none. Set against=reference"
        # With an opponent for completion 0 too (`RejectionSampled`) none is the policy's own.
        if a.draw is None or 0 in a.draw.opposed():
            yield "link=nash learns from what the policy itself said. Set draw=againstmixture"
        if a.weights is not None:
            yield "weights=wpo weighs pairs, and link=nash learns from one side alone. Set weights=none"
        # By name, as the divergence of `Link`.
        if type(a.statistic).__name__ != "Total":
            yield "link=nash reads the log-prob of the whole completion. Set statistic=total"

    def reads(self) -> tuple[str, ...]:
        return ("reference", "margin")
