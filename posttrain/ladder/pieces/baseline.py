"""Baselines: what a reward is compared with. A group without spread has credit 0 where a baseline compares siblings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from posttrain.ladder.pieces.piece import Piece, named, not_negative, positive, share, times
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm

SEVERAL = "scale=one or group_std, shape=none, and pull=none or one in the loss"
"""The choices to set where steps, turns or sources are compared, not whole answers."""


class Baseline(Piece, begin=True):
    """The value that a reward is compared with; its mathematics is in `algorithm.credit.baseline_values`."""

    relative: ClassVar[bool] = False
    """Whether siblings are compared, so that a group without spread has credit exactly 0."""
    per_token: ClassVar[bool] = False
    """Whether credit differs between the tokens of an episode."""
    to_go: ClassVar[bool] = False
    """Whether each token pays only the KL in the reward from itself on, not that of the whole episode."""
    earns_to_go: ClassVar[bool] = False
    """Whether rewards of earlier turns are left out of a token's credit."""
    greedy: ClassVar[bool] = False
    """Whether each prompt's greedy answer is sampled beside its siblings."""
    moving: ClassVar[bool] = False
    """Whether it changes from sample to sample, and is kept from step to step."""
    each_source: ClassVar[bool] = False
    """Whether a moving one is kept for each `source` of the tasks."""
    of_sources: ClassVar[bool] = False
    """Whether it can compare every reward source on its own (rewards=each)."""
    scaled_apart: ClassVar[bool] = False
    """Whether each of its differences has a scale of its own."""
    of: ClassVar[str] = "r of the group"
    """The number that it compares, in the words of a formula."""
    facts: ClassVar[tuple[str, ...]] = ()
    """Facts that an episode needs beside its reward: judged `steps`, turns that were `paid`, several `turns`."""

    def compares_siblings(self) -> bool:
        return self.relative


def _refusals_of_tokens(b: Baseline, a: Algorithm) -> Iterator[str]:
    """Refusals of baselines that compare token by token."""
    # A deviation of whole answers is not the deviation of these differences, and divides none of them.
    if a.scale != "one":
        answer_scale = f"scale={a.scale} is one number for an answer"
        yield f"{answer_scale}, and baseline={named(b)} compares token by token. Set scale=one, or whiten=token"


def _refusals_of_turns(b: Baseline, a: Algorithm) -> Iterator[str]:
    """Refusals of baselines that compare turns."""
    # Other scales, and a KL in the reward, are one number for a whole answer, which belongs to no single turn.
    if a.scale not in ("one", "group_std") or a.charges_answers:
        yield (
            f"baseline={named(b)} compares turns, not answers. Set scale=one or group_std, and pull=none or one in the"
            " loss"
        )
    yield from _refusals_of_judged(b, a)


def _refusals_of_judged(b: Baseline, a: Algorithm) -> Iterator[str]:
    """Refusals of baselines that need judged steps or turns."""
    if a.rewards == "none":
        yield f"rewards=none leaves no step or turn to compare, which baseline={named(b)} does. Set baseline=zero"


@dataclass(frozen=True, kw_only=True)
class Zero(Baseline):
    """No baseline: credit is the reward."""

    def words(self) -> str:
        return "r"


@dataclass(frozen=True, kw_only=True)
class ToGo(Baseline):
    """No baseline, and a token's credit counts only what follows it: the reward, minus the KL from it on (A02).

    Rewards of earlier turns are left out too. A scale divides all of that. It is the scale of whole rewards, so that an
    answer's first token has the same credit as under `Zero`.
    """

    to_go = True
    earns_to_go = True

    def words(self) -> str:
        return "r"


