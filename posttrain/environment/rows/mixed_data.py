"""Several data sets as one source of tasks, each with its share of what is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.core import seeds
from posttrain.core.types import Task


@dataclass(frozen=True)
class MixedTasks:
    """An endless source of the tasks of several lists.

    Of the first n draws each list has its share, up to one draw. Each pass through a list has a new order.

    >>> few, many = (tuple(Task(id=f"{n}{i}", prompt="p") for i in range(c)) for n, c in (("a", 2), ("b", 9)))
    >>> mixed = MixedTasks((few, many), (1.0, 3.0), seed=0)
    >>> "".join(mixed.task(i).id[0] for i in range(8)), mixed.visit(7)
    ('babbbabb', 0)
    """

    lists: tuple[tuple[Task, ...], ...]
    weights: tuple[float, ...]
    seed: int
    _places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(list, how many of it were drawn before) of each draw, as far as draws were asked for."""
    _drawn: dict[int, int] = field(default_factory=dict[int, int])
    """How many draws of `_places` are of each list."""
    _orders: dict[int, tuple[int, list[int]]] = field(default_factory=dict[int, tuple[int, list[int]]])
    """(epoch, the order of the list in it) of each list, for the epoch that was asked for last."""

    @property
    def count(self) -> int | None:
        return None

    def task(self, index: int) -> Task:
        if index < 0:
            raise IndexError(f"task index {index} is negative")
        list_index, drawn = self._place(index)
        # The order of each pass has its own generator, so task i depends on the seed and i alone.
        epoch, position = divmod(drawn, len(self.lists[list_index]))
        if self._orders.get(list_index, (-1, []))[0] != epoch:  # -1: no order yet
            rng = seeds.generator(self.seed, f"mixed/{list_index}", epoch)
            self._orders[list_index] = epoch, rng.permutation(len(self.lists[list_index])).tolist()
        return self.lists[list_index][self._orders[list_index][1][position]]

    def visit(self, index: int) -> int:
        """Returns the number of times that the task of this draw was drawn before."""
        list_index, drawn = self._place(index)
        return drawn // len(self.lists[list_index])

    def passes(self, draws: int) -> list[tuple[float, int]]:
        """Returns for each list the number of passes through it in `draws` draws, and its length."""
        total, weights_and_counts = sum(self.weights), zip(self.weights, map(len, self.lists), strict=True)
        return [(draws * w / total / count, count) for w, count in weights_and_counts]

    def _place(self, index: int) -> tuple[int, int]:
        """(list, how many of it were drawn before) of a draw."""
        total = sum(self.weights)
        while len(self._places) <= index:
            # Of n draws a list should have w / total * n. The list that is furthest behind is drawn next. All places
            # are kept, because each depends on those before it.
            n = len(self._places) + 1
            due = [w / total * n - self._drawn.get(i, 0) for i, w in enumerate(self.weights)]
            list_index = due.index(max(due))
            self._places.append((list_index, self._drawn.get(list_index, 0)))
            self._drawn[list_index] = self._drawn.get(list_index, 0) + 1
        return self._places[index]
