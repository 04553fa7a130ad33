"""An algorithm as data: REINFORCE plus a list of patches. Torch-free; the mathematics is in `posttrain.algorithm`.

    A    = (r - baseline) / scale                                credit, one prompt's siblings, or per token with values
    push = trust_region(logp, anchor, A, sequence)               factor of a token's policy gradient; not differentiated
    loss = sum_t weight_t * ( -sg[c_t * push_t] * A_t * logp_t + pull_t )

c is the product of the corrections, 1 without one; sg[x] is x, not differentiated.

Every field is one choice, and no choice is spread over two. A piece with numbers is a type (`posttrain.ladder.pieces`)
that says what it reads, costs and refuses. A field is declared by the base class of its choice, so a new piece changes
nothing here. `Algorithm` refuses combinations that mean nothing, `patch` a change that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from posttrain.ladder.pieces.baseline import SEVERAL, Baseline, Value, Zero
from posttrain.ladder.pieces.correction import Correction
from posttrain.ladder.pieces.hint import Hint
from posttrain.ladder.pieces.piece import Piece, named
from posttrain.ladder.pieces.pull import KL, Pull
from posttrain.ladder.pieces.shape import BestOf, Shaping
from posttrain.ladder.pieces.step_size import StepScale
from posttrain.ladder.pieces.token_choice import Curriculum, Distill, EntropyBonus, Imitate, Shown, Tokens
from posttrain.ladder.pieces.trust_region import TrustRegion
from posttrain.ladder.rollout_request import AsksGroups, RolloutRequest
from posttrain.system.errors import ConfigError, nearest

if TYPE_CHECKING:
    from posttrain.ladder.preference_algorithm import PreferenceAlgorithm

Rewards = Literal["sum", "each", "none"]
"""Which rewards are compared. sum: the weighted sum of all sources. each: every source on its own, then summed (GDPO,
A31). none: no reward at all."""
Scale = Literal["one", "group_std", "batch_std", "group_mean", "best_std", "mixed_share"]
"""The divisor of the credit. Standard deviations have ddof 1 and no epsilon. `best_std` is that of the best of k over
all k-subsets of siblings. `mixed_share` is the share of the step's samples whose group has spread (GPG, A12)."""
Whiten = Literal["token", "sample", "source"]
"""Whitening of the credit over the step (mean 0, standard deviation 1 with ddof 1): over every token, over every
sample, or over the samples whose tasks have the same `source`."""
Ratio = Literal["one", "token", "sequence_mean", "sequence_product", "sequence_token"]
"""Importance ratio pi/anchor in the push: none, per token, exp(mean log-ratio) or exp(sum) of the episode.
`sequence_token` is `sequence_mean` for credit that varies inside an episode (GSPO-token)."""
Anchor = Literal["behaviour", "start", "proximal"]
"""The log-prob that pi is compared with. behaviour: the sampler's stored log-prob. start: the learner's at the start of
the step. proximal: an interpolation of sampler and policy by their versions, which approximates `start` without its
forward pass (A-3PO, A26)."""
Aggregate = Literal["token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm. The defaults are REINFORCE; `posttrain.ladder.policy_rows` has the others."""

    name: str
    """Its name, by which the ladder and run.json call it."""
    paper: str
    """Its publication: an arXiv id, or author and year."""
    baseline: Baseline = Zero()
    """The value that a reward is compared with."""
    scale: Scale = "one"
    rewards: Rewards = "sum"
    whiten: Whiten | None = None
    ratio: Ratio = "one"
    anchor: Anchor = "behaviour"
    clip: TrustRegion | None = None
    """The trust region: how large the push of a token may be; none: no bound."""
    aggregate: Aggregate = "sequence_sum"
    """How the terms of tokens become one loss: a mean over all tokens, over those of a prompt, or of a sequence; a
    sum over those of a sequence; or a sum divided by a constant."""
    pull: Pull | None = None
    """A pull towards the reference or the anchor, such as a KL; none: no pull."""
    correction: tuple[Correction, ...] = ()
    """Factors that correct for the difference of sampler and learner, multiplied."""
    filter: Literal["mixed"] | None = None
    """mixed: only groups whose raw outcomes differ enter the step. The rollout plays more until it is full (A36)."""
    curriculum: Curriculum | None = None
    """Which prompts are drawn more often; none: all in turn."""
    shape: tuple[Shaping, ...] = ()
    """Changes of the reward, applied in this order."""
    tokens: Tokens | None = None
    """Which tokens of a minibatch have a policy gradient; none: all."""
    entropy: EntropyBonus | None = None
    """A bonus for entropy, so that the policy keeps trying things; none: no bonus."""
    imitate: Imitate | None = None
    """Imitation beside the policy term; none: no imitation."""
    shown: Shown | None = None
    """Demonstrations among the siblings; none: all siblings are sampled."""
    distill: Distill | None = None
    """Learning from a teacher over whole next-token distributions; none: no teacher."""
    hint: Hint | None = None
    """The hint that the teacher is shown and the policy is not; none: the same prompt."""
    step_scale: StepScale | None = None
    """The share of the learning rate that an optimizer step uses, by its minibatch; none: all of it."""
    note: str = ""
    """Where the paper and popular code differ, and what this library does."""
    parent: Algorithm | None = None
    """The algorithm that it is a patch of."""

    def __post_init__(self) -> None:
        # The class of an absent piece is not here, so nobody knows what it refuses. Such an algorithm
        # was checked where it was made. Here it is only printed and compared.
        for reason in () if self.absent else _meaningless(self):
            raise ConfigError(f"algorithm {self.name!r}: {reason}")

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All its pieces, in the order of the choices."""
        chosen = [getattr(self, name) for name in CHOICES]
        # A choice is one piece, a tuple of pieces, a word or None. Tuples are opened, words and None are left out.
        flat = [x for c in chosen for x in (cast("tuple[Any, ...]", c) if isinstance(c, tuple) else (c,))]
        return tuple(x for x in flat if isinstance(x, Piece))

    @property
    def absent(self) -> tuple[str, ...]:
        """The names of its pieces whose classes this program does not have. What they refuse is then not known."""
        return tuple(type(p).__name__ for p in self.pieces if p.absent)

    # --- what credit and loss read ------------------------------------------------------------------------------------

    @property
    def group_relative(self) -> bool:
        """True where credit compares siblings, so that a group without spread has credit exactly 0."""
        return any(p.compares_siblings() for p in self.pieces)

    @property
    def learns_values(self) -> Value | None:
        """The value baseline, where there is one."""
        return self.baseline if isinstance(self.baseline, Value) else None

    @property
    def best_of(self) -> BestOf | None:
        """The shaping towards the best of k, where there is one."""
        return next((s for s in self.shape if isinstance(s, BestOf)), None)

    @property
    def kl_in_credit(self) -> KL | None:
        """The KL that credit reads, where there is one."""
        return self.pull if isinstance(self.pull, KL) and self.pull.in_credit else None

    @property
    def taught(self) -> bool:
        """True where the algorithm learns only from a teacher, and the stage must name it. With a hint the policy is
        its own teacher."""
        return self.rewards == "none" and self.hint is None

    @property
    def own_teacher(self) -> bool:
        """True where the teacher is the policy as each step begins, or its average: no reference is kept."""
        return self.hint is not None and self.hint.weights != "start"

    @property
    def charges_tokens(self) -> bool:
        """True where a KL is subtracted from the credit of each token alone."""
        return self.kl_in_credit is not None and self.kl_in_credit.placement == "token"

    @property
    def charges_answers(self) -> bool:
        """True where a KL is subtracted from the rewards by which siblings are compared."""
        return self.kl_in_credit is not None and self.kl_in_credit.placement != "token"

    @property
    def varies(self) -> bool:
        """True where credit can differ between the tokens of one episode."""
        # A KL to go makes credit differ too: each token pays the KL from itself on.
        return self.baseline.per_token or self.charges_tokens or (self.baseline.to_go and self.kl_in_credit is not None)

    # --- what roles read ----------------------------------------------------------------------------------------------

    @property
    def forms_ratio(self) -> bool:
        """True where a ratio of the policy and the anchor is computed."""
        return self.ratio != "one" or any(p.forms_ratio for p in self.pieces)

    @property
    def start_before_loss(self) -> bool:
        """True where credit, or the choice of tokens, needs the log-probs at the start of the step before the loss."""
        return any(p.reads_start_early(self) for p in self.pieces)

    @property
    def reads(self) -> frozenset[str]:
        """The streams that the step must score before the loss: subset of {start, reference, values, entropy, energy,
        teacher, implicit}."""
        # What follows from two choices together stands here: a ratio needs START only with anchor=start.
        need = {stream for p in self.pieces for stream in p.reads(self)}
        if (self.forms_ratio and self.anchor == "start") or self.start_before_loss:
            need.add("start")
        return frozenset(need)

    @property
    def stores_top(self) -> int:
        """Number of the most probable tokens that the sampler stores with every sampled token."""
        return max((p.stores_top() for p in self.pieces), default=0)

    @property
    def reads_silent_tokens(self) -> bool:
        """True where a token with zero credit still has a gradient (from pull, entropy, value or imitation), and so
        must stay in the batch."""
        return any(p.reads_silent for p in self.pieces)

    @property
    def hears(self) -> bool:
        """True where the algorithm also learns from what the policy was told between its turns."""
        return self.imitate is not None and self.imitate.of == "heard"

    @property
    def silences(self) -> bool:
        """True where the trust region gives tokens outside its bounds a push of exactly 0."""
        return self.clip is not None and self.clip.silences

    @property
    def refresh(self) -> int:
        """Steps after which the reference is replaced by the current policy; 0: never."""
        return 0 if self.pull is None else self.pull.renews()

    def request(self, stage: AsksGroups) -> RolloutRequest:
        """The groups that a step of `stage` wants from its rollout."""
        return RolloutRequest(
            groups=stage.prompts,
            siblings=stage.siblings,
            extra=stage.oversample,
            mixed=self.filter == "mixed",
            most=stage.refill,
            greedy=self.baseline.greedy,
            shown=self.shown,
        )

    def lineage(self) -> tuple[Algorithm, ...]:
        """All algorithms from REINFORCE to this one, each a patch of the one before."""
        return (*self.parent.lineage(), self) if self.parent else (self,)


def _meaningless(a: Algorithm) -> Iterator[str]:
    """Yields the reasons why a combination of choices means nothing, with what to change. The pieces add their own."""
    yield from _meaningless_credit(a)
    for piece in a.pieces:
        yield from piece.refuses(a)
    # With anchor=behaviour the ratio is pi/mu = pi/start * start/mu, so it contains start/mu already.
    weighing = [c for c in a.correction if c.weighs]
    if weighing and a.anchor == "behaviour" and a.ratio != "one":
        yield (
            "a correction start/mu on top of anchor=behaviour corrects the same mismatch twice. Set anchor=start, or"
            " correction=none"
        )
    if len(weighing) > 1:
        names = " and ".join(named(c) for c in weighing)
        yield (
            f"correction={names} would multiply start/mu twice. Keep one of them; reject, veto and negativemask may"
            " stand beside it"
        )
    # One ratio for all tokens of an answer comes from an objective with one advantage for the answer.
    if a.ratio in ("sequence_mean", "sequence_product") and a.varies:
        yield (
            "a sequence-level ratio with credit that varies inside the sequence means nothing. Set ratio=sequence_token"
            " (GSPO-token)"
        )


def _meaningless_credit(a: Algorithm) -> Iterator[str]:
    """The reasons that concern rewards, scale and whitening."""
    # `maxrl_success` divides the plain reward by the group's mean: it needs no baseline that compares siblings.
    divides_plain_reward = isinstance(a.baseline, Zero) and a.scale == "group_mean"
    if a.scale in ("group_std", "group_mean", "best_std") and not a.group_relative and not divides_plain_reward:
        yield (
            f"scale={a.scale} compares siblings, but the baseline does not. Use baseline=groupmean or others, or"
            " scale=one"
        )
    if a.scale == "best_std" and a.best_of is None:
        yield "scale=best_std divides by the spread of the best of k, and no k is named. Add shape=bestof"
    # This scale is computed from raw outcomes. Rewards that another shaping has changed are in other units.
    if a.scale == "best_std" and any(s.changes_reward and not isinstance(s, BestOf) for s in a.shape):
        yield (
            "scale=best_std is the spread of the best raw outcome, so nothing else may shape it. Set shape=bestof"
            " alone, or scale=one"
        )
    if a.whiten is not None and a.scale == "batch_std":
        yield "whiten already divides by a standard deviation of the step. Set scale=one, or whiten=none"
    # Each source is compared on its own. So choices that work on the whole reward do
    # not fit: shaping, a KL in the reward, a scale of the sum.
    whole_rewards = a.scale not in ("one", "group_std") or a.shape or a.charges_answers
    if a.rewards == "each" and (whole_rewards or not a.baseline.of_sources):
        yield (
            "rewards=each compares every reward source with its own siblings. Use baseline=groupmean or others,"
            f" {SEVERAL}"
        )
    if a.rewards == "none" and a.kl_in_credit is None and a.distill is None:
        yield (
            "rewards=none learns from the teacher alone, and there is none. Set pull=kl(estimator=k1, placement=token),"
            " or distill"
        )
    if a.rewards == "none" and any(s.changes_reward for s in a.shape):
        yield "rewards=none leaves nothing to shape. Set shape=none"


A = TypeVar("A", bound="Algorithm | PreferenceAlgorithm")
"""An algorithm of one of the two ladders."""


def choices(kind: type[Any]) -> tuple[str, ...]:
    """The fields of an algorithm's type that are choices of the mathematics, in the order they are printed."""
    return tuple(f.name for f in fields(kind) if f.name not in ("name", "paper", "note", "parent"))


def differences(a: A, b: A) -> dict[str, tuple[Any, Any]]:
    """The choices in which two algorithms of one ladder differ: field -> (in a, in b)."""
    return {f: (getattr(a, f), getattr(b, f)) for f in choices(type(a)) if getattr(a, f) != getattr(b, f)}


def patch(parent: A, name: str, paper: str, *, note: str = "", **changes: Any) -> A:
    """The parent with some choices changed. Refuses an unknown field and a change that changes nothing."""
    known = choices(type(parent))
    for field, value in changes.items():
        if field not in known:
            raise ConfigError(f"patch {name!r}: no choice is called {field!r}; {nearest(field, known)}")
        # A patch states differences. A change that repeats the parent would state a difference where there is none.
        if getattr(parent, field) == value:
            raise ConfigError(f"patch {name!r}: {field}={value!r} is what {parent.name!r} already has. Leave it out")
    if not changes:
        raise ConfigError(f"patch {name!r} of {parent.name!r} changes nothing")
    return replace(parent, name=name, paper=paper, note=note, parent=parent, **changes)


CHOICES = choices(Algorithm)
"""The choices of an algorithm."""
