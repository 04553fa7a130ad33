"""Checks that tokens that were said ahead of the updates have the log-probs of the weights that said them.

A sample is learned from when its weights are gone. But there is a moment at which both sides still hold them: between
a push and the next optimizer step. What has been said since the push, in groups of this step or of later ones that wait
in the queue, is compared with the learner then. `AheadCheck` sees that it does not change until it is learned from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.checks.sampling.sampler_checks import keeps_caches, sampler_agrees
from posttrain.checks.sampling.sampler_draws import PACKED, PROBED, Bets, draws_are_true
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, merge
from posttrain.core.streams import START
from posttrain.core.types import Episode, Group, Segment
from posttrain.role.events import DifferentiatedEvent, Event, Observer, ObserverReport, PackedEvent, PlayedEvent
from posttrain.role.group_queue import GroupQueue
from posttrain.role.learner_passes import Needs
from posttrain.role.learning.logprob_tolerance import Exact, Gap, allowed, as_sampled
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError


def fresh_segments(groups: Sequence[Group], version: int, stale: bool = False) -> list[Segment]:
    """Segments with tokens of `version`, as many as a check reads: those that other weights began come first, since
    their caches were made by these. `stale`: caches are kept on purpose (engine.update=stale). Then segments that other
    weights began are left out."""
    mixed, pure = list[Segment](), list[Segment]()
    for s in (s for g in groups for e in g.episodes if e.own for s in e.segments):
        said = s.version[s.mask]
        if (said == version).any():
            (pure if (said == version).all() else mixed).append(s)
    out, tokens, packed = list[Segment](), 0, 0
    for s in (*(() if stale else mixed), *pure):
        if tokens >= PROBED or (out and packed + len(s.ids) > PACKED):
            break
        out.append(s)
        tokens, packed = tokens + int((s.version[s.mask] == version).sum()), packed + len(s.ids)
    return out


def start_is_the_learner(batch: Batch, learner_M: np.ndarray, dtype: str, exact: Exact) -> None:
    """The log-probs of the start of a step, which a proximal ratio divides by, are the learner's own before its first
    optimizer step."""
    gap = Gap.of(batch[START], learner_M)
    bound = allowed(dtype, gap, learner_M, exact, batch.sampling.temperature)
    if not gap.within(bound):
        raise InvariantError(
            f"the log-probs of the start of the step are not the learner's: worst gap {gap.worst:.3g} (bound"
            f" {bound.worst:.2g} in {dtype}), mean gap {gap.mean:.3g} (bound {bound.mean:.2g}) over {len(learner_M)}"
            " tokens, before the first optimizer step. The proximal ratio must be 1 there: were they computed with"
            " other weights, in an earlier step, or taken from the sampler?"
        )


class FreshCheck(Observer):
    """Tokens of groups asked ahead agree with the learner while it still has the weights that said them; draws too. In
    the first 16 steps and in every eighth later one, and wherever a turn went on under new weights."""

    def __init__(self, bets: Bets) -> None:
        self._bets = bets

    def needs(self, roles: ReinforceRoles, event: PackedEvent) -> Needs:
        return Needs(logp=event.first and START in event.batch)

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        match event:
            case PlayedEvent(e) if roles.stage.most_behind:
                return self._agree(roles, e)
            case DifferentiatedEvent(packed, passes) if packed.first and START in packed.batch:
                micros = zip(passes.micros, passes.logp, strict=True)
                for micro, logp_M in micros:
                    exact = lambda batch=micro: roles.learner.exact(batch)  # noqa: E731
                    start_is_the_learner(micro, logp_M.astype(np.float32), roles.run.model.dtype, exact)
            case _:
                pass
        return None

    def _agree(self, roles: ReinforceRoles, e: Experience) -> ObserverReport | None:
        waiting = roles.groups.queued()[1] if isinstance(roles.groups, GroupQueue) else ()
        groups, version = (*e.played, *waiting), roles.trainer.version
        segments = fresh_segments(groups, version, keeps_caches(roles.run.engine))
        often = e.index <= 16 or e.index % 8 == 0
        if not segments or not (often or (segments[0].version[segments[0].mask] != version).any()):
            return None
        packed = Packed.of(segments)
        fresh = np.concatenate([s.version[s.mask] for s in segments]) == version
        mu = np.concatenate([s.logp[s.mask] for s in segments])
        learner = as_sampled(roles.learner)
        seen = sampler_agrees(
            packed,
            mu,
            learner.score(packed),
            fresh,
            dtype=roles.run.model.dtype,
            exact=lambda: learner.exact(packed),
            text=roles.text,
            same=roles.run.exact,
        )
        whole = [x for g in groups for x in g.episodes if _all_of(x, version)]
        if whole and roles.sync.sampler.draws_by_place:
            # bets are not placed here: which answers have ended already depends on their lengths
            seen = merge(seen, draws_are_true(roles, self._bets, whole, 0, roles.stream))
        if roles.run.deterministic and roles.stage.staleness:
            return None  # which groups have ended already depends on time
        return ObserverReport(merge(seen, {"canary/fresh": Gauge(float(fresh.sum()), 1)}))


def _all_of(e: Episode, version: int) -> bool:
    """Returns whether this version said every token of an episode."""
    return e.own and all((s.version[s.mask] == version).all() for s in e.segments)
