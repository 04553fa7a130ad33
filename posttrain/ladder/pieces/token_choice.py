"""Choices and terms per token beside push and pull, and pieces that choose prompts and siblings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from posttrain.ladder.pieces.piece import Piece, not_negative, positive, share, times
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm


class Tokens(Piece, begin=True):
    """A choice of tokens of the minibatch. Its mathematics is in `algorithm.loss.token_selection`."""

    # Tokens are chosen over the whole minibatch. Without the silent tokens its means and shares would be others.
    reads_silent: ClassVar[bool] = True
    silences: ClassVar[bool] = True
    """Whether the tokens that it does not choose are masked: they have no policy gradient."""
    reads_now: ClassVar[bool] = False
    """Whether it chooses by the policy's log-probs before each optimizer step, not by those at the start of the batch.
    They cost a forward pass for every optimizer step of a batch but the first."""


@dataclass(frozen=True, kw_only=True)
class ClipCov(Tokens):
    """Masks `share` of the tokens, rounded down, at random among those with low < cov < high (A33, 2505.22617).

    At the paper's share no token is masked in a minibatch below 5,000 tokens.

    cov_t = (A_t - mean A) * (logp_t - mean logp) over the minibatch, with the log-probs before it.
    """

    share: float = 2e-4
    """Share of the tokens that are masked."""
    low: float = 1.0
    """Smallest covariance of a token that may be masked."""
    high: float = 5.0
    """Largest covariance of a token that may be masked."""

    def __post_init__(self) -> None:
        share("tokens.share", self.share)
        if not self.low < self.high:
            raise ConfigError(f"tokens.low={self.low} must lie below tokens.high={self.high}")

    def words(self) -> str:
        return (
            f"{self.share:g} of the tokens, drawn among those with {self.low:g} < cov < {self.high:g}, are silent; "
            "cov = (A - mean)(log p - mean) before the step"
        )


@dataclass(frozen=True, kw_only=True)
class KlCov(Tokens):
    """The `share` of tokens with the largest covariance has coef * |log pi - log anchor| beside
    the policy term (A33)."""

    silences = False
    forms_ratio = True

    share: float = 0.002
    """Share of the tokens that pay the KL."""
    coef: float = 1.0
    """Weight of that KL."""

    def __post_init__(self) -> None:
        share("tokens.share", self.share)
        positive("tokens.coef", self.coef)

    def words(self) -> str:
        largest = "largest (A - mean)(log p - mean) before the step"
        return f"the {self.share:g} of the tokens with the {largest} pay {times(self.coef)}|log pi - log anchor|"


@dataclass(frozen=True, kw_only=True)
class TopEntropy(Tokens):
    """Masks all but the `share` of tokens with the largest entropy at the start of the step (A12, 2506.01939)."""

    share: float = 0.2
    """Share of the tokens that learn."""

    def __post_init__(self) -> None:
        share("tokens.share", self.share)

    def words(self) -> str:
        return f"only the {self.share:g} of the tokens with the largest entropy speak"

    def reads(self, a: Algorithm) -> Iterable[str]:
        return ("entropy",)


@dataclass(frozen=True, kw_only=True)
class SecondMoment(Tokens):
    """Masks the tokens with the largest |log pi/mu| until the mean square of the rest is at most `limit` (M2PO, A26).

    pi is the policy before the optimizer step. The mask is made again for each step of a batch.
    """

    reads_now = True

    limit: float = 0.04
    """Largest mean square of log pi/mu over the tokens of which some are masked."""
    of: Literal["outward", "all"] = "outward"
    """The tokens that may be masked. outward: those whose push leads further from the sampler (pi > mu and credit above
    0, pi < mu and credit below 0); the others always learn, as under a clip. all: all tokens."""

    def __post_init__(self) -> None:
        positive("tokens.limit", self.limit)

    def words(self) -> str:
        among = "of tokens that are pushed further from mu, " if self.of == "outward" else ""
        return f"{among}the largest |log pi/mu| fall silent until the mean of their squares is at most {self.limit:g}"

    def uses(self) -> str:
        return "the log-probs before every optimizer step"

    def reads_start_early(self, a: Algorithm) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class EntropyBonus(Piece):
    """-coef * H beside the policy term, with the same weights."""

    reads_silent = True

    coef: float = 0.01
    """Weight of the entropy."""
    target: float | None = None
    """Adaptive coefficient (Skywork-OR1, A33): each step coef rises by `delta` while the entropy is below target, and
    falls by it above, not below 0. The bonus is applied only below target. None: fixed."""
    delta: float = 0.005
    """Step of the adaptive coefficient; see `target`."""

    def __post_init__(self) -> None:
        not_negative("entropy.coef", self.coef)
        positive("entropy.delta", self.delta)
        if self.target is not None:
            positive("entropy.target", self.target, "target=none")

    def words(self) -> str:
        if self.target is None:
            return f"-{times(self.coef)}H"
        rule = f"c rises by {self.delta:g} a step below H = {self.target:g} and falls above, where it is not applied"
        return f"-c H, c = {self.coef:g} at first; {rule}"


@dataclass(frozen=True, kw_only=True)
class Imitate(Piece):
    """-coef * mean log-prob of some tokens of the minibatch, equally weighted (A19 positive NLL; A24 CHORD; ECHO).

    `solved`: what the policy said in episodes that are right (`Episode.solved`). `shown`: tokens of the group's
    demonstrations. `heard`: what the policy was told after its first turn, such as results of tools. Nobody drew these,
    so they are scored at temperature 1, and they are in no other term.
    """

    reads_silent = True

    coef: float = 0.1
    """Weight of the imitation."""
    of: Literal["solved", "shown", "heard"] = "solved"
    """The tokens that are imitated: those of solved episodes, of the demonstrations shown, or those that the policy
    heard between its turns."""
    unsure: bool = False
    """Weight each token by sg[p (1 - p)] (CHORD-phi)."""

    def __post_init__(self) -> None:
        positive("imitate.coef", self.coef, "imitate=none")

    def words(self) -> str:
        whose = {"solved": "solved responses", "shown": "shown responses", "heard": "what was heard between turns"}
        return f"-{self.coef:g} mean over the tokens of {whose[self.of]} of " + (
            "sg[p (1 - p)] log pi" if self.unsure else "log pi"
        )

    def refuses(self, a: Algorithm) -> Iterator[str]:
        if self.of == "shown" and a.shown is None:
            yield "imitate.of=shown imitates demonstrations, and there are none. Set shown, or imitate.of=solved"


@dataclass(frozen=True, kw_only=True)
class Shown(Piece):
    """Siblings that are demonstrations, in the same group and baseline (LUFFY, A24).

    The push of their tokens is the gradient of f(p) = p / (p + gamma), never clipped. gamma=none: they have no policy
    gradient (CHORD imitates them instead).
    """

    siblings: int = 1
    """How many of the group's siblings are demonstrations."""
    style: str | None = None
    """The style of text that the environment writes. None: the last style that it names,
    which is its most elaborate one."""
    gamma: float | None = 0.1
    """How far an improbable token of a demonstration is learned from. None: demonstrations have no policy gradient."""

    def __post_init__(self) -> None:
        positive("shown.siblings", self.siblings, "shown=none")
        if self.gamma is not None:
            positive("shown.gamma", self.gamma, "gamma=none")

    def words(self) -> str:
        g = "" if self.gamma is None else f"{self.gamma:g}"
        gradient = f"gradient of p / (p + {g}), so push = {g} p / (p + {g})^2" if g else "no policy gradient"
        style = f" in style {self.style}" if self.style else ""
        return f"{self.siblings} of the siblings written by demonstration{style}; their tokens have {gradient}"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        # Every token of a batch must have K candidates, and a
        # demonstration has no sampler that could name them.
        if a.stores_top:
            yield (
                "clip.top reads the sampler's most probable tokens, and a demonstration has no sampler. Set clip.top=0,"
                " or shown=none"
            )
        # The stored log-prob of a shown token is 0, which would read as a KL of -log ref, or as a ratio of pi.
        of_ratio = any(p.forms_ratio for p in a.pieces) or getattr(a.pull, "estimator", "") == "rk3"
        if a.anchor != "start" and (of_ratio or a.kl_in_credit is not None):
            yield (
                "a KL in the credit, and a term of log pi/anchor, are taken under the sampler, which a demonstration"
                " does not have. Set anchor=start, or shown=none"
            )

    def uses(self) -> str:
        return "demonstrations"

    def samples(self) -> str:
        return f"{self.siblings} of the siblings are not sampled, but need a demonstration"


