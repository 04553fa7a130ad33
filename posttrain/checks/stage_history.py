"""The steps of a stage so far, for its checks, and those at which credit and loss are computed a second time."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.gauge import Step

FIRST, KEPT = 8, 64
"""How many of the first and of the last steps are kept while the stage runs. A resumed stage begins with all earlier
steps."""


class StageHistory:
    """The steps of one stage up to now."""

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        self.steps = list(steps)
        self.taken = len(self.steps)
        """Steps taken before this process started."""

    def add(self, step: Step) -> None:
        self.steps.append(step)

    def trim(self) -> None:
        """Forget the steps between the first and the last."""
        # The first steps stay, because some rules compare the last steps of a stage with its first.
        del self.steps[FIRST:-KEPT]


def due(index: int) -> bool:
    """Returns whether step `index` (from 1) is computed a second time: the first four, powers of two, then every
    32nd."""
    return index <= 4 or index & (index - 1) == 0 or index % 32 == 0
