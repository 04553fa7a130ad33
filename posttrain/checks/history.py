"""The record of a stage so far, as its checks read it."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.gauge import Step

KEPT = 64
"""Steps that are kept while the stage goes on; at the start all of those before a resume are there."""


class StageHistory:
    """The steps of one stage up to now. Empty where learner, sampler and reference still hold the same weights."""

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        self.steps = list(steps)
        self.taken = len(self.steps)
        """Steps before this process began."""

    def add(self, step: Step) -> None:
        self.steps.append(step)

    def trim(self) -> None:
        del self.steps[:-KEPT]
