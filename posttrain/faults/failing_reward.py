"""A reward whose service fails after some calls, used to show the faults about outages."""

from __future__ import annotations

from posttrain.core.types import Task

ANSWERS = 90
"""Calls before the service fails."""
_asked: dict[str, int] = {}
"""The number of calls so far, under the key "n"."""


def down(task: Task, text: str) -> float:
    """A small bonus for short answers, until the service fails."""
    _asked["n"] = _asked.get("n", 0) + 1
    if _asked["n"] > ANSWERS:
        raise ConnectionError("reward service unreachable")
    return 0.1 if len(text) < 4 else 0.0
