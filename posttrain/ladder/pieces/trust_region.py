"""Trust regions: the factor of each token's policy gradient, the push. Where it is exactly 0 the token is masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from posttrain.ladder.pieces.piece import Piece, named, not_negative, ordered, positive
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm


class TrustRegion(Piece, begin=True):
    """The push as a function of the ratio and the sign of the credit. Its mathematics is in
    `algorithm.loss.push_factor`."""

    per_token: ClassVar[bool] = False
    """Whether it compares single tokens, so that it needs ratio=token."""
    silences: ClassVar[bool] = False
    """Whether a token outside its bounds has a push of exactly 0. Bounds narrower than rounding then
    mask tokens at random."""

    def refuses(self, a: Algorithm) -> Iterator[str]:
        # A ratio that is always 1 never reaches a bound.
        if a.ratio == "one":
            yield "clip needs a ratio to bound, and ratio='one' has none. Set ratio=token, or clip=none"
        if self.per_token and a.ratio not in ("token", "one"):
            yield f"clip={named(self)} compares single tokens, so it needs ratio=token"

    def without_top(self) -> Self:
        """The same trust region without the sampler's top tokens, from the sampled token alone."""
        return self


@dataclass(frozen=True, kw_only=True)
class Clip(TrustRegion):
    """PPO's clip: a token is masked once its ratio has left [1 - low, 1 + high] in the direction of its credit.

    `cap` is the dual clip of 1912.09729 (there 3) and the two-sided clip of INTELLECT-2 (there 4): a token with A < 0
    is also masked where its ratio exceeds cap. The forms of both papers have this gradient (A06).
    """

    silences = True

    low: float = 0.2
    """A token with A < 0 is masked where its ratio falls below 1 minus this."""
    high: float = 0.2
    """A token with A > 0 is masked where its ratio exceeds 1 plus this."""
    cap: float | None = None
    """A token with A < 0 is also masked where its ratio exceeds this. None: no such bound."""

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ConfigError(f"clip.low={self.low} must lie in [0, 1] and clip.high={self.high} must be >= 0")
        # A cap at or below the clip's own upper bound would mask punished tokens that the policy has hardly moved.
        if self.cap is not None and not self.cap > 1 + self.high:
            raise ConfigError(
                f"clip.cap={self.cap} must lie above 1 + clip.high={1 + self.high:g}; to switch it off set cap=none"
            )

    def words(self) -> str:
        capped = "" if self.cap is None else f", or rho > {self.cap:g} with A < 0"
        return f"rho; 0 where rho > {1 + self.high:g} with A > 0, or rho < {1 - self.low:g} with A < 0{capped}"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        yield from super().refuses(a)
        # Credit that varies inside a sequence is refused in `ladder.algorithm`, with a message that says what to do.
        if a.ratio in ("sequence_mean", "sequence_product") and a.aggregate == "token_mean" and not a.varies:
            mean = "is no longer a mean over sequences. Set aggregate=sequence_mean"
            yield f"a clipped sequence-level ratio with aggregate=token_mean {mean}"


@dataclass(frozen=True, kw_only=True)
class Cap(TrustRegion):
    """The ratio itself, bounded to [low, high]. No token is masked (CISPO, A15; AIPO, A23)."""

    low: float = 0.0
    """Smallest push."""
    high: float = 5.0
    """Largest push."""

    def __post_init__(self) -> None:
        ordered("clip", self.low, self.high)

    def words(self) -> str:
        return f"rho within [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, kw_only=True)
class Taper(TrustRegion):
    """1 where A >= 0, min(ratio, cap) where A < 0. The push of failures falls as they become unlikely (TOPR, A22)."""

    cap: float = 1.0
    """Largest push of a token with A < 0."""

    def __post_init__(self) -> None:
        positive("clip.cap", self.cap)

    def words(self) -> str:
        return f"min(rho, {self.cap:g}) where A < 0, else 1"


@dataclass(frozen=True, kw_only=True)
class Soft(TrustRegion):
    """ratio * 4 s (1 - s) with s = sigmoid(tau * (ratio - 1)). It is a smooth gate, 1 at ratio 1 (SAPO, A16)."""

    tau: float = 1.0
    """Temperature where A > 0."""
    tau_negative: float = 1.05
    """Temperature where A < 0."""

    def __post_init__(self) -> None:
        positive("clip.tau", self.tau)
        positive("clip.tau_negative", self.tau_negative)

    def words(self) -> str:
        return (
            f"4 rho s (1 - s), s = sigmoid(tau (rho - 1)), tau = {self.tau:g} where A > 0, else {self.tau_negative:g}"
        )


@dataclass(frozen=True, kw_only=True)
class Geometric(TrustRegion):
    """One weight per episode: exp of the mean log-ratio, with each token's log-ratio clipped to +-low/high in the
    direction of its credit (GMPO, A14).

    A clipped token is masked. The push of the others is the episode's weight.
    """

    per_token = True
    silences = True

    low: float = 0.4
    """Largest fall of a log-ratio where A < 0."""
    high: float = 0.4
    """Largest rise of a log-ratio where A > 0."""

    def __post_init__(self) -> None:
        positive("clip.low", self.low)
        positive("clip.high", self.high)

    def words(self) -> str:
        return (
            f"exp(mean over y of log rho, at most {self.high:g} where A > 0, at least -{self.low:g} where A < 0); 0 for"
            " a bounded token"
        )


