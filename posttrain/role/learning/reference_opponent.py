"""The opponent of the policy where pairs are drawn against one: the reference, or a mixture with it.

An opponent is an engine of its own. What it samples enters the episode like any turn, with the opponent's log-probs and
version OPPOSED. So no check takes it for what the policy's engine sampled, and no gauge counts it as the policy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.core.gauge import Gauges
from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.types import OPPOSED, SampledTurn
from posttrain.role.sync import Sync


@dataclass(frozen=True)
class OpponentSampler:
    """A sampler (`core.ports.Sampler`) whose tokens are marked as an opponent's."""

    engine: Sampler

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def keeps_sets(self) -> bool:
        return self.engine.keeps_sets

    @property
    def draws_by_place(self) -> bool:
        return self.engine.draws_by_place

    @property
    def context(self) -> int:
        return self.engine.context

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        said = await self.engine.generate(ids, sampling, place)
        return replace(said, version=np.full_like(said.version, OPPOSED))

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return await self.engine.score(ids)

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        return await self.engine.load(version, tensors)

    def gauges(self) -> Gauges:
        return self.engine.gauges()

    def clock(self) -> Mapping[str, float]:
        return self.engine.clock()


@dataclass(frozen=True)
class Opponent:
    """An opponent, and how it follows the policy."""

    engine: Sampler
    sync: Sync | None
    """Pushes the policy's weights to it; None where it holds none of them (the reference alone)."""

    @property
    def sampler(self) -> OpponentSampler:
        return OpponentSampler(self.engine)

    async def follow(self, version: int) -> None:
        """Bring its weights of the policy up to `version`, with the checks of every push."""
        if self.sync is not None:
            await self.sync.follow(version)
