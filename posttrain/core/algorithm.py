"""An algorithm as data: REINFORCE plus a list of patches. Torch-free; the mathematics lives in `posttrain.algorithm`.

    A    = (r - baseline) / scale                                credit, one prompt's siblings, or per token with values
    push = trust_region(logp, anchor, A, sequence)               how loudly a token may speak; never differentiated
    loss = sum_t weight_t * ( -sg[c_t * push_t] * A_t * logp_t + pull_t )

Every field is one choice, and no choice is spread over two fields. A piece that has numbers is its own type and owns
them. `Algorithm` refuses combinations that mean nothing; `patch` refuses a change that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from posttrain.core.errors import ConfigError, nearest

Scale = Literal["one", "group_std", "batch_std", "group_mean"]
"""Divides the credit. Standard deviations are ddof 1 with no epsilon."""
Ratio = Literal["one", "token", "sequence_mean", "sequence_product"]
"""Importance ratio pi/anchor in the push: none, per token, exp(mean log-ratio) or exp(sum) of the episode."""
Anchor = Literal["behaviour", "start"]
"""What pi is compared with: the sampler's stored log-prob, or the learner's at the start of the step."""
Aggregate = Literal["token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant"]
Whiten = Literal["token", "sample"]
Estimator = Literal["k1", "k2", "k3", "rk3"]
Placement = Literal["reward", "loss", "both"]


# --- baselines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Zero:
    """No baseline: credit is the reward."""


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
class Value:
    """A learned value per token, GAE over spoken tokens only (A05; Schulman et al. 1506.02438)."""

    gae_lambda: float = 0.95
    gamma: float = 1.0
    coef: float = 0.5
    """Weight of the value loss beside the policy term."""
    clip: float | None = 0.2
    """Values move at most this far from the old value before the loss stops paying for it. None: no value clip."""

    def __post_init__(self) -> None:
        for name in ("gae_lambda", "gamma"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"baseline.{name}={getattr(self, name)}: must lie in [0, 1]")
        if self.coef < 0 or (self.clip is not None and self.clip <= 0):
            raise ConfigError(f"baseline.coef={self.coef} must be >= 0 and baseline.clip={self.clip} > 0; to switch the value clip off set clip=none")


Baseline = Zero | Ema | GroupMean | Others | Value

# --- trust regions: each its own type, owning its numbers ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Clip:
    """PPO's clip: a token is silent once its ratio has left [1 - low, 1 + high] in the direction its credit pushes."""

    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 or self.high < 0:
            raise ConfigError(f"clip.low={self.low} must lie in [0, 1] and clip.high={self.high} must be >= 0")


TrustRegion = Clip

# --- regularisers ---------------------------------------------------------------------------------------------------

_KL_TRUTH: dict[tuple[Estimator, Placement], str] = {
    ("k1", "reward"): "exact",
    ("k2", "loss"): "exact on policy at each token; no token is charged for the KL of the tokens after it",
    ("k3", "loss"): "biased: on policy its gradient is that of the forward KL(ref || pi) at each token, off policy of neither",
    ("k3", "both"): "exact on policy",
    ("rk3", "loss"): "exact at each token, also off policy; no token is charged for the KL of the tokens after it",
}
_KL_REFUSED: dict[tuple[Estimator, Placement], str] = {
    ("k1", "loss"): "k1 as a loss has zero expected gradient on policy: it regularises nothing",
    ("k1", "both"): "k1 as a loss has zero expected gradient on policy: beside k1/reward it only adds noise",
    ("k2", "reward"): "k2 in the reward alone misses the path term and does not estimate the KL",
    ("k2", "both"): "its gradient is that of E[k2], which is not the KL",
    ("k3", "reward"): "k3 in the reward alone misses the path term: its gradient can point the wrong way",
    ("rk3", "reward"): "rk3 in the reward alone misses the path term, like k3",
    ("rk3", "both"): "rk3 in the loss is already exact: the reward term on top is a second, wrong one",
}


