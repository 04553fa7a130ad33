"""Helpers with which the drivers build the roles of their stages: shared fields, the passes message, the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.config.stages.stage import starts
from posttrain.core.ports import Reference, TaskSource
from posttrain.role.events import RestoredEvent
from posttrain.role.prompt_order import Prompts, RevisitingTasks
from posttrain.role.rollout import Rollout
from posttrain.role.weights.saved_weights import restore, snapshot
from posttrain.stages.loop import Driver
from posttrain.stages.run_parts import load_kept

MANY = 20
"""With more passes over the same rows a warning is printed; 1 to 3 are usual."""


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


def sampling_parts(driver: Driver[Any, Any, Any], cursor: int, rollout: Rollout) -> dict[str, Any]:
    """The fields of `role.roles.SamplingRoles`, for a stage that walks through its tasks from `cursor` on."""
    parts, setting = driver.parts, driver.setting
    return stage_parts(driver) | {
        "sampling": parts.sampling(driver.stage),
        "rollout": rollout,
        "prompts": Prompts(setting.environment.train, parts.run.seed, cursor),
        "other_environments": parts.other_environments(driver.stage),
    }


def say_passes(driver: Driver[Any, Any, Any], source: TaskSource, begins: str) -> None:
    """Prints how a stage that learns from rows begins and how many passes it makes; warns where these are too many."""
    stage, parts = driver.stage, driver.parts
    # A stage that takes as long as an earlier one (`time_of`) has no known number of steps, so no passes are printed.
    rows_drawn = 0 if driver.limit is not None else stage.steps * stage.batch
    passes_and_rows = [(rows_drawn / source.count, source.count)] if source.count else []
    # Several sources are met at different rates, so each has its own number of passes.
    passes_and_rows = source.passes(rows_drawn) if isinstance(source, RevisitingTasks) else passes_and_rows
    passes = "".join(f", {count:.3g} passes over {rows:,} rows" for count, rows in passes_and_rows if count)
    parts.say(f"{stage.name}: {begins}{passes}")
    if any(count > MANY for count, _ in passes_and_rows):
        fewer_epochs = "" if parts.run.model.path is None else f"{stage.name}.epochs=3, or "
        parts.say(
            f"warning: {stage.name} takes{passes.removeprefix(',')}: it will know them by heart. Set"
            f" {fewer_epochs}{stage.name}.patience=3 with {stage.name}.eval_every"
        )


@contextmanager
def start_weights(driver: Driver[Any, Any, Any], checkpoint: Path | None, name: str = "") -> Iterator[None]:
    """Inside, the learner has the weights with which the stage began, or those that were kept under `name`.
    `checkpoint`: where the stage is resumed in its middle; the learner has its weights, which come back at the end."""
    if checkpoint is None:
        yield
        return
    parts = driver.parts
    now = snapshot(parts.learner)
    try:
        load_kept(parts, driver.progress, name or starts(parts.run.stages, driver.stage))
        yield
    finally:
        # Also after an error: the policy must not keep the weights of the reference.
        restore(parts.learner, now)


def frozen_start(driver: Driver[Any, Any, Any], checkpoint: Path | None, name: str = "") -> Reference:
    """A frozen copy of the weights of `start_weights`."""
    with start_weights(driver, checkpoint, name):
        reference = driver.parts.freeze()
    return same_reference(driver, reference)


def same_reference(driver: Driver[Any, Any, Any], reference: Reference) -> Reference:
    """Returns the reference, and notes its digest in the state. InvariantError if a resumed stage has another one."""
    state = driver.state
    driver.parts.watch.emit(RestoredEvent("reference", state.reference_digest, lambda: reference.digest))
    state.reference_digest = reference.digest
    return reference