@dataclass(frozen=True, kw_only=True)
class Distill(Piece):
    """coef * generalised JSD_beta(teacher || policy) of the whole next-token distribution (GKD, A30).

    beta * KL(teacher || M) + (1 - beta) * KL(policy || M) with M = beta * teacher + (1 - beta) * policy; beta 0 and 1
    are the limits KL(teacher || policy) and KL(policy || teacher). It is computed over the teacher's `top` most
    probable tokens, with all others as one; top=0 reads all tokens. The teacher is the stage's reference.
    """

    reads_silent = True

    beta: float = 0.5
    """Between KL(teacher || policy) at 0 and KL(policy || teacher) at 1."""
    top: int = 0
    """How many of the teacher's most probable tokens are compared; 0: all tokens."""
    coef: float = 1.0
    """Weight of the divergence."""

    def __post_init__(self) -> None:
        share("distill.beta", self.beta)
        not_negative("distill.top", self.top)
        positive("distill.coef", self.coef, "distill=none")

    def words(self) -> str:
        over = f"the teacher's {self.top} most probable tokens and the rest" if self.top else "the whole vocabulary"
        return f"{times(self.coef)}JSD_{self.beta:g}(teacher || pi) over {over}"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        # Both use the same streams, TOP_IDS and TOP_LOGP.
        if a.stores_top:
            yield (
                "distill and clip.top would each name the candidate tokens of a position. Set clip.top=0, or"
                " distill=none"
            )

    def reads(self, a: Algorithm) -> Iterable[str]:
        return ("teacher",)

    def memory(self) -> str:
        return f"{self.top} ids and log-probs a token" if self.top else "the vocabulary's log-probs a token"


