"""Train/inference corrections: c = start/mu, detached, multiplies the push (A25). Several multiply; at most one weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.core.pieces.checks import ordered, positive

Level = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class Truncate:
    """c = min(start/mu, cap), per token or of the episode's product (TIS, A25). cap=none weighs without a bound (AReaL, A26)."""

    cap: float | None = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        if self.cap is not None:
            positive("correction.cap", self.cap, "cap=none")


@dataclass(frozen=True, kw_only=True)
class Mask:
    """c = start/mu where low <= start/mu <= high, else 0, per token or of the episode's product (IcePop, MIS; A25)."""

    low: float = 0.5
    high: float = 5.0
    level: Level = "token"

    def __post_init__(self) -> None:
        ordered("correction", self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class BinaryKL:
    """c = start/mu where KL between start and mu on {the said token, any other} is at most phi in both directions, else 0 (KPop, A25)."""

    phi: float = 0.1

    def __post_init__(self) -> None:
        positive("correction.phi", self.phi)


@dataclass(frozen=True, kw_only=True)
class Reject:
    """Drops whole episodes whose geometric mean of start/mu leaves [low, high]; the kept ones are not weighed (Geo-RS, A25)."""

    low: float = 0.99
    high: float = 1.01

    def __post_init__(self) -> None:
        ordered("correction", self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Veto:
    """Drops whole episodes that hold a token with start/mu below `below`: one catastrophic token poisons its episode (A25)."""

    below: float = 1e-4

    def __post_init__(self) -> None:
        positive("correction.below", self.below)


@dataclass(frozen=True, kw_only=True)
class NegativeMask:
    """Drops episodes with A < 0 that the current policy has left: mean over tokens of log mu - log pi > delta (DeepSeek-V3.2, A08)."""

    delta: float = 0.5

    def __post_init__(self) -> None:
        positive("correction.delta", self.delta)


Correction = Truncate | Mask | BinaryKL | Reject | Veto | NegativeMask
WEIGHING = (Truncate, Mask, BinaryKL)
