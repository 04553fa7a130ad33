"""Real bugs that can be planted in the real code on purpose, to see that the run's own checks catch them."""

from __future__ import annotations

from posttrain.faults.judging import (
    data_faults,
    hint_faults,
    judge_faults,
    reward_faults,
    search_faults,
    selection_faults,
    step_label_faults,
)
from posttrain.faults.learning import (
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
from posttrain.faults.planting import FAULTS, Fault, find, planted, refuse_silent
from posttrain.faults.system import (
    engine_faults,
    online_pair_faults,
    placement_faults,
    rank_expert_faults,
    rank_faults,
    staleness_faults,
    system_faults,
    transfer_faults,
)

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
    "refuse_silent",
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
