"""REFERENCE and the other forward-only scorers: what the algorithm reads beside the sampler's own log-probs, no more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.algorithm import KL, Algorithm
from posttrain.core.batch import Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Learner, Scorer
from posttrain.core.types import Episode, Group, Scored, ScoredGroup

Stream = tuple[np.ndarray, ...]


def reads_start(a: Algorithm, optimizer_steps: int) -> bool:
    """Whether the start-of-step log-probs need a forward of their own.

    With one optimizer step a step they equal the training forward's own, except where credit already needs them.
    """
    credit_needs = isinstance(a.pull, KL) and a.pull.placement != "loss" and a.anchor == "start"
    return credit_needs or ("start" in a.reads and optimizer_steps > 1)


def score(
    groups: Sequence[Group], a: Algorithm, learner: Learner, reference: Scorer | None, *, optimizer_steps: int
) -> tuple[ScoredGroup, ...]:
    """Judged episodes of each group with the streams `a` reads. Groups without a judged episode leave here."""
    episodes = [e for g in groups for e in g.judged]
    if not episodes:
        return ()
    packed = Packed.of([s for e in episodes for s in e.segments])
    start = _cut(learner.score(packed), episodes) if reads_start(a, optimizer_steps) else None
    ref = None
    if "reference" in a.reads:
        if reference is None:
            raise InvariantError(f"algorithm {a.name!r} reads a reference, and the house has none")
        ref = _cut(reference.score(packed), episodes)
    values = _cut(learner.value(packed), episodes) if "values" in a.reads else None
    scored = iter(
        Scored(e, start[i] if start else None, ref[i] if ref else None, values[i] if values else None) for i, e in enumerate(episodes)
    )
    return tuple(ScoredGroup(g, tuple(next(scored) for _ in g.judged)) for g in groups if g.judged)


def _cut(stream_M: np.ndarray, episodes: Sequence[Episode]) -> list[Stream]:
    """A packed stream back into per-episode, per-segment arrays."""
    sizes = [s.spoken for e in episodes for s in e.segments]
    if sum(sizes) != len(stream_M):
        raise InvariantError(f"a scorer returned {len(stream_M)} log-probs for {sum(sizes)} spoken tokens")
    parts = iter(np.split(stream_M, np.cumsum(sizes)[:-1]))
    return [tuple(next(parts) for _ in e.segments) for e in episodes]
