"""What the roles of every kind of stage hold, from its driver: written once, so that a new field has one place."""

from __future__ import annotations

from typing import Any

from posttrain.controller.stages.driver import Driver


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
