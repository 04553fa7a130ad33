"""Baselines: what a reward is compared with. Group-relative ones compare siblings and are silent without spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.core.errors import ConfigError
from posttrain.core.pieces.checks import not_negative, positive, share


@dataclass(frozen=True, kw_only=True)
class Zero:
    """No baseline: credit is the reward."""


@dataclass(frozen=True, kw_only=True)
class ToGo:
    """No baseline, and a token answers only for what follows it: the reward, less the KL paid from it on (A02).

    What the world paid for earlier turns is not in it either. A scale divides all of that: it is the one of whole rewards, so that an
    answer's first token has the credit it has under `Zero`.
    """


@dataclass(frozen=True, kw_only=True)
class Ema:
    """b <- decay * b + (1 - decay) * R, sample after sample in order of group and sibling, from b = 0 (A01).

    Every sample is compared with b as it was *before* it, so a sample never meets a baseline that saw it.
    """

    decay: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"baseline.decay={self.decay}: must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class GroupMean:
    """Mean reward of all judged siblings, the sample itself included (A07)."""


@dataclass(frozen=True, kw_only=True)
class Others:
    """Leave-one-out: mean reward of the other judged siblings (RLOO, A09)."""


@dataclass(frozen=True, kw_only=True)
class LengthMean:
    """Mean reward of the siblings weighted by their lengths: the variance-optimal one where gradients grow with length (OPO, A04)."""


@dataclass(frozen=True, kw_only=True)
class EnergyMean:
    """Per token t: mean reward of the siblings that still speak, weighted by their energy up to t (OTB, A04).

    The energy of a token is |d log pi / d logits|^2 = 1 - 2 pi + sum_v pi_v^2 under the learner at the start of the step: what it
    adds to the gradient's variance. Where no sibling but one still speaks there is nothing to compare with, and credit is 0.
    """


@dataclass(frozen=True, kw_only=True)
class SoftMean:
    """tau * log of the siblings' mean of exp(reward / tau): tau * log Z of Kimi k1.5 and OPMD (A20, A21)."""

    tau: float = 1.0

    def __post_init__(self) -> None:
        positive("baseline.tau", self.tau)


@dataclass(frozen=True, kw_only=True)
class SecondBest:
    """Only the best sibling has credit: its reward less the second best's (A32, verl's grpo_passk)."""


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """Reward of the prompt's argmax answer, sampled beside the siblings and never learned from (ReMax, A03).

    Like `ToGo`, a token answers only for the KL paid from it on.
    """


@dataclass(frozen=True, kw_only=True)
class StepMean:
    """Mean over all judged steps of all siblings; a token's credit sums the steps that end at or after it (A07, process form).

    Steps are verdicts about a part of an episode (`Judged.end`). A group without any compares its outcomes, each at its answer's
    end; a sibling without any beside others that have some has no credit.
    """


@dataclass(frozen=True, kw_only=True)
class TurnMean:
    """Per turn k: what was paid for it less the mean of what the siblings' turn k was paid, plus the outcome's own comparison in
    every turn (MT-GRPO, E05). Without paid turns it is `GroupMean`."""

    outcome: float = 1.0
    """Weight of the outcome's credit beside the turn's (lambda in Eq. 7 of 2505.11821)."""

    def __post_init__(self) -> None:
        not_negative("baseline.outcome", self.outcome)


@dataclass(frozen=True, kw_only=True)
class AnchorMean:
    """Episode credit as in `GroupMean`, plus, per turn, its discounted return less the mean over all turns of the group that began
    in the same state (GiGPO, E05). A state that occurred once gives nothing."""

    gamma: float = 0.95
    """Discount of a turn's return, once a turn."""
    omega: float = 1.0
    """Weight of the state's credit beside the episode's."""
    by: Literal["observation", "history"] = "observation"
    """What a state is: the tokens seen since the last turn, as in the paper, where the observation tells it whole; or everything
    the policy saw and said before."""

    def __post_init__(self) -> None:
        share("baseline.gamma", self.gamma)
        positive("baseline.omega", self.omega, "baseline=groupmean")
        if self.by not in ("observation", "history"):
            raise ConfigError(f"baseline.by={self.by!r}: must be observation or history")


@dataclass(frozen=True, kw_only=True)
class Value:
    """A learned value per token, GAE over spoken tokens only (A05; Schulman et al. 1506.02438)."""

    gae_lambda: float = 0.95
    """Of the value targets, and of the credit where `credit_lambda` is none."""
    gamma: float = 1.0
    coef: float = 0.5
    """Weight of the value loss beside the policy term."""
    clip: float | None = 0.2
    """Values move at most this far from the old value before the loss stops paying for it. None: no value clip."""
    credit_lambda: float | None = None
    """Decoupled GAE (VC-PPO, 2503.01491): the credit's own lambda. None: `gae_lambda`."""
    length_alpha: float | None = None
    """Length-adaptive credit (VAPO, A19): credit_lambda = 1 - 1 / (alpha * |y|), not below 0. None: off."""
    trace: float | None = None
    """V-trace (1802.01561): importance start/mu, truncated here, in the value targets. None: off."""
    warmup: int = 0
    """First steps of the stage that train the value head alone, on a policy that stands still (A19)."""

    def __post_init__(self) -> None:
        for name in ("gae_lambda", "gamma", "credit_lambda"):
            if (value := getattr(self, name)) is not None:
                share(f"baseline.{name}", value)
        not_negative("baseline.warmup", self.warmup)
        for name in ("length_alpha", "trace"):
            if (value := getattr(self, name)) is not None:
                positive(f"baseline.{name}", value, f"{name}=none")
        if self.credit_lambda is not None and self.length_alpha is not None:
            raise ConfigError("baseline.credit_lambda and baseline.length_alpha both say the credit's lambda: set one of them to none")
        if not self.coef >= 0 or not (self.clip is None or self.clip > 0):
            raise ConfigError(
                f"baseline.coef={self.coef} must be >= 0 and baseline.clip={self.clip} > 0; to switch the value clip off set clip=none"
            )


Baseline = (
    Zero
    | ToGo
    | Ema
    | GroupMean
    | Others
    | LengthMean
    | EnergyMean
    | SoftMean
    | SecondBest
    | Greedy
    | StepMean
    | TurnMean
    | AnchorMean
    | Value
)
GROUP_RELATIVE = (GroupMean, Others, LengthMean, EnergyMean, SoftMean, SecondBest, StepMean, TurnMean, AnchorMean)
TO_GO = (ToGo, Greedy, Value)
"""Baselines under which a KL in the reward is charged to the tokens at and before the one that paid it, not to the whole episode."""
