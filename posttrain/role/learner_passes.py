"""What observers read of the forward and backward passes of one optimizer step: scores, and gradients of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from posttrain.core.batch import Batch
from posttrain.core.exchange.row_gradient import held
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.ports import Learner
from posttrain.system.errors import InvariantError


@dataclass(frozen=True)
class Needs:
    """What observers need of an optimizer step apart from its gauges. The rest is not copied."""

    logp: bool = False
    """The learner's log-prob of every spoken token."""
    gradients: bool = False
    """The gradients of the loss by each log-prob, entropy and value."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.logp or other.logp, self.gradients or other.gradients)


@dataclass
class Passes:
    """Scores and gradients of each micro-batch, in order, in float64. Only what an observer needs is kept."""

    needs: Needs
    micros: list[Batch] = field(default_factory=list[Batch])
    episodes: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """The episodes of each micro-batch, as the minibatch numbers them."""
    logp: list[np.ndarray] = field(default_factory=list[np.ndarray])
    logp_grad: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """d loss / d log-prob."""
    entropy_grad: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """d loss / d entropy, if the loss reads entropies."""
    value: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list[tuple[np.ndarray, np.ndarray]])
    """(value, d loss / d value), if the loss reads values."""
    stale_gradients: int = 0
    """Parameters that still held a gradient before the first backward pass. There should be none."""
    scale: float = 1.0
    """The factor of the loss in the backward passes. The gradients here are without it."""
    balance: list[list[float]] = field(default_factory=list[list[float]])
    """[load-balance loss, d loss / d it] of each micro-batch that has one; 0 where it has no gradient."""

    @classmethod
    def of(cls, needs: Needs, learner: Learner, scale: float = 1.0) -> Passes:
        """Start recording, before the first forward pass."""
        # A gradient left over from an earlier step would be added to this step's gradients.
        before = [p.grad for p in learner.parameters().values()] if needs.gradients else []
        return cls(needs, stale_gradients=sum(g is not None and bool(held(g).any()) for g in before), scale=scale)

    def join(self, ranks: Sequence[Passes]) -> None:
        """Become the passes of all ranks, one rank after the other."""
        for name in ("micros", "episodes", "logp", "logp_grad", "entropy_grad", "value", "balance"):
            setattr(self, name, [x for each in ranks for x in getattr(each, name)])
        self.stale_gradients = sum(each.stale_gradients for each in ranks)

    def joined(self, batch: Batch, parts: Sequence[np.ndarray]) -> np.ndarray:
        """[M]: values per spoken token of each micro-batch, in the order of the minibatch; InvariantError where they
        are not one for each token."""
        # Within a micro-batch the tokens keep the order of the minibatch.
        places = [np.flatnonzero(np.isin(batch.sequence_M, chosen)) for chosen in self.episodes]
        place = np.concatenate([np.zeros(0, np.int64), *places])
        if not np.array_equal(np.sort(place), np.arange(batch.spoken)) or [*map(len, places)] != [*map(len, parts)]:
            raise InvariantError(
                f"the micro-batches computed {sum(map(len, parts))} values for {len(place)} spoken tokens of a"
                f" minibatch of {batch.spoken}: every token belongs to exactly one micro-batch"
            )
        out = np.empty(len(place))
        out[place] = np.concatenate([np.zeros(0), *parts])
        return out

    def record(self, micro: Batch, scores: TokenScores, episodes: np.ndarray) -> None:
        """Keep the scores of a micro-batch, and, by hooks that only read them, their gradients once backward has
        computed them."""
        if not (self.needs.logp or self.needs.gradients):
            return
        self.micros.append(micro)
        self.episodes.append(episodes)
        if scores.logp is not None:
            self.logp.append(_numbers(scores.logp))
        if not self.needs.gradients:
            return
        if scores.entropy is not None and scores.entropy.requires_grad:
            # Inside backward the gradient by a score exists for a moment. Divided by the scale, it is that of the loss.
            scores.entropy.register_hook(lambda grad: self.entropy_grad.append(_numbers(grad) / self.scale))
        if scores.value is not None and scores.value.requires_grad:
            value_M = _numbers(scores.value)
            scores.value.register_hook(lambda grad: self.value.append((value_M, _numbers(grad) / self.scale)))
        if scores.balance is not None:
            self._balance(scores.balance)
        if scores.logp is not None and scores.logp.requires_grad:
            scores.logp.register_hook(lambda grad: self.logp_grad.append(_numbers(grad) / self.scale))

    def _balance(self, balance: Tensor) -> None:
        """Keep a load-balance loss, and its gradient once backward has computed it."""
        # A list that the hook fills in: the value is known now, its gradient only after backward.
        loss_and_gradient = [float(balance.detach()), 0.0]
        self.balance.append(loss_and_gradient)
        if balance.requires_grad:
            balance.register_hook(lambda grad: loss_and_gradient.__setitem__(1, float(grad) / self.scale))


def _numbers(x: Tensor) -> np.ndarray:
    """A copy of the tensor in float64, on the CPU."""
    return x.detach().double().cpu().numpy()
