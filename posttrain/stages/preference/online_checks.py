"""Checks that pairs of the policy's own samples are what was sampled and judged, and that an opponent samples right.
Which completion is preferred is computed a second time, from the verdicts alone. An opponent must sample from the
mixture of policy and reference that the settings name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from posttrain.checks.learning.credit_by_definition import kind, same_outcome
from posttrain.checks.stage_history import due
from posttrain.core import seeds
from posttrain.core.batch import Batch, Packed
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.ports import Examiner
from posttrain.core.streams import MU, OPPONENT, VERSION
from posttrain.core.types import OPPOSED, Episode, Group, Segment, Top, TruncationSets
from posttrain.core.verdict import outcome
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.role.events import Event, Observer, ObserverReport, PackedEvent, PlayedEvent
from posttrain.role.learning.logprob_tolerance import Gap, allowed
from posttrain.role.roles import OnlineRoles
from posttrain.stages.preference.preference_data import sides_are_as_judged
from posttrain.stages.preference.preference_gradient import JudgedRows
from posttrain.stages.preference.preference_loss_checks import PreferenceLossCheck
from posttrain.system.errors import InvariantError

EPISODES, TOKENS = 4, 16
"""How many episodes of an opponent are scored again, and at most how many tokens of each. The numbers are small, since
the log-probs of the whole vocabulary are read at each token."""


@dataclass(frozen=True, eq=False)
class PairAgain:
    """A pair, computed a second time from the verdicts. `gap`: the difference of the two rewards."""

    chosen: Episode
    rejected: Episode
    gap: float


def kept_again(reward_C: np.ndarray, keep: int, temperature: float, rng: np.random.Generator) -> np.ndarray:
    """The candidates that statistical rejection sampling keeps (2309.06657), by the round in which they pass."""
    round_C = np.full(len(reward_C), np.inf)
    for k in range(keep):
        left_C = np.isinf(round_C)
        if not left_C.any() or (~left_C).sum() >= keep:
            break
        # The probability of each candidate that is left, as in the paper. The chance of one that has passed already is
        # not used; its reward may lie above the maximum of the others, and `minimum` keeps its exponential finite. All
        # C uniforms are drawn in each round, as the stage draws them.
        chance_C = np.exp(np.minimum(reward_C - reward_C[left_C].max(), 0) / temperature)
        round_C[left_C & (rng.random(len(reward_C)) < chance_C)] = k
    # Sorted by round. A stable sort keeps the order of the places within a round.
    return np.argsort(round_C, kind="stable")[: min(keep, len(reward_C))]


def compared_again(judged: Sequence[tuple[float, Episode]], g: Group, a: PreferenceAlgorithm, place: int) -> list[Any]:
    """Returns the completions of a prompt that are compared, by `draw`, from (reward, episode) of each judged one."""
    if len(judged) < 2 or kind(a.draw) == "BestWorst":
        return [judged] if len(judged) > 1 else []
    if kind(a.draw) != "RejectionSampled":
        return [judged[:2]]
    # The same random numbers as in the stage: so both computations must keep the same completions in the same order.
    rng, draw = seeds.generator(place, "pairs", g.task.id, g.visit), cast("Any", a.draw)
    kept = kept_again(np.array([r for r, _ in judged]), draw.keep, draw.temperature, rng)
    mixed = rng.permutation(kept)
    return [[judged[i], judged[j]] for i, j in zip(mixed[0::2], mixed[1::2], strict=False)]


def pairs_again(groups: Sequence[Group], a: PreferenceAlgorithm, place: int) -> list[PairAgain]:
    """The pairs of a step, from the definition of `draw`. `place`: the stage's random key."""
    pairs: list[PairAgain] = []
    for g in groups:
        rewards_and_episodes = [(r, e) for e in g.episodes if (r := outcome(e.verdicts)) is not None and e.spoken]
        for candidates in compared_again(rewards_and_episodes, g, a, place):
            if same_outcome([e for _, e in candidates]):
                # With link=nash a tie is a pair with preference 1/2: its divergence to the reference is learned too.
                if kind(a.link) == "Nash":
                    pairs.append(PairAgain(candidates[0][1], candidates[1][1], 0.0))
                continue
            by_reward = sorted(candidates, key=lambda rewarded: rewarded[0])
            # Of equal rewards the completion that was sampled first.
            best = next(e for r, e in candidates if r == by_reward[-1][0])
            worst = next(e for r, e in candidates if r == by_reward[0][0])
            pairs.append(PairAgain(best, worst, by_reward[-1][0] - by_reward[0][0]))
    return pairs


