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
    """A check that every rank makes of its own rows of gradients, moments and weights. `number`: its place among these
    checks, by which all ranks know it."""

    def __init__(self, inner: Observer, number: int, lead: RankLead) -> None:
        self.inner, self._number, self._lead = inner, number, lead

    def needs(self, roles: Any, event: PackedEvent) -> Needs:
        return self.inner.needs(roles, event)

    async def begin(self, roles: Any) -> None:
        lead = self._lead
        lead.state.roles = roles
        # The first check sends all of them to the other ranks, since observers begin in their order.
        if self._number == 0:
            order_to_others = together.watch, (roles.run.model, roles.stage, lead.state.checks, roles.sync.probe_ids)
            with lead.ordered("take checks", order_to_others):
                pass  # rank 0 has them already
        with lead.ordered(f"begin {type(self.inner).__name__}", (together.begin_check, (self._number,))):
            await self.inner.begin(roles)

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        # Gradients, moments and weights exist only as rows of each rank. Of other events rank 0 has all the data.
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


def row_checks(lead: RankLead, observers: Sequence[Observer], kinds: tuple[type[Observer], ...]) -> Observers:
    """The observers of a stage. Those of the given kinds are wrapped in `RowCheck`, so every rank makes them."""
    # The place in this list is the number by which all ranks know a check.
    checks_of_rows = [observer for observer in observers if isinstance(observer, kinds)]
    lead.state.checks = checks_of_rows
    return Observers(
        [
            RowCheck(observer, checks_of_rows.index(observer), lead) if observer in checks_of_rows else observer
            for observer in observers
        ]
    )


def rank_observers(
    lead: RankLead,
    checks: Callable[[Stage, Sequence[Step], Mapping[str, Any]], Sequence[Observer]],
    kinds: tuple[type[Observer], ...],
) -> Callable[[Stage, Sequence[Step], Mapping[str, Any]], Observers]:
    """Returns the function `RunParts.observe` of a run over ranks."""
    return lambda stage, steps, kept: row_checks(lead, checks(stage, steps, kept), kinds)
