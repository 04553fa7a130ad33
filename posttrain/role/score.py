"""REFERENCE and the other forward-only scorers: what the algorithm reads beside the sampler's own log-probs, no more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.algorithm import Algorithm
from posttrain.core.batch import Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Examiner, Learner
from posttrain.core.types import Episode, Group, Scored, ScoredGroup, Top

Stream = tuple[np.ndarray, ...]


def reads_start(a: Algorithm, optimizer_steps: int) -> bool:
    """Whether the start-of-step log-probs need a forward of their own.

    With one optimizer step a step they equal the training forward's own, except where credit already needs them.
    """
    return a.start_before_loss or ("start" in a.reads and optimizer_steps > 1)


def score(
    groups: Sequence[Group], a: Algorithm, learner: Learner, reference: Examiner | None, *, optimizer_steps: int
) -> tuple[ScoredGroup, ...]:
    """Judged episodes of each group with the streams `a` reads. Groups without a judged episode leave here."""
    episodes = [e for g in groups for e in g.judged]
    if not episodes:
        return ()
    packed = Packed.of([s for e in episodes for s in e.segments])
    start = _cut(learner.score(packed), episodes) if reads_start(a, optimizer_steps) else None
    ref = _cut(_there(a, reference).score(packed), episodes) if "reference" in a.reads else None
    values = _cut(learner.value(packed), episodes) if "values" in a.reads else None
    entropy = _cut(learner.entropy(packed), episodes) if "entropy" in a.reads else None
    energy = _cut(learner.energy(packed), episodes) if "energy" in a.reads else None
    teacher = _cut_top(_there(a, reference).top(packed, a.distill.top), episodes) if a.distill is not None else None
    scored = iter(
        Scored(e, _at(start, i), _at(ref, i), _at(values, i), _at(entropy, i), None if teacher is None else teacher[i], _at(energy, i))
        for i, e in enumerate(episodes)
    )
    return tuple(ScoredGroup(g, tuple(next(scored) for _ in g.judged)) for g in groups if g.judged)


def _at(streams: list[Stream] | None, episode: int) -> Stream | None:
    return None if streams is None else streams[episode]


def _there(a: Algorithm, reference: Examiner | None) -> Examiner:
    if reference is None:
        raise InvariantError(f"algorithm {a.name!r} reads a reference, and the house has none")
    return reference


def _cut_top(top: Top, episodes: Sequence[Episode]) -> list[tuple[Top, ...]]:
    """Top tokens of a packing back into per-episode, per-segment ones."""
    return [tuple(map(Top, ids, logp)) for ids, logp in zip(_cut(top.ids, episodes), _cut(top.logp, episodes), strict=True)]


def _cut(stream_M: np.ndarray, episodes: Sequence[Episode]) -> list[Stream]:
    """A packed stream back into per-episode, per-segment arrays."""
    sizes = [s.spoken for e in episodes for s in e.segments]
    if sum(sizes) != len(stream_M):
        raise InvariantError(f"a scorer returned {len(stream_M)} log-probs for {sum(sizes)} spoken tokens")
    parts = iter(np.split(stream_M, np.cumsum(sizes)[:-1]))
    return [tuple(next(parts) for _ in e.segments) for e in episodes]
