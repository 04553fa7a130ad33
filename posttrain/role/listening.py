"""What the loss really asks of each log-prob, and what the optimizer really does with a gradient, heard from outside.

Nothing is computed differently while somebody listens: hooks read, they never write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.run import Optimizer
from posttrain.role.audit import kind, pieces, understood
from posttrain.role.movement import Handed
from posttrain.role.trainer import Trainer

LIMIT = 20.0
"""Log-ratios are held within this before exp, as the definition of the ratio says."""


@dataclass
class Heard:
    """One optimizer step as it was heard: per micro-batch, in order; and what the optimizer was handed."""

    logp: list[np.ndarray] = field(default_factory=list[np.ndarray])
    asked: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """d loss / d log-prob."""
    entropy: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """d loss / d entropy, where the loss reads it."""
    value: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list[tuple[np.ndarray, np.ndarray]])
    """(value, d loss / d value), where the loss reads it."""
    left: int = 0
    """Parameters that still held a gradient before the first backward."""
    handed: Handed | None = None
    """What the optimizer was handed, where it was listened to."""


class _Ear:
    """A learner whose differentiable scores are listened to; everything else is the learner's own."""

    def __init__(self, learner: Any, heard: Heard) -> None:
        self._learner, self._heard = learner, heard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._heard.logp:
            self._heard.left = sum(p.grad is not None and bool(p.grad.any()) for p in self._learner.parameters().values())
        scores = self._learner.forward(*args, **kwargs)
        if scores.entropy is not None and scores.entropy.requires_grad:
            scores.entropy.register_hook(lambda grad: self._heard.entropy.append(_numbers(grad)))
        if scores.value is not None and scores.value.requires_grad:
            said = _numbers(scores.value)
            scores.value.register_hook(lambda grad: self._heard.value.append((said, _numbers(grad))))
        if scores.logp.requires_grad:
            self._heard.logp.append(_numbers(scores.logp))
            scores.logp.register_hook(lambda grad: self._heard.asked.append(_numbers(grad)))
        return scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


class _Scale:
    """An optimizer that says, before its step, what the step should do."""

    def __init__(self, optimizer: Any, heard: Heard, config: Optimizer) -> None:
        self._optimizer, self._heard, self._config = optimizer, heard, config

    def step(self) -> float:
        self._heard.handed = Handed.of(self._optimizer, self._config)
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@contextmanager
def listening(trainer: Trainer, *, update: Optimizer | None) -> Iterator[Heard]:
    """Inside the block the trainer's learner, and with `update`, the stage's configuration, its optimizer too, are listened to."""
    heard, learner, optimizer = Heard(), trainer.learner, trainer.optimizer
    trainer.learner = _Ear(learner, heard)  # type: ignore[assignment]
    if update is not None:
        trainer.optimizer = _Scale(optimizer, heard, update)  # type: ignore[assignment]
    try:
        yield heard
    finally:
        trainer.learner, trainer.optimizer = learner, optimizer


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


@dataclass(frozen=True, eq=False)
class Demand:
    """What the loss should ask of each log-prob [M]; `sure` is False where rounding decides on which side of a bound a token lies."""

    want_M: np.ndarray
    size_M: np.ndarray
    """Size of the terms it is made of: what rounding is relative to."""
    sure_M: np.ndarray


