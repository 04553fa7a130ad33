"""Turn-level credit: a turn's reward is compared with turns of the siblings, of the same number or from the same state.
A turn is a run of spoken tokens. Positions count the spoken tokens of all segments, so observations are in no sum."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.algorithm.credit.reward_spread import Array, compared
from posttrain.core.types import Episode
from posttrain.ladder.pieces.baseline import AnchorMean, TurnMean


@dataclass(frozen=True)
class Turn:
    """Spoken tokens `begin` to `end` of an episode, with the context before them and their reward."""

    begin: int
    end: int
    observation: bytes
    """The context tokens since the turn before. For a segment's first turn, all of its prompt."""
    history: bytes
    """All tokens of the segment before the turn."""
    paid: float
    """The rewards that were given for this turn."""


def turns(episode: Episode) -> list[Turn]:
    """The episode's turns in order."""
    paid = earned(episode)
    out: list[Turn] = []
    spoken = 0
    for s in episode.segments:
        # With a 0 before and behind it, the mask rises at the first token of
        # each run and falls behind its last: the places alternate begin, end.
        edges = np.flatnonzero(np.diff(s.mask.astype(np.int8), prepend=0, append=0))
        last = 0
        for begin, end in edges.reshape(-1, 2).tolist():
            n = end - begin
            out.append(
                # Token ids, since text could be equal for different tokens.
                Turn(
                    spoken,
                    spoken + n,
                    s.ids[last:begin].tobytes(),
                    s.ids[:begin].tobytes(),
                    math.fsum(paid[spoken : spoken + n]),
                )
            )
            spoken, last = spoken + n, end
    return out


def earned(episode: Episode) -> Array:
    """Rewards of turns [T], each at the last token of its turn."""
    out = np.zeros(episode.spoken)
    for j in episode.verdicts:
        # `end` counts spoken tokens from 1. Scores of steps are no payment and stay out.
        if j.paid and j.end is not None and j.verdict.score is not None and 0 < j.end <= len(out):
            out[j.end - 1] += j.weight * j.verdict.score
    return out


def by_turn(b: TurnMean, episodes: Sequence[Episode], rewards: Array, noise: float, *, scaled: bool) -> list[Array]:
    """MT-GRPO (2505.11821, Eq. 7): a turn's reward compared with the same turn of the siblings, plus the credit of the
    outcome in every turn.

    `rewards` [G] are the siblings' whole rewards, `noise` the largest difference of these that counts as rounding. The
    rewards of turns are subtracted from them before they are compared. `noise` is right for every part of a reward,
    because the rewards of turns are among its terms.
    """
    # A_k = outcome * A(R) + A(paid_k), where R is the reward less the rewards of all turns:
    # else a turn's reward would count in its own term and in the outcome's.
    turns_G = [turns(e) for e in episodes]
    outcome = compared(
        np.array([r - math.fsum(t.paid for t in ts) for r, ts in zip(rewards, turns_G, strict=True)]),
        noise,
        scaled=scaled,
    )
    out = [np.full(e.spoken, b.outcome * a) for e, a in zip(episodes, outcome, strict=True)]
    for number in range(max(map(len, turns_G), default=0)):
        # Among the episodes that have a turn k. One that is alone there gets no credit for the turn.
        having = [i for i, ts in enumerate(turns_G) if number < len(ts)]
        credit = compared(np.array([turns_G[i][number].paid for i in having]), noise, scaled=scaled)
        for i, a in zip(having, credit, strict=True):
            out[i][turns_G[i][number].begin : turns_G[i][number].end] += a
    return out


def by_state(b: AnchorMean, episodes: Sequence[Episode], rewards: Array, noise: float, *, scaled: bool) -> list[Array]:
    """GiGPO (2505.10978): the episode's credit, plus that of each turn compared with all turns from the same state.

    A turn's return is the sum of the rewards from this turn on, discounted once per turn. The part of the reward that
    was not paid for a turn counts at the last turn.
    """
    turns_G = [turns(e) for e in episodes]
    out = [np.full(e.spoken, a) for e, a in zip(episodes, compared(rewards, noise, scaled=scaled), strict=True)]
    # First every turn gets its return g_k = r_k + gamma g_{k+1}, from the last turn backwards. Then all
    # turns from equal states are compared as one group, whatever their sibling and their number.
    by_key: defaultdict[bytes, list[tuple[int, Turn, float]]] = defaultdict(list)
    for i, (ts, reward) in enumerate(zip(turns_G, rewards, strict=True)):
        to_go = 0.0
        unpaid = reward - math.fsum(t.paid for t in ts)
        for t in reversed(ts):
            to_go = t.paid + unpaid + b.gamma * to_go
            # What was paid for no turn is earned at the end of the episode:
            # the first turn of this walk takes it, and no other.
            unpaid = 0.0
            by_key[t.observation if b.by == "observation" else t.history].append((i, t, to_go))
    for members in by_key.values():
        for (i, t, _), a in zip(
            members, compared(np.array([x for *_, x in members]), noise, scaled=scaled), strict=True
        ):
            out[i][t.begin : t.end] += b.omega * a
    return out
