"""What is chosen or added per token beside push and pull, and how prompts and siblings are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.core.errors import ConfigError
from posttrain.core.pieces.checks import not_negative, positive, share

# --- which tokens of a minibatch speak: chosen over the whole minibatch, before it is split -------------------------


@dataclass(frozen=True, kw_only=True)
class ClipCov:
    """Silences `share` of the tokens, rounded down, at random among those with low < cov < high (A33, 2505.22617).

    At the paper's share a minibatch below 5,000 tokens silences none.

    cov_t = (A_t - mean A) * (logp_t - mean logp) over the minibatch, with the log-probs before it.
    """

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0

    def __post_init__(self) -> None:
        share("tokens.share", self.share)
        if not self.low < self.high:
            raise ConfigError(f"tokens.low={self.low} must lie below tokens.high={self.high}")


@dataclass(frozen=True, kw_only=True)
class KlCov:
    """The `share` of tokens with the largest covariance get coef * |log pi - log start| beside the policy term (A33)."""

    share: float = 0.002
    coef: float = 1.0

    def __post_init__(self) -> None:
        share("tokens.share", self.share)
        positive("tokens.coef", self.coef)


@dataclass(frozen=True, kw_only=True)
class TopEntropy:
    """Only the `share` of tokens with the largest entropy at the start of the step speak (A12, 2506.01939)."""

    share: float = 0.2

    def __post_init__(self) -> None:
        share("tokens.share", self.share)


@dataclass(frozen=True, kw_only=True)
class SecondMoment:
    """Silences the tokens with the largest |log start/mu| until the mean of their squares is at most `limit` (M2PO, A26)."""

    limit: float = 0.04

    def __post_init__(self) -> None:
        positive("tokens.limit", self.limit)


Tokens = ClipCov | KlCov | TopEntropy | SecondMoment

# --- further terms ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """-coef * H beside the policy term, with the same weights."""

    coef: float = 0.01
    target: float | None = None
    """Adaptive (Skywork-OR1, A33): each step coef rises by `delta` while the entropy is below target and falls by it above,
    not below 0; the bonus is active only below target. None: fixed."""
    delta: float = 0.005

    def __post_init__(self) -> None:
        not_negative("entropy.coef", self.coef)
        positive("entropy.delta", self.delta)
        if self.target is not None:
            positive("entropy.target", self.target, "target=none")


@dataclass(frozen=True, kw_only=True)
class Imitate:
    """-coef * mean log-prob of some of the minibatch's own tokens, weighed alike (A19 positive NLL; A24 CHORD).

    `solved`: tokens of episodes with raw outcome >= 1. `shown`: tokens a demonstration put into the group.
    """

    coef: float = 0.1
    of: Literal["solved", "shown"] = "solved"
    unsure: bool = False
    """Weigh each token by sg[p (1 - p)]: CHORD-phi."""

    def __post_init__(self) -> None:
        positive("imitate.coef", self.coef, "imitate=none")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Siblings that a demonstration wrote, in the same group and baseline (LUFFY, A24).

    Their tokens are pushed with the gradient of f(p) = p / (p + gamma), never clipped. gamma=none: they have no policy
    gradient (CHORD imitates them instead).
    """

    siblings: int = 1
    """How many of the group's siblings are shown."""
    style: str | None = None
    """Which kind of text the environment writes. None: the last it names, its most elaborate one."""
    gamma: float | None = 0.1

    def __post_init__(self) -> None:
        positive("shown.siblings", self.siblings, "shown=none")
        if self.gamma is not None:
            positive("shown.gamma", self.gamma, "gamma=none")


@dataclass(frozen=True, kw_only=True)
class Distill:
    """coef * generalised JSD_beta(teacher || policy) of the whole next-token distribution (GKD, A30).

    beta * KL(teacher || M) + (1 - beta) * KL(policy || M) with M = beta * teacher + (1 - beta) * policy; beta 0 and 1 are
    the limits KL(teacher || policy) and KL(policy || teacher). Read on the teacher's `top` most probable tokens and the rest
    as one; 0 reads all. The teacher is the stage's reference.
    """

    beta: float = 0.5
    top: int = 0
    coef: float = 1.0

    def __post_init__(self) -> None:
        share("distill.beta", self.beta)
        not_negative("distill.top", self.top)
        positive("distill.coef", self.coef, "distill=none")


# --- which prompts are asked ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoEasy:
    """A task whose last pass rate reached `rate` is not asked again (no-positive-resampling, ScaleRL, A28)."""

    rate: float = 0.9

    def __post_init__(self) -> None:
        share("curriculum.rate", self.rate)


@dataclass(frozen=True, kw_only=True)
class Priority:
    """Tasks are drawn in proportion to 1 - their pass rate so far, and to `floor` where that is less (Kimi k1.5, A20)."""

    floor: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ConfigError(f"curriculum.floor={self.floor}: must lie in (0, 1]")


Curriculum = NoEasy | Priority