@dataclass(frozen=True, kw_only=True)
class KL:
    """A pull towards the reference. `truth` says whether its gradient is that of KL(pi || ref) (A34).

    d = logp - logp_ref; k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, rk3 = ratio * k3 with the ratio differentiated.
    """

    coef: float = 0.04
    estimator: Estimator = "k3"
    placement: Placement = "loss"

    def __post_init__(self) -> None:
        pair = (self.estimator, self.placement)
        if pair not in _KL_TRUTH:
            why = _KL_REFUSED.get(pair, "there is no such pair")
            legal = ", ".join(f"{e}/{p}" for e, p in _KL_TRUTH)
            raise ConfigError(f"pull.estimator={self.estimator} with pull.placement={self.placement}: {why}. Use one of {legal}")
        if self.coef <= 0:
            raise ConfigError(f"pull.coef={self.coef}: must be > 0; to switch the KL off set pull=none")

    @property
    def truth(self) -> str:
        return _KL_TRUTH[self.estimator, self.placement]


@dataclass(frozen=True, kw_only=True)
class SequenceL2:
    """coef / 2 * (log pi(y)/anchor(y))^2 of the whole episode: Kimi k1.5's surrogate (A20, Eq. 3)."""

    coef: float = 0.1

    def __post_init__(self) -> None:
        if self.coef <= 0:
            raise ConfigError(f"pull.coef={self.coef}: must be > 0; to switch the pull off set pull=none")


Pull = KL | SequenceL2

# --- train / inference corrections: c = start / mu, detached, multiplies push only -----------------------------------


@dataclass(frozen=True, kw_only=True)
class Truncate:
    """c = min(start/mu, cap), per token or of the episode's product (TIS, A25)."""

    cap: float = 2.0
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ConfigError(f"correction.cap={self.cap}: must be > 0")


@dataclass(frozen=True, kw_only=True)
class Mask:
    """c = start/mu where low <= start/mu <= high, else 0, per token or of the episode's product (IcePop, MIS; A25)."""

    low: float = 0.5
    high: float = 5.0
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(f"correction.low={self.low} must be >= 0 and below correction.high={self.high}")


Correction = Truncate | Mask

