"""Observers that note something and never stop a run: the rules of `posttrain.diagnose`, and the peaks of memory."""

from __future__ import annotations

from typing import Any

from posttrain.checks.stage_history import StageHistory
from posttrain.core.gauge import Gauge, Step
from posttrain.diagnose.rules.all_rules import findings
from posttrain.diagnose.rules.notes_once import RULE
from posttrain.role.events import (
    DifferentiatedEvent,
    Event,
    LearnedEvent,
    Observer,
    ObserverReport,
    PackedEvent,
    PlayedEvent,
)
from posttrain.role.roles import JudgedRoles


class LiveRules(Observer):
    """Every rule that holds after a step adds a note to it. `diagnose.rules.notes_once` chooses what is printed.

    It must be the last observer, since it reads the whole line of the record. It also counts for `never_stops` the
    answers that say a special token (`rollout/special`): with a wrong stop id, they go on past the end of their turn.
    """

    def __init__(self, history: StageHistory) -> None:
        self._history = history
        self._special: frozenset[int] = frozenset()
        """Ids of the tokenizer's special tokens, without the stop ids."""

    async def begin(self, roles: JudgedRoles) -> None:
        tokenizer = getattr(roles.rollout.renderer, "tokenizer", None)
        marked = [i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special]
        special = map(int, (*getattr(tokenizer, "all_special_ids", ()), *marked))
        # Stop ids are special tokens too, and every answer that ends by itself has one. They are no sign of a fault.
        self._special = frozenset(special) - {*(roles.sampling.stop_ids or ())}

    def on_event(self, roles: JudgedRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent) or not self._special:
            return None
        # What a demonstration or an opponent said is no habit of the policy.
        episodes = [e for g in event.experience.played for e in g.episodes if e.own]
        says_special = [any(not self._special.isdisjoint(s.ids[s.mask].tolist()) for s in e.segments) for e in episodes]
        return ObserverReport({"rollout/special": Gauge.of(says_special)})

    def on_line(self, roles: JudgedRoles, step: Step) -> ObserverReport | None:
        self._history.add(step)
        # Trimmed before the rules read it, so that their cost does not grow with the length of the run.
        self._history.trim()
        rule_findings = findings(self._history.steps, roles.stage)
        return ObserverReport(notes=tuple(f"{RULE}{f.rule}: {f.message}" for f in rule_findings))


class PhasePeaks(Observer):
    """Ends a phase of the clock at each event of a minibatch, so that each phase has its own peak of memory.

    `clock.phase(name)` notes the peak since the last call under the name of the phase that ends; without a name it
    notes nothing. It must be the first observer, so that what others do after an event counts for the next phase.
    """

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        match event:
            case PackedEvent():
                roles.clock.phase()
            case DifferentiatedEvent():
                roles.clock.phase("passes")
            # What follows the passes up to the optimizer's step, the checks of the gradient included.
            case LearnedEvent():
                roles.clock.phase("update")
        return None
