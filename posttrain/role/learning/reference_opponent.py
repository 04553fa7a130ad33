"""The opponent of the policy where pairs are drawn against one: the reference, or a mixture with it.

An opponent is an engine of its own. What it samples enters the episode like any turn, with the opponent's log-probs and
version OPPOSED. So no check takes it for what the policy's engine sampled, and no gauge counts it as the policy's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.types import OPPOSED, SampledTurn
from posttrain.role.sync import Sync


@dataclass(frozen=True)
class OpponentSampler:
    """A sampler whose tokens are marked as an opponent's. The rest of `core.ports.Sampler` is that of `engine`."""

    engine: Sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        said = await self.engine.generate(ids, sampling, place)
        return replace(said, version=np.full_like(said.version, OPPOSED))


@dataclass(frozen=True)
class Opponent:
    """An opponent, and how it follows the policy."""

    engine: Sampler
    sync: Sync | None
    """Pushes the policy's weights to it; None where it holds none of them (the reference alone)."""

    @property
    def sampler(self) -> Sampler:
        return cast("Sampler", OpponentSampler(self.engine))

    async def follow(self, version: int) -> None:
        """Bring its weights of the policy up to `version`, with the checks of every push."""
        if self.sync is not None:
            await self.sync.follow(version)
