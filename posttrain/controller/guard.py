"""The canaries of one stage, in the order of the step. It counts what it saw and stops the run on what must not be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from posttrain.controller.house import House
from posttrain.core.batch import Batch, Packed
from posttrain.core.errors import RewardError
from posttrain.core.types import Credit, Gauges, Group, ScoredGroup, merge
from posttrain.diagnose.gauges import failures
from posttrain.role.canaries import (
    Movement,
    masks_cover_what_was_said,
    no_distance_yet,
    reference_unmoved,
    sampler_agrees,
)
from posttrain.role.pack import Minibatch
from posttrain.role.rollout import Asked


class Guard:
    """Watches one stage. `fresh` says that learner, sampler and reference still hold the same weights (no step taken yet)."""

    def __init__(self, *, fresh: bool) -> None:
        self._fresh = fresh
        self._moved = not fresh
        self._gauges: Gauges = {}

    def take(self) -> Gauges:
        """What was seen since the last call."""
        seen, self._gauges = self._gauges, {}
        return seen

    def rolled_out(self, h: House, asked: Asked) -> None:
        """Masks cover exactly what the engine said, and not too many samples went unjudged."""
        engine = h.sync.sampler.gauges()
        masks_cover_what_was_said(asked.played, int(engine["engine/tokens"].sum))
        self._gauges = merge(self._gauges, engine)
        episodes = [e for g in asked.played for e in g.episodes]
        unjudged = sum(e.reward is None for e in episodes)
        if unjudged > h.stage.max_failed * len(episodes):
            kinds = "; ".join(f"{name} x {n} ({why})" for name, (n, why) in failures(asked.played).items()) or "every source abstained"
            raise RewardError(
                f"{unjudged} of {len(episodes)} samples of this step could not be judged: {kinds}. They are no wrong answers, so they were "
                f"left out, and more than {h.stage.name}.max_failed={h.stage.max_failed:g} of a step is too many to go on. Mend "
                f"{', '.join(r.function for r in h.run.env.rewards) or 'the environment'}, then resume: posttrain run --resume {h.book.folder}"
            )

    def scored(self, h: House, groups: Sequence[ScoredGroup]) -> None:
        """Before the first optimizer step: rho = 1 on every token, and no distance to a reference of equal weights."""
        if h.reference is not None:
            reference_unmoved(h.reference, h.reference_digest)
        episodes = [e for g in groups for e in g.episodes]
        if not self._fresh or not episodes:
            return
        self._fresh = False
        segments = [s for e in episodes for s in e.episode.segments]
        packed = Packed.of(segments)
        learner = h.learner.score(packed)
        version = np.concatenate([s.version[s.mask] for s in segments])
        mu = np.concatenate([s.logp[s.mask] for s in segments])
        self._gauges = merge(
            self._gauges, sampler_agrees(packed, mu, learner, version == h.trainer.version, dtype=h.run.model.dtype, text=h.text)
        )
        if h.reference is not None and episodes[0].reference is not None:
            reference = np.concatenate([x for e in episodes for x in e.reference or ()])
            if h.own_reference:
                no_distance_yet(learner, reference, h.run.model.dtype)

    def observer(self, h: House, minibatch: Minibatch) -> Callable[[Batch, np.ndarray], None] | None:
        """On the first optimizer step after a push, every token the current weights said has rho = 1."""
        if not minibatch.first:
            return None
        version = h.trainer.version

        def observe(batch: Batch, learner_M: np.ndarray) -> None:
            fresh = batch.version_M == version
            seen = sampler_agrees(batch, batch.logp_mu_M, learner_M, fresh, dtype=h.run.model.dtype, text=h.text)
            self._gauges = merge(self._gauges, seen)

        return observe

    @contextmanager
    def first_move(self, h: House, batch: Batch) -> Iterator[None]:
        """Around an optimizer step: in the first of the stage that carries credit every trainable parameter moves.

        Without credit there may be nothing to follow: the gradient of a KL pull is 0 at the reference itself.
        """
        if self._moved or not np.any(batch.advantage_M):
            yield
            return
        watch = Movement.watch(h.trainer.trained())
        yield
        unread = () if h.stage.algorithm.learns_values else ("value_head.",)
        self._gauges = merge(self._gauges, watch.check(h.trainer.trained(), unread=unread))
        self._moved = True


def notes(asked: Asked, credit: Credit, wanted: int) -> tuple[str, ...]:
    """Plain words for a step that learned little or nothing."""
    out: list[str] = []
    if len(asked.groups) < wanted:
        out.append(
            f"only {len(asked.groups)} of {wanted} groups passed the filter after asking for {len(asked.played)}; "
            "the tasks are too easy or too hard for this policy (raise refill, or change the tasks)"
        )
    rewards = sorted({float(r) for g in credit.groups for r in g.group.rewards})
    shown = ", ".join(f"{r:g}" for r in rewards[:4])
    if credit.groups and all(g.silent for g in credit.groups):
        out.append(f"no group has spread (all siblings agree; rewards seen: {shown}), so this step carries no credit")
    elif len(rewards) == 1:
        out.append(f"every sample got the same reward ({shown}), so nothing in this step tells good from bad")
    return tuple(out)


def unjudged_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups no episode of which could be judged: they reach no credit, and the record keeps them."""
    return tuple(g for g in groups if not g.judged)
