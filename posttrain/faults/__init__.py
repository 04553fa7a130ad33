"""Real bugs that can be planted in the real code on purpose, to see that the run's own checks catch them."""

from __future__ import annotations

from posttrain.faults import (
    adapters,
    ahead,
    engine,
    judges,
    keeping,
    learning,
    machine,
    online_pairs,
    packing,
    parcels,
    placement,
    precision,
    preferences,
    preferred_loss,
    prefixes,
    rewards,
    step_labels,
    updates,
    world,
)
from posttrain.faults.registry import FAULTS, Fault, find, planted, refuse_silent

__all__ = [
    "FAULTS",
    "Fault",
    "adapters",
    "ahead",
    "engine",
    "find",
    "judges",
    "keeping",
    "learning",
    "machine",
    "online_pairs",
    "packing",
    "parcels",
    "placement",
    "planted",
    "precision",
    "preferences",
    "preferred_loss",
    "prefixes",
    "refuse_silent",
    "rewards",
    "step_labels",
    "updates",
    "world",
]
