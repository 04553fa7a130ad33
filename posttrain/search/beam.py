"""Beam search over steps: the best beginnings by a process reward model are kept, and each goes on by several steps."""

from __future__ import annotations

import numpy as np

from posttrain.core.types import Task
from posttrain.search.step_sampling import Beginning, StepSearch


async def beam(search: StepSearch, task: Task, *, width: int, expand: int, steps: int = 64) -> Beginning:
    """The best answer of a beam, of those that ended. Where none did, the best beginning is ended.

    Args:
        width: beginnings that are kept after each step.
        expand: continuations that each of them is given. The first step has width x expand.
        steps: most steps of an answer.
    """
    ones = [Beginning(np.zeros(0, np.int32))]
    for number in range(steps):
        going = [b for b in ones if b.stop is None]
        if not going or not search.goes_on(task):
            break
        grown = await search.grown(task, going, expand if number else width * expand, f"beam/{number}")
        ones = sorted([*(b for b in ones if b.stop is not None), *grown], key=search.worth, reverse=True)[:width]
    return await search.ended(task, ones)