def rows_of_pairs(pairs: Sequence[PairAgain], a: PreferenceAlgorithm) -> JudgedRows:
    """Returns how the completions of a minibatch of sampled pairs were judged."""
    gaps = np.array([p.gap for p in pairs])
    margin_U = np.array([1 / (1 + math.exp(-g)) for g in gaps]) if kind(a.link) == "Nash" else gaps
    return JudgedRows(
        side_E=np.tile([1, 0], len(pairs)),
        unit_E=np.repeat(np.arange(len(pairs)), 2),
        weight_U=np.ones(len(pairs)),
        margin_U=margin_U,
    )


def tokens_are_as_sampled(batch: Batch, pairs: Sequence[PairAgain]) -> None:
    """Checks that the minibatch has the sampled tokens with the sampler's log-probs, and who said them."""
    episodes = [e for p in pairs for e in (p.chosen, p.rejected)]
    segments = [s for e in episodes for s in e.segments]
    sequence_M = np.repeat(np.arange(len(episodes)), [e.spoken for e in episodes])
    if not np.array_equal(batch.sequence_M, sequence_M):
        raise InvariantError(
            f"the completions of the minibatch have {np.bincount(batch.sequence_M).tolist()[:8]}... tokens that count,"
            f" and those of the {len(pairs)} pairs of this step {np.bincount(sequence_M).tolist()[:8]}...: chosen and"
            " rejected are swapped, a completion is another one's or is cut, or prompts and observations count"
        )
    version_M = np.concatenate([s.version[s.mask] for s in segments])
    want = (
        ("the tokens", batch.ids_N, np.concatenate([s.ids for s in segments])),
        ("the tokens that count", batch.target_M, np.concatenate([s.ids[s.mask] for s in segments])),
        ("the sampler's log-probs", batch[MU], np.concatenate([s.logp[s.mask] for s in segments])),
        ("the versions", batch[VERSION], version_M),
        ("who said what (opponent)", batch[OPPONENT], version_M == OPPOSED),
    )
    for what, in_batch, sampled in want:
        if not np.array_equal(in_batch, sampled):
            wrong = (
                f"{int((in_batch != sampled).sum())} differ"
                if len(in_batch) == len(sampled)
                else f"{len(in_batch)} stand"
            )
            raise InvariantError(
                f"{what} of the minibatch are not those of the {len(pairs)} pairs that were sampled and judged"
                f" ({len(sampled)} in all, {wrong}): chosen and rejected are swapped, or a completion of another prompt"
                " or step stands in a pair"
            )


class SampledPairCheck(Observer):
    """Checks that the minibatch of a step has the samples of the step, in the pairs that their verdicts give."""

    def __init__(self) -> None:
        self._pairs: list[PairAgain] = []

    def on_event(self, roles: OnlineRoles, event: Event) -> ObserverReport | None:
        match event:
            case PlayedEvent(e):
                self._pairs = pairs_again(e.groups, roles.stage.algorithm, roles.place)
            case PackedEvent(batch=batch):
                tokens = [x.spoken for p in self._pairs for x in (p.chosen, p.rejected)]
                # With another number of completions the tokens cannot be compared. `sides_are_as_judged` then raises.
                if batch.episodes == len(tokens):
                    tokens_are_as_sampled(batch, self._pairs)
                sides_are_as_judged(batch, rows_of_pairs(self._pairs, roles.stage.algorithm))
        return None


class OnlineLossCheck(PreferenceLossCheck):
    """`PreferenceLossCheck` for a stage whose pairs are its own samples."""

    def __init__(self) -> None:
        super().__init__({})
        self._rows: JudgedRows | None = None

    def rows(self, roles: Any, index: int) -> JudgedRows:
        assert self._rows is not None  # a step is played before it is packed
        return self._rows

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        if isinstance(event, PlayedEvent):
            a = roles.stage.algorithm
            self._rows = rows_of_pairs(pairs_again(event.experience.groups, a, roles.place), a)
            return None
        return super().on_event(roles, event)


# --- the opponent ----------------------------------------------------------------------------------------------------