@dataclass(frozen=True, kw_only=True)
class Ema(Baseline):
    """b <- decay * b + (1 - decay) * R, sample after sample in order of group and sibling, from b = 0 (A01). Every
    sample is compared with b from *before* it, so that its baseline does not contain its own reward. A sample that is
    learned from again (`config.stages.reinforce`) is compared with b as it is, and b does not take it in a second
    time."""

    moving = True

    decay: float = 0.95
    """How slowly it follows the rewards: the share of the old value that stays."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"baseline.decay={self.decay}: must lie in [0, 1)")

    def words(self) -> str:
        return f"r - b, then b <- {self.decay:g} b + {1 - self.decay:g} r, sample after sample"


@dataclass(frozen=True, kw_only=True)
class GroupMean(Baseline):
    """Mean reward of all judged siblings, the sample itself included (A07)."""

    relative = True
    of_sources = True

    def words(self) -> str:
        return "r - mean(r of the group)"


@dataclass(frozen=True, kw_only=True)
class Others(Baseline):
    """Leave-one-out: mean reward of the other judged siblings (RLOO, A09)."""

    relative = True
    of_sources = True

    def words(self) -> str:
        return "r - mean(r of the other siblings)"


@dataclass(frozen=True, kw_only=True)
class LengthMean(Baseline):
    """Mean reward of the siblings, weighted by their lengths. It has the least variance where gradients grow with
    length (OPO, A04)."""

    relative = True

    def words(self) -> str:
        return "r - sum(|y| r) / sum(|y|) over the group"


@dataclass(frozen=True, kw_only=True)
class EnergyMean(Baseline):
    """Per token t: mean reward of the siblings that have a token t, weighted by their energy up to t (OTB, A04).

    The energy of a token is |d log pi / d logits|^2 = 1 - 2 pi + sum_v pi_v^2 under the learner at the start of the
    step. It measures what the token adds to the gradient's variance. Where only one sibling has a token t, there is
    nothing to compare with, and credit is 0.
    """

    relative = True
    per_token = True

    def words(self) -> str:
        weight = "W_t = sum_(j<=t) (1 - 2 pi_j + sum_v pi_v^2)"
        return f"r - sum(W_t r) / sum(W_t) over the siblings that still speak at t, {weight}"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        return _refusals_of_tokens(self, a)

    def reads(self, a: Algorithm) -> Iterable[str]:
        return ("energy",)


@dataclass(frozen=True, kw_only=True)
class OffPolicyMean(Baseline):
    """Mean reward of the siblings, weighted by w^2 and their energy: of the baselines that are one number a prompt, the
    one with the least variance under importance sampling (OPOB of VCPO, 2602.17616). w = start(y)/mu(y), not bounded.
    The energy of a response is the sum of its tokens' (`EnergyMean`); the authors' is the squared norm of its
    gradient."""

    relative = True

    def words(self) -> str:
        return "r - sum(w^2 W r) / sum(w^2 W) over the group, w = start(y)/mu(y), W = sum_t (1 - 2 pi_t + sum_v pi_v^2)"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        if a.shown is not None:
            yield "baseline=offpolicymean reads start(y)/mu(y), and shown siblings have no sampler. Set shown=none"

    def reads(self, a: Algorithm) -> Iterable[str]:
        return ("energy",)

    def reads_start_early(self, a: Algorithm) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class SoftMean(Baseline):
    """tau * log of the siblings' mean of exp(reward / tau): tau * log Z of Kimi k1.5 and OPMD (A20, A21)."""

    relative = True

    tau: float = 1.0
    """Temperature: towards 0 it is the best of the siblings, large it is their mean."""

    def __post_init__(self) -> None:
        positive("baseline.tau", self.tau)

    def words(self) -> str:
        return f"r - tau log mean(exp(r / tau)) over the group, tau = {self.tau:g}"


@dataclass(frozen=True, kw_only=True)
class SecondBest(Baseline):
    """Only the best sibling has credit: its reward minus the second best (A32, verl's grpo_passk)."""

    relative = True

    def words(self) -> str:
        return "r - second best r of the group for the best sibling, 0 for the others"


