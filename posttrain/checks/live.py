"""The rules of the diagnosis, read after every step. They warn and never stop a run."""

from __future__ import annotations

from posttrain.checks.history import StageHistory
from posttrain.core.gauge import Step
from posttrain.diagnose.rules import findings
from posttrain.role.events import Observer, ObserverReport
from posttrain.role.roles import ReinforceRoles


class LiveRules(Observer):
    """A rule that finds something becomes a note of the first step at which it does. It must observe last: it reads the
    whole line."""

    def __init__(self, history: StageHistory) -> None:
        self._history = history

    async def after(self, roles: ReinforceRoles, step: Step) -> ObserverReport | None:
        self._history.trim()
        before = {f.rule for f in findings(self._history.steps, roles.stage)}
        self._history.add(step)
        new = [f for f in findings(self._history.steps, roles.stage) if f.rule not in before]
        return ObserverReport(notes=tuple(f"rule {f.rule}: {f.message}" for f in new))
