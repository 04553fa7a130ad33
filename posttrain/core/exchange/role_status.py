"""The present work of one role of a run: a row of the terminal's table, and a line in the message about a stall."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RoleRow:
    """One engine, the learner, or what waits between them."""

    name: str
    doing: str
    depth: str = ""
    """The work that the role holds, such as `3 turns`."""
    tokens: int | None = None
    """In flight: asked for and not answered yet, those of prompts included."""
    age: float | None = None
    """Seconds since its present work began, or since the oldest request that it holds arrived."""
    idle: float | None = None
    """Share of its time in which it had nothing to do, since the stage began."""
    more: str = ""
    """Further words, such as the version of its weights."""

    def line(self) -> str:
        """The row as a line of a message.

        >>> RoleRow(name="engine 0", doing="ready", depth="1 turns", tokens=41, more="version 12").line()
        'engine 0: ready, 1 turns, 41 tokens in flight, version 12'
        """
        flight = "" if self.tokens is None else f"{self.tokens} tokens in flight"
        return f"{self.name}: " + ", ".join(filter(None, (self.doing, self.depth, flight, self.more)))