@dataclass(frozen=True, kw_only=True)
class Greedy(Baseline):
    """Reward of the prompt's greedy answer, sampled beside the siblings and never learned from (ReMax, A03).

    As in `ToGo`, a token's credit counts only the KL from it on.
    """

    to_go = True
    greedy = True

    def words(self) -> str:
        return "r - R of the greedy answer"

    def uses(self) -> str:
        return "greedy answer"

    def samples(self) -> str:
        return "one greedy answer a prompt"


@dataclass(frozen=True, kw_only=True)
class StepMean(Baseline):
    """Mean over all judged steps of all siblings (A07, process form). A token's credit is the sum over the steps that
    end at it or after it.

    Steps are verdicts about a part of an episode (`Judged.end`). In a group without steps the outcomes are compared,
    each at the end of its answer. A sibling without steps, in a group that has some, has no credit.
    """

    relative = True
    per_token = True
    of = "v of the group's steps"
    facts = ("steps",)

    def words(self) -> str:
        return "sum over the steps that end at or after t of v - mean(v of the group's steps)"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        if a.scale not in ("one", "group_std") or a.shape or a.charges_answers:
            yield f"baseline=stepmean compares steps, not answers. Set {SEVERAL}"
        yield from _refusals_of_judged(self, a)

    def uses(self) -> str:
        return "verdicts about steps"


@dataclass(frozen=True, kw_only=True)
class TurnMean(Baseline):
    """Per turn k: its reward minus the mean reward of the siblings' turn k, plus the credit of the outcome in every
    turn (MT-GRPO, E05). Without rewards of turns it is `GroupMean`."""

    relative = True
    per_token = True
    scaled_apart = True
    facts = ("paid", "turns")

    outcome: float = 1.0
    """Weight of the outcome's credit relative to the turn's (lambda in Eq. 7 of 2505.11821)."""

    def __post_init__(self) -> None:
        not_negative("baseline.outcome", self.outcome)

    def words(self) -> str:
        outcome_term = f"{times(self.outcome)}(R - mean(R of the group)), R without what turns were paid"
        return f"paid_k - mean(paid_k of the siblings' turn k) + {outcome_term}"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        return _refusals_of_turns(self, a)

    def uses(self) -> str:
        return "turns"


@dataclass(frozen=True, kw_only=True)
class AnchorMean(Baseline):
    """Episode credit as in `GroupMean`, plus per turn its discounted return minus the mean over all turns of the group
    that began in the same state (GiGPO, E05). A state that occurred once adds nothing."""

    relative = True
    per_token = True
    scaled_apart = True
    facts = ("turns",)

    gamma: float = 0.95
    """Discount of a turn's return, once per turn."""
    omega: float = 1.0
    """Weight of the state's credit relative to the episode's."""
    by: Literal["observation", "history"] = "observation"
    """The definition of a state. observation: the context tokens since the last turn, as in the paper; right where an
    observation describes the whole state. history: all tokens before the turn."""

    def __post_init__(self) -> None:
        share("baseline.gamma", self.gamma)
        positive("baseline.omega", self.omega, "baseline=groupmean")
        if self.by not in ("observation", "history"):
            raise ConfigError(f"baseline.by={self.by!r}: must be observation or history")

    def words(self) -> str:
        state = "after the same observation" if self.by == "observation" else "after the same history"
        turn = f"(g_k - mean(g of the group's turns {state})), g_k = r_k + {self.gamma:g} g_(k+1)"
        return f"r - mean(r of the group) + {times(self.omega)}{turn}"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        return _refusals_of_turns(self, a)

    def uses(self) -> str:
        return "turns"


