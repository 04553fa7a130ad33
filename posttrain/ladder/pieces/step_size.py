"""The size of an optimizer step: which share of the learning rate is used, by what the minibatch showed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.ladder.pieces.piece import Piece, positive

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm


class StepScale(Piece, begin=True):
    """The share of the learning rate that one optimizer step uses. Its mathematics is in `algorithm.loss.step_scale`.

    It is not a factor of the loss: an optimizer that divides by its own moments does not see such a factor.
    """


@dataclass(frozen=True, kw_only=True)
class EffectiveSize(StepScale):
    """sqrt(min(1, ESS / base)) with ESS = (sum w)^2 / (n sum w^2) over the n responses of the minibatch, where
    w = pi(y)/mu(y) is not bounded (VCPO, 2602.17616).

    A few stale responses with large ratios make a small effective sample size, and then a small step. The square root
    is the authors' rule for AdamW.
    """

    reads_silent = True  # a response without credit counts as one of the n

    base: float = 1.0
    """ESS at which the whole learning rate is used. The authors take 1, and .55 for long answers with tools."""

    def __post_init__(self) -> None:
        positive("step_scale.base", self.base, "step_scale=none")

    def words(self) -> str:
        over = "" if self.base == 1 else f" / {self.base:g}"
        share = f"sqrt(min(1, ESS{over}))" if over else "sqrt(ESS)"
        return f"{share} of the learning rate; ESS = (sum w)^2 / (n sum w^2) over n responses, w = pi(y)/mu(y)"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        # w = pi(y)/mu(y), and a demonstration has no mu.
        if a.shown is not None:
            yield (
                "step_scale=effectivesize compares responses with their sampler, and shown ones have none. Set"
                " shown=none, or step_scale=none"
            )
