"""Turns of an episode's other seats. They are kept for people and for counting tokens, and never learned from."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.errors import InvariantError


@dataclass(frozen=True)
class SeatTurn:
    """One turn of a seat that is not trained."""

    seat: str
    text: str
    tokens: int
    after: int
    """Turns of the trained seat that had ended when this one ended."""
    policy: bool
    """Whether the policy's own engine said it, so that the engine's count of tokens holds it."""

    def __post_init__(self) -> None:
        if not self.seat or self.tokens < 0 or self.after < 0:
            raise InvariantError(f"a turn of another seat needs a name and counts >= 0: got {self}")
