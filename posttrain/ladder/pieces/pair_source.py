"""The sources of the pairs of a preference algorithm. `stages.preference.sampled_pairs` makes the pairs."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.ladder.pieces.link import PreferencePiece
from posttrain.ladder.pieces.piece import positive, share
from posttrain.system.errors import ConfigError


class PairSource(PreferencePiece, begin=True):
    """The way in which pairs are drawn where no judgements are given: a reward or a judge says which completion is
    better."""

    def samples(self) -> int:
        """Completions that are drawn for a prompt."""
        return 2

    def opponent(self) -> float | None:
        """The share of the reference in what draws the completions of `opposed`; None where the policy says all."""
        return None

    def opposed(self) -> range:
        """Returns the indices of a prompt's completions that are not the policy's: the second, with an opponent."""
        return range(0) if self.opponent() is None else range(1, 2)

    def pairs(self) -> int:
        """The most pairs that a prompt gives."""
        return 1

    def reads(self) -> tuple[str, ...]:
        return () if self.opponent() is None else ("reference",)


@dataclass(frozen=True, kw_only=True)
class TwoSamples(PairSource):
    """Two completions of the policy; the better one is chosen (OAIF, B09)."""

    def words(self) -> str:
        return "two completions of the policy, the better one chosen"


@dataclass(frozen=True, kw_only=True)
class BestWorst(PairSource):
    """The best and the worst of several completions of the policy (iterative DPO, B09)."""

    of: int = 8
    """Completions drawn for a prompt."""

    def __post_init__(self) -> None:
        if self.of < 2:
            raise ConfigError(f"draw.of={self.of}: a best and a worst are two completions at least")

    def words(self) -> str:
        return f"the best and the worst of {self.of} completions of the policy"

    def samples(self) -> int:
        return self.of


@dataclass(frozen=True, kw_only=True)
class AgainstReference(PairSource):
    """A completion of the policy and one of the reference; the better one is chosen (XPO, B09)."""

    def words(self) -> str:
        return "one completion of the policy and one of the reference, the better one chosen"

    def opponent(self) -> float | None:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class AgainstMixture(PairSource):
    """A completion of the policy and one of pi^(1 - coef) ref^coef (Nash-MD, B09)."""

    coef: float = 0.5
    """Share of the reference in the geometric mixture."""

    def __post_init__(self) -> None:
        share("draw.coef", self.coef)

    def words(self) -> str:
        return f"one completion of the policy and one of pi^{1 - self.coef:g} ref^{self.coef:g}"

    def opponent(self) -> float | None:
        return self.coef


@dataclass(frozen=True, kw_only=True)
class RejectionSampled(PairSource):
    """Completions of the reference are kept with probability exp((R - max R) / temperature), as if the optimal policy
    had said them. The kept ones are paired at random, and the better one of each pair is chosen (RSO, B07)."""

    of: int = 64
    """Completions of the reference drawn for a prompt."""
    keep: int = 8
    """Completions that are kept, an even number. Each is in one pair (the paper's "first-round-rank")."""
    temperature: float = 0.5
    """The beta of the optimal policy ref * exp(R / beta), in units of the reward. A larger one keeps more alike."""

    def __post_init__(self) -> None:
        positive("draw.temperature", self.temperature)
        if not 2 <= self.keep <= self.of:
            raise ConfigError(f"draw.keep={self.keep}: must be at least 2 and at most draw.of={self.of}")
        if self.keep % 2:
            raise ConfigError(f"draw.keep={self.keep}: pairs are made of two; set draw.keep={self.keep - 1}")

    def words(self) -> str:
        return (
            f"{self.keep} of {self.of} completions of the reference, each kept with probability exp((R - max R) /"
            f" {self.temperature:g}), the better one of each two chosen"
        )

    def samples(self) -> int:
        return self.of

    def opponent(self) -> float | None:
        return 1.0

    def opposed(self) -> range:
        return range(self.of)

    def pairs(self) -> int:
        return self.keep // 2
