"""SCORE: computes the streams that an algorithm reads of a step's judged episodes, such as log-probs and values. With
`model.router_replay=start` they first get the learner's router choices in place of the sampler's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.ports import Examiner, Learner, Scorer
from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import SCORED, Scoring, Stream
from posttrain.core.types import Episode, Group
from posttrain.ladder.algorithm import Algorithm
from posttrain.role.learning.hinted_teacher import HintedEpisode, Hints, same_words
from posttrain.system.errors import InvariantError


def at_start(episodes: Sequence[Episode], learner: Learner) -> list[Episode]:
    """The same episodes with the experts that the learner's routers choose now, for all of their tokens."""
    routers = learner.routers()
    if routers is None:
        raise InvariantError("model.router_replay=start, and the learner has no routers")
    segments = [s for e in episodes for s in e.segments]
    # [N, R, K]: for every token of all episodes the K experts of each of R routers. Cut back to segments by lengths.
    own_N = routers.read(Packed.of(segments), replay=False).own
    parts = iter(np.split(own_N, np.cumsum([len(s.ids) for s in segments])[:-1]))
    return [replace(e, segments=tuple(replace(s, routed=next(parts)) for s in e.segments)) for e in episodes]


def score(
    groups: Sequence[Group],
    a: Algorithm,
    learner: Learner,
    reference: Examiner | None,
    *,
    optimizer_steps: int,
    implicit: Scorer | None = None,
    hints: Hints | None = None,
    reroute: bool = False,
) -> tuple[ScoredGroup, ...]:
    """The judged episodes of each group with the streams that `a` reads. Groups without any are left out.

    Args:
        implicit: the implicit process reward model, where the algorithm reads one.
        hints: what the reference reads instead of the policy's prompts, where the algorithm has a hint.
        reroute: whether the experts of every token become those that the learner's routers choose now (`at_start`).
    """
    episodes = [e for g in groups for e in g.judged]
    if not episodes:
        return ()
    if reroute:
        episodes = at_start(episodes, learner)
    # Packed into one sequence, which each model scores in passes of a size that fits; streams that need the same
    # numbers of the policy share one.
    segments = [s for e in episodes for s in e.segments]
    hinted_episodes = _told(groups, a, hints)
    hinted = None if hinted_episodes is None else [s for t in hinted_episodes for s in t.segments]
    if hinted is not None:
        same_words(segments, hinted)
    scoring = Scoring(
        Packed.of(segments),
        a,
        learner,
        reference if hints is None else hints.teacher(learner, reference),
        optimizer_steps,
        implicit,
        None if hinted is None else Packed.of(hinted),
    )
    # Makers run in order over the packed sequence. Each stream is cut back to
    # episodes, because credit works by episode and `pack` may leave some out.
    cut_streams = {
        stream: _cut(stream, x_M, episodes) for maker in SCORED for stream, x_M in maker.make(scoring).items()
    }
    scored = iter(
        Scored(
            e,
            "" if hinted_episodes is None else hinted_episodes[i].missing,
            streams={s: parts[i] for s, parts in cut_streams.items()},
        )
        for i, e in enumerate(episodes)
    )
    return tuple(ScoredGroup(g, tuple(next(scored) for _ in g.judged)) for g in groups if g.judged)


def _told(groups: Sequence[Group], a: Algorithm, hints: Hints | None) -> list[HintedEpisode] | None:
    """The judged episodes with the hint in their prompts, as the teacher reads them; None without a hint."""
    if a.hint is None:
        return None
    if hints is None:
        raise InvariantError(
            f"algorithm {a.name!r} shows its teacher a hint, and the stage has none to show: build its roles with hints"
        )
    return [e for g in groups for e in hints.of(g)]


def _cut(stream: Stream, x_M: np.ndarray, episodes: Sequence[Episode]) -> list[tuple[np.ndarray, ...]]:
    """Cut a packed stream [M] into arrays per episode and segment."""
    sizes = [s.spoken for e in episodes for s in e.segments]
    if sum(sizes) != len(x_M):
        raise InvariantError(
            f"the scorer of {stream.name!r} returned {len(x_M)} numbers for {sum(sizes)} spoken tokens: it must give"
            " one for each of `packed.source_M`"
        )
    # Packing keeps the order of episodes and segments, so cutting
    # at the same sizes gives every token its own number back.
    parts = iter(np.split(x_M, np.cumsum(sizes)[:-1]))
    return [tuple(next(parts) for _ in e.segments) for e in episodes]
