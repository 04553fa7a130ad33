"""Ranks: the processes that train one model together. Each has a part of the weights and of every minibatch.

Every rank runs the same program on the same minibatches and reaches the same exchanges in the same order. `check_same`
compares values of the ranks: a rank with another value is named in an error, and no rank waits for it for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from posttrain.system.errors import InvariantError, RunFolderError

T = TypeVar("T")


class Ranks(Protocol):
    """This process among those that train together."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""
        ...

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def every(self, value: Any) -> list[Any]:
        """The value of every rank, in the order of the ranks. Each rank calls it, and gets the same list."""
        ...


@dataclass(frozen=True)
class OneRank:
    """A process that trains alone."""

    rank: int = 0
    world: int = 1

    def every(self, value: Any) -> list[Any]:
        return [value]


ALONE = OneRank()


def check_same(ranks: Ranks, value: Any, what: str, advice: str) -> None:
    """InvariantError on every rank unless all ranks have the same value. `what` and `advice` are words of the error."""
    values = ranks.every(value)
    if others := [r for r, x in enumerate(values) if x != values[0]]:
        raise InvariantError(
            f"ranks do not have the same {what}: rank 0 has {values[0]!r}, rank {others[0]} has {values[others[0]]!r}."
            f" {advice}"
        )


SHARED = (InvariantError, RunFolderError)
"""Errors that every rank raises where one does."""


def of_every(ranks: Ranks, function: Callable[[], T]) -> list[T]:
    """Returns the results of `function` on each rank, in the order of the ranks.

    Raises:
        InvariantError, RunFolderError: on every rank, where it was raised on one; the first such rank is named.
    """
    if ranks.world == 1:
        return [function()]
    # An error is exchanged like a value: a rank that raised at once would leave the others waiting for ever.
    # `error_place`: where `SHARED` has its class, which all ranks must raise.
    value, error_place, error_text = None, 0, ""
    try:
        value = function()
    # Other exceptions are not exchanged: they are faults of the program, and end the process.
    except SHARED as error:
        error_place, error_text = int(isinstance(error, RunFolderError)), str(error)
    results: list[tuple[T, int, str]] = ranks.every((value, error_place, error_text))
    for rank, (_, place, text) in enumerate(results):
        if text:
            raise SHARED[place](f"rank {rank}: {text}")
    return [x for x, _, _ in results]


def of_one_copy(ranks: Ranks, value: float, what: str) -> list[float]:
    """The values of the first ranks that together hold one copy of all weights.

    The value of a rank is the norm of its part of `what`. With several copies (`replicas`), their ranks hold the same
    parts in the same order, so their values must have the same bits: InvariantError on every rank where they differ.
    """
    # Ranks are numbered copy after copy, so the next copy of a part lies `ranks_of_copy` ranks further.
    values, ranks_of_copy = ranks.every(value), ranks.world // getattr(ranks, "replicas", 1)
    for at, norm in enumerate(values):
        first = values[at % ranks_of_copy]
        # NaN differs from itself, so it is passed on: the reader of the norms has a better message for it.
        if norm != first and not math.isnan(norm + first):
            raise InvariantError(
                f"copies of the weights differ: the part of the {what} on rank {at % ranks_of_copy} has the norm"
                f" {first!r}, and its copy on rank {at} has {norm!r}. A copy was updated or summed in another way: go"
                " on from the last checkpoint"
            )
    return list(values[:ranks_of_copy])


def joint_norm(norms: Sequence[float]) -> float:
    """The norm of all numbers together, from the norms of their parts: (3, 4) -> 5. Not finite where a part is not."""
    try:
        # fsum: the order of the ranks changes no bit.
        return math.sqrt(math.fsum(x * x for x in norms))
    except OverflowError:  # `fsum`: the squares are finite and their sum is too large
        return math.inf