def demand(a: Algorithm, batch: Batch, logp_M: np.ndarray) -> Demand | None:
    """d loss / d logp of one minibatch, from the definition of the family; None where a piece is not understood.

    -weight * c * push * A + weight * d pull / d logp
    """
    if (
        not understood(a, "loss", {"ratio", "anchor", "clip", "pull", "correction"})
        or a.ratio not in _RATIOS
        or a.anchor not in ("start", "behaviour")
    ):
        return None
    mu = batch.logp_mu_M.astype(np.float64)
    start = logp_M if batch.logp_start_M is None else batch.logp_start_M.astype(np.float64)
    gap = logp_M - (mu if a.anchor == "behaviour" else start)
    ratio = _RATIOS[a.ratio](gap, batch.sequence_M)
    credit, weight = batch.advantage_M, batch.weight_M
    sure = np.ones(len(ratio), bool)
    push = ratio
    if a.clip is not None:
        clip: Any = a.clip
        silent = np.where(credit > 0, ratio > 1 + clip.high, (credit < 0) & (ratio < 1 - clip.low))
        push = np.where(silent, 0.0, ratio)
        sure &= np.minimum(np.abs(ratio - 1 - clip.high), np.abs(ratio - 1 + clip.low)) > 1e-5
    for piece in pieces(a.correction):
        raw = _RATIOS["token" if piece.level == "token" else "sequence_product"](start - mu, batch.sequence_M)
        if kind(piece) == "Truncate":
            push = push * (raw if piece.cap is None else np.minimum(raw, piece.cap))
        else:
            push = push * np.where((raw >= piece.low) & (raw <= piece.high), raw, 0.0)
            sure &= np.minimum(np.abs(raw - piece.low), np.abs(raw - piece.high)) > 1e-5
    pull = _pull(a.pull, batch, logp_M, gap)
    if pull is None:
        return None
    return Demand(weight * (pull[0] - push * credit), weight * (np.abs(push * credit) + pull[1]), sure)


def value_demand(value: Any, batch: Batch, value_M: np.ndarray) -> np.ndarray | None:
    """d loss / d value of one minibatch: weight * coef * the slope of the larger of the plain and the clipped square, halved."""
    if batch.return_M is None or (value.clip is not None and batch.value_M is None):
        return None
    plain = value_M - batch.return_M
    slope = plain
    if value.clip is not None and batch.value_M is not None:
        step = value_M - batch.value_M
        near = batch.value_M + np.clip(step, -value.clip, value.clip) - batch.return_M
        slope = np.where(plain**2 >= near**2, plain, np.where(np.abs(step) <= value.clip, near, 0.0))
    return batch.weight_M * value.coef * slope


def _pull(pull: Any, batch: Batch, logp_M: np.ndarray, gap_M: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(d pull / d logp, size of what it is made of), before the weights."""
    nothing = np.zeros(len(logp_M))
    if pull is None or getattr(pull, "placement", "loss") == "reward":
        return nothing, nothing
    if kind(pull) == "SequenceL2":
        total = _sums(gap_M, batch.sequence_M)
        return pull.coef * total, pull.coef * _sums(np.abs(logp_M), batch.sequence_M)
    if batch.logp_ref_M is None or pull.placement not in ("loss", "both"):
        return None
    d = logp_M - batch.logp_ref_M
    lost = d < -LIMIT
    near = np.maximum(d, -LIMIT)
    k3, k3_slope = np.exp(-near) - 1 + near, np.where(lost, 0.0, 1 - np.exp(-near))
    slope = {"k2": d, "k3": k3_slope, "rk3": _exp(gap_M) * (k3 * (np.abs(gap_M) <= LIMIT) + k3_slope)}.get(pull.estimator)
    return None if slope is None else (pull.coef * slope, pull.coef * (1 + np.abs(logp_M)) * np.maximum(1, np.exp(-near)))


def _sums(x_M: np.ndarray, sequence_M: np.ndarray) -> np.ndarray:
    return np.bincount(sequence_M, weights=x_M)[sequence_M]


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(x, -LIMIT, LIMIT))


_RATIOS = {
    "one": lambda gap, sequence: np.ones(len(gap)),
    "token": lambda gap, sequence: _exp(gap),
    "sequence_mean": lambda gap, sequence: _exp(_sums(gap, sequence) / _sums(np.ones(len(gap)), sequence)),
    "sequence_product": lambda gap, sequence: _exp(_sums(gap, sequence)),
}
