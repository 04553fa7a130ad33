"""How many groups may be asked ahead of the updates, so that no sample is older than promised."""

from __future__ import annotations


def capacity(*, staleness: int, prompts: int, left: int, taken: int, waiting: int) -> int:
    """Returns the number of further groups that may be asked now.

    A step learns from `prompts` groups, in the order of asking. Groups of the present step and of the `staleness` steps
    after it may be on their way at once, and no more. So a group that is asked now is learned from at most `staleness`
    updates later, and nothing that was played is ever thrown away for its age.

    Args:
        staleness: by how many steps a sample may be older than the weights that learn from it.
        prompts: groups of a step.
        left: steps of the stage that are not learned yet, the present one included.
        taken: groups that the present step has taken so far.
        waiting: groups asked and not taken yet. Those that a filter refused do not count, since no step uses them.

    >>> capacity(staleness=1, prompts=32, left=100, taken=0, waiting=0)
    64
    >>> capacity(staleness=1, prompts=32, left=100, taken=32, waiting=20)
    12
    >>> capacity(staleness=4, prompts=32, left=2, taken=0, waiting=60)
    4
    """
    # Near the end of a stage fewer steps are left than the bound allows: no step would use groups beyond them.
    return max(0, min(staleness + 1, left) * prompts - taken - waiting)
