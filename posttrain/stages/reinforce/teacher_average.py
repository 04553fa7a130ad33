"""A teacher whose weights are the moving average that the optimizer keeps (`optimizer.ema`)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.ports import Learner
from posttrain.core.types import Top
from posttrain.role.trainer import WeightOptimizer
from posttrain.role.weights.saved_weights import AVERAGE, restore, snapshot
from posttrain.system.errors import InvariantError


@dataclass(frozen=True)
class AveragePolicy:
    """The policy's own model, which gets the averages in place of its weights while it scores. They are part of the
    optimizer's state, so a resumed run has them. Afterwards the weights are copied back bit by bit."""

    learner: Learner
    optimizer: WeightOptimizer

    def score(self, packed: Packed) -> np.ndarray:
        """float32 [M], under `packed.sampling`."""
        with self._averaged():
            return self.learner.score(packed)

    def entropy(self, packed: Packed) -> np.ndarray:
        """See `core.ports.Examiner`."""
        with self._averaged():
            return self.learner.entropy(packed)

    def energy(self, packed: Packed) -> np.ndarray:
        """See `core.ports.Examiner`."""
        with self._averaged():
            return self.learner.energy(packed)

    def top(self, packed: Packed, k: int) -> Top:
        """See `core.ports.Examiner`."""
        with self._averaged():
            return self.learner.top(packed, k)

    def fingerprint(self) -> str:
        """Exact digest of the averages."""
        with self._averaged():
            return self.learner.fingerprint()

    @contextmanager
    def _averaged(self) -> Generator[None]:
        """Inside the block the learner's model has the averages as its weights."""
        state = self.optimizer.state_tensors()
        policy_weights = snapshot(self.learner)
        # Averages may have another dtype. A parameter without an average does not train, so it keeps its value.
        averages = {n: state[AVERAGE + n].to(p.dtype) for n, p in policy_weights.items() if AVERAGE + n in state}
        if not averages:
            raise InvariantError(
                "the teacher is a moving average of the policy, and the optimizer keeps none: set optimizer.ema"
            )
        try:
            restore(self.learner, {**policy_weights, **averages})
            yield
        finally:
            # Also after an error: the policy must not keep the averages as its weights.
            restore(self.learner, policy_weights)
