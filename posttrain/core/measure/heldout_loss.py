"""The held-out loss: the mean negative log-prob, in nats per token, of the demonstrations of held-out tasks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.measure.interval import Gain, Score
from posttrain.core.measure.number_text import number_text

Rows = Mapping[str, tuple[float, float]]
"""(sum of weight * negative log-prob, sum of weights) over the tokens of each demonstration, by a digest of these."""


@dataclass(frozen=True)
class HeldoutLoss:
    """The loss of held-out demonstrations: the mean over all their tokens, as in training.

    >>> print(HeldoutLoss({"a": (3.0, 2.0), "b": (1.0, 2.0)}).words)
    held-out loss 1.000, perplexity 2.718
    """

    rows: Rows

    @property
    def score(self) -> Score:
        return Score.free([*self.values(self.rows).values()])

    def values(self, of: Iterable[str]) -> dict[Hashable, float]:
        """One number for each of these rows that this loss has. Their mean is the mean loss over all tokens: row k gets
        nll_k * rows / weight. So an interval has rows as its units."""
        shared = [k for k in of if k in self.rows]
        weight = math.fsum(self.rows[k][1] for k in shared)
        return {k: self.rows[k][0] * len(shared) / weight for k in shared}

    def gain(self, after: HeldoutLoss) -> Gain:
        """The change from this loss to another one, over the rows of both. Below 0: the loss fell."""
        shared = [k for k in self.rows if k in after.rows]
        return Gain.free(self.values(shared), after.values(shared))

    def gauges(self) -> Gauges:
        nll, weight = (math.fsum(r[i] for r in self.rows.values()) for i in (0, 1))
        return {"heldout/loss": Gauge(nll, weight), "heldout/perplexity": Gauge(perplexity(self.score.mean), 1)}

    @property
    def words(self) -> str:
        return loss_words(self.score.mean)


def perplexity(loss: float) -> float:
    """exp of a loss in nats: the number of equally probable tokens that would give the same loss."""
    # exp of more than 709 is no float64.
    return math.exp(min(loss, 700.0))


def agreement_words(share: float) -> str:
    """A line about the share of held-out pairs whose better side has the higher score."""
    return f"{share:.3f} of held-out pairs ordered as judged"


def loss_words(loss: float) -> str:
    return f"held-out loss {number_text(loss)}, perplexity {perplexity(loss):.4g}"
