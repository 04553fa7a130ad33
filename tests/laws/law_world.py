"""An off-policy step in which sampler, start, reference, teacher and policy all differ, as the library and as a
textbook see it.

Every position has a vocabulary of its own, so the id of a spoken token says where in the world it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from law_toys import NOW, batch_of
from torch import Tensor

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.policy_loss import Terms, objective
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.scored import Credit
from posttrain.core.streams import TOP_IDS
from posttrain.core.types import Top
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.baseline import AnchorMean, TurnMean
from posttrain.toy.episodes import SAMPLING, PlainEpisode, scored_group

L_MAX = SAMPLING.max_tokens
VOCABULARY, FIRST_ID = 12, 100

SHAPES: list[list[list[list[int]]]] = [
    [[[2, 1], [3]], [[1]], [[4]], [[17]], [[2], [2]], [[3]]],
    [[[5]], [[1], [2]], [[3, 2]], [[2]], [[1, 1]]],
    [[[6]], [[1, 1], [1]], [[2]], [[19]]],
]
"""Spoken tokens per turn, segment, sibling and group."""
UNJUDGED = (1, 2)


@dataclass(frozen=True, eq=False)
class Ep:
    """One judged episode as a textbook sees it; tensors are per spoken token, log-probs unless said otherwise."""

    group: int
    R: float
    parts: dict[str, tuple[float, float]]
    """Every reward source that gave a value: (weight, score)."""
    steps: list[tuple[int, float]]
    """Judged steps: (tokens up to its end, score)."""
    turns: list[tuple[int, int, str, float]]
    """Every turn: its first token, the one behind its last, what was seen before it, and what it was paid."""
    greedy: float
    shown: bool
    mu: Tensor
    old: Tensor
    ref: Tensor
    v_old: Tensor
    entropy_old: Tensor
    energy: Tensor
    phi: Tensor
    version: Tensor
    mu_near: Tensor
    """[n, V]: the sampler's whole distribution."""
    teacher: Tensor
    """[n, V]"""
    lp: Tensor
    H: Tensor
    v: Tensor
    near: Tensor
    """[n, V]: the policy's whole distribution; `lp` is its entry of the said token."""
    said: Tensor

    def __len__(self) -> int:
        return len(self.lp)


Book = Callable[[Sequence[Ep]], Tensor]
"""A published objective as a loss over the judged episodes of a step."""


def _softmax_through(rng: np.random.Generator, said: np.ndarray, logp: np.ndarray) -> np.ndarray:
    """Logits [M, V] of a distribution that gives each said token the log-prob it has."""
    z = rng.normal(size=(len(said), VOCABULARY))
    rows = np.arange(len(said))
    z[rows, said] = -np.inf
    p = np.exp(logp)
    z[rows, said] = np.log(p) - np.log1p(-p) + np.log(np.exp(z).sum(1))
    return z


