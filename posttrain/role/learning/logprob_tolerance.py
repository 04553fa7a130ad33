"""Fixed token ids as a packed batch, so that learner and sampler can score the same sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.ports import Learner
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment

READ = Sampling(stop_ids=())
"""The contract of sequences that nobody samples: a reward model only reads them."""


def packed_text(ids: np.ndarray, prompt: int = 1) -> Packed:
    """int32 ids as one packed sequence in which every token after the first `prompt` ones counts as spoken."""
    spoken = np.arange(len(ids)) >= prompt
    blank = np.where(spoken, 0, np.nan).astype(np.float32)
    return Packed.of(
        [Segment(ids.astype(np.int32), spoken, blank, np.where(spoken, 0, -1).astype(np.int32), Sampling(stop_ids=()))]
    )


@dataclass(frozen=True)
class Gap:
    """Differences of the log-probs of a set of tokens, in nats: the largest one and the mean."""

    worst: float
    mean: float

    @staticmethod
    def of(one_M: np.ndarray, two_M: np.ndarray) -> Gap:
        """Between two computations of the same log-probs. A difference that is not finite counts as infinite."""
        apart = np.abs(one_M.astype(np.float64) - two_M)
        # NaN is within no bound, but a comparison with it is False on either side: infinity says the same in numbers.
        apart = np.where(np.isfinite(apart), apart, np.inf)
        return Gap(float(apart.max(initial=0.0)), float(apart.sum() / max(1, apart.size)))

    def within(self, bound: Gap) -> bool:
        return self.worst <= bound.worst and self.mean <= bound.mean


LEAST: Mapping[str, Gap] = {"float32": Gap(2e-3, 2e-5), "bfloat16": Gap(0.25, 0.02), "float16": Gap(0.03, 2.5e-3)}
"""A gap that is always allowed, by dtype."""
CEILING: Mapping[str, Gap] = {"float32": Gap(0.05, 2e-3), "bfloat16": Gap(2.0, 0.2), "float16": Gap(0.25, 0.025)}
"""The largest gap that is ever allowed, by dtype."""
MARGIN = 8.0
"""How many times the error of one computation against float64 two of them may differ."""
Exact = Callable[[], np.ndarray | None]
"""Computes the same log-probs [M] in float64; None if the model is too large."""


def unmeasured(dtype: str, temperature: float) -> Gap:
    """The bound without a float64 computation: `LEAST`, divided by the temperature where that is below 1."""
    # Logits are divided by the temperature, and with them their rounding errors.
    by, least, most = 1 / min(1.0, temperature), LEAST[dtype], CEILING[dtype]
    return Gap(min(by * least.worst, most.worst), min(by * least.mean, most.mean))


def allowed(dtype: str, gap: Gap, learner_M: np.ndarray, exact: Exact, temperature: float) -> Gap:
    """The bound for `gap`: `LEAST` if the gap is within it, else what the learner's own rounding error allows.

    If the model is too large for float64, it is `unmeasured`.
    """
    least, most = LEAST[dtype], CEILING[dtype]
    # The usual case, which needs no float64 pass. `exact` copies the
    # weights, so it is called only where the gap must be explained.
    if gap.within(least):
        return least
    if (exact_M := exact()) is None:
        return unmeasured(dtype, temperature)
    # Two correct computations each differ from the exact one by about this much.
    # How much that is depends on the weights, so no fixed number would do.
    own = Gap.of(learner_M, exact_M)
    return Gap(
        min(max(least.worst, MARGIN * own.worst), most.worst), min(max(least.mean, MARGIN * own.mean), most.mean)
    )


def as_sampled(learner: Learner) -> Learner:
    """Returns the model that a sampler is compared with: the learner, whose experts are those that the sampler chose
    where it is a mixture. Where two experts score alike rounding decides, and a learner that chooses by itself is
    another model."""
    routers = learner.routers()
    return learner if routers is None else routers.followed()


FLOOR: Mapping[str, float] = {"float32": LEAST["float32"].worst, "bfloat16": 0.03, "float16": 4e-3}
"""The least noise assumed, by dtype, since a few tokens may show too little of it."""


def noise(dtype: str, learner: Learner, packed: Packed) -> float:
    """Nats by which a correct engine's log-prob of any of these tokens may differ from the learner's.

    It is measured in float64 unless the model is too large for that.
    """
    if (exact_M := learner.exact(packed)) is None:
        return unmeasured(dtype, packed.sampling.temperature).worst
    return min(max(FLOOR[dtype], MARGIN * Gap.of(learner.score(packed), exact_M).worst), CEILING[dtype].worst)
