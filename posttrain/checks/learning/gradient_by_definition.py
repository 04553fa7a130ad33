"""The gradient of the loss by each log-prob and value, from the definition of the family."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from posttrain.algorithm.loss.minibatch_streams import CHOSEN, IMITATE, MIX, WAS_SHOWN
from posttrain.checks.learning.credit_by_definition import NEUTRAL, kind, pieces, uncovered_credit
from posttrain.checks.learning.push_by_definition import (
    CORRECTIONS,
    LIMIT,
    REGIONS,
    MismatchInputs,
    PushInputs,
    exp,
    means,
    sums,
)
from posttrain.core.batch import Batch
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, START, VALUE, WEIGHT
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.token_choice import KlCov

NEAR = 1e-5
"""A token nearer than this to a bound may be decided otherwise by rounding."""
BESIDE = {"distill", "imitate"}
"""Choices without a form whose gradient does not go through the log-probs of the said tokens."""


@dataclass(frozen=True, eq=False)
class Demand:
    """The expected gradient of the loss by each log-prob [M]."""

    want_M: np.ndarray
    size_M: np.ndarray
    """Size of its terms: rounding is relative to it."""
    sure_M: np.ndarray
    """False for a token so near a bound that rounding decides on which side it is."""


def uncovered(a: Algorithm) -> list[str]:
    """Names of the choices of an algorithm whose part of the loss has no second form here."""
    known = {"ratio", "anchor", "clip", "pull", "correction", "tokens", "imitate", "shown"}
    out = [f.name for f in fields(a) if f.name not in known | NEUTRAL["loss"] and getattr(a, f.name) != f.default]
    if a.clip is not None and (kind(a.clip) not in REGIONS or getattr(a.clip, "top", 0)):
        out.append("clip")
    if any(kind(piece) not in CORRECTIONS for piece in pieces(a.correction)):
        out.append("correction")
    if a.pull is not None and not _in_credit(a.pull) and kind(a.pull) not in ("KL", "SequenceL2", "TokenL2"):
        out.append("pull")
    if a.imitate is not None and a.imitate.of == "heard":
        out.append("imitate")
    return out


def computed_once(a: Algorithm) -> str:
    """A line that names what a run of this algorithm does not compute a second time; '' where it is nothing."""
    parts = {"loss": uncovered(a), "credit": uncovered_credit(a)}
    named = [f"{part} ({', '.join(choices)})" for part, choices in parts.items() if choices]
    return f"no second computation checks {' or '.join(named)}" if named else ""


def demand(a: Algorithm, batch: Batch, logp_M: np.ndarray) -> Demand | None:
    """d loss / d logp of one minibatch, from the definition of the family; None if a choice is not covered, or where a
    stream that it reads is not in the batch. -weight * c * push * A + weight * d pull / d logp - coef * imitated."""
    needed = {CHOSEN: a.tokens, MIX: a.anchor == "proximal" or None, WAS_SHOWN: a.shown}
    needed[IMITATE] = a.imitate if a.imitate is not None and a.imitate.of != "heard" else None
    if set(uncovered(a)) - BESIDE or any(why is not None and stream not in batch for stream, why in needed.items()):
        return None
    mu = batch[MU].astype(np.float64)
    start = batch[START].astype(np.float64) if START in batch else logp_M
    if a.anchor == "proximal":
        start = mu + batch[MIX] * (logp_M - mu)
    gap, credit, weight = logp_M - (mu if a.anchor == "behaviour" else start), batch[ADVANTAGE], batch[WEIGHT]
    inputs = PushInputs(_RATIOS[a.ratio](gap, batch.sequence_M), gap, credit, logp_M, batch.sequence_M)
    push, near = (inputs.r, np.full(len(gap), np.inf)) if a.clip is None else REGIONS[kind(a.clip)](a.clip, inputs)
    for piece in pieces(a.correction):
        factor, bound = CORRECTIONS[kind(piece)](piece, MismatchInputs(mu, start, inputs))
        push, near = push * factor, np.minimum(near, bound)
    pull, size = _pull(a.pull, batch, logp_M, gap) or (None, None)
    if pull is None or size is None:
        return None
    if a.tokens is not None and a.tokens.silences:
        push = push * batch[CHOSEN]
    elif isinstance(a.tokens, KlCov):
        paid = a.tokens.coef * batch[CHOSEN]
        pull, size, near = pull + paid * np.sign(gap), size + paid, np.minimum(near, np.abs(gap) + (paid == 0))
    if a.shown is not None:
        p, gamma = np.exp(logp_M), a.shown.gamma
        push = np.where(batch[WAS_SHOWN], 0.0 if gamma is None else gamma * p / (p + gamma) ** 2, push)
    want, size = weight * (pull - push * credit), weight * (np.abs(push * credit) + size)
    if a.imitate is not None and a.imitate.of != "heard":
        p = np.exp(logp_M)
        told = a.imitate.coef * batch[IMITATE] * (p * (1 - p) if a.imitate.unsure else 1.0)
        want, size = want - told, size + told
    return Demand(want, size, near > NEAR)


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
    if pull is None or _in_credit(pull):
        return nothing, nothing
    if kind(pull) == "TokenL2":
        return 2 * pull.coef * gap_M, 2 * pull.coef * (np.abs(logp_M) + np.abs(logp_M - gap_M))
    if kind(pull) == "SequenceL2":
        total = sums(gap_M, batch.sequence_M)
        return pull.coef * total, pull.coef * sums(np.abs(logp_M) + np.abs(logp_M - gap_M), batch.sequence_M)
    if REFERENCE not in batch or pull.placement not in ("loss", "both"):
        return None
    d = logp_M - batch[REFERENCE]
    lost = d < -LIMIT
    near = np.maximum(d, -LIMIT)
    k3, k3_slope = np.exp(-near) - 1 + near, np.where(lost, 0.0, 1 - np.exp(-near))
    slope = {"k2": d, "k3": k3_slope, "rk3": exp(gap_M) * (k3 * (np.abs(gap_M) <= LIMIT) + k3_slope)}.get(
        pull.estimator
    )
    size = pull.coef * (1 + np.abs(logp_M)) * np.maximum(1, np.exp(-near))
    if pull.estimator == "rk3":
        size = size * np.maximum(1, exp(gap_M))
    return None if slope is None else (pull.coef * slope, size)


def _in_credit(pull: Any) -> bool:
    """Returns whether the loss has no term of this pull."""
    return getattr(pull, "placement", "loss") in ("reward", "token")


_RATIOS = {
    "one": lambda gap, sequence: np.ones(len(gap)),
    "token": lambda gap, sequence: exp(gap),
    "sequence_mean": lambda gap, sequence: exp(means(gap, sequence)),
    "sequence_token": lambda gap, sequence: exp(means(gap, sequence)),
    "sequence_product": lambda gap, sequence: exp(sums(gap, sequence)),
}
