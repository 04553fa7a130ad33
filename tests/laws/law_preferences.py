"""Minibatches of judged completions for laws, and a loss's value and gradient on them in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from textbooks_preference import Row, Side

from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import prepared
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.gauge import Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.streams import COLLISION, MARGIN, OPPONENT, REFERENCE, SIDE, START, WEIGHT, Stream
from posttrain.core.types import Segment
from posttrain.ladder.preference_algorithm import SIDES, PreferenceAlgorithm

Z = 0.5
"""KTO's z in these laws."""


@dataclass(frozen=True, eq=False)
class Judged:
    """Completions of a minibatch: log-probs of their tokens under policy and reference, and what is known of them."""

    a: PreferenceAlgorithm
    logp: tuple[np.ndarray, ...]
    reference: tuple[np.ndarray, ...]
    side: tuple[int, ...]
    margin: tuple[float, ...]
    """Of each unit."""
    own: tuple[bool, ...]
    """Of each unit: whether the policy said the chosen one, and its opponent the other."""
    squares: tuple[np.ndarray, ...]
    """sum of pi^2 at each token."""
    weight: tuple[float, ...] = ()
    """Of each unit; none: they weigh alike."""

    @property
    def width(self) -> int:
        return len(SIDES[self.a.rows]) or 1

    @property
    def units(self) -> int:
        return len(self.logp) // self.width

    def of(self, a: PreferenceAlgorithm) -> Judged:
        """The same completions for another algorithm of the same rows."""
        return Judged(a, self.logp, self.reference, self.side, self.margin, self.own, self.squares, self.weight)

    def taking(self, units: Sequence[int]) -> Judged:
        """These units, in this order."""
        k = self.width
        at = [u * k + i for u in units for i in range(k)]
        return Judged(
            a=self.a,
            logp=tuple(self.logp[i] for i in at),
            reference=tuple(self.reference[i] for i in at),
            side=tuple(self.side[i] for i in at),
            margin=tuple(self.margin[u] for u in units),
            own=tuple(self.own[u] for u in units),
            squares=tuple(self.squares[i] for i in at),
            weight=tuple(self.weight[u] for u in units) if self.weight else (),
        )

    def batch(self) -> Batch:
        """The minibatch with all its streams, before `prepared`."""
        k, lengths = self.width, [len(x) for x in self.logp]

        def spread(x_E: Sequence[float] | Sequence[bool] | Sequence[int], kind: type) -> np.ndarray:
            return np.repeat(np.array(x_E, kind), lengths)

        logp = np.concatenate(self.logp)
        own_E = [(s == 1) == self.own[e // k] for e, s in enumerate(self.side)]
        streams: dict[Stream, np.ndarray] = {
            SIDE: spread(self.side, np.int32),
            REFERENCE: np.concatenate(self.reference),
            START: logp,
            COLLISION: np.concatenate(self.squares),
            MARGIN: spread([self.margin[e // k] for e in range(len(lengths))], np.float64),
            OPPONENT: ~spread(own_E, np.bool_),
        }
        if self.weight:
            streams[WEIGHT] = spread([self.weight[e // k] for e in range(len(lengths))], np.float64)
        segments = [_segment(n) for n in lengths]
        unit_E = np.repeat(np.arange(self.units, dtype=np.int32), k)
        return Batch.of(segments, unit_E=unit_E, streams=streams)

    def rows(self, logp_M: torch.Tensor) -> list[Row]:
        """The rows of a textbook, as parts of one tensor, so that it has the gradient."""
        parts = torch.split(logp_M, [len(x) for x in self.logp])
        sides: list[Side] = [(x, torch.from_numpy(r)) for x, r in zip(parts, self.reference, strict=True)]
        out = list[Row]()
        for u in range(self.units):
            at = range(u * self.width, (u + 1) * self.width)
            by = {self.side[e]: sides[e] for e in at}
            squares = {self.side[e]: torch.from_numpy(self.squares[e]) for e in at}
            both = (squares[1], squares[0]) if 1 in squares and 0 in squares else None
            out.append(Row(by.get(1), by.get(0), by.get(2), self.margin[u], both, self.own[u]))
        return out


def _segment(n: int) -> Segment:
    """One masked token, then n spoken ones."""
    mask = np.arange(n + 1) > 0
    logp = np.where(mask, 0.0, np.nan).astype(np.float32)
    return Segment(np.zeros(n + 1, np.int32), mask, logp, np.where(mask, 0, -1).astype(np.int32), Sampling())


def judged(a: PreferenceAlgorithm, lengths: Sequence[int], seed: int = 0) -> Judged:
    """A random minibatch; `lengths` are those of all completions, whole units of them."""
    rng = np.random.default_rng(seed)
    order = SIDES[a.rows]
    units = len(lengths) // (len(order) or 1)
    logp = tuple(-rng.exponential(1.0, n) - 1e-3 for n in lengths)
    side = order * units if order else tuple(int(x) for x in rng.integers(0, 2, units))
    return Judged(
        a=a,
        logp=logp,
        reference=tuple(np.minimum(x + rng.normal(0, 0.7, len(x)), -1e-3) for x in logp),
        side=side,
        margin=tuple(float(x) for x in rng.random(units)),
        own=tuple(bool(x) for x in rng.random(units) < 0.5),
        squares=tuple(np.exp(2 * x) + rng.random(len(x)) * 0.1 for x in logp),
    )


@dataclass(frozen=True, eq=False)
class Outcome:
    value: float
    gradient: np.ndarray
    gauges: Gauges


def outcome(
    j: Judged, parts: Sequence[Sequence[int]] | None = None, running: dict[str, float] | None = None
) -> Outcome:
    """Value and gradient [M] of the loss, on the whole minibatch or in parts of its units, given by their numbers."""
    batch, _ = prepared(j.a, j.batch(), running, np.array([Z]) if j.a.reads_mismatched else None)
    loss, found, gradient_M, terms = PreferenceLoss(j.a), 0.0, np.zeros(batch.spoken), []
    for part in parts or [range(batch.units)]:
        episodes = np.concatenate([batch.members(u) for u in part])
        micro = batch.select(episodes)
        at = np.isin(batch.sequence_M, episodes)
        logp_M = torch.tensor(np.concatenate(j.logp)[at], dtype=torch.float64, requires_grad=True)
        term = loss.terms(micro, TokenScores(logp=logp_M, entropy=None, value=None))
        terms.append(term)
        found += float(term.loss.detach())
        term.loss.backward()
        assert logp_M.grad is not None
        gradient_M[at] += logp_M.grad.numpy()
    return Outcome(found, gradient_M, loss.gauges(batch, terms))


def textbook(j: Judged, book: Callable[[Sequence[Row]], torch.Tensor]) -> tuple[float, np.ndarray]:
    """Value and gradient [M] of a textbook on the same numbers."""
    logp_M = torch.tensor(np.concatenate(j.logp), dtype=torch.float64, requires_grad=True)
    value = book(j.rows(logp_M))
    value.backward()
    assert logp_M.grad is not None
    return float(value.detach()), logp_M.grad.numpy()
