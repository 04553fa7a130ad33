"""PACK: cuts the credited groups of a step into minibatches, one for each optimizer step.

Token weights are computed here, once for a whole minibatch; every later split only selects tokens. An episode whose
advantages are all 0 may be left out of the forward pass, but counts in the denominators.

32 prompts x 8 siblings = 256 episodes. With minibatches=4 and epochs=2 that gives 8 minibatches of 8 whole groups, of
which only the first is on-policy for certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.algorithm.loss.minibatch_streams import WHOLE, MinibatchContext
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.config.run import Reinforce
from posttrain.core import seeds
from posttrain.core.batch import Batch, Packed
from posttrain.core.scored import Credit, EpisodeCredit, GroupCredit
from posttrain.core.streams import MU, VERSION, WEIGHT
from posttrain.core.types import OUTSIDE
from posttrain.ladder.algorithm import Algorithm
from posttrain.system.errors import InvariantError


@dataclass(frozen=True)
class Minibatch:
    """The data of one optimizer step."""

    batch: Batch | None
    """None if no token of it can give a gradient."""
    first: bool
    """Whether it is the first of its step."""
    episodes: int
    """Episodes that count in the denominators."""


def pack(
    credit: Credit,
    a: Algorithm,
    stage: Reinforce,
    *,
    seed: int,
    step: int,
    version: int = 0,
    now: Callable[[Packed], np.ndarray] | None = None,
) -> Iterator[Minibatch]:
    """Cut the step's groups into `minibatches` of whole groups, `epochs` times. Each later epoch has a new order.

    A minibatch is made when it is asked for, after the optimizer steps on those before it.

    Args:
        a: the stage's algorithm with its adaptive coefficients as they are now.
        version: of the weights at the start of the step.
        now: computes log-probs under the learner's weights of the moment, for choices of tokens that read them. None:
            no optimizer step is taken between the minibatches.
    """
    groups = [g for g in credit.groups if any(not e.dropped for e in g.episodes)]
    if not groups:
        return
    for epoch in range(stage.epochs):
        # Later epochs are shuffled, so that other groups come together in a minibatch.
        order = np.arange(len(groups))
        if epoch:
            order = seeds.generator(seed, "minibatch-order", step, epoch).permutation(len(groups))
        parts = [p for p in np.array_split(order, min(stage.minibatches, len(groups))) if len(p)]
        for i, part in enumerate(parts):
            # In the order of the step, whatever the shuffle was: the batch is a function of its members alone.
            chosen = [groups[j] for j in sorted(part)]
            rng = seeds.generator(seed, "tokens", step, epoch, i)
            # Its number within this step, from 0. The weights after it have version + optimizer_step + 1.
            optimizer_step = epoch * len(parts) + i
            yield _minibatch(
                a,
                chosen,
                max_tokens=stage.sampling.max_tokens,
                first=optimizer_step == 0,
                versions=(version, version + optimizer_step + 1),
                rng=rng,
                now=None if optimizer_step == 0 else now,  # before the first one the weights are those of the scores
            )


def _minibatch(
    a: Algorithm,
    groups: Sequence[GroupCredit],
    *,
    max_tokens: int,
    first: bool,
    versions: tuple[int, int],
    rng: np.random.Generator,
    now: Callable[[Packed], np.ndarray] | None,
) -> Minibatch:
    """One minibatch of these groups: its weights, its batch, and the streams made over the whole of it. `versions`: of
    the weights at the start of the step, and after this minibatch."""
    # Weights first, then silent episodes are left out: the denominator must not depend on which answers have credit.
    members = [(i, e) for i, g in enumerate(groups) for e in g.episodes if not e.dropped]
    per_token = weigh(a.aggregate, [e.episode.spoken for _, e in members], [i for i, _ in members], max_tokens)
    not_silent = [
        (e, w)
        for (_, e), w in zip(members, per_token, strict=True)
        if a.reads_silent_tokens or any(np.any(x != 0) for x in e.advantage)
    ]
    if not not_silent:
        return Minibatch(None, first, len(members))
    credits = [e for e, _ in not_silent]
    batch = _batch(credits, np.array([w for _, w in not_silent]))
    # Over the whole minibatch: choices of tokens and weights of imitation must not depend on micro-batches.
    context = MinibatchContext(a, batch, credits, versions, rng, now)
    whole_streams = {stream: x_M for maker in WHOLE for stream, x_M in maker.make(context).items()}
    return Minibatch(batch.having(whole_streams), first, len(members))


def _batch(credits: Sequence[EpisodeCredit], weights: np.ndarray) -> Batch:
    """The episodes packed, with their streams. `weights` [E]: the weight of each token of an episode."""
    segments = [s for e in credits for s in e.episode.segments]
    sequence = [i for i, e in enumerate(credits) for _ in e.episode.segments]
    if any(np.any(s.version == OUTSIDE) for s in segments):
        raise InvariantError(
            "a batch holds tokens of a server whose weights and log-probs are not ours (version OUTSIDE): nothing can"
            " be learned from them"
        )
    streams_E = [e.streams for e in credits]
    streams = {
        MU: np.concatenate([s.logp[s.mask] for s in segments]),
        VERSION: np.concatenate([s.version[s.mask] for s in segments]),
        WEIGHT: np.repeat(weights, [e.episode.spoken for e in credits]),
    }
    streams |= {
        # Streams of credit and of models, in the order of first appearance. A
        # stream that only some episodes have is an error: `_stream` raises it.
        stream: _stream([h.get(stream) for h in streams_E], stream.name)
        for stream in dict.fromkeys(s for h in streams_E for s in h)
    }
    batch = Batch.of(segments, sequence, streams=streams)
    if batch.spoken != sum(e.episode.spoken for e in credits):
        raise InvariantError("packing lost or invented spoken tokens")
    return batch


def _stream(parts: Sequence[tuple[np.ndarray, ...] | None], name: str) -> np.ndarray:
    """One array [M] from arrays per episode and segment."""
    present = [p for p in parts if p is not None]
    if len(present) != len(parts):
        raise InvariantError(
            f"stream {name!r} is missing for {len(parts) - len(present)} of {len(parts)} episodes: whoever makes it"
            " makes it for all of a step"
        )
    return np.concatenate([x for p in present for x in p])


def batch_algebra(stage: Reinforce) -> str:
    """The batch sizes of a stage in words, printed when it starts.

    >>> batch_algebra(Reinforce(name="rl", prompts=32, siblings=8, minibatches=4))  # doctest: +NORMALIZE_WHITESPACE
    '32 prompts x 8 siblings = 256 episodes a step -> 4 minibatches of 8 groups x 1 epoch = 4 optimizer steps, the first
    on-policy'
    """
    episodes = stage.prompts * stage.siblings
    epochs = f"{stage.epochs} epoch" + ("s" if stage.epochs > 1 else "")
    cut = f"{stage.minibatches} minibatch" + ("es" if stage.minibatches > 1 else "")
    total = stage.optimizer_steps
    steps = "1 optimizer step, on-policy" if total == 1 else f"{total} optimizer steps, the first on-policy"
    return (
        f"{stage.prompts} prompts x {stage.siblings} siblings = {episodes} episodes a step -> "
        f"{cut} of {stage.prompts // stage.minibatches} groups x {epochs} = {steps}"
    )
