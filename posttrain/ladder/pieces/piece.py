"""The interface of every piece of an algorithm. No other code has to know a piece by name.

A piece is in two files. In this folder, in the file of its choice, is a frozen dataclass with its numbers and its
formula. In `posttrain.algorithm` is its mathematics, registered for its type. A piece holds numbers, words and
switches, and uses nothing outside the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from posttrain.system.errors import ConfigError
from posttrain.system.subclass_registry import Open

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm


class Piece(Open, ABC):
    """One form of one choice. The defaults here mean that the piece needs nothing special."""

    reads_silent: ClassVar[bool] = False
    """Whether it gives a gradient to tokens without credit, so that these must stay in the batch."""
    forms_ratio: ClassVar[bool] = False
    """Whether it reads the ratio of the policy and the anchor, whatever ratio the push uses."""

    absent: ClassVar[bool] = False
    """Whether this is the record of a piece whose class this program does not have (`ladder.pieces.unknown_pieces`)."""

    @abstractmethod
    def words(self) -> str:
        """Its formula, one line in the letters of `ladder.formula`."""

    def refuses(self, a: Algorithm) -> Iterator[str]:
        """Yields the reasons why the piece means nothing in `a`, with what to change. Reasons that concern no single
        piece are in `ladder.algorithm`."""
        yield from ()

    def reads(self, a: Algorithm) -> Iterable[str]:
        """The streams that must be scored for it before the loss."""
        return ()

    def reads_start_early(self, a: Algorithm) -> bool:
        """Returns whether the piece needs the log-probs at the start of the step before the loss computes them."""
        return False

    def compares_siblings(self) -> bool:
        """Returns whether it makes credit compare siblings, so that a group without spread has credit exactly 0."""
        return False

    def stores_top(self) -> int:
        """Returns the number of most probable tokens that the sampler must store with every sampled token."""
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
    """A factor in a formula: `0.04 `, and '' for 1."""
    return "" if coefficient == 1 else f"{coefficient:g} "


def named(piece: Piece) -> str:
    """The piece as an override writes it."""
    return type(piece).__name__.lower()


def share(path: str, value: float) -> None:
    """ConfigError unless the value lies in [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{path}={value}: must lie in [0, 1]")


def positive(path: str, value: float, off: str = "") -> None:
    """ConfigError unless the value is above 0. `off` is the override that switches the choice off."""
    if not value > 0:
        raise ConfigError(f"{path}={value}: must be > 0" + (f"; to switch it off set {off}" if off else ""))


def not_negative(path: str, value: float) -> None:
    """ConfigError unless the value is 0 or more."""
    if not value >= 0:
        raise ConfigError(f"{path}={value}: must be >= 0")


def ordered(path: str, low: float, high: float) -> None:
    """ConfigError unless 0 <= low < high."""
    if not 0 <= low < high:
        raise ConfigError(f"{path}.low={low} must be >= 0 and below {path}.high={high}")
