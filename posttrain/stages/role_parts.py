"""Parts of the roles of every kind of stage, from its driver: written once, so that a new field has one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.config.stages.stage import starts
from posttrain.core.ports import Reference, TaskSource
from posttrain.role.events import RestoredEvent
from posttrain.role.prompt_order import RevisitingTasks
from posttrain.role.weights.saved_weights import restore, snapshot
from posttrain.stages.loop import Driver
from posttrain.stages.run_parts import load_kept

MANY = 20
"""More passes over the same rows are told as too many: 1 to 3 are usual."""


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


def say_passes(driver: Driver[Any, Any, Any], source: TaskSource, begins: str) -> None:
    """Says how a stage that learns from rows begins, how often it meets them, and whether that is too often."""
    stage, parts = driver.stage, driver.parts
    # A stage as long as another one takes an unknown number of steps: nothing is said of its passes.
    draws = 0 if driver.limit is not None else stage.steps * stage.batch
    each = [(draws / source.count, source.count)] if source.count else []
    # Several sources are met at different rates, so each has its own number of passes.
    each = source.passes(draws) if isinstance(source, RevisitingTasks) else each
    passes = "".join(f", {n:.3g} passes over {rows:,} rows" for n, rows in each if n)
    parts.say(f"{stage.name}: {begins}{passes}")
    if any(n > MANY for n, _ in each):
        fewer = "" if parts.run.model.path is None else f"{stage.name}.epochs=3, or "
        parts.say(
            f"warning: {stage.name} takes{passes.removeprefix(',')}: it will know them by heart. Set"
            f" {fewer}{stage.name}.patience=3 with {stage.name}.eval_every"
        )


def frozen_start(driver: Driver[Any, Any, Any], checkpoint: Path | None, name: str = "") -> Reference:
    """A frozen copy of the model as the stage began, or of the weights that were kept under a name.

    Args:
        checkpoint: of a stage that was cut in its middle; the kept weights are read again.
    """
    parts = driver.parts
    if checkpoint is None:
        return same_reference(driver, parts.freeze())
    # The learner has the weights of the checkpoint. They are set aside while the kept ones are loaded and frozen.
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
