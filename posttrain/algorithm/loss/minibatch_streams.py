"""Streams that are made over a whole minibatch before it is split, so that a split changes nothing. To add one, write
its `Stream` and its `Maker` here, and put the maker into `WHOLE` (see `core/streams.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.algorithm.loss.token_selection import choose, mixing
from posttrain.core.batch import Batch, Packed
from posttrain.core.scored import EpisodeCredit
from posttrain.core.streams import ENTROPY, NOW, TOP_IDS, TOP_LOGP, VERSION, Maker, Stream
from posttrain.core.types import SHOWN
from posttrain.ladder.algorithm import Algorithm

MIX = Stream(
    "mix",
    "float64",
    "where between sampler (0) and policy (1) the start of the step is taken to lie",
    "the proximal anchor (anchor=proximal)",
)
CHOSEN = Stream(
    "chosen", "bool", "the tokens that `Algorithm.tokens` chose", "the choice of tokens that speak or pay (tokens=...)"
)
IMITATE = Stream(
    "imitate",
    "float64",
    "the weights of the imitated tokens, which sum to 1 or are all 0",
    "the imitation term (imitate=...)",
)
HEARD = Stream(
    "heard",
    "float64",
    "what each token that the policy was told weighs, one over their number in the minibatch: the same number beside"
    " every spoken token",
    "the imitation of what was heard (imitate.of=heard)",
)
WAS_SHOWN = Stream(
    "shown", "bool", "the tokens that a demonstration wrote", "demonstrations beside samples (shown=...)"
)


@dataclass(frozen=True, eq=False)
class MinibatchContext:
    """The context of makers of these streams: a minibatch with all its tokens, scores and credit."""

    algorithm: Algorithm
    batch: Batch
    credits: Sequence[EpisodeCredit]
    """Credit of each episode of the batch, in order."""
    versions: tuple[int, int]
    """Version of the weights at the start of the step, and of the weights after this minibatch."""
    rng: np.random.Generator
    """Random generator of this minibatch alone."""
    now: Callable[[Packed], np.ndarray] | None = None
    """Log-probs under the weights of now. None: they are still those at the start of the batch."""

    @property
    def shown_M(self) -> np.ndarray:
        return self.batch[VERSION] == SHOWN


def _chosen(w: MinibatchContext) -> np.ndarray:
    """The tokens that `Algorithm.tokens` chooses, by the weights before this optimizer step."""
    tokens, batch = w.algorithm.tokens, w.batch
    assert tokens is not None
    # One more forward pass, under the weights that earlier minibatches of this
    # step have made. NOW is for this choice alone and is not kept in the batch.
    if tokens.reads_now and w.now is not None:
        batch = batch.having({NOW: w.now(batch)})
    return choose(tokens, batch, batch.find(ENTROPY), w.rng)


def _imitated(w: MinibatchContext) -> np.ndarray:
    """Equal weights for the shown tokens, or for the policy's own tokens in solved episodes."""
    assert w.algorithm.imitate is not None
    # [E], spread to tokens by `sequence_M`. A demonstration does not count as a
    # solved episode here, because the policy did not write it.
    solved = np.array([e.episode.solved for e in w.credits])
    wanted = w.shown_M if w.algorithm.imitate.of == "shown" else solved[w.batch.sequence_M] & ~w.shown_M
    # With nothing to imitate all weights are 0, and the term is 0.
    return wanted / max(1, int(wanted.sum()))


def _heard(w: MinibatchContext) -> np.ndarray:
    """One over the number of heard tokens in the minibatch, at every spoken token."""
    # Heard tokens have no entry. Their weight is written at every spoken token, and a micro-batch reads its first one.
    return np.full(w.batch.spoken, 1 / max(1, w.batch.heard().spoken))


def _sampled_top(w: MinibatchContext) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probs) [M, K] of the candidates that the sampler recorded at each spoken token."""
    tops = [s.top for e in w.credits for s in e.episode.segments if s.top]
    return np.concatenate([t.ids for t in tops]), np.concatenate([t.logp for t in tops])


WHOLE: list[Maker[MinibatchContext]] = [
    # All of them read the batch as it was packed, and none reads what another one made: their order does not matter.
    Maker((WAS_SHOWN,), lambda w: w.algorithm.shown is not None, lambda w: (w.shown_M,)),
    Maker((MIX,), lambda w: w.algorithm.anchor == "proximal", lambda w: (mixing(w.batch[VERSION], *w.versions),)),
    Maker((CHOSEN,), lambda w: w.algorithm.tokens is not None, lambda w: (_chosen(w),)),
    Maker((IMITATE,), lambda w: w.algorithm.imitate is not None and not w.algorithm.hears, lambda w: (_imitated(w),)),
    Maker((HEARD,), lambda w: w.algorithm.hears, lambda w: (_heard(w),)),
    Maker(
        (TOP_IDS, TOP_LOGP),
        lambda w: w.algorithm.distill is None and any(s.top for e in w.credits for s in e.episode.segments),
        _sampled_top,
    ),
]
"""The makers of these streams, in the order in which they run."""
