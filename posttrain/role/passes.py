"""What the forward and backward passes of one optimizer step say, kept for those who observe it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from posttrain.core.batch import Batch
from posttrain.core.ports import Learner
from posttrain.core.scores import TokenScores


@dataclass(frozen=True)
class Needs:
    """What those who observe an optimizer step need of it beside its gauges. What nobody needs is not copied."""

    logp: bool = False
    """The learner's log-probs of every spoken token."""
    gradients: bool = False
    """What the loss asks of each log-prob, entropy and value: its derivative by them."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.logp or other.logp, self.gradients or other.gradients)


@dataclass
class Passes:
    """Per micro-batch, in order; float64, as far as it was needed."""

    needs: Needs
    micros: list[Batch] = field(default_factory=list[Batch])
    logp: list[np.ndarray] = field(default_factory=list[np.ndarray])
    logp_grad: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """d loss / d log-prob."""
    entropy_grad: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """d loss / d entropy, where the loss reads it."""
    value: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list[tuple[np.ndarray, np.ndarray]])
    """(value, d loss / d value), where the loss reads it."""
    stale_gradients: int = 0
    """Parameters that still held a gradient before the first backward."""

    @classmethod
    def of(cls, needs: Needs, learner: Learner) -> Passes:
        """Before the first pass."""
        held = [p.grad for p in learner.parameters().values()] if needs.gradients else []
        return cls(needs, stale_gradients=sum(g is not None and bool(g.any()) for g in held))

    def record(self, micro: Batch, scores: TokenScores) -> None:
        """Take note of differentiable scores, and of their derivatives once these are there. Hooks read, they never
        write."""
        if not (self.needs.logp or self.needs.gradients):
            return
        self.micros.append(micro)
        self.logp.append(_numbers(scores.logp))
        if not self.needs.gradients:
            return
        if scores.entropy is not None and scores.entropy.requires_grad:
            scores.entropy.register_hook(lambda grad: self.entropy_grad.append(_numbers(grad)))
        if scores.value is not None and scores.value.requires_grad:
            said = _numbers(scores.value)
            scores.value.register_hook(lambda grad: self.value.append((said, _numbers(grad))))
        if scores.logp.requires_grad:
            scores.logp.register_hook(lambda grad: self.logp_grad.append(_numbers(grad)))


def _numbers(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()