@dataclass(frozen=True, kw_only=True)
class Value(Baseline):
    """A learned value per token, GAE over spoken tokens only (A05; Schulman et al. 1506.02438)."""

    reads_silent = True  # A token without credit still has an error of its value.
    per_token = True
    to_go = True

    gae_lambda: float = 0.95
    """Lambda of the value targets, and of the credit where `credit_lambda` is none."""
    gamma: float = 1.0
    """Discount of a reward by each token in between."""
    coef: float = 0.5
    """Weight of the value loss relative to the policy term."""
    clip: float | None = 0.2
    """PPO's value clip: a value further than this from the old value has no further gain in the loss. None: no clip."""
    credit_lambda: float | None = None
    """Lambda of the credit, for decoupled GAE (VC-PPO, 2503.01491). None: `gae_lambda`."""
    length_alpha: float | None = None
    """Length-adaptive credit (VAPO, A19): credit_lambda = 1 - 1 / (alpha * |y|), not below 0. None: off."""
    trace: float | None = None
    """V-trace (1802.01561): the cap of the ratio start/mu in the value targets. None: off."""
    warmup: int = 0
    """Number of first steps of the stage that train only the value head, with the policy unchanged (A19)."""

    def __post_init__(self) -> None:
        for name in ("gae_lambda", "gamma", "credit_lambda"):
            if (value := getattr(self, name)) is not None:
                share(f"baseline.{name}", value)
        not_negative("baseline.warmup", self.warmup)
        for name in ("length_alpha", "trace"):
            if (value := getattr(self, name)) is not None:
                positive(f"baseline.{name}", value, f"{name}=none")
        if self.credit_lambda is not None and self.length_alpha is not None:
            raise ConfigError(
                "baseline.credit_lambda and baseline.length_alpha both say the credit's lambda: set one of them to none"
            )
        for name in ("credit_lambda", "length_alpha"):
            if self.trace is not None and (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"baseline.{name}={value:g}: with baseline.trace credit reads the V-trace targets, whose lambda is"
                    f" gae_lambda. Set {name}=none, or trace=none"
                )
        if not self.coef >= 0 or not (self.clip is None or self.clip > 0):
            raise ConfigError(
                f"baseline.coef={self.coef} must be >= 0 and baseline.clip={self.clip} > 0; to switch the value clip"
                " off set clip=none"
            )

    def words(self) -> str:
        gamma = "" if self.gamma == 1 else f"{self.gamma:g} "
        if self.trace is not None:
            return f"r_t + {gamma}target_(t+1) - V_t; targets of V-trace, start/mu up to {self.trace:g}"
        lambda_words = (
            f"max(0, 1 - 1 / ({self.length_alpha:g} |y|))"
            if self.length_alpha is not None
            else f"{self.gae_lambda if self.credit_lambda is None else self.credit_lambda:g}"
        )
        discount = "lambda" if self.gamma == 1 else f"({self.gamma:g} lambda)"
        return f"sum_k {discount}^k delta_(t+k), delta_t = r_t + {gamma}V_(t+1) - V_t, lambda = {lambda_words}"

    def loss_words(self) -> str:
        """The formula of the value loss."""
        near = "" if self.clip is None else f", V bounded to V_start +- {self.clip:g} where that costs more"
        warm = f"; the first {self.warmup} steps train V alone" if self.warmup else ""
        target = f"V + GAE of lambda {self.gae_lambda:g}"
        if self.trace is not None:
            gamma = "" if self.gamma == 1 else f"{self.gamma:g} "
            later = "" if self.gamma * self.gae_lambda == 1 else f"{self.gamma * self.gae_lambda:g} "
            delta = f"r_t + {gamma}V_(t+1) - V_t + {later}(target_(t+1) - V_(t+1))"
            target = f"V_t + min(start/mu, {self.trace:g}) ({delta})"
        return f"{self.coef:g} * 1/2 (V - target)^2{near}; target = {target}{warm}"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        yield from _refusals_of_tokens(self, a)
        # GAE sums the rewards of later tokens, so a KL of one token would be charged to the tokens before it too.
        if a.charges_tokens:
            yield (
                "placement=token charges a token alone, while GAE hands its charge to the tokens before it. Set"
                " pull.placement=reward"
            )

    def reads(self, a: Algorithm) -> Iterable[str]:
        return ("values",)

    def reads_start_early(self, a: Algorithm) -> bool:
        return self.trace is not None