class World:
    """Three groups of ragged multi-segment episodes, one of them not judged, with the streams that `a` reads and no
    others."""

    def __init__(self, a: Algorithm, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.a = a
        lengths = [[sum(map(sum, turns)) for turns in group] for group in SHAPES]
        m = sum(map(sum, lengths))
        self.at = np.arange(m)
        self.mu = np.minimum(-rng.gamma(2.0, 0.5, m), -0.02).astype(np.float32)
        self.start, self.ref = (
            np.minimum(self.mu + rng.normal(size=m) * s, -0.01).astype(np.float32) for s in (0.2, 0.4)
        )
        self.v_old, self.entropy_old = rng.normal(size=m).astype(np.float32), rng.random(m).astype(np.float32)
        self.version = rng.integers(0, NOW + 1, m).astype(np.int32)
        self.energy = np.random.default_rng([seed, 1]).uniform(0.01, 1.9, m).astype(np.float32)
        self.phi = (self.ref + np.random.default_rng([seed, 2]).normal(size=m)).astype(np.float32)
        said = rng.integers(0, VOCABULARY, m)
        now = np.minimum(self.start.astype(np.float64) + rng.normal(size=m) * 0.3, -0.005)
        self.logits = torch.tensor(_softmax_through(rng, said, now), requires_grad=True)
        sampled = torch.log_softmax(torch.tensor(_softmax_through(rng, said, self.mu.astype(np.float64))), 1)
        self.mu_near = sampled.numpy().astype(np.float32)
        self.mu_near[self.at, said] = self.mu
        self.teacher = torch.log_softmax(torch.tensor(rng.normal(size=(m, VOCABULARY))), 1).numpy().astype(np.float32)
        self.near = torch.log_softmax(self.logits, 1)
        self.lp = self.near[self.at, said]
        self.H = torch.tensor(rng.random(m), requires_grad=True)
        self.v = torch.tensor(rng.normal(size=m), requires_grad=True)
        self.said = said.astype(np.int64)
        self.greedy = [0.4, 0.9, 0.1]
        self.answers: list[list[PlainEpisode]] = []
        self.eps: list[Ep] = []
        end = 0
        for i, shape in enumerate(SHAPES):
            self.answers.append([])
            for j, turns in enumerate(shape):
                here = slice(end, end + lengths[i][j])
                end = here.stop
                self._add(i, j, turns, here, (*_verdicts(rng, i, j, lengths[i][j]), *self._paid(i, j, turns)))
        self.groups = [scored_group(str(i), g, greedy=self.greedy[i]) for i, g in enumerate(self.answers)]

    def _add(self, group: int, sibling: int, turns: list[list[int]], here: slice, verdicts: tuple[Judged, ...]) -> None:
        a, reads = self.a, self.a.reads
        shown = a.shown is not None and sibling == len(SHAPES[group]) - 1
        ids = (FIRST_ID + VOCABULARY * self.at[:, None] + np.arange(VOCABULARY)).astype(np.int32)
        answer = PlainEpisode(
            None if (group, sibling) == UNJUDGED else 0.0,
            turns,
            self.mu[here],
            start=self.start[here] if "start" in reads else None,
            reference=self.ref[here] if "reference" in reads else None,
            values=self.v_old[here] if "values" in reads else None,
            entropy=self.entropy_old[here] if "entropy" in reads else None,
            energy=self.energy[here] if "energy" in reads else None,
            implicit=self.phi[here] if "implicit" in reads else None,
            ids=ids[self.at, self.said][here],
            version=self.version[here],
            shown=shown,
            observation=2 + sibling % 2,
            verdicts=verdicts,
            top=_most_probable(ids[here], self.mu_near[here], a.stores_top) if a.stores_top else None,
            teacher=_most_probable(ids[here], self.teacher[here], a.distill.top) if a.distill is not None else None,
        )
        self.answers[group].append(answer)
        if (group, sibling) == UNJUDGED:
            return
        valued = {
            j.source: (j.weight, j.verdict.score) for j in verdicts if j.end is None and j.verdict.score is not None
        }
        steps = [
            (j.end, j.verdict.score)
            for j in verdicts
            if j.end is not None and not j.paid and j.verdict.score is not None
        ]
        paid = sum(j.verdict.score or 0.0 for j in verdicts if j.paid)

        def put(x: np.ndarray) -> Tensor:
            return torch.as_tensor(np.asarray(x[here], np.float64))

        episode = Ep(
            group,
            sum(w * s for w, s in valued.values()) + paid,
            valued,
            steps,
            _turns(turns, sibling, verdicts),
            self.greedy[group],
            shown,
            mu=put(0 * self.mu if shown else self.mu),
            old=put(self.start),
            ref=put(self.ref),
            v_old=put(self.v_old),
            entropy_old=put(self.entropy_old),
            energy=put(self.energy),
            phi=put(self.phi),
            version=put(self.version),
            mu_near=put(self.mu_near),
            teacher=put(self.teacher),
            lp=self.lp[here],
            H=self.H[here],
            v=self.v[here],
            near=self.near[here],
            said=torch.as_tensor(self.said[here]),
        )
        self.eps.append(episode)

    def _paid(self, group: int, sibling: int, turns: list[list[int]]) -> tuple[Judged, ...]:
        """A reward for every other turn, where the algorithm knows turns."""
        if not isinstance(self.a.baseline, TurnMean | AnchorMean):
            return ()
        rng = np.random.default_rng([group, sibling])
        ends = np.cumsum([n for segment in turns for n in segment])[::2]
        return tuple(Judged("turn", 1.0, Verdict.value(rng.random()), end=int(end), paid=True) for end in ends)

    # --- the library's side ---

    @cached_property
    def credit(self) -> Credit:
        return credit_step(self.a, self.groups, max_tokens=L_MAX, ema=0.0)

    @cached_property
    def batch(self) -> Batch:
        """The step through credit and packer."""
        return batch_of(self.a, self.credit)

    def scores(self, batch: Batch, logp: Tensor | None = None) -> TokenScores:
        """What the policy says of the tokens of a batch of this world."""
        at = torch.as_tensor((batch.target_M - FIRST_ID) // VOCABULARY, dtype=torch.int64)
        candidates = None
        if TOP_IDS in batch:
            column = torch.as_tensor((batch[TOP_IDS] - FIRST_ID) % VOCABULARY, dtype=torch.int64)
            candidates = self.near[at].gather(1, column)
        heard = -torch.as_tensor(batch.heard().target_M % 7 + 1, dtype=torch.float64) if self.a.hears else None
        spoken = (self.lp if logp is None else logp)[at]
        return TokenScores(spoken, self.H[at], self.v[at], candidates, heard=heard)

    def terms(self, *batches: Batch, a: Algorithm | None = None) -> list[Terms]:
        """Loss and gauges of each batch."""
        return [objective(a or self.a, streams(b, dtype=torch.float64), self.scores(b)) for b in batches]

    def gradient(self, loss: Tensor) -> tuple[Tensor, ...]:
        """d/dlogits [M, V], d/dentropy [M], d/dvalue [M]; zeros where nothing is read."""
        inputs = (self.logits, self.H, self.v)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))

    def library(self) -> tuple[Tensor, ...]:
        return self.gradient(self.terms(self.batch)[0].loss)

    def textbook(self, book: Book) -> tuple[Tensor, ...]:
        return self.gradient(book(self.eps))


