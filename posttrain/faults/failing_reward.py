"""A reward whose service fails after some calls, used to show the faults about outages."""

from __future__ import annotations

from itertools import count

from posttrain.core.types import Task

ANSWERS = 90
"""Calls before the service fails: the first steps of a run still have their rewards."""
_calls = count(1)


def down(task: Task, text: str) -> float:
    """A small bonus for short answers, until the service fails."""
    if next(_calls) > ANSWERS:
        raise ConnectionError("reward service unreachable")
    return 0.1 if len(text) < 4 else 0.0
