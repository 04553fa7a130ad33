"""An algorithm as data: REINFORCE plus a list of patches. Torch-free; the mathematics lives in `posttrain.algorithm`.

    A    = (r - baseline) / scale                                credit, one prompt's siblings, or per token with values
    push = trust_region(logp, anchor, A, sequence)               how loudly a token may speak; never differentiated
    loss = sum_t weight_t * ( -sg[c_t * push_t] * A_t * logp_t + pull_t )

Every field is one choice, and no choice is spread over two fields. A piece that has numbers is its own type and owns
them (`posttrain.core.pieces`). `Algorithm` refuses combinations that mean nothing; `patch` refuses a change that changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from posttrain.core.errors import ConfigError, nearest
from posttrain.core.pieces.baseline import (
    GROUP_RELATIVE,
    TO_GO,
    AnchorMean,
    Baseline,
    EnergyMean,
    Greedy,
    GroupMean,
    Others,
    StepMean,
    TurnMean,
    Value,
    Zero,
)
from posttrain.core.pieces.correction import WEIGHING, BinaryKL, Correction, NegativeMask
from posttrain.core.pieces.pull import KL, OF_RATIO, Pull
from posttrain.core.pieces.shape import BestOf, DropTruncated, Shaping
from posttrain.core.pieces.token import (
    Curriculum,
    Distill,
    EntropyBonus,
    Imitate,
    SecondMoment,
    Shown,
    Tokens,
    TopEntropy,
)
from posttrain.core.pieces.trust import PER_TOKEN, Clip, Divergence, Hump, TrustRegion
from posttrain.core.request import Request

if TYPE_CHECKING:
    from posttrain.core.run import Reinforce

Rewards = Literal["sum", "each", "none"]
"""What is compared: the weighted sum of all sources; each source on its own, then summed (GDPO, A31); or nothing at all."""
Scale = Literal["one", "group_std", "batch_std", "group_mean", "best_std", "mixed_share"]
"""Divides the credit. Standard deviations are ddof 1 with no epsilon; `best_std` is that of the best of k over all k-subsets of
siblings, `mixed_share` the share of the step's samples whose group has spread (GPG, A12)."""
Whiten = Literal["token", "sample", "source"]
"""Centre and scale the credit (ddof 1) over the step: every token, every sample, or every sample within its task's `source`."""
Ratio = Literal["one", "token", "sequence_mean", "sequence_product", "sequence_token"]
"""Importance ratio pi/anchor in the push: none, per token, exp(mean log-ratio) or exp(sum) of the episode; `sequence_token` is
`sequence_mean` for credit that varies inside an episode (GSPO-token)."""
Anchor = Literal["behaviour", "start", "proximal"]
"""What pi is compared with: the sampler's stored log-prob, the learner's at the start of the step, or an interpolation of
sampler and policy by their versions that stands in for the latter without its forward pass (A-3PO, A26)."""
Aggregate = Literal["token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One member of the family. Defaults are REINFORCE; see `posttrain.core.ladder` for the others."""

    name: str
    paper: str
    """Where it is published: an arXiv id, or author and year."""
    baseline: Baseline = Zero()
    scale: Scale = "one"
    rewards: Rewards = "sum"
    whiten: Whiten | None = None
    ratio: Ratio = "one"
    anchor: Anchor = "behaviour"
    clip: TrustRegion | None = None
    aggregate: Aggregate = "sequence_sum"
    pull: Pull | None = None
    correction: tuple[Correction, ...] = ()
    filter: Literal["mixed"] | None = None
    """mixed: only groups whose raw outcomes differ enter the step; the rollout asks again until it is full (A36)."""
    curriculum: Curriculum | None = None
    shape: tuple[Shaping, ...] = ()
    tokens: Tokens | None = None
    entropy: EntropyBonus | None = None
    imitate: Imitate | None = None
    shown: Shown | None = None
    distill: Distill | None = None
    note: str = ""
    """Where paper and popular code differ, and what is done here."""
    parent: Algorithm | None = None

    def __post_init__(self) -> None:
        for reason in _meaningless(self):
            raise ConfigError(f"algorithm {self.name!r}: {reason}")

    @property
    def group_relative(self) -> bool:
        """Whether credit compares siblings, so that a group without spread has credit exactly 0."""
        return isinstance(self.baseline, GROUP_RELATIVE) or any(isinstance(s, BestOf) and s.gain for s in self.shape)

    @property
    def learns_values(self) -> Value | None:
        """The value baseline, where there is one."""
        return self.baseline if isinstance(self.baseline, Value) else None

    @property
    def kl_in_credit(self) -> KL | None:
        """The KL that credit reads, where there is one."""
        return self.pull if isinstance(self.pull, KL) and self.pull.in_credit else None

    @property
    def start_before_loss(self) -> bool:
        """Whether credit, or the choice of tokens, needs the log-probs at the start of the step before the loss has them."""
        traced = self.learns_values is not None and self.learns_values.trace is not None
        return traced or isinstance(self.tokens, SecondMoment) or (self.kl_in_credit is not None and self.anchor == "start")

    @property
    def reads(self) -> frozenset[str]:
        """What the step must score before the loss: subset of {start, reference, values, entropy, energy, teacher}."""
        need: set[str] = set()
        anchored = self.ratio != "one" or isinstance(self.pull, OF_RATIO)
        corrected = any(not isinstance(c, NegativeMask) for c in self.correction) and self.anchor != "proximal"
        if (anchored and self.anchor == "start") or corrected or self.start_before_loss:
            need.add("start")
        if isinstance(self.pull, KL):
            need.add("reference")
        if self.learns_values is not None:
            need.add("values")
        if isinstance(self.tokens, TopEntropy):
            need.add("entropy")
        if isinstance(self.baseline, EnergyMean):
            need.add("energy")
        if self.distill is not None:
            need.add("teacher")
        return frozenset(need)

    @property
    def stores_top(self) -> int:
        """How many of its most probable tokens the sampler stores with every token it says."""
        return self.clip.top if isinstance(self.clip, Divergence) else 0

    @property
    def reads_silent_tokens(self) -> bool:
        """Whether a token with zero credit still matters (pull, entropy, value, imitation), so it may not leave the batch."""
        return (
            self.pull is not None
            or self.entropy is not None
            or self.imitate is not None
            or self.distill is not None
            or self.tokens is not None
            or isinstance(self.baseline, Value)
        )

    @property
    def refresh(self) -> int:
        """Steps after which the policy becomes its own reference; 0: never."""
        return self.pull.refresh if isinstance(self.pull, KL) else 0

    def request(self, stage: Reinforce) -> Request:
        """What a step of `stage` asks of its rollout."""
        return Request(
            groups=stage.prompts,
            siblings=stage.siblings,
            extra=stage.oversample,
            mixed=self.filter == "mixed",
            most=stage.refill,
            greedy=isinstance(self.baseline, Greedy),
            shown=self.shown,
        )

    def lineage(self) -> tuple[Algorithm, ...]:
        """From REINFORCE down to this one."""
        return (*self.parent.lineage(), self) if self.parent else (self,)


def _meaningless(a: Algorithm) -> Iterator[str]:
    """The reasons a combination of choices means nothing, with what to change."""
    yield from _meaningless_credit(a)
    yield from _meaningless_push(a)
    if isinstance(a.pull, KL) and a.pull.estimator == "rk3" and a.ratio == "one":
        yield "rk3 weights k3 by the ratio, and ratio='one' has none. Set ratio=token, or use k3/both"
    if isinstance(a.pull, KL) and a.pull.refresh and a.distill is not None:
        yield "distill's teacher is the reference, and pull.refresh would replace it. Set pull.refresh=0, or distill=none"
    if a.shown is not None and a.stores_top:
        yield "clip.top reads the sampler's most probable tokens, and a demonstration has no sampler. Set clip.top=0, or shown=none"
    if a.distill is not None and a.stores_top:
        yield "distill and clip.top would each name the candidate tokens of a position. Set clip.top=0, or distill=none"
    if a.shown is not None and a.kl_in_credit is not None and a.anchor != "start":
        yield "a KL in the credit is taken under the sampler, which a demonstration does not have. Set anchor=start, or shown=none"
    if a.imitate is not None and a.imitate.of == "shown" and a.shown is None:
        yield "imitate.of=shown imitates demonstrations, and there are none. Set shown, or imitate.of=solved"


def _meaningless_credit(a: Algorithm) -> Iterator[str]:
    scores_only = isinstance(a.baseline, Zero) and a.scale == "group_mean"
    if a.scale in ("group_std", "group_mean", "best_std") and not a.group_relative and not scores_only:
        yield f"scale={a.scale} compares siblings, but the baseline does not. Use baseline=groupmean or others, or scale=one"
    if a.scale == "best_std" and not any(isinstance(s, BestOf) for s in a.shape):
        yield "scale=best_std divides by the spread of the best of k, and no k is named. Add shape=bestof"
    if a.scale == "best_std" and any(not isinstance(s, BestOf | DropTruncated) for s in a.shape):
        yield "scale=best_std is the spread of the best raw outcome, so nothing else may shape it. Set shape=bestof alone, or scale=one"
    if any(isinstance(s, BestOf) and s.gain for s in a.shape) and not isinstance(a.baseline, Zero):
        yield "shape.bestof.gain already compares a sample with its siblings. Set baseline=zero, or gain=false"
    if a.whiten is not None and a.scale == "batch_std":
        yield "whiten already divides by a standard deviation of the step. Set scale=one, or whiten=none"
    many = "scale=one or group_std, shape=none, and pull=none or one in the loss"
    several = a.scale not in ("one", "group_std") or a.shape or _charges_answers(a)
    if a.rewards == "each" and (several or not isinstance(a.baseline, GroupMean | Others)):
        yield f"rewards=each compares every reward source with its own siblings. Use baseline=groupmean or others, {many}"
    if isinstance(a.baseline, EnergyMean) and a.scale != "one":
        yield f"scale={a.scale} is one number for an answer, and baseline=energymean compares token by token. Set scale=one, or whiten=token"
    if isinstance(a.baseline, StepMean) and several:
        yield f"baseline=stepmean compares steps, not answers. Set {many}"
    if isinstance(a.baseline, TurnMean | AnchorMean) and (a.scale not in ("one", "group_std") or _charges_answers(a)):
        yield f"baseline={type(a.baseline).__name__.lower()} compares turns, not answers. Set scale=one or group_std, and pull=none or one in the loss"
    if a.rewards == "none" and a.kl_in_credit is None and a.distill is None:
        yield "rewards=none learns from the teacher alone, and there is none. Set pull=kl(estimator=k1, placement=token), or distill"
    if a.rewards == "none" and isinstance(a.baseline, StepMean | TurnMean | AnchorMean):
        yield f"rewards=none leaves no step or turn to compare, which baseline={type(a.baseline).__name__.lower()} does. Set baseline=zero"
    if a.rewards == "none" and any(not isinstance(s, DropTruncated) for s in a.shape):
        yield "rewards=none leaves nothing to shape. Set shape=none"
    if isinstance(a.baseline, Value) and isinstance(a.pull, KL) and a.pull.placement == "token":
        yield "placement=token charges a token alone, while GAE hands its charge to the tokens before it. Set pull.placement=reward"


def _charges_answers(a: Algorithm) -> bool:
    """Whether a KL is charged to what siblings are compared by."""
    return a.kl_in_credit is not None and a.kl_in_credit.placement != "token"


def _varies(a: Algorithm) -> bool:
    """Whether credit can differ between the tokens of one episode."""
    charged = isinstance(a.baseline, TO_GO) or (a.kl_in_credit is not None and a.kl_in_credit.placement == "token")
    return isinstance(a.baseline, Value | StepMean | EnergyMean | TurnMean | AnchorMean) or (a.kl_in_credit is not None and charged)


def _meaningless_push(a: Algorithm) -> Iterator[str]:
    if a.clip is not None and a.ratio == "one":
        yield "clip needs a ratio to bound, and ratio='one' has none. Set ratio=token, or clip=none"
    if isinstance(a.clip, PER_TOKEN) and a.ratio not in ("token", "one"):
        yield f"clip={type(a.clip).__name__.lower()} compares single tokens, so it needs ratio=token"
    if isinstance(a.clip, Hump) and not a.ratio.startswith("sequence"):
        yield "clip=hump bounds the ratio of whole episodes. Set ratio=sequence_product"
    if isinstance(a.clip, Divergence) and a.clip.top and a.anchor != "behaviour":
        yield "clip.top reads the sampler's most probable tokens, so it compares with the sampler. Set anchor=behaviour"
    weighing = [c for c in a.correction if isinstance(c, WEIGHING)]
    if weighing and a.anchor == "behaviour" and a.ratio != "one":
        yield "a correction start/mu on top of anchor=behaviour corrects the same mismatch twice. Set anchor=start, or correction=none"
    if len(weighing) > 1:
        names = " and ".join(type(c).__name__.lower() for c in weighing)
        yield f"correction={names} would multiply start/mu twice. Keep one of them; reject, veto and negativemask may stand beside it"
    if a.ratio in ("sequence_mean", "sequence_product") and _varies(a):
        yield "a sequence-level ratio with credit that varies inside the sequence means nothing. Set ratio=sequence_token (GSPO-token)"
    if a.ratio in ("sequence_mean", "sequence_product") and a.aggregate == "token_mean" and isinstance(a.clip, Clip):
        yield "a clipped sequence-level ratio with aggregate=token_mean is no longer a mean over sequences. Set aggregate=sequence_mean"
    if a.correction and any(isinstance(c, BinaryKL) for c in a.correction) and a.anchor == "proximal":
        yield "BinaryKL compares sampler and learner, and anchor=proximal skips the learner's forward. Set anchor=start"


CHOICES = tuple(f.name for f in fields(Algorithm) if f.name not in ("name", "paper", "note", "parent"))
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
