"""The rules of `posttrain.diagnose`, read after every step. They warn and never stop a run."""

from __future__ import annotations

from posttrain.checks.stage_history import StageHistory
from posttrain.core.gauge import Gauge, Step
from posttrain.core.types import Episode
from posttrain.diagnose.rules.all_rules import findings
from posttrain.diagnose.rules.notes_once import RULE
from posttrain.role.events import Event, Observer, ObserverReport, PlayedEvent
from posttrain.role.roles import JudgedRoles


class LiveRules(Observer):
    """Every rule that holds after a step adds a note to it. What is printed of them is `diagnose.rules.notes_once`. It
    must be the last observer, since it reads the whole line of the record."""

    def __init__(self, history: StageHistory) -> None:
        self._history = history
        self._special: frozenset[int] = frozenset()

    async def begin(self, roles: JudgedRoles) -> None:
        tokenizer = getattr(roles.rollout.renderer, "tokenizer", None)
        special = {*getattr(tokenizer, "all_special_ids", ()), *_marked(tokenizer)} - {*(roles.sampling.stop_ids or ())}
        self._special = frozenset(map(int, special))

    def on_event(self, roles: JudgedRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent) or not self._special:
            return None
        episodes = [e for g in event.experience.played for e in g.episodes if e.own]
        return ObserverReport({"rollout/special": Gauge.of([self._says_special(e) for e in episodes])})

    def _says_special(self, episode: Episode) -> bool:
        return any(not self._special.isdisjoint(s.ids[s.mask].tolist()) for s in episode.segments)

    def on_line(self, roles: JudgedRoles, step: Step) -> ObserverReport | None:
        self._history.add(step)
        self._history.trim()
        return ObserverReport(
            notes=tuple(f"{RULE}{f.rule}: {f.message}" for f in findings(self._history.steps, roles.stage))
        )


def _marked(tokenizer: object) -> list[int]:
    """Ids of the added tokens that a tokenizer marks as special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [int(i) for i, token in added.items() if token.special]
