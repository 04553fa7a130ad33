"""Stages one after another on the same learner, each evaluated, checkpointed and resumable. One file a kind of
stage."""

from __future__ import annotations

from posttrain.controller.stages import label_steps, online, prefer, reinforce, reject, reward_model, supervised
from posttrain.controller.stages.progress import Progress, StageResult, StageState
from posttrain.controller.stages.sequence import Stages, check_drivers, where

__all__ = [
    "Progress",
    "StageResult",
    "StageState",
    "Stages",
    "check_drivers",
    "label_steps",
    "online",
    "prefer",
    "reinforce",
    "reject",
    "reward_model",
    "supervised",
    "where",
]
