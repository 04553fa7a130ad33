"""The checks that every rank makes of its own rows, as rank 0 asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Step
from posttrain.role.events import (
    DifferentiatedEvent,
    Event,
    LearnedEvent,
    Observer,
    ObserverReport,
    Observers,
    PackedEvent,
)
from posttrain.role.learner_passes import Needs
from posttrain.stages.ranks import rank_state as together
from posttrain.stages.ranks.rank_lead import RankLead


class RowCheck(Observer):
    """A check that every rank makes of its own rows: of gradients, moments and weights. `number`: among those."""

    def __init__(self, inner: Observer, number: int, lead: RankLead) -> None:
        self.inner, self._number, self._lead = inner, number, lead

    def needs(self, roles: Any, event: PackedEvent) -> Needs:
        return self.inner.needs(roles, event)

    async def begin(self, roles: Any) -> None:
        lead = self._lead
        lead.state.roles = roles
        # Observers begin in their order, so the first of them carries all checks to the other ranks. Rank 0 has them
        # already.
        if self._number == 0:
            others = together.watch, (roles.run.model, roles.stage, lead.state.checks, roles.sync.probe_ids)
            with lead.ordered("take checks", others):
                pass
        with lead.ordered(f"begin {type(self.inner).__name__}", (together.begin_check, (self._number,))):
            await self.inner.begin(roles)

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        # Gradients, moments and weights exist as rows of each rank. What other events tell, rank 0 has whole.
        if not isinstance(event, DifferentiatedEvent | LearnedEvent):
            return self.inner.on_event(roles, event)
        return self._lead.all(together.check_rows, self._number, what=f"{type(self.inner).__name__} of the own rows")

    async def after(self, roles: Any, step: Step) -> ObserverReport | None:
        return await self.inner.after(roles, step)

    def on_line(self, roles: Any, step: Step) -> ObserverReport | None:
        return self.inner.on_line(roles, step)

    def end(self) -> None:
        self.inner.end()

    def state(self) -> dict[str, Any]:
        return self.inner.state()


def row_checks(lead: RankLead, found: Sequence[Observer], kinds: tuple[type[Observer], ...]) -> Observers:
    """The observers of a stage, with those of these kinds on every rank."""
    # The place in `own` is the number by which all ranks know a check.
    own = [one for one in found if isinstance(one, kinds)]
    lead.state.checks = own
    return Observers([RowCheck(one, own.index(one), lead) if one in own else one for one in found])


def rank_observers(
    lead: RankLead,
    checks: Callable[[Stage, Sequence[Step], Mapping[str, Any]], Sequence[Observer]],
    kinds: tuple[type[Observer], ...],
) -> Callable[[Stage, Sequence[Step], Mapping[str, Any]], Observers]:
    """`RunParts.observe` of a run over ranks."""
    return lambda stage, steps, kept: row_checks(lead, checks(stage, steps, kept), kinds)
