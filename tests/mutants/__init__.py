"""Faults that only tests and benchmarks plant: with those of `posttrain.faults` every check has one that it catches."""

from __future__ import annotations

from posttrain.faults.planting import REGISTERED, Fault, find, planted
from tests.mutants.judging import (
    data_faults,
    hint_faults,
    judge_faults,
    reward_faults,
    search_faults,
    selection_faults,
    step_label_faults,
)
from tests.mutants.learning import (
    adapter_faults,
    expert_faults,
    learning_faults,
    packing_faults,
    precision_faults,
    preference_faults,
    preference_loss_faults,
    shared_prefix_faults,
    update_faults,
)
from tests.mutants.system import (
    engine_faults,
    online_pair_faults,
    placement_faults,
    rank_expert_faults,
    rank_faults,
    staleness_faults,
    system_faults,
    transfer_faults,
)

FAULTS: dict[str, Fault] = dict(REGISTERED)
"""Every fault by name: those of the package, then the mutants."""

__all__ = [
    "FAULTS",
    "Fault",
    "adapter_faults",
    "data_faults",
    "engine_faults",
    "expert_faults",
    "find",
    "hint_faults",
    "judge_faults",
    "learning_faults",
    "online_pair_faults",
    "packing_faults",
    "placement_faults",
    "planted",
    "precision_faults",
    "preference_faults",
    "preference_loss_faults",
    "rank_expert_faults",
    "rank_faults",
    "reward_faults",
    "search_faults",
    "selection_faults",
    "shared_prefix_faults",
    "staleness_faults",
    "step_label_faults",
    "system_faults",
    "transfer_faults",
    "update_faults",
]
