"""The rules of the diagnosis, read after every step. They warn and never stop a run."""

from __future__ import annotations

from posttrain.checks.past import Past
from posttrain.core.gauge import Step
from posttrain.diagnose.rules import findings
from posttrain.role.events import Observer, Remark
from posttrain.role.roles import ReinforceRoles


class LiveRules(Observer):
    """A rule that finds something becomes a note of the first step at which it does. It must observe last: it reads the
    whole line."""

    def __init__(self, past: Past) -> None:
        self._past = past

    async def after(self, h: ReinforceRoles, step: Step) -> Remark | None:
        self._past.trim()
        before = {f.rule for f in findings(self._past.steps, h.stage)}
        self._past.add(step)
        new = [f for f in findings(self._past.steps, h.stage) if f.rule not in before]
        return Remark(notes=tuple(f"rule {f.rule}: {f.message}" for f in new))
