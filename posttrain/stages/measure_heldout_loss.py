"""Measures the held-out loss of a stage that imitates: the demonstrations of held-out tasks, the same each time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.config.run import Supervised
from posttrain.config.stages.stage import Stage
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.measure.heldout_loss import HeldoutLoss
from posttrain.core.ports import Dialogue, Environment, Learner, PairRenderer
from posttrain.core.types import Task
from posttrain.role.learning.demonstrations import Demonstrated, imitating, shown
from posttrain.role.rollout import Rollout
from posttrain.system.errors import InvariantError

HELDOUT = 20_261_128
"""Seed of held-out demonstrations, not the run's: runs of different seeds are measured on the same."""


@dataclass
class HeldoutDemonstrations:
    """The demonstration of each held-out task, as the stage imitates it. They are made once, when first needed."""

    environment: Environment
    renderer: PairRenderer
    dialogue: Callable[[str], Dialogue]
    stage: Supervised
    context: int
    _demonstrations: list[Demonstrated] | None = None

    @staticmethod
    def of(
        stage: Stage, environment: Environment, renderer: PairRenderer, rollout: Rollout
    ) -> HeldoutDemonstrations | None:
        """The held-out demonstrations of a stage; None where it imitates none."""
        imitated_stage, context = imitating(stage), rollout.sampler.context
        return imitated_stage and HeldoutDemonstrations(
            environment, renderer, rollout.dialogue, imitated_stage, context
        )

    async def loss(self, learner: Learner, tokens: int) -> HeldoutLoss | None:
        """Their loss under the learner's weights, about `tokens` tokens at once; None where no task is held out."""
        if self._demonstrations is None:
            self._demonstrations = [await self._demonstration(task) for task in self.environment.heldout]
        return heldout_loss(learner, self._demonstrations, tokens) if self._demonstrations else None

    async def _demonstration(self, task: Task) -> Demonstrated:
        rng = seeds.generator(HELDOUT, f"demonstration/{self.stage.style}/{task.id}", 0)
        return await shown(self.environment, self.renderer, self.dialogue, self.stage, task, rng, self.context)


def heldout_loss(learner: Learner, ones: Sequence[Demonstrated], tokens: int) -> HeldoutLoss:
    """The loss of demonstrations under the learner's weights, about `tokens` tokens at once."""
    rows: dict[str, tuple[float, float]] = {}
    for demonstrations in _parts(ones, tokens):
        logp_M = learner.score(Packed.of([s for d in demonstrations for s in d.segments])).astype(np.float64)
        if not_finite := int((~np.isfinite(logp_M)).sum()):
            raise InvariantError(f"{not_finite} tokens of held-out demonstrations have no finite log-prob")
        # logp_M has the tokens of one demonstration after the other. `first` is where the next demonstration begins.
        first = 0
        for d in demonstrations:
            own_logp_M, first = logp_M[first : first + len(d.weight_M)], first + len(d.weight_M)
            rows[_key(d)] = (float(-(d.weight_M * own_logp_M).sum()), float(d.weight_M.sum()))
    return HeldoutLoss(rows)


def _parts(ones: Sequence[Demonstrated], tokens: int) -> Iterator[list[Demonstrated]]:
    """Yields the demonstrations in lists of at most `tokens` tokens each."""
    part: list[Demonstrated] = []
    size = 0
    for d in ones:
        length = sum(len(s.ids) for s in d.segments)
        # A demonstration is never cut, so one that is longer than `tokens` is a part of its own.
        if part and size + length > tokens:
            yield part
            part, size = [], 0
        part.append(d)
        size += length
    if part:
        yield part


def _key(d: Demonstrated) -> str:
    """A digest of the tokens, of which count, and of their weights: runs share a row only where they scored the
    same."""
    h = hashlib.blake2b(digest_size=8)
    for s in d.segments:
        h.update(s.ids.tobytes() + s.mask.tobytes())
    h.update(d.weight_M.tobytes())
    return h.hexdigest()
