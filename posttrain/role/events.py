"""What happens in a step, as typed events, and those who observe it.

The step emits one event a phase; every observer hears it before the step goes on, in order. An observer may raise,
which stops the run. Nothing is computed differently because somebody observes.

    PlayedEvent            answers were played and judged
    ScoredEvent           models scored them; there is no credit yet
    PackedEvent           a minibatch is made; nothing was differentiated
    DifferentiatedEvent   its gradient is there; the optimizer has not moved
    LearnedEvent          the optimizer has moved; nothing was pushed
    PushedEvent           the sampler serves the weights that came of it

Between steps there are two more: EvaluatedEvent, held-out tasks were answered, and RestoredEvent, something came back
from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.batch import Batch
from posttrain.core.experience import Experience
from posttrain.core.gauge import Gauges, Step, merge
from posttrain.core.scored import Credit, ScoredGroup
from posttrain.role.evaluate import EvaluationReport
from posttrain.role.passes import Needs, Passes


@dataclass(frozen=True, eq=False)
class PlayedEvent:
    experience: Experience


@dataclass(frozen=True, eq=False)
class ScoredEvent:
    experience: Experience
    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True, eq=False)
class PackedEvent:
    index: int
    """The step, from 1."""
    batch: Batch
    first: bool
    """Whether it is the first minibatch of a step, so that the sampler still serves the learner's weights."""
    version: int
    """Of the learner's weights before the optimizer step."""


@dataclass(frozen=True, eq=False)
class DifferentiatedEvent:
    packed: PackedEvent
    passes: Passes


@dataclass(frozen=True, eq=False)
class LearnedEvent:
    packed: PackedEvent
    passes: Passes
    lr: float
    """Of this optimizer step."""


@dataclass(frozen=True, eq=False)
class PushedEvent:
    experience: Experience
    credit: Credit


@dataclass(frozen=True, eq=False)
class EvaluatedEvent:
    report: EvaluationReport
    version: int
    """Of the weights that were evaluated."""


@dataclass(frozen=True, eq=False)
class RestoredEvent:
    what: str
    saved: str
    """Fingerprint when it was saved; '' where nothing was."""
    now: Callable[[], str]
    """The same of what is there now."""


Event = (
    PlayedEvent
    | ScoredEvent
    | PackedEvent
    | DifferentiatedEvent
    | LearnedEvent
    | PushedEvent
    | EvaluatedEvent
    | RestoredEvent
)


@dataclass(frozen=True)
class ObserverReport:
    """What an observer adds to the record of the step."""

    gauges: Gauges = field(default_factory=Gauges)
    notes: tuple[str, ...] = ()


class Observer:
    """Observes one stage. `roles` is what the stage works with (`role.roles`). Every verb does nothing here."""

    def needs(self, roles: Any, event: PackedEvent) -> Needs:
        """What must be kept of the passes of this minibatch."""
        return Needs()

    async def begin(self, roles: Any) -> None:
        """Before the first step of the stage, also of one that is gone on with."""

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        """One phase of the step; the next one waits."""

    async def after(self, roles: Any, step: Step) -> ObserverReport | None:
        """After the step, whose line of the record this is. It may ask the environment."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must carry, as plain data."""
        return {}


class Observers:
    """Several observers in a fixed order; what they remark is gathered for the step's line of the record."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._all = tuple(observers)
        self._roles: Any = None
        self._gauges: Gauges = {}
        self._notes: tuple[str, ...] = ()

    def needs(self, event: PackedEvent) -> Needs:
        out = Needs()
        for one in self._all:
            out = out | one.needs(self._roles, event)
        return out

    async def begin(self, roles: Any) -> None:
        """What the stage works with, before its first step."""
        self._roles = roles
        for one in self._all:
            await one.begin(roles)

    def end(self) -> None:
        """The stage is over. What it works with holds these observers, so it would not be freed while they hold it."""
        self._roles = None

    def emit(self, event: Event) -> None:
        """Every observer hears it, in order."""
        for one in self._all:
            self._add(one.on_event(self._roles, event))

    async def after(self, step: Step) -> Step:
        """The step's line with what the observers say of it, each of the line as the one before left it."""
        for one in self._all:
            if (remark := await one.after(self._roles, step)) is not None:
                step = _with(step, remark)
        return step

    def take(self) -> ObserverReport:
        """What was remarked since the last call."""
        seen, self._gauges, self._notes = ObserverReport(self._gauges, self._notes), {}, ()
        return seen

    def state(self) -> dict[str, Any]:
        """What a checkpoint must carry of all of them."""
        return {key: value for one in self._all for key, value in one.state().items()}

    def _add(self, remark: ObserverReport | None) -> None:
        if remark is not None:
            self._gauges, self._notes = merge(self._gauges, remark.gauges), (*self._notes, *remark.notes)


def _with(step: Step, remark: ObserverReport) -> Step:
    return Step(
        step.stage, step.index, step.version, {**step.gauges, **remark.gauges}, step.clock, (*step.notes, *remark.notes)
    )


UNOBSERVED = Observers()
