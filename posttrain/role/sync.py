"""WEIGHT SYNC: trainer -> rollout, versioned, with a fingerprint on both sides at every push."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.errors import InvariantError
from posttrain.core.ports import Learner, Sampler


@dataclass
class Sync:
    """Publishes the learner's weights to the sampler."""

    learner: Learner
    sampler: Sampler

    async def push(self, version: int) -> str:
        """Serve the learner's weights as `version`; stops the run unless the sampler serves exactly them."""
        served = await self.sampler.load(version, self.learner.tensors())
        ours = self.learner.fingerprint()
        if served != ours:
            raise InvariantError(
                f"weight sync of version {version} failed: the learner's weights have fingerprint {ours}, the sampler serves {served}. "
                "A tensor was skipped, stale or changed on the way; nothing sampled after this could be trusted. "
                "Restart from the last checkpoint, and check that learner and sampler hold the same architecture and dtype"
            )
        if self.sampler.version != version:
            raise InvariantError(f"the sampler says it serves version {self.sampler.version} after a push of version {version}")
        return served
