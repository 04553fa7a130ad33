"""Parts of the roles of every kind of stage, from its driver: written once, so that a new field has one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.config.stages.stage import starts
from posttrain.core.ports import Reference
from posttrain.role.events import RestoredEvent
from posttrain.role.weights.saved_weights import restore, snapshot
from posttrain.stages.loop import Driver
from posttrain.stages.start_weights import load_kept


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


def frozen_start(driver: Driver[Any, Any, Any], checkpoint: Path | None, name: str = "") -> Reference:
    """A frozen copy of the model as the stage began, or of the weights that were kept under a name.

    Args:
        checkpoint: of a stage that was cut in its middle; the kept weights are read again.
    """
    parts = driver.parts
    if checkpoint is None:
        return same_reference(driver, parts.freeze())
    now = snapshot(parts.learner)
    load_kept(parts, driver.progress, name or starts(parts.run.stages, driver.stage))
    reference = parts.freeze()
    restore(parts.learner, now)
    return same_reference(driver, reference)


def same_reference(driver: Driver[Any, Any, Any], reference: Reference) -> Reference:
    """The reference. InvariantError where a stage that goes on has another one than before."""
    state = driver.state
    driver.parts.watch.emit(RestoredEvent("reference", state.reference_digest, lambda: reference.digest))
    state.reference_digest = reference.digest
    return reference