@cache
def world(a: Algorithm, seed: int) -> World:
    """A world is read only, so laws share it."""
    return World(a, seed)


def _verdicts(rng: np.random.Generator, group: int, sibling: int, length: int) -> tuple[Judged, ...]:
    """Two sources, one of which once abstains, and judged steps in the first two groups."""
    right = float(sibling == 0 or (sibling != 1 and rng.random() < 0.4))
    form = Verdict.abstain() if (group, sibling) == (0, 3) else Verdict.value(rng.random() / 2)
    outcome = Verdict.failed("outage") if (group, sibling) == UNJUDGED else Verdict.value(right)
    ends = np.unique(rng.integers(1, length + 1, 3)) if group < 2 else []
    steps = [Judged("steps", 1.0, Verdict.value(rng.random()), end=int(end)) for end in ends]
    return (Judged("right", 1.0, outcome), Judged("form", 0.5, form), *steps)


def _turns(turns: list[list[int]], sibling: int, verdicts: tuple[Judged, ...]) -> list[tuple[int, int, str, float]]:
    paid = {j.end: j.verdict.score or 0.0 for j in verdicts if j.paid}
    out: list[tuple[int, int, str, float]] = []
    for segment in turns:
        for i, n in enumerate(segment):
            begin = out[-1][1] if out else 0
            out.append((begin, begin + n, f"saw {2 + sibling % 2}" if i else "saw 2", paid.get(begin + n, 0.0)))
    return out


def _most_probable(ids: np.ndarray, logp: np.ndarray, k: int) -> Top:
    order = np.argsort(-logp, axis=1, kind="stable")[:, : k or logp.shape[1]]
    return Top(np.take_along_axis(ids, order, 1), np.take_along_axis(logp, order, 1))
