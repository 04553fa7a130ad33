"""Checks that a resumed run continues exactly the run that was stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.checks.stage_history import StageHistory
from posttrain.role.events import Event, Observer, ObserverReport, RestoredEvent
from posttrain.role.roles import ReinforceRoles, StageRoles
from posttrain.system.errors import InvariantError


def goes_on(walked: float | None, cursor: int, taken: float | None, steps: int | None) -> None:
    """A resumed stage takes the prompts that come next, with an optimizer that has its earlier state.

    Args:
        walked: prompts that the stage had taken by its last recorded step; None: it has no walk through prompts.
        cursor: the prompt at which it goes on.
        taken: optimizer steps by the record.
        steps: optimizer steps by the optimizer's own state; None: it counts none.
    """
    if walked is not None and int(walked) != cursor:
        raise InvariantError(
            f"the stage stopped after {int(walked)} prompts and would go on at prompt {cursor}: tasks and random"
            " numbers would repeat or be skipped. The checkpoint's cursor was not restored"
        )
    if taken is not None and steps is not None and int(taken) != steps:
        raise InvariantError(
            f"the stage has taken {int(taken)} optimizer steps and the optimizer remembers {steps}: its moments and"
            " warm-up would begin again. The checkpoint's optimizer state was not loaded"
        )


def came_back(what: str, saved: str, fingerprint: Callable[[], str]) -> None:
    """Checks that the state restored from a checkpoint is the state that was saved. `saved` is '' if nothing was."""
    if saved and (now := fingerprint()) != saved:
        raise InvariantError(
            f"the checkpoint's {what} came back changed: fingerprint {saved} when it was saved, {now} now that it is"
            " loaded. What is saved and what is trained differ (merged adapters, a stale copy, a part that is not"
            " loaded): go on from an older checkpoint, and look at who writes and who reads"
        )


class ResumeCheck(Observer):
    """A resumed stage takes the prompts that come next, with an optimizer that has its earlier state."""

    def __init__(self, history: StageHistory) -> None:
        self._history = history

    async def begin(self, roles: ReinforceRoles) -> None:
        # A stage that begins has nothing to go on from.
        steps = self._history.steps
        if not steps:
            return
        walked = steps[-1].gauges.get("rollout/walked")
        goes_on(walked.sum if walked else None, roles.groups.cursor, *_updates(self._history, roles))


class OptimizerResumeCheck(Observer):
    """A resumed stage that learns from data has an optimizer with its earlier state.

    Its data are a function of the number of the step, so nothing else has to be remembered.
    """

    def __init__(self, history: StageHistory) -> None:
        self._history = history

    async def begin(self, roles: StageRoles[Any]) -> None:
        if self._history.steps:
            goes_on(None, 0, *_updates(self._history, roles))


def _updates(history: StageHistory, roles: StageRoles[Any]) -> tuple[float, int | None]:
    """Optimizer steps of the stage, by its record and by the state of its optimizer."""
    # The history is whole here: it is trimmed only while the stage runs. A step whose update was skipped counts 0.
    taken = sum(s.gauges["optim/steps"].sum for s in history.steps if "optim/steps" in s.gauges)
    # The count is part of the optimizer's state: one that was made anew has 0.
    remembered = roles.trainer.optimizer.state_tensors().get("steps")
    return taken, None if remembered is None else int(remembered)


class RestoreCheck(Observer):
    """A check that the state restored from a checkpoint is the state that was saved."""

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        if isinstance(event, RestoredEvent):
            came_back(event.what, event.saved, event.now)