@dataclass(frozen=True, kw_only=True)
class Divergence(TrustRegion):
    """Masks a token where policy and anchor are further apart than delta and its credit leads further away (DPPO, A18).

    The distance at one position is the total variation or KL(anchor || pi). With `top` = 0 its outcomes are the sampled
    token and all others. Else they are the sampler's `top` most probable tokens, the sampled one, and all others.
    """

    per_token = True
    silences = True

    measure: Literal["tv", "kl"] = "tv"
    """The distance: tv, the total variation, or kl, KL(anchor || pi)."""
    delta: float = 0.15
    """Largest distance before a token is masked."""
    top: int = 0
    """How many of the sampler's most probable tokens are compared; 0: only the sampled one and the rest."""
    cap: float = 20.0
    """The push is min(ratio, cap)."""

    def __post_init__(self) -> None:
        positive("clip.delta", self.delta)
        positive("clip.cap", self.cap)
        not_negative("clip.top", self.top)

    def words(self) -> str:
        over = (
            f"the sampler's {self.top} most probable tokens, the said one and the rest"
            if self.top
            else "the said token and the rest"
        )
        anchor = "mu" if self.top else "anchor"
        far = f"TV({anchor}, pi)" if self.measure == "tv" else f"KL({anchor} || pi)"
        return (
            f"min(rho, {self.cap:g}); 0 where D > {self.delta:g} and the push leads further away, D = {far} over {over}"
        )

    def refuses(self, a: Algorithm) -> Iterator[str]:
        yield from super().refuses(a)
        # TOP_LOGP holds the sampler's log-probs, so this distance is always one to the sampler.
        if self.top and a.anchor != "behaviour":
            yield (
                "clip.top reads the sampler's most probable tokens, so it compares with the sampler. Set"
                " anchor=behaviour"
            )

    def stores_top(self) -> int:
        return self.top

    def uses(self) -> str:
        return f"top {self.top} tokens" if self.top else ""

    def memory(self) -> str:
        return f"{self.top} ids and log-probs a token" if self.top else ""

    def without_top(self) -> Self:
        return replace(self, top=0)


@dataclass(frozen=True, kw_only=True)
class FutureKL(TrustRegion):
    """PPO's clip times f_t = exp(sum_{k >= t} 2^(-(k-t)/half_life) * log-ratio_k) within 1 +- band (FIPO, A29).

    Log-ratios of tokens with a ratio above `ignore` do not count. For a token with A < 0 and a ratio above `loud`, f_t
    is at most 1.
    """

    per_token = True
    silences = True

    low: float = 0.2
    """As in PPO's clip: the bound below 1."""
    high: float = 0.28
    """As in PPO's clip: the bound above 1."""
    band_low: float = 0.2
    """f is at least 1 minus this."""
    band_high: float = 0.2
    """f is at most 1 plus this."""
    half_life: float = 32.0
    """Tokens after which the weight of a later log-ratio is halved."""
    loud: float = 4.0
    """Where A < 0 and the ratio exceeds this, f is at most 1."""
    ignore: float = 10.0
    """Tokens with a larger ratio do not count in f."""

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ConfigError(f"clip.low={self.low} must lie in [0, 1] and clip.high={self.high} must be >= 0")
        for name in ("band_low", "band_high"):
            not_negative(f"clip.{name}", getattr(self, name))
        for name in ("half_life", "loud", "ignore"):
            positive(f"clip.{name}", getattr(self, name))

    def words(self) -> str:
        band = f"within [{1 - self.band_low:g}, {1 + self.band_high:g}]"
        return (
            f"f rho; 0 where rho > {1 + self.high:g} with A > 0, or rho < {1 - self.low:g} with A < 0; f ="
            f" exp(sum_(k>=t) 2^(-(k-t)/{self.half_life:g}) log rho_k) {band}, not above 1 where A < 0 and rho >"
            f" {self.loud:g}"
        )


@dataclass(frozen=True, kw_only=True)
class Hump(TrustRegion):
    """W^k exp(lambda (1 - W)) of the episode's ratio W. It is 1 at W = 1 and falls on both sides. k and lambda depend
    on the sign of A (VESPO, A29)."""

    k: float = 2.0
    """Power of the ratio where A > 0."""
    fade: float = 3.0
    """lambda where A > 0."""
    k_negative: float = 3.0
    """Power of the ratio where A < 0."""
    fade_negative: float = 2.0
    """lambda where A < 0."""

    def __post_init__(self) -> None:
        for name in ("k", "fade", "k_negative", "fade_negative"):
            positive(f"clip.{name}", getattr(self, name))

    def words(self) -> str:
        up = f"rho^{self.k:g} exp({self.fade:g} (1 - rho))"
        down = f"rho^{self.k_negative:g} exp({self.fade_negative:g} (1 - rho))"
        return f"{up} where A > 0, {down} where A < 0"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        yield from super().refuses(a)
        # k and lambda are chosen for W of a whole episode, which spreads far more than a token's ratio.
        if not a.ratio.startswith("sequence"):
            yield "clip=hump bounds the ratio of whole episodes. Set ratio=sequence_product"
