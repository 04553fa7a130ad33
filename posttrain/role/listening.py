"""What the loss really asks of each log-prob, and what the optimizer really does with a gradient, heard from outside.

Nothing is computed differently while somebody listens: hooks read, they never write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Batch
from posttrain.core.run import Optimizer
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, START, VALUE, WEIGHT
from posttrain.role.audit import kind, pieces, understood
from posttrain.role.trainer import Trainer

LIMIT = 20.0
"""Log-ratios are held within this before exp, as the definition of the ratio says."""
SAMPLED = 1 << 20
"""Tensors up to this many numbers have their first update followed."""


@dataclass
class Heard:
    """One optimizer step as it was heard: per micro-batch, in order; and the gradients the optimizer was handed."""

    logp: list[np.ndarray] = field(default_factory=list[np.ndarray])
    asked: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """d loss / d log-prob."""
    entropy: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """d loss / d entropy, where the loss reads it."""
    value: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list[tuple[np.ndarray, np.ndarray]])
    """(value, d loss / d value), where the loss reads it."""
    left: int = 0
    """Parameters that still held a gradient before the first backward."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Of the tensors of at most `SAMPLED` numbers."""
    largest: dict[str, Largest] = field(default_factory=dict[str, Any])
    """Of every tensor with a gradient that is not 0."""
    norm: float = math.nan


@dataclass(frozen=True)
class Largest:
    """The number of a tensor with the largest gradient: where it lies in the flat tensor, its gradient and its weight before the step."""

    index: int
    gradient: float
    weight: float


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
    """An optimizer whose gradients are copied as they arrive."""

    def __init__(self, optimizer: Any, heard: Heard) -> None:
        self._optimizer, self._heard = optimizer, heard

    def step(self) -> float:
        moved = self._optimizer.trained()
        grads = {n: p.grad for n, p in moved.items() if p.grad is not None}
        self._heard.gradients = {n: g.detach().double().cpu().clone() for n, g in grads.items() if g.numel() <= SAMPLED}
        for name, g in grads.items():
            at = int(g.detach().abs().argmax())
            gradient, weight = (float(x.detach().flatten()[at]) for x in (g, moved[name]))
            if gradient:
                self._heard.largest[name] = Largest(at, gradient, weight)
        self._heard.norm = math.sqrt(math.fsum(float(g.detach().double().square().sum()) for g in grads.values()))
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@contextmanager
def listening(trainer: Trainer, *, gradients: bool) -> Iterator[Heard]:
    """Inside the block the trainer's learner, and with `gradients` its optimizer too, are listened to."""
    heard, learner, optimizer = Heard(), trainer.learner, trainer.optimizer
    trainer.learner = _Ear(learner, heard)  # type: ignore[assignment]
    if gradients:
        trainer.optimizer = _Scale(optimizer, heard)  # type: ignore[assignment]
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
    mu = batch[MU].astype(np.float64)
    start = batch[START].astype(np.float64) if START in batch else logp_M
    gap = logp_M - (mu if a.anchor == "behaviour" else start)
    ratio = _RATIOS[a.ratio](gap, batch.sequence_M)
    credit, weight = batch[ADVANTAGE], batch[WEIGHT]
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
    if RETURN not in batch or (value.clip is not None and VALUE not in batch):
        return None
    plain = value_M - batch[RETURN]
    slope = plain
    if value.clip is not None and VALUE in batch:
        step = value_M - batch[VALUE]
        near = batch[VALUE] + np.clip(step, -value.clip, value.clip) - batch[RETURN]
        slope = np.where(plain**2 >= near**2, plain, np.where(np.abs(step) <= value.clip, near, 0.0))
    return batch[WEIGHT] * value.coef * slope


def _pull(pull: Any, batch: Batch, logp_M: np.ndarray, gap_M: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(d pull / d logp, size of what it is made of), before the weights."""
    nothing = np.zeros(len(logp_M))
    if pull is None or getattr(pull, "placement", "loss") == "reward":
        return nothing, nothing
    if kind(pull) == "SequenceL2":
        total = _sums(gap_M, batch.sequence_M)
        return pull.coef * total, pull.coef * _sums(np.abs(logp_M), batch.sequence_M)
    if REFERENCE not in batch or pull.placement not in ("loss", "both"):
        return None
    d = logp_M - batch[REFERENCE]
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


@dataclass(frozen=True)
class Update:
    """The largest departure of a first optimizer step from the configured one, each relative to what was expected."""

    name: str
    moved: float
    momentum: float


def first_update(
    config: Optimizer, heard: Heard, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> Update:
    """The first step of AdamW from rest is known in closed form: -lr * g / (|g| + eps) - lr * decay * w.

    Args:
        before, after: what the optimizer moves, around the step.
        state: its state afterwards; the moments are (1 - beta1) * g and (1 - beta2) * g^2.
    """
    lr = config.lr / config.warmup if config.warmup else config.lr
    shrink = min(1.0, config.clip / heard.norm) if heard.norm > 0 else 1.0
    worst = Update("", 0.0, 0.0)
    for name, raw in heard.gradients.items():
        g, old, new = raw * shrink, before[name].double().cpu(), after[name].detach().double().cpu()
        want = -lr * g / (g.abs() + config.eps) - lr * config.weight_decay * old
        moved = float(((new - old - want).abs() - 3e-7 * old.abs()).max()) / lr
        momentum = 0.0
        for key, part, want in (("exp_avg", 1 - config.beta1, g), ("exp_avg_sq", 1 - config.beta2, g * g)):
            size = part * float(want.abs().max())
            if size > 0 and (held := state.get(f"{key}.{name}")) is not None:
                momentum = max(momentum, float((held.double().cpu() - part * want).abs().max()) / size)
        if max(moved, momentum) > max(worst.moved, worst.momentum):
            worst = Update(name, moved, momentum)
    return worst
