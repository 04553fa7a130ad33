"""The rules of `posttrain.diagnose`, read after every step. They warn and never stop a run."""

from __future__ import annotations

from posttrain.checks.history import StageHistory
from posttrain.core.gauge import Step
from posttrain.diagnose.rules import findings
from posttrain.role.events import Observer, ObserverReport
from posttrain.role.roles import ReinforceRoles


class LiveRules(Observer):
    """A rule that finds something adds a note to the first step at which it does.

    It must be the last observer, since it reads the whole line of the record.
    """

    def __init__(self, history: StageHistory) -> None:
        self._history = history

    async def after(self, roles: ReinforceRoles, step: Step) -> ObserverReport | None:
        self._history.trim()
        before = {f.rule for f in findings(self._history.steps, roles.stage)}
        self._history.add(step)
        new = [f for f in findings(self._history.steps, roles.stage) if f.rule not in before]
        return ObserverReport(notes=tuple(f"rule {f.rule}: {f.message}" for f in new))