# --- shaping of the reward, applied in order; filters never see it --------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Signed:
    """reward -> 2 * reward - 1: outcomes of {0, 1} become the {-1, +1} of DAPO's rule reward."""


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """Soft punishment, DAPO Eq. 13: 0 up to L_max - cache spoken tokens, then linearly down to -1 at L_max.

    L_max is the sampling's max_tokens. `cache` is a share of it.
    """

    cache: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.cache <= 1:
            raise ConfigError(f"shape.overlong.cache={self.cache}: a share of max_tokens in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class DropTruncated:
    """Overlong filtering (DAPO): an episode cut off at its length keeps its place in the baseline, but has no gradient."""


Shaping = Signed | Overlong | DropTruncated


@dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """-coef * H beside the policy term, with the same weights."""

    coef: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One member of the family. Defaults are REINFORCE; see `posttrain.core.ladder` for the others."""

    name: str
    paper: str
    """Where it is published: an arXiv id, or author and year."""
    baseline: Baseline = Zero()
    scale: Scale = "one"
    whiten: Whiten | None = None
    """Centre and scale the credit over the whole step (ddof 1), each token or each sample counting once."""
    ratio: Ratio = "one"
    anchor: Anchor = "behaviour"
    clip: TrustRegion | None = None
    aggregate: Aggregate = "sequence_sum"
    pull: Pull | None = None
    correction: Correction | None = None
    filter: Literal["mixed"] | None = None
    """mixed: only groups whose raw outcomes differ enter the step; the rollout asks again until it is full (A36)."""
    shape: tuple[Shaping, ...] = ()
    entropy: EntropyBonus | None = None
    note: str = ""
    """Where paper and popular code differ, and what is done here."""
    parent: Algorithm | None = None

    def __post_init__(self) -> None:
        for reason in _meaningless(self):
            raise ConfigError(f"algorithm {self.name!r}: {reason}")

    @property
    def group_relative(self) -> bool:
        """Whether credit compares siblings, so that a group without spread has credit exactly 0."""
        return isinstance(self.baseline, GroupMean | Others)

    @property
    def reads(self) -> frozenset[str]:
        """What the step must score before the loss: subset of {start, reference, values}."""
        need: set[str] = set()
        kl_in_reward = isinstance(self.pull, KL) and self.pull.placement != "loss"
        anchored = self.ratio != "one" or isinstance(self.pull, SequenceL2) or kl_in_reward
        if (anchored and self.anchor == "start") or self.correction is not None:
            need.add("start")
        if isinstance(self.pull, KL):
            need.add("reference")
        if isinstance(self.baseline, Value):
            need.add("values")
        return frozenset(need)

    @property
    def needs_episode_whole(self) -> bool:
        """Whether a sequence-level quantity ties an episode's tokens together, so a micro-batch may not cut it."""
        return (
            self.ratio.startswith("sequence")
            or isinstance(self.pull, SequenceL2)
            or (self.correction is not None and self.correction.level == "sequence")
        )

    @property
    def reads_silent_tokens(self) -> bool:
        """Whether a token with zero credit still matters (pull, entropy or value), so it may not leave the batch."""
        return self.pull is not None or self.entropy is not None or isinstance(self.baseline, Value)

    def lineage(self) -> tuple[Algorithm, ...]:
        """From REINFORCE down to this one."""
        return (*self.parent.lineage(), self) if self.parent else (self,)


def _meaningless(a: Algorithm) -> Iterator[str]:
    """The reasons a combination of choices means nothing, with what to change."""
    if a.clip is not None and a.ratio == "one":
        yield "clip needs a ratio to bound, and ratio='one' has none. Set ratio=token, or clip=none"
    if a.correction is not None and a.anchor == "behaviour" and a.ratio != "one":
        yield "a correction start/mu on top of anchor=behaviour corrects the same mismatch twice. Set anchor=start, or correction=none"
    if a.scale in ("group_std", "group_mean") and not a.group_relative:
        yield f"scale={a.scale} compares siblings, but the baseline does not. Use baseline=groupmean or others, or scale=one"
    if a.ratio.startswith("sequence") and isinstance(a.baseline, Value):
        yield "a sequence-level ratio with credit that varies inside the sequence means nothing (that would be GSPO-token). Set ratio=token"
    if a.ratio.startswith("sequence") and a.aggregate == "token_mean" and isinstance(a.clip, Clip):
        yield "a clipped sequence-level ratio with aggregate=token_mean is no longer a mean over sequences. Set aggregate=sequence_mean"
    if isinstance(a.pull, KL) and a.pull.estimator == "rk3" and a.ratio == "one":
        yield "rk3 weights k3 by the ratio, and ratio='one' has none. Set ratio=token, or use k3/both"
    if a.whiten is not None and a.scale == "batch_std":
        yield "whiten already divides by a standard deviation of the step. Set scale=one, or whiten=none"


CHOICES = tuple(f for f in ("baseline", "scale", "whiten", "ratio", "anchor", "clip", "aggregate", "pull", "correction", "filter", "shape", "entropy"))
"""The fields that are choices of the mathematics, in the order they are printed."""


def differences(a: Algorithm, b: Algorithm) -> dict[str, tuple[Any, Any]]:
    """The choices in which two algorithms differ: field -> (in a, in b)."""
    return {f: (getattr(a, f), getattr(b, f)) for f in CHOICES if getattr(a, f) != getattr(b, f)}


def patch(parent: Algorithm, name: str, paper: str, *, note: str = "", **changes: Any) -> Algorithm:
    """The parent with some choices changed. Refuses an unknown field and a change that changes nothing."""
    for field, value in changes.items():
        if field not in CHOICES:
            raise ConfigError(f"patch {name!r}: no choice is called {field!r}; {nearest(field, CHOICES)}")
        if getattr(parent, field) == value:
            raise ConfigError(f"patch {name!r}: {field}={value!r} is what {parent.name!r} already has. Leave it out")
    if not changes:
        raise ConfigError(f"patch {name!r} of {parent.name!r} changes nothing")
    return replace(parent, name=name, paper=paper, note=note, parent=parent, **changes)


assert set(CHOICES) <= {f.name for f in fields(Algorithm)}
