"""How far two right computations of one log-prob may lie apart, and when that is too far.

Sampler and learner compute the same numbers with other shapes and orders, so they differ by rounding. How much depends
on dtype, width, depth, how sharp the policy has become, and the temperature, which divides logits and so multiplies
their errors. No constant fits all of that. A gap below `LEAST` is fine everywhere; beyond it the weights are computed
with once more in float64, which shows how much of what the learner says is rounding. A gap may be `MARGIN` times that,
and never more than `CEILING`: a learner that is wrong by as much as that is wrong, however it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.ports import Learner


@dataclass(frozen=True)
class Gap:
    """Nats: the largest of a set of tokens, and their mean."""

    worst: float
    mean: float

    @staticmethod
    def of(one_M: np.ndarray, two_M: np.ndarray) -> Gap:
        """Between two computations of the same log-probs; what is not finite is infinitely far."""
        apart = np.abs(one_M.astype(np.float64) - two_M)
        apart = np.where(np.isfinite(apart), apart, np.inf)
        return Gap(float(apart.max(initial=0.0)), float(apart.sum() / max(1, apart.size)))

    def within(self, bound: Gap) -> bool:
        return self.worst <= bound.worst and self.mean <= bound.mean


LEAST: Mapping[str, Gap] = {"float32": Gap(2e-3, 2e-5), "bfloat16": Gap(0.25, 0.02)}
"""Allowed without a closer look, by dtype."""
CEILING: Mapping[str, Gap] = {"float32": Gap(0.05, 2e-3), "bfloat16": Gap(2.0, 0.2)}
"""Never allowed beyond."""
MARGIN = 8.0
"""How many times a computation's own error in float64's eyes two of them may lie apart."""
Exact = Callable[[], np.ndarray | None]
"""The same log-probs [M] in float64, computed when asked; None where the model is too large."""


def unmeasured(dtype: str, temperature: float) -> Gap:
    """The bound where nothing is measured: `LEAST` at temperature 1 and above. Below, errors of logits are divided by
    it."""
    by, least, most = 1 / min(1.0, temperature), LEAST[dtype], CEILING[dtype]
    return Gap(min(by * least.worst, most.worst), min(by * least.mean, most.mean))


def allowed(dtype: str, gap: Gap, learner_M: np.ndarray, exact: Exact, temperature: float) -> Gap:
    """The bound that holds for `gap`: `LEAST`, or what the learner's own rounding lets it be; `unmeasured` where the
    model is too large."""
    least, most = LEAST[dtype], CEILING[dtype]
    if gap.within(least):
        return least
    if (exact_M := exact()) is None:
        return unmeasured(dtype, temperature)
    own = Gap.of(learner_M, exact_M)
    return Gap(
        min(max(least.worst, MARGIN * own.worst), most.worst), min(max(least.mean, MARGIN * own.mean), most.mean)
    )


FLOOR: Mapping[str, float] = {"float32": LEAST["float32"].worst, "bfloat16": 0.03}
"""Least noise, however little of it a few tokens show."""


def noise(dtype: str, learner: Learner, packed: Packed) -> float:
    """Nats by which an honest engine's log-prob of any of these tokens may differ from the learner's, measured where
    that can be."""
    if (exact_M := learner.exact(packed)) is None:
        return unmeasured(dtype, packed.sampling.temperature).worst
    return min(max(FLOOR[dtype], MARGIN * Gap.of(learner.score(packed), exact_M).worst), CEILING[dtype].worst)
