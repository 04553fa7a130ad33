"""Train/inference corrections: c = start/mu, detached, multiplies the push (A25). An algorithm may have several, and
their product is used. At most one of them contains start/mu itself; the others only keep or drop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from posttrain.ladder.pieces.piece import Piece, ordered, positive

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm

Level = Literal["token", "sequence"]


class Correction(Piece, begin=True):
    """One factor of c. Its mathematics is in `algorithm.loss.mismatch_correction`."""

    weighs: ClassVar[bool] = False
    """Whether it multiplies by start/mu, and does not only keep or drop."""

    def reads(self, a: Algorithm) -> Iterable[str]:
        # The proximal anchor is an estimate of start without its forward pass, and serves corrections too.
        return () if a.anchor == "proximal" else ("start",)

    def of_episodes(self) -> bool:
        """Returns whether the correction reads start/mu as the product over an episode."""
        return False


@dataclass(frozen=True, kw_only=True)
class Truncate(Correction):
    """c = min(start/mu, cap), per token or of the episode's product (TIS, A25).
    With cap=none there is no bound (AReaL, A26)."""

    weighs = True

    cap: float | None = 2.0
    """Largest factor. None: no bound."""
    level: Level = "token"
    """Per token, or the product over the episode."""

    def __post_init__(self) -> None:
        if self.cap is not None:
            positive("correction.cap", self.cap, "cap=none")

    def words(self) -> str:
        return ("start/mu" if self.cap is None else f"min(start/mu, {self.cap:g})") + f" per {self.level}"

    def of_episodes(self) -> bool:
        return self.level == "sequence"


@dataclass(frozen=True, kw_only=True)
class Mask(Correction):
    """c = start/mu where low <= start/mu <= high, else 0, per token or of the episode's product (IcePop, MIS; A25)."""

    weighs = True

    low: float = 0.5
    """Smallest start/mu that is kept."""
    high: float = 5.0
    """Largest start/mu that is kept."""
    level: Level = "token"
    """Per token, or the product over the episode."""

    def __post_init__(self) -> None:
        ordered("correction", self.low, self.high)

    def words(self) -> str:
        return f"start/mu within [{self.low:g}, {self.high:g}], else 0, per {self.level}"

    def of_episodes(self) -> bool:
        return self.level == "sequence"


@dataclass(frozen=True, kw_only=True)
class BinaryKL(Correction):
    """c = start/mu where the KL between start and mu over two outcomes (the sampled token, any other) is at most phi in
    both directions, else 0 (KPop, A25)."""

    weighs = True

    phi: float = 0.1
    """Largest KL, in either direction."""

    def __post_init__(self) -> None:
        positive("correction.phi", self.phi)

    def words(self) -> str:
        return (
            f"start/mu, and 0 where KL between start and mu on the said token exceeds {self.phi:g} in either direction"
        )

    def refuses(self, a: Algorithm) -> Iterator[str]:
        # With anchor=proximal, start is interpolated from mu, so it cannot show how far learner and sampler are apart.
        if a.anchor == "proximal":
            yield (
                "BinaryKL compares sampler and learner, and anchor=proximal skips the learner's forward. Set"
                " anchor=start"
            )


@dataclass(frozen=True, kw_only=True)
class Reject(Correction):
    """Drops whole episodes whose geometric mean of start/mu is outside [low, high]. Kept episodes have factor 1
    (Geo-RS, A25)."""

    low: float = 0.99
    """Smallest geometric mean of start/mu that is kept."""
    high: float = 1.01
    """Largest geometric mean of start/mu that is kept."""

    def __post_init__(self) -> None:
        ordered("correction", self.low, self.high)

    def words(self) -> str:
        return f"1, and 0 for responses with (start(y)/mu(y))^(1/|y|) outside [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, kw_only=True)
class Veto(Correction):
    """Drops whole episodes that contain a token with start/mu below `below` (A25)."""

    below: float = 1e-4
    """Smallest start/mu of a token that is kept."""

    def __post_init__(self) -> None:
        positive("correction.below", self.below)

    def words(self) -> str:
        return f"1, and 0 for responses with a token of start/mu < {self.below:g}"


@dataclass(frozen=True, kw_only=True)
class NegativeMask(Correction):
    """Drops episodes with A < 0 that are far from the current policy: mean over tokens of log mu - log pi > delta
    (DeepSeek-V3.2, A08)."""

    delta: float = 0.5
    """Largest mean distance that is kept."""

    def __post_init__(self) -> None:
        positive("correction.delta", self.delta)

    def words(self) -> str:
        return f"1, and 0 for responses with A < 0 and mean over t of log(mu/pi) > {self.delta:g}"

    def reads(self, a: Algorithm) -> Iterable[str]:
        # It compares the current policy with the sampler, so it needs no START.
        return ()
