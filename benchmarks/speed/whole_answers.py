"""A queue whose weights wait for whole answers, though the run is not deterministic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.core.sampling import Sampling
from posttrain.role.group_queue import GroupQueue, GroupSource
from posttrain.role.prompt_order import Prompts
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver


@contextmanager
def whole_answers(wanted: bool) -> Iterator[None]:
    """Where wanted, new weights of runs inside wait until all answers that were begun have ended, as those of a
    deterministic run do; the engine computes as in any other run."""
    made = ReinforceDriver._groups

    def waiting(self: ReinforceDriver, prompts: Prompts, sampling: Sampling) -> GroupSource:
        groups = made(self, prompts, sampling)
        if isinstance(groups, GroupQueue):
            groups.deterministic = wanted or groups.deterministic
        return groups

    ReinforceDriver._groups = waiting  # type: ignore[method-assign]
    try:
        yield
    finally:
        ReinforceDriver._groups = made  # type: ignore[method-assign]
