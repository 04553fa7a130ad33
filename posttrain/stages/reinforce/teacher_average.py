"""A teacher whose weights are a moving average of the policy's: the one that the optimizer keeps (`Optimizer.ema`)."""

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
    """The policy's own model, with the averages in the place of its weights for as long as it scores.

    The averages lie in the optimizer's state, so a resumed run has them. They are copied in and the weights copied
    back, which leaves every bit as it was.
    """

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
        state = self.optimizer.state_tensors()
        own = snapshot(self.learner)
        # Averages are kept in the type of the optimizer's state. A parameter without one stands still, and keeps its
        # value.
        averages = {n: state[AVERAGE + n].to(p.dtype) for n, p in own.items() if AVERAGE + n in state}
        if not averages:
            raise InvariantError(
                "the teacher is a moving average of the policy, and the optimizer keeps none: set optimizer.ema"
            )
        try:
            restore(self.learner, {**own, **averages})
            yield
        finally:
            # In every case: a step that fails while the teacher scores must not go on with the averages as policy.
            restore(self.learner, own)
