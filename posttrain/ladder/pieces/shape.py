"""Shaping of the reward, applied in order. Filters, pass rates and difficulty read the raw outcome instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from posttrain.ladder.pieces.baseline import Zero
from posttrain.ladder.pieces.piece import Piece, not_negative, positive
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm


class Shaping(Piece, begin=True):
    """One change of the reward. Its mathematics is in `algorithm.credit.reward_shaping`."""

    changes_reward: ClassVar[bool] = True
    """False where it only decides which episodes have a gradient."""


@dataclass(frozen=True, kw_only=True)
class Signed(Shaping):
    """reward -> 2 * reward - 1: outcomes of {0, 1} become the {-1, +1} of DAPO's rule reward."""

    def words(self) -> str:
        return "2 r - 1"


@dataclass(frozen=True, kw_only=True)
class Overlong(Shaping):
    """Soft overlong penalty, DAPO Eq. 13: 0 up to L_max - cache spoken tokens, then linearly down to -1 at L_max.

    L_max is the sampling's max_tokens. `cache` is a share of it.
    """

    cache: float = 0.2
    """Share of max_tokens over which the penalty grows to 1."""

    def __post_init__(self) -> None:
        # At 0 the slope would be a division by 0.
        if not 0 < self.cache <= 1:
            raise ConfigError(f"shape.overlong.cache={self.cache}: a share of max_tokens in (0, 1]")

    def words(self) -> str:
        return f"r + clip(({1 - self.cache:g} L - |y|) / ({self.cache:g} L), -1, 0), L = max_tokens"


@dataclass(frozen=True, kw_only=True)
class DropTruncated(Shaping):
    """Overlong filtering (DAPO): an episode cut off at its length counts in the baseline, but has no gradient."""

    changes_reward = False

    def words(self) -> str:
        return "r; a response cut off at its length carries no gradient"


@dataclass(frozen=True, kw_only=True)
class BestOf(Shaping):
    """reward -> k * mean, over the k-subsets of siblings that contain this one, of the best reward in the subset (A32).

    The group's mean of credit * grad log pi is then an unbiased gradient of the expected best of k (PKPO); for outcomes
    of {0, 1} that is pass@k. Fewer than k siblings count as one subset of all of them.
    """

    k: int = 4
    """Size of the subsets: the k of the best of k."""
    gain: bool = False
    """Subtract the best reward of each subset without this sample (PKPO's loo-1, Eq. 33). It stays unbiased and has far
    less variance. A baseline over these rewards would be biased, because the others' rewards contain this sample's."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"shape.bestof.k={self.k}: must be >= 1")
        if self.gain and self.k == 1:
            raise ConfigError(
                "shape.bestof.gain=true with k=1 compares a sample with nobody. Set gain=false, or k >= 2"
            )

    def words(self) -> str:
        best = "best r - best r without this one" if self.gain else "best r"
        return f"{self.k} mean({best}) over the subsets of {self.k} siblings that hold this one"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        # The rewards of the others contain this sample's reward, so a
        # mean over them depends on it, and the baseline would add a bias.
        if self.gain and not isinstance(a.baseline, Zero):
            yield "shape.bestof.gain already compares a sample with its siblings. Set baseline=zero, or gain=false"

    def compares_siblings(self) -> bool:
        return self.gain


@dataclass(frozen=True, kw_only=True)
class RankLength(Shaping):
    """reward + coef * a number between +.5 for the group's shortest answer and -.5 for its longest. For failures the
    number is at most 0 (Kimi k1.5, C04)."""

    coef: float = 1.0
    """Weight of the length's rank."""

    def __post_init__(self) -> None:
        positive("shape.ranklength.coef", self.coef)

    def words(self) -> str:
        return f"r + {self.coef:g} b, b = 1/2 - (|y| - shortest) / (longest - shortest), at most 0 where not solved"


