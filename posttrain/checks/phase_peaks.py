"""Notes the peak memory of the two phases of an optimizer step, so that a plan can be compared with it."""

from __future__ import annotations

from typing import Any

from posttrain.role.events import DifferentiatedEvent, Event, LearnedEvent, Observer, ObserverReport, PackedEvent

PASSES, UPDATE = "passes", "update"
"""Forward and backward passes of a minibatch; from the end of them to the optimizer's step, with what is checked of the
gradient."""


class PhasePeaks(Observer):
    """It must be the first observer, so that what others do after an event counts for the next phase."""

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        match event:
            case PackedEvent():
                roles.clock.phase()
            case DifferentiatedEvent():
                roles.clock.phase(PASSES)
            case LearnedEvent():
                roles.clock.phase(UPDATE)
            case _:
                pass
        return None
