"""Notes of a run by kind: printed once in the terminal, and counted at the end. The record has every note."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from posttrain.core.gauge import Step

RULE = "rule "
"""A note that begins with this and a rule's name is a finding of that rule."""
SHOWN = 8
"""The most steps that a line names. Dots stand for the others."""
WORDS = 60
"""The most characters of a note in a line that counts it."""


def kind_of(note: str) -> str:
    """The name of the rule that a note comes from.

    For other notes it is their words, without numbers and without what stands in brackets.
    """
    if note.startswith(RULE):
        return note.removeprefix(RULE).partition(":")[0]
    # Numbers and brackets change from step to step; the words around them are the kind.
    return re.sub(r"\s+", " ", re.sub(r"\([^()]*\)|[-+]?\d[\d.,%]*", "", note)).strip()


@dataclass(frozen=True)
class RepeatedNote:
    """The note that one rule, or one kind of note, gave in a stage."""

    stage: str
    rule: str
    """Name of the rule; '' for a note that is no finding."""
    message: str
    """The words of the note at its first step."""
    steps: tuple[int, ...]

    @property
    def count(self) -> str:
        """A line with the rule's name, or the note's first words, and the steps at which it held."""
        words = self.message if len(self.message) <= WORDS else self.message[:WORDS].rpartition(" ")[0] + " ..."
        return f"{self.stage}: {self.rule or words} held at {self._times}"

    @property
    def line(self) -> str:
        """The message with the steps at which it held, for a summary."""
        return f"{self.stage}: {self.message} [{self._times}]"

    @property
    def _times(self) -> str:
        shown = ", ".join(map(str, self.steps[:SHOWN])) + (", ..." if len(self.steps) > SHOWN else "")
        often = f" ({len(self.steps)} times)" if len(self.steps) > 1 else ""
        return f"step{'s' if len(self.steps) > 1 else ''} {shown}{often}"


def findings_of(steps: Iterable[Step]) -> list[RepeatedNote]:
    """The findings of live rules in a record, each rule of a stage once, in the order in which they came."""
    return [s for s in notes_of(steps) if s.rule]


def notes_of(steps: Iterable[Step]) -> list[RepeatedNote]:
    """All notes of a record, each kind of a stage once, in the order in which they came."""
    kinds: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for step in steps:
        for note in step.notes:
            kinds.setdefault((step.stage, kind_of(note)), []).append((step.index, note))
    repeated: list[RepeatedNote] = []
    for (stage, kind), occurrences in kinds.items():
        note = occurrences[0][1]
        is_rule = note.startswith(RULE)
        message = note.removeprefix(RULE).partition(": ")[2] if is_rule else note
        # A step may have one kind of note several times, and counts once.
        repeated.append(
            RepeatedNote(stage, kind if is_rule else "", message, tuple(dict.fromkeys(i for i, _ in occurrences)))
        )
    return repeated


class SaidOnce:
    """Lets each kind of note of a stage pass once, and counts the rest."""

    def __init__(self) -> None:
        self._seen: list[Step] = []
        self._known: set[tuple[str, str]] = set()

    def new(self, step: Step) -> Sequence[str]:
        """The notes of a step that are of a kind not seen before in its stage."""
        new_notes: list[str] = []
        for note in step.notes:
            if (key := (step.stage, kind_of(note))) not in self._known:
                self._known.add(key)
                new_notes.append(note)
        if step.notes:
            # Gauges and clock are not needed to count, and would be held until the end.
            self._seen.append(replace(step, gauges={}, clock={}))
        return new_notes

    def take_counts(self) -> list[str]:
        """A line for each kind of note that held at more than one step since the last call.

        Findings of rules are left out: the report of the run lists them with their steps.
        """
        seen, self._seen = self._seen, []
        return [n.count for n in notes_of(seen) if len(n.steps) > 1 and not n.rule]