@dataclass(frozen=True, kw_only=True)
class TargetLength(Shaping):
    """L1 (2503.04697, C04). exact: reward - alpha * |target - |y||; most: reward * clip(alpha * (target - |y|) + .5, 0,
    1).

    alpha is that of the paper; its code halves it in the second form. The target is the task's `n_gold` where it has
    one.
    """

    target: int = 32
    """Wanted length in tokens."""
    alpha: float = 0.0003
    """Weight of the distance to the target."""
    form: Literal["exact", "most"] = "exact"
    """exact: neither shorter nor longer; most: no longer."""

    def __post_init__(self) -> None:
        positive("shape.targetlength.target", self.target)
        positive("shape.targetlength.alpha", self.alpha)

    def words(self) -> str:
        off = f"{self.target} - |y|"
        return (
            f"r - {self.alpha:g} | {off} |" if self.form == "exact" else f"r clip({self.alpha:g} ({off}) + 1/2, 0, 1)"
        )


@dataclass(frozen=True, kw_only=True)
class RateLength(Shaping):
    """reward - beta * max(the group's pass rate, 1/G) * |y|. Length costs most on
    easy prompts (ALP 2506.05256, C04)."""

    beta: float = 1e-4
    """Weight of the length, for a prompt that all siblings solve."""

    def __post_init__(self) -> None:
        positive("shape.ratelength.beta", self.beta)

    def words(self) -> str:
        return f"r - {self.beta:g} max(share of the group solved, 1/G) |y|"


@dataclass(frozen=True, kw_only=True)
class Cosine(Shaping):
    """Replaces the reward by half a cosine over length 0 ... max_tokens: solved 1 -> .5, not solved -1 -> -.5
    (2502.03373, C04)."""

    solved_short: float = 1.0
    """Reward of a solved episode of length 0."""
    solved_long: float = 0.5
    """Reward of a solved episode of the largest length."""
    wrong_short: float = -1.0
    """Reward of an unsolved episode of length 0."""
    wrong_long: float = -0.5
    """Reward of an unsolved episode of the largest length."""
    exceeded: float = -1.0
    """Reward of an episode that was cut off at its length (the paper uses -10)."""

    def words(self) -> str:
        solved, wrong = f"{self.solved_short:g} to {self.solved_long:g}", f"{self.wrong_short:g} to {self.wrong_long:g}"
        return f"half a cosine of |y| / max_tokens: {solved} solved, {wrong} not, {self.exceeded:g} cut off"


@dataclass(frozen=True, kw_only=True)
class Repetition(Shaping):
    """reward - penalty * (1 - distinct n-grams / n-grams) over the spoken tokens (C04)."""

    n: int = 3
    """Tokens of a sequence that counts as repeated."""
    penalty: float = 1.0
    """Amount that a response loses where all its sequences are the same."""

    def __post_init__(self) -> None:
        positive("shape.repetition.n", self.n)
        not_negative("shape.repetition.penalty", self.penalty)

    def words(self) -> str:
        return f"r - {self.penalty:g} (1 - distinct {self.n}-grams / {self.n}-grams)"


@dataclass(frozen=True, kw_only=True)
class Gate(Shaping):
    """reward -> `otherwise` where the reward source `source` gave less than 1. A right format adds nothing (C03).

    With weight 0, that source is judged and recorded but is no part of the outcome.
    """

    source: str = "think_format"
    """The reward source that must have given 1."""
    otherwise: float = 0.0
    """The reward where it gave less."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("shape.gate.source is empty: name a reward source")

    def words(self) -> str:
        return f"r where source {self.source} gave 1, else {self.otherwise:g}"


@dataclass(frozen=True, kw_only=True)
class RelativeLength(Shaping):
    """reward -> L_ref / |y| - 1 + coef * (reward - A_ref) (O1-Pruner 2501.12570, C04).

    L_ref and A_ref are the task's `reference_length` and `reference_accuracy`, means over the reference policy's
    samples.
    """

    coef: float = 5.0
    """Weight of the accuracy relative to the length."""

    def __post_init__(self) -> None:
        positive("shape.relativelength.coef", self.coef)

    def words(self) -> str:
        return f"reference_length / |y| - 1 + {self.coef:g} (r - reference_accuracy)"