class Curriculum(Piece, begin=True):
    """The rule that decides which task is played next, by its pass rate when it was last played (0 where never)."""

    drawn: ClassVar[bool] = False
    """Whether tasks are drawn in proportion to their weight. Else all tasks of weight > 0 are played in turn."""

    @abstractmethod
    def weight(self, rate: float) -> float:
        """Weight of a task with this pass rate."""

    def left_out(self) -> str:
        """Returns the property of every task that is left out, in words."""
        return "has weight 0"


@dataclass(frozen=True, kw_only=True)
class NoEasy(Curriculum):
    """A task whose last pass rate reached `rate` is not played again (no-positive-resampling, ScaleRL, A28)."""

    rate: float = 0.9
    """Pass rate from which a task is not played again."""

    def __post_init__(self) -> None:
        share("curriculum.rate", self.rate)

    def words(self) -> str:
        return f"a task solved by {self.rate:g} of its siblings is not asked again"

    def weight(self, rate: float) -> float:
        return 1.0 if rate < self.rate else 0.0

    def left_out(self) -> str:
        return f"was solved at a rate of {self.rate:g} or more"


@dataclass(frozen=True, kw_only=True)
class Priority(Curriculum):
    """Tasks are drawn in proportion to 1 - their pass rate so far, or to `floor` where that
    is larger (Kimi k1.5, A20)."""

    drawn = True

    floor: float = 0.05
    """Smallest weight of a task, so that solved ones come back."""

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ConfigError(f"curriculum.floor={self.floor}: must lie in (0, 1]")

    def words(self) -> str:
        return f"tasks are drawn in proportion to max(1 - pass rate, {self.floor:g})"

    def weight(self, rate: float) -> float:
        return max(self.floor, 1 - rate)
