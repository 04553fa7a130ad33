"""What every piece of an algorithm says of itself, so that nobody else has to know it by name.

A piece is two files. Here, in the file of its choice, stands a frozen dataclass with its numbers and its words; in
`posttrain.algorithm` stands its mathematics, registered by its type. A piece holds numbers, words and switches, and
reaches nothing outside the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from posttrain.core.open import Open

if TYPE_CHECKING:
    from posttrain.core.algorithm import Algorithm


class Piece(Open, ABC):
    """One form of one choice. What is not overridden here says that the piece asks for nothing special."""

    reads_silent: ClassVar[bool] = False
    """Whether a token without credit still matters to it, so that the token may not leave the batch."""
    forms_ratio: ClassVar[bool] = False
    """Whether it compares the policy with the anchor, whatever ratio the push takes."""

    @abstractmethod
    def words(self) -> str:
        """Its formula, one line in the letters of `core.formula`."""

    def refuses(self, a: Algorithm) -> Iterator[str]:
        """Why it means nothing in `a`, with what to change. What concerns no single piece is refused by `Algorithm`."""
        yield from ()

    def reads(self, a: Algorithm) -> Iterable[str]:
        """The streams that must be scored for it before the loss."""
        return ()

    def reads_start_early(self, a: Algorithm) -> bool:
        """Whether it needs the log-probs at the start of the step before the loss has them."""
        return False

    def compares_siblings(self) -> bool:
        """Whether credit compares siblings because of it, so that a group without spread has credit exactly 0."""
        return False

    def stores_top(self) -> int:
        """How many of its most probable tokens the sampler stores for it with every token it says."""
        return 0

    def uses(self) -> str:
        """In words, what it reads beside streams; '' for nothing."""
        return ""

    def samples(self) -> str:
        """In words, what it costs while sampling; '' for nothing."""
        return ""

    def memory(self) -> str:
        """In words, what it keeps in memory beside what its streams need; '' for nothing."""
        return ""


def times(coefficient: float) -> str:
    """A factor before something: `0.04 `, and nothing for 1."""
    return "" if coefficient == 1 else f"{coefficient:g} "


def named(piece: Piece) -> str:
    """As an override writes it."""
    return type(piece).__name__.lower()
