"""Pairs of sampled completions: which samples of a prompt are compared, which one is preferred, and their minibatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.core import seeds
from posttrain.core.batch import Batch
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.measure.equal_numbers import rounding, spread
from posttrain.core.streams import MARGIN, MU, OPPONENT, SIDE, VERSION
from posttrain.core.types import Episode, Group
from posttrain.core.verdict import resolution, size
from posttrain.ladder.pieces.link import Nash
from posttrain.ladder.pieces.pair_source import BestWorst, RejectionSampled
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm


@dataclass(frozen=True, eq=False)
class SampledPair:
    """Two completions of one prompt. `gap` is the difference of their rewards."""

    chosen: Episode
    rejected: Episode
    gap: float

    @property
    def probability(self) -> float:
        """Probability that the chosen completion is preferred, by Bradley and Terry: sigmoid(gap)."""
        return 1 / (1 + math.exp(-self.gap))


@dataclass(frozen=True, eq=False)
class SampledPairs:
    """The pairs of a step, and the numbers of those that gave none."""

    pairs: tuple[SampledPair, ...]
    tied: int
    """Pairs whose completions were judged alike, up to rounding, and are left out. With link=nash they are kept, since
    its divergence to the reference is learned at any preference."""
    unjudged: int
    """Prompts with fewer than two completions of the policy or its opponent that were judged and have a token."""

    def gauges(self) -> Gauges:
        # Each unjudged prompt counts as one pair that was not made.
        pairs_or_prompts = len(self.pairs) + self.tied + self.unjudged
        opponent_chosen = [p.chosen.opposed for p in self.pairs if p.chosen.opposed != p.rejected.opposed and p.gap]
        # How often the policy is preferred to its opponent: of pairs with one completion of each, without ties.
        won = (
            {"preference/won": Gauge.of([not by_opponent for by_opponent in opponent_chosen])}
            if opponent_chosen
            else {}
        )
        return won | {
            "preference/pairs": Gauge(len(self.pairs), 1),
            "preference/tied": Gauge(self.tied, pairs_or_prompts),
            "preference/gap": Gauge.of([p.gap for p in self.pairs]),
        }


def rejection_sampled(rewards: np.ndarray, keep: int, temperature: float, rng: np.random.Generator) -> list[int]:
    """The candidates that are kept, in the order in which they pass (2309.06657, algorithm 1).

    A round keeps each candidate that is left with probability exp((R - max R) / temperature), where max R is the
    largest reward of the candidates left. The best of them always passes, so `keep` rounds are enough. If the best
    answer that the reference can give is among the candidates, those that the first round keeps are distributed as ref
    * exp(R / temperature). The paper's program joins equal texts. Here each sample counts, as this distribution needs.

    Args:
        rewards: float64 [C], of candidates drawn from the reference.
        rng: draws C uniforms in each round, one for each candidate, kept or not. So a candidate's number depends on its
            place alone.

    Returns:
        min(keep, C) places among the candidates.
    """
    left, kept = list(range(len(rewards))), list[int]()
    while left and len(kept) < keep:
        uniform = rng.random(len(rewards))
        largest = max(rewards[i] for i in left)
        passed = [i for i in left if uniform[i] < math.exp((rewards[i] - largest) / temperature)]
        kept += passed
        left = [i for i in left if i not in passed]
    return kept[:keep]


def compared(group: Group, a: PreferenceAlgorithm, key: int) -> list[list[Episode]]:
    """The completions of a prompt that are compared, in lists of which the best and the worst become a pair. [] where
    there are fewer than two. `key`: see `sampled_pairs`."""
    # Demonstrations (`shown`) are not samples of the policy, so they are in no pair.
    judged = [e for e in group.judged if not e.shown and e.spoken]
    if len(judged) < 2:
        return []
    if isinstance(a.draw, BestWorst):
        return [judged]
    if not isinstance(a.draw, RejectionSampled):
        return [judged[:2]]
    rng = seeds.generator(key, "pairs", group.task.id, group.visit)
    rewards = np.array([e.reward for e in judged], np.float64)
    kept = rng.permutation(rejection_sampled(rewards, a.draw.keep, a.draw.temperature, rng))
    # Two and two. With an odd number the last one is in no pair.
    return [[judged[i], judged[j]] for i, j in kept[: len(kept) // 2 * 2].reshape(-1, 2)]


def sampled_pairs(groups: Sequence[Group], a: PreferenceAlgorithm, key: int) -> SampledPairs:
    """The pairs of all groups: the first two judged completions; with `BestWorst` the best and the worst; with
    `RejectionSampled` the kept ones two and two. Of equal rewards the first is taken. `key`: the random key of this
    stage, for the draw of those that are kept."""
    pairs: list[SampledPair] = []
    tied = unjudged = 0
    for group in groups:
        sets = compared(group, a, key)
        unjudged += not sets
        for considered in sets:
            rewards = np.array([e.reward for e in considered], np.float64)
            # Rewards that differ only by rounding are a tie. Else float noise would decide.
            noise = rounding([size(e.verdicts) for e in considered], max(resolution(e.verdicts) for e in considered))
            if spread(rewards, noise):
                best, worst = considered[int(np.argmax(rewards))], considered[int(np.argmin(rewards))]
                pairs.append(SampledPair(best, worst, float(rewards.max() - rewards.min())))
            elif isinstance(a.link, Nash):
                pairs.append(SampledPair(considered[0], considered[1], 0.0))
            else:
                tied += 1
    return SampledPairs(tuple(pairs), tied, unjudged)


def batch_of_pairs(pairs: Sequence[SampledPair], a: PreferenceAlgorithm) -> Batch:
    """A minibatch in which each pair is a unit, the chosen completion first. Streams: SIDE, OPPONENT, MARGIN (the gap
    of the rewards, or with link=nash the probability that the chosen one is preferred), MU and VERSION."""
    episodes = [e for p in pairs for e in (p.chosen, p.rejected)]
    segments = [s for e in episodes for s in e.segments]
    sequence = [i for i, e in enumerate(episodes) for _ in e.segments]
    spoken = [e.spoken for e in episodes]
    side_E = np.tile(np.array([1, 0], np.int32), len(pairs))
    margins = [p.probability if isinstance(a.link, Nash) else p.gap for p in pairs]
    margin_E = np.repeat(np.array(margins, np.float64), 2)
    return Batch.of(
        segments,
        sequence,
        unit_E=np.repeat(np.arange(len(pairs), dtype=np.int32), 2),
        streams={
            SIDE: np.repeat(side_E, spoken),
            OPPONENT: np.repeat(np.array([e.opposed for e in episodes]), spoken),
            MARGIN: np.repeat(margin_E, spoken),
            MU: np.concatenate([s.logp[s.mask] for s in segments]),
            VERSION: np.concatenate([s.version[s.mask] for s in segments]),
        },
    )
