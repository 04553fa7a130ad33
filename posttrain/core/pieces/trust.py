"""Trust regions: how loudly a token may speak. Each is its own type and owns its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.core.errors import ConfigError
from posttrain.core.pieces.checks import not_negative, ordered, positive


@dataclass(frozen=True, kw_only=True)
class Clip:
    """PPO's clip: a token is silent once its ratio has left [1 - low, 1 + high] in the direction its credit pushes.

    `cap` is the dual clip of 1912.09729 (there 3) and the two-sided clip of INTELLECT-2 (there 4): a token with A < 0 is
    also silent where its ratio exceeds cap. Both papers' forms have this one gradient (A06).
    """

    low: float = 0.2
    high: float = 0.2
    cap: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ConfigError(f"clip.low={self.low} must lie in [0, 1] and clip.high={self.high} must be >= 0")
        if self.cap is not None and not self.cap > 1 + self.high:
            raise ConfigError(f"clip.cap={self.cap} must lie above 1 + clip.high={1 + self.high:g}; to switch it off set cap=none")


@dataclass(frozen=True, kw_only=True)
class Cap:
    """The ratio itself, bounded to [low, high]: no token is ever silent (CISPO, A15; AIPO, A23)."""

    low: float = 0.0
    high: float = 5.0

    def __post_init__(self) -> None:
        ordered("clip", self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Taper:
    """1 where A >= 0, min(ratio, cap) where A < 0: failures fade as they become unlikely (TOPR, A22)."""

    cap: float = 1.0

    def __post_init__(self) -> None:
        positive("clip.cap", self.cap)


@dataclass(frozen=True, kw_only=True)
class Soft:
    """ratio * 4 s (1 - s) with s = sigmoid(tau * (ratio - 1)): a smooth gate, 1 at ratio 1 (SAPO, A16)."""

    tau: float = 1.0
    """Temperature where A > 0."""
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        positive("clip.tau", self.tau)
        positive("clip.tau_negative", self.tau_negative)


@dataclass(frozen=True, kw_only=True)
class Geometric:
    """One weight an episode: exp of the mean log-ratio, each token's clipped to +-low/high in the harmful direction (GMPO, A14).

    A clipped token does not speak, the others do with the episode's weight.
    """

    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        positive("clip.low", self.low)
        positive("clip.high", self.high)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Silent where policy and anchor are further apart than delta and the push leads further away (DPPO, A18).

    The distance at one position is the total variation or the KL(anchor || pi) of the said token against the rest
    (`top` = 0), or of the sampler's `top` most probable tokens, the said one, and the rest.
    """

    measure: Literal["tv", "kl"] = "tv"
    delta: float = 0.15
    top: int = 0
    cap: float = 20.0
    """The push is min(ratio, cap)."""

    def __post_init__(self) -> None:
        positive("clip.delta", self.delta)
        positive("clip.cap", self.cap)
        not_negative("clip.top", self.top)


@dataclass(frozen=True, kw_only=True)
class FutureKL:
    """PPO's clip times f_t = exp(sum_{k >= t} 2^(-(k-t)/half_life) * log-ratio_k) within 1 +- band (FIPO, A29).

    Log-ratios of tokens with a ratio above `ignore` do not count; a token with A < 0 and a ratio above `loud` is not
    amplified.
    """

    low: float = 0.2
    high: float = 0.28
    band_low: float = 0.2
    band_high: float = 0.2
    half_life: float = 32.0
    loud: float = 4.0
    ignore: float = 10.0

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ConfigError(f"clip.low={self.low} must lie in [0, 1] and clip.high={self.high} must be >= 0")
        for name in ("band_low", "band_high"):
            not_negative(f"clip.{name}", getattr(self, name))
        for name in ("half_life", "loud", "ignore"):
            positive(f"clip.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Hump:
    """W^k exp(lambda (1 - W)) of the episode's ratio W: 1 at W = 1, fading on both sides, per sign of A (VESPO, A29)."""

    k: float = 2.0
    fade: float = 3.0
    """lambda where A > 0."""
    k_negative: float = 3.0
    fade_negative: float = 2.0

    def __post_init__(self) -> None:
        for name in ("k", "fade", "k_negative", "fade_negative"):
            positive(f"clip.{name}", getattr(self, name))


TrustRegion = Clip | Cap | Taper | Soft | Geometric | Divergence | FutureKL | Hump
PER_TOKEN = (Geometric, Divergence, FutureKL)
"""Trust regions that compare single tokens, so they need ratio=token."""