def opponents_play(groups: Sequence[Group], opposed: range) -> None:
    """Checks that of each prompt the siblings `opposed` are the opponent's completions, and no others are."""
    for g in groups:
        for e in g.episodes:
            right = e.sibling in opposed
            if e.spoken and e.opposed is not right:
                speaker, owner = ("opponent" if x else "policy" for x in (e.opposed, right))
                raise InvariantError(
                    f"completion {e.sibling} of task {g.task.id!r} was said by the {speaker}, and it is the {owner}'s:"
                    " the policy would be compared with itself, or learn from what it did not say"
                )


def beginning(s: Segment, most: int) -> Segment:
    """The beginning of a segment, up to its `most`-th spoken token."""
    # m spoken tokens remain, and n tokens in all. Arrays over all tokens are cut at n, arrays over spoken ones at m.
    at = np.flatnonzero(s.mask)[:most]
    n, m = int(at[-1]) + 1, len(at)
    return replace(
        s,
        ids=s.ids[:n],
        mask=s.mask[:n],
        logp=s.logp[:n],
        version=s.version[:n],
        kept=None if s.kept is None else TruncationSets.of(s.kept.sets()[:m]),
        top=None if s.top is None else Top(s.top.ids[:m], s.top.logp[:m]),
        in_turn=None if s.in_turn is None else s.in_turn[:m],
    )


def mixture_logp(policy: Examiner, reference: Examiner, packed: Packed, share: float) -> np.ndarray:
    """float64 [M]: log of pi^(1 - share) ref^share at each spoken token, from the two whole distributions."""
    mixed_MV = 0.0
    for model, weight in ((policy, 1 - share), (reference, share)):
        # `top` with 0 gives the whole vocabulary, sorted for each model in another way. `put_along_axis` brings it back
        # to the order of the vocabulary, so that the two models can be added.
        top = model.top(packed, 0)
        logp_MV = np.full((len(top), int(top.ids.max()) + 1), -np.inf)
        np.put_along_axis(logp_MV, top.ids.astype(np.int64), top.logp.astype(np.float64), 1)
        # A weight of 0 leaves the model out: 0 times -inf would be NaN.
        mixed_MV = mixed_MV + (weight * logp_MV if weight else 0.0)
    assert isinstance(mixed_MV, np.ndarray)
    # log Z = log sum exp. The maximum is subtracted first, so that not all exponentials become 0.
    most = mixed_MV.max(1, keepdims=True)
    norm_M = np.log(np.exp(mixed_MV - most).sum(1)) + most[:, 0]
    return mixed_MV[np.arange(packed.spoken), packed.target_M] - norm_M


def opponent_says(mu_M: np.ndarray, want_M: np.ndarray, bound: Gap, share: float) -> Gauges:
    """Checks that the log-probs of an opponent's tokens are those of pi^(1 - share) ref^share; returns their gap."""
    gap = Gap.of(mu_M, want_M)
    if not gap.worst <= bound.worst:
        m = int(np.argmax(np.abs(mu_M - want_M)))
        raise InvariantError(
            f"the opponent said a token with log-prob {mu_M[m]:.4f}, and pi^{1 - share:g} ref^{share:g} gives it"
            f" {want_M[m]:.4f} (worst gap {gap.worst:.3g}, bound {bound.worst:.2g}): it samples from other weights or"
            " another share. Check that the last push reached the opponent's engine, and draw.coef"
        )
    return {"canary/opponent_gap": Gauge(gap.worst, 1)}


class OpponentCheck(Observer):
    """Checks that an opponent said its completions, and at `due` steps that its log-probs are those of the mixture."""

    def on_event(self, roles: OnlineRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent):
            return None
        e, share = event.experience, roles.stage.share
        opponents_play(e.groups, roles.stage.opposed)
        if share is None or not due(e.index):
            return None
        episodes = [x for g in e.groups for x in g.episodes if x.opposed and x.segments[0].spoken][:EPISODES]
        if not episodes:
            return None
        assert roles.reference is not None  # an opponent is made of it
        packed = Packed.of([beginning(x.segments[0], TOKENS) for x in episodes])
        mu_M = np.concatenate([x.segments[0].logp[x.segments[0].mask][:TOKENS] for x in episodes])
        want_M = mixture_logp(roles.learner, roles.reference, packed, share)
        exact = lambda: roles.learner.exact(packed)  # noqa: E731
        temperature = packed.sampling.temperature
        bound = allowed(roles.run.model.dtype, Gap.of(mu_M, want_M), roles.learner.score(packed), exact, temperature)
        twice = Gap(2 * bound.worst, 2 * bound.mean)  # twice, since two models contribute their rounding
        return ObserverReport(opponent_says(mu_M, want_M, twice, share))
