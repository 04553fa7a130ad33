"""What the roles of every kind of stage hold, from its driver: written once, so that a new field has one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.controller.stages.driver import Driver
from posttrain.core.ports import Reference
from posttrain.core.stage import starts
from posttrain.role.weights import load_weights, restore, snapshot


def stage_parts(driver: Driver[Any, Any, Any]) -> dict[str, Any]:
    """The fields of `role.roles.StageRoles`."""
    parts = driver.parts
    return {
        "run": parts.run,
        "stage": driver.stage,
        "learner": parts.learner,
        "trainer": driver.trainer,
        "sync": parts.sync,
        "book": parts.book,
        "text": parts.text,
        "watch": driver.watch,
        "clock": driver.clock,
    }


def data_parts(driver: Driver[Any, Any, Any]) -> dict[str, Any]:
    """The fields of `role.roles.DataRoles`."""
    parts, setting = driver.parts, driver.setting
    return stage_parts(driver) | {
        "environment": setting.environment,
        "renderer": parts.renderer,
        "dialogue": setting.rollout.dialogue,
        "stop_ids": parts.stop_ids,
        "context": parts.sampler.context,
    }


def frozen_start(driver: Driver[Any, Any, Any], checkpoint: Path | None) -> Reference:
    """A frozen copy of the model as the stage began. `checkpoint`: of a stage that was cut in its middle; the weights
    that the run kept of its beginning are read again."""
    parts, stage = driver.parts, driver.stage
    if checkpoint is None:
        return parts.freeze()
    now = snapshot(parts.learner)
    load_weights(parts.book.kept(starts(parts.run.stages, stage)), parts.learner)
    reference = parts.freeze()
    restore(parts.learner, now)
    return reference
