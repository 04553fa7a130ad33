"""The events of a training step, in their order below, and the observers that get them. A step emits one event after
each phase. Every observer gets it, in a fixed order, before the step goes on. An observer may raise, which stops the
run. Observers never change what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.batch import Batch
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauges, Step, merge
from posttrain.core.scored import Credit, ScoredGroup
from posttrain.role.heldout_evaluation import EvaluationReport
from posttrain.role.judges.regenerate import RegeneratedAnswer
from posttrain.role.judges.step_completion import LabelledAnswer
from posttrain.role.learner_passes import Needs, Passes
from posttrain.role.learning.rejection_selection import Candidate


@dataclass(frozen=True, eq=False)
class PlayedEvent:
    """The rollouts were played and judged."""

    experience: Experience


@dataclass(frozen=True, eq=False)
class KeptEvent:
    """Completions were selected to be imitated, and the weights to train are in place."""

    round: int
    """The round that imitates them, counted from 1."""
    improvement: int
    """How many earlier rounds imitated from the same candidates."""
    kept: tuple[Candidate, ...]
    selects: bool = True
    """Whether they were selected now. False: a resumed stage took them up again."""


@dataclass(frozen=True, eq=False)
class LabelledEvent:
    """Answers were cut into steps, and completed from the end of each."""

    index: int
    """The step, counted from 1."""
    answers: tuple[LabelledAnswer, ...]


@dataclass(frozen=True, eq=False)
class RegeneratedEvent:
    """Wrong answers were said anew from their first wrong step."""

    index: int
    """The step, counted from 1."""
    answers: tuple[RegeneratedAnswer, ...]


@dataclass(frozen=True, eq=False)
class ScoredEvent:
    """The models scored the answers; credit is not computed yet."""

    experience: Experience
    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True, eq=False)
class OutcomesEvent:
    """An implicit process reward model is about to learn the outcomes of the answers."""

    index: int
    """The step, counted from 1."""
    batch: Batch
    """Every scored answer, with its outcome."""


@dataclass(frozen=True, eq=False)
class PackedEvent:
    """A minibatch was packed; there was no forward pass on it yet."""

    index: int
    """The step, counted from 1."""
    batch: Batch
    first: bool
    """Whether it is the first minibatch of its step. If so, the sampler still serves the learner's weights."""
    version: int
    """The version of the learner's weights before the optimizer step."""


@dataclass(frozen=True, eq=False)
class DifferentiatedEvent:
    """The gradient of a minibatch was computed; the optimizer has not stepped yet."""

    packed: PackedEvent
    passes: Passes
    share: float = 1.0
    """The share of the learning rate that the optimizer step will use."""


@dataclass(frozen=True, eq=False)
class LearnedEvent:
    """The optimizer has stepped; the sampler has the old weights."""

    packed: PackedEvent
    passes: Passes
    lr: float
    """The learning rate of this optimizer step."""


@dataclass(frozen=True, eq=False)
class PushedEvent:
    """The sampler serves the new weights."""

    experience: Experience
    credit: Credit


@dataclass(frozen=True, eq=False)
class EvaluatedEvent:
    """A held-out evaluation has ended."""

    report: EvaluationReport
    version: int
    """The version of the weights that were evaluated."""


@dataclass(frozen=True, eq=False)
class RestoredEvent:
    """Something was restored from a checkpoint."""

    what: str
    """Name of the state that was restored, in words."""
    saved: str
    """Its fingerprint when it was saved; '' if nothing was saved."""
    now: Callable[[], str]
    """Computes the fingerprint of what was restored."""


Event = (
    PlayedEvent
    | KeptEvent
    | LabelledEvent
    | RegeneratedEvent
    | ScoredEvent
    | OutcomesEvent
    | PackedEvent
    | DifferentiatedEvent
    | LearnedEvent
    | PushedEvent
    | EvaluatedEvent
    | RestoredEvent
)


@dataclass(frozen=True)
class ObserverReport:
    """Gauges and notes (short texts) that an observer adds to the step's line of the record."""

    gauges: Gauges = field(default_factory=Gauges)
    notes: tuple[str, ...] = ()


class Observer:
    """Observes one stage. `roles` is what the stage works with (`role.roles`). Every method does nothing here."""

    def needs(self, roles: Any, event: PackedEvent) -> Needs:
        """Returns the parts of this minibatch's forward and backward passes that must be kept."""
        return Needs()

    async def begin(self, roles: Any) -> None:
        """Called before the stage's first step, and before the first step of a stage that is resumed."""

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        """Called after each phase of a step. The next phase waits until it returns."""

    async def after(self, roles: Any, step: Step) -> ObserverReport | None:
        """Called after the step with its line of the record. It may call the environment."""

    def on_line(self, roles: Any, step: Step) -> ObserverReport | None:
        """Called with the whole line of the record, held-out measures included, just before it is written."""

    def end(self) -> None:
        """Called after the stage's last step."""

    def state(self) -> dict[str, Any]:
        """Returns the state of this observer that a checkpoint must store, as plain data."""
        return {}


class Observers:
    """Several observers in a fixed order. Their reports are gathered for the step's line of the record."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._all = tuple(observers)
        self._roles: Any = None
        self._gauges: Gauges = {}
        self._notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Class names of the observers, in their order."""
        return tuple(type(observer).__name__ for observer in self._all)

    def needs(self, event: PackedEvent) -> Needs:
        out = Needs()
        # The union of all needs: what several observers need is kept once, for all.
        for observer in self._all:
            out = out | observer.needs(self._roles, event)
        return out

    async def begin(self, roles: Any) -> None:
        """Start observing a stage. `roles` is what it works with."""
        self._roles = roles
        for observer in self._all:
            await observer.begin(roles)

    def end(self) -> None:
        """The stage is over. The roles hold these observers; without this reference back they can be freed."""
        for observer in self._all:
            observer.end()
        self._roles = None

    def emit(self, event: Event) -> None:
        for observer in self._all:
            # An observer that raises ends the step here: the observers after it do not get the event.
            self._add(observer.on_event(self._roles, event))

    async def after(self, step: Step) -> Step:
        """The step's line with the observers' reports on it. Each observer gets the line as the one before left it."""
        for observer in self._all:
            if (report := await observer.after(self._roles, step)) is not None:
                step = _with(step, report)
        return step

    def line(self, step: Step) -> Step:
        """The whole line of the record, with the reports that the observers add to it."""
        for observer in self._all:
            if (report := observer.on_line(self._roles, step)) is not None:
                step = _with(step, report)
        return step

    def take(self) -> ObserverReport:
        """The reports gathered since the last call, as one."""
        # Reports are gathered, because the phases come before the step's line exists.
        report, self._gauges, self._notes = ObserverReport(self._gauges, self._notes), {}, ()
        return report

    def state(self) -> dict[str, Any]:
        """Returns the state of all observers that a checkpoint must store."""
        return {key: value for observer in self._all for key, value in observer.state().items()}

    def _add(self, report: ObserverReport | None) -> None:
        if report is not None:
            self._gauges, self._notes = merge(self._gauges, report.gauges), (*self._notes, *report.notes)


def _with(step: Step, report: ObserverReport) -> Step:
    """The line with a report in it: gauges of the report replace those of their name; notes are added."""
    return replace(step, gauges={**step.gauges, **report.gauges}, notes=(*step.notes, *report.notes))


UNOBSERVED = Observers()
