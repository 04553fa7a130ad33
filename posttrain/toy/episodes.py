"""Groups of episodes from plain numbers: rewards, log-probs, and how many tokens each turn has.

>>> right, wrong = PlainEpisode(1.0, [[2]], np.array([-0.5, -1.0])), PlainEpisode(0.0, [[1]], np.array([-2.0]))
>>> group = scored_group("a", [right, wrong])
>>> group.group.rewards.tolist(), [e.episode.spoken for e in group.episodes]
([1.0, 0.0], [2, 1])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.core.sampling import Sampling
from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import ENERGY, ENTROPY, IMPLICIT, REFERENCE, START, TOP_IDS, TOP_LOGP, VALUE
from posttrain.core.types import SHOWN, Episode, Group, Segment, Stop, Task, Top
from posttrain.core.verdict import Judged, Verdict

SAMPLING = Sampling(max_tokens=20, stop_ids=(0,))
"""The sampling contract of an episode without one of its own."""


@dataclass
class PlainEpisode:
    """One episode in plain numbers. Arrays have one entry for each spoken token, over all segments.

    `turns` lists spoken tokens per (segment, turn): [[3, 2], [4]] is two segments, the first with an observation
    inside.
    """

    reward: float | None
    """None: its verifier failed, so the episode is not judged."""
    turns: Sequence[Sequence[int]]
    mu: np.ndarray
    """Log-probs of the sampler."""
    start: np.ndarray | None = None
    """Log-probs of the learner at the start of the step. This and the next five are None where they were not scored."""
    reference: np.ndarray | None = None
    values: np.ndarray | None = None
    entropy: np.ndarray | None = None
    energy: np.ndarray | None = None
    implicit: np.ndarray | None = None
    """Log-probs of an implicit process reward model."""
    stop: Stop = Stop.SAID
    observation: int = 2
    """Number of tokens of the observation between two turns."""
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Spoken token ids, int32. Empty: all are 7."""
    version: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Version of the weights that sampled each token, int32. Empty: all are 0."""
    shown: bool = False
    """Whether it is a demonstration; `mu` is then not known."""
    verdicts: tuple[Judged, ...] = ()
    """Verdicts of the episode. Empty: one verdict of value `reward`."""
    top: Top | None = None
    """The sampler's most probable tokens."""
    teacher: Top | None = None
    """The teacher's most probable tokens."""
    sampling: Sampling = SAMPLING

    @property
    def spoken(self) -> int:
        return sum(sum(t) for t in self.turns)

    @property
    def judged(self) -> tuple[Judged, ...]:
        verdict = Verdict.failed("outage") if self.reward is None else Verdict.value(self.reward)
        return self.verdicts or (Judged("toy", 1.0, verdict),)


def segments_of(plain: PlainEpisode) -> tuple[Segment, ...]:
    """The episode's segments. Each has two prompt tokens, then its turns with observations between them."""
    out: list[Segment] = []
    # The arrays go over all segments: `here` are the entries of this segment, from `at` on.
    at = 0
    for turns in plain.turns:
        mask: list[bool] = [False, False]
        for i, n in enumerate(turns):
            mask += [False] * (plain.observation if i else 0) + [True] * n
        m = np.array(mask)
        here = slice(at, at + int(m.sum()))
        logp, ids = np.full(len(m), np.nan, np.float32), np.full(len(m), 7, np.int32)
        version = np.full(len(m), -1, np.int32)
        # A log-prob is at most 0; rounding may have put it slightly above.
        logp[m] = 0.0 if plain.shown else np.minimum(plain.mu[here], 0)
        version[m] = SHOWN if plain.shown else plain.version[here] if len(plain.version) else 0
        if len(plain.ids):
            ids[m] = plain.ids[here]
        top = None if plain.top is None else Top(plain.top.ids[here], plain.top.logp[here])
        sampling = plain.sampling if top is None else replace(plain.sampling, top=top.ids.shape[1])
        out.append(Segment(ids, m, logp, version, sampling, top=top))
        at = here.stop
    return tuple(out)


def episode_of(task: Task, sibling: int, plain: PlainEpisode) -> Episode:
    """The library's episode of these plain numbers."""
    return Episode(task, 0, sibling, segments_of(plain), plain.stop, plain.judged)


def _cut(x: np.ndarray, episode: Episode) -> tuple[np.ndarray, ...]:
    """An array over all spoken tokens as one array per segment."""
    return tuple(np.split(x, np.cumsum([s.spoken for s in episode.segments])[:-1]))


def _scored(episode: Episode, plain: PlainEpisode) -> Scored:
    streams = {START: plain.start, REFERENCE: plain.reference, VALUE: plain.values}
    streams |= {ENTROPY: plain.entropy, ENERGY: plain.energy, IMPLICIT: plain.implicit}
    streams |= {} if plain.teacher is None else {TOP_IDS: plain.teacher.ids, TOP_LOGP: plain.teacher.logp}
    return Scored(episode, streams={s: _cut(x, episode) for s, x in streams.items() if x is not None})


def scored_group(
    name: str, plain: Sequence[PlainEpisode], greedy: float | None = None, info: Mapping[str, Any] | None = None
) -> ScoredGroup:
    """A prompt's siblings, scored.

    Args:
        name: id of the task.
        plain: the siblings in order. Those without a reward are in the group and not among the scored.
        greedy: the reward of the prompt's argmax answer, where there is one.
        info: further columns of the task.
    """
    task = Task(name, "?", info=info or {})
    episodes = [episode_of(task, i, p) for i, p in enumerate(plain)]
    # The argmax answer is judged beside the siblings, and is no sibling itself.
    argmax = None if greedy is None else episode_of(task, len(plain), PlainEpisode(greedy, [[1]], np.full(1, -1.0)))
    scored = [_scored(e, p) for e, p in zip(episodes, plain, strict=True) if e.reward is not None]
    return ScoredGroup(Group(task, 0, tuple(episodes), argmax), tuple(scored))


def rewarded(*groups: Sequence[float], lengths: Sequence[Sequence[int]] | None = None) -> list[ScoredGroup]:
    """Groups with these rewards, one token each unless `lengths` says more, and log-probs of -1.

    >>> [g.group.rewards.tolist() for g in rewarded([1, 0], [0, 0, 1])]
    [[1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    lengths = lengths or [[1] * len(g) for g in groups]

    def plain(reward: float, n: int) -> PlainEpisode:
        same = np.full(n, -1.0)
        return PlainEpisode(reward, [[n]], same, same, reference=same, energy=np.ones(n), implicit=same)

    return [
        scored_group(str(i), [plain(r, n) for r, n in zip(g, ns, strict=True)])
        for i, (g, ns) in enumerate(zip(groups, lengths, strict=True))
    ]
