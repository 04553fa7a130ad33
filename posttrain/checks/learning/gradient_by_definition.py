"""The gradient of the loss by each log-prob and value, from the definition of the family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.checks.learning.credit_by_definition import kind, pieces, understood
from posttrain.core.batch import Batch
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, START, VALUE, WEIGHT
from posttrain.ladder.algorithm import Algorithm

LIMIT = 20.0
"""Log-ratios are clamped to this before exp, as in the definition of the ratio."""


@dataclass(frozen=True, eq=False)
class Demand:
    """The expected gradient of the loss by each log-prob [M]."""

    want_M: np.ndarray
    size_M: np.ndarray
    """Size of its terms: rounding is relative to it."""
    sure_M: np.ndarray
    """False for a token so near a bound that rounding decides on which side it is."""


def demand(a: Algorithm, batch: Batch, logp_M: np.ndarray) -> Demand | None:
    """d loss / d logp of one minibatch, from the definition of the family; None if a piece is not covered.

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
    """d loss / d value of one minibatch: weight * coef * the derivative of half the larger square, plain or clipped."""
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
    """(d pull / d logp, size of its terms), before the weights."""
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
    slope = {"k2": d, "k3": k3_slope, "rk3": _exp(gap_M) * (k3 * (np.abs(gap_M) <= LIMIT) + k3_slope)}.get(
        pull.estimator
    )
    return (
        None if slope is None else (pull.coef * slope, pull.coef * (1 + np.abs(logp_M)) * np.maximum(1, np.exp(-near)))
    )


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
