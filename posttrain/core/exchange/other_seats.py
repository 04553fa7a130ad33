"""Turns of the other seats of an episode. They are kept for readers and for token counts, and are never trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.system.errors import InvariantError


@dataclass(frozen=True)
class SeatTurn:
    """One turn of a seat that is not trained."""

    seat: str
    text: str
    tokens: int
    after: int
    """How many turns of the trained seat had ended when this one ended."""
    policy: bool
    """Whether the policy's own engine sampled it. If so, the engine's token count includes it."""

    def __post_init__(self) -> None:
        # The types are checked because a record from elsewhere may hold anything.
        given: dict[str, Any] = dict(vars(self))
        typed = all(isinstance(given[name], str) for name in ("seat", "text")) and isinstance(given["policy"], bool)
        if not typed or not self.seat or self.tokens < 0 or self.after < 0:
            raise InvariantError(f"a turn of another seat needs a name and counts >= 0: got {self}")
