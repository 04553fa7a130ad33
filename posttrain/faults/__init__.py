"""Real bugs that can be planted in the real code on purpose, to see that a run's own checks catch them.

The faults of this package are those that teach something; `tests/mutants` has others.
"""

from __future__ import annotations

from posttrain.faults import judging_faults, learning_faults, sampling_faults, system_faults
from posttrain.faults.planting import REGISTERED, Fault, find, named, planted, refuse_silent

FAULTS: dict[str, Fault] = dict(REGISTERED)
"""The faults of this package by name, in the order in which `posttrain faults` lists them."""

__all__ = [
    "FAULTS",
    "Fault",
    "find",
    "judging_faults",
    "learning_faults",
    "named",
    "planted",
    "refuse_silent",
    "sampling_faults",
    "system_faults",
]
