"""How far two correct computations of the same log-probs may differ, by dtype and by the learner's measured error.
`allowed` is the bound for a difference of learner and sampler, `noise` one for a single log-prob."""

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
        """The gap of two computations of the same log-probs. A difference that is not finite counts as infinite."""
        difference_M = np.abs(one_M.astype(np.float64) - two_M)
        # Every comparison with NaN is False, so NaN could pass a test by accident. Infinity fails every bound.
        difference_M = np.where(np.isfinite(difference_M), difference_M, np.inf)
        return Gap(float(difference_M.max(initial=0.0)), float(difference_M.sum() / max(1, difference_M.size)))

    def within(self, bound: Gap) -> bool:
        """Whether both numbers are at most those of the bound."""
        return self.worst <= bound.worst and self.mean <= bound.mean


LEAST: Mapping[str, Gap] = {"float32": Gap(2e-3, 2e-5), "bfloat16": Gap(0.25, 0.02), "float16": Gap(0.03, 2.5e-3)}
"""A gap that is always allowed, by dtype. With equal weights 5e-5 was measured in float32, and 0.13 in bfloat16."""
CEILING: Mapping[str, Gap] = {"float32": Gap(0.05, 2e-3), "bfloat16": Gap(2.0, 0.2), "float16": Gap(0.25, 0.025)}
"""The largest gap that is ever allowed, by dtype."""
MARGIN = 8.0
"""Two computations may differ by this many times the error of one of them against float64."""
Exact = Callable[[], np.ndarray | None]
"""Computes the same log-probs [M] in float64; None if the model is too large."""


def unmeasured(dtype: str, temperature: float) -> Gap:
    """The bound without a float64 computation: `LEAST`, divided by the temperature where that is below 1."""
    # The temperature divides the logits, and also their rounding errors.
    factor, least, most = 1 / min(1.0, temperature), LEAST[dtype], CEILING[dtype]
    return Gap(min(factor * least.worst, most.worst), min(factor * least.mean, most.mean))


def allowed(dtype: str, gap: Gap, learner_M: np.ndarray, exact: Exact, temperature: float) -> Gap:
    """The bound for `gap`: `LEAST` if the gap is within it, else what the learner's own rounding error allows, or
    `unmeasured` if the model is too large for float64."""
    least, most = LEAST[dtype], CEILING[dtype]
    # The usual case. `exact` copies the weights, so it is called only where the gap must be explained.
    if gap.within(least):
        return least
    if (exact_M := exact()) is None:
        return unmeasured(dtype, temperature)
    # Two correct computations each differ from the exact one by about this much.
    # How much that is depends on the weights, so no fixed number would do.
    learner_error = Gap.of(learner_M, exact_M)
    return Gap(
        min(max(least.worst, MARGIN * learner_error.worst), most.worst),
        min(max(least.mean, MARGIN * learner_error.mean), most.mean),
    )


def as_sampled(learner: Learner) -> Learner:
    """Returns the model that a sampler is compared with: the learner, with the experts that the sampler chose. Where
    two have nearly equal scores, rounding decides, and a learner that chooses its own would be another model."""
    routers = learner.routers()
    return learner if routers is None else routers.followed()


FLOOR: Mapping[str, float] = {"float32": LEAST["float32"].worst, "bfloat16": 0.03, "float16": 4e-3}
"""The least noise that `noise` assumes, by dtype, because a few tokens may show too little of it."""


def noise(dtype: str, learner: Learner, packed: Packed) -> float:
    """Nats by which a correct engine's log-prob of any of these tokens may differ from the learner's, measured in
    float64 unless the model is too large."""
    if (exact_M := learner.exact(packed)) is None:
        return unmeasured(dtype, packed.sampling.temperature).worst
    return min(max(FLOOR[dtype], MARGIN * Gap.of(learner.score(packed), exact_M).worst), CEILING[dtype].worst)
