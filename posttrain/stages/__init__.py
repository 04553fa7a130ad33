"""Stages one after another on the same learner, each evaluated, checkpointed and resumable. Read `loop`, then
`training_step` (one RL step), then the folder of a kind. A new kind is a folder here and a file in `config.stages`;
`checks_by_kind` says which checks observe it."""

from __future__ import annotations

from posttrain.stages.preference import online_stage as online_stage
from posttrain.stages.preference import preference_stage as preference_stage
from posttrain.stages.progress import Progress, StageResult, StageState
from posttrain.stages.reinforce import reinforce_stage as reinforce_stage
from posttrain.stages.rejection import rejection_stage as rejection_stage
from posttrain.stages.reward_model import reward_model_stage as reward_model_stage
from posttrain.stages.sequence import Stages, check_drivers, where
from posttrain.stages.step_labels import step_label_stage as step_label_stage
from posttrain.stages.supervised import supervised_stage as supervised_stage

__all__ = ["Progress", "StageResult", "StageState", "Stages", "check_drivers", "where"]
