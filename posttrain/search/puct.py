"""Tree search over steps. PUCT or UCB chooses which beginning is continued, and values go up to all nodes above."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from posttrain.core.types import Task
from posttrain.search.search_checks import tree_adds_up
from posttrain.search.search_kinds import TreeRule
from posttrain.search.step_sampling import Beginning, StepSearch


@dataclass(eq=False)
class TreeNode:
    """A beginning of an answer, with the count (`visits`) and the sum (`total`) of the values found at and below it."""

    beginning: Beginning
    parent: TreeNode | None = None
    children: list[TreeNode] = field(default_factory=list["TreeNode"])
    visits: int = 0
    total: float = 0.0
    found: list[float] = field(default_factory=list[float])
    """The values that were found at this node itself."""

    @property
    def value(self) -> float:
        """The mean of what was found at it and below it; 0 before the first visit."""
        return self.total / self.visits if self.visits else 0.0

    def chosen(self, exploration: float, rule: TreeRule = "puct") -> TreeNode:
        """The child with the largest value + exploration * bonus, of the children that are not finished.

        With N visits of this node, n of the child and K children, the bonus of PUCT with an even prior (1712.01815) is
        sqrt(N) / (K * (1 + n)). The bonus of UCB (UCT, Kocsis and Szepesvari 2006) is sqrt(ln(N) / n).
        """
        # Children below which all answers have ended are left out. The search could not expand anything there.
        unfinished = [c for c in self.children if not c.finished]
        return max(unfinished, key=lambda c: c.value + exploration * self._bonus(c, rule))

    def _bonus(self, child: TreeNode, rule: TreeRule) -> float:
        if rule == "puct":
            return math.sqrt(self.visits) / (len(self.children) * (1 + child.visits))
        # UCB visits a child without visits first. Here every child has a visit from its creation on, so this case is
        # only a safeguard.
        return math.sqrt(math.log(self.visits) / child.visits) if child.visits else math.inf

    @property
    def finished(self) -> bool:
        """True where nothing below this node can go on."""
        if self.beginning.stop is not None:
            return True
        return bool(self.children) and all(c.finished for c in self.children)

    def back_up(self, value: float) -> None:
        """Adds a value that was found at this node to this node and to all nodes above it."""
        self.found.append(value)
        node: TreeNode | None = self
        while node is not None:
            node.visits, node.total = node.visits + 1, node.total + value
            node = node.parent

    def leaves(self) -> list[TreeNode]:
        return [self] if not self.children else [x for c in self.children for x in c.leaves()]


async def tree_search(
    search: StepSearch, task: Task, *, expansions: int, expand: int, exploration: float = 1.0, rule: TreeRule = "puct"
) -> Beginning:
    """The best of the answers that ended in a tree search. If none ended, the best beginning is continued to its end.

    Args:
        expansions: how often a node is given children.
        expand: continuations of a node.
        rule: which node goes on.
    """
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    for number in range(expansions):
        if root.finished or not search.goes_on(task):
            break
        # From the root down, a child is chosen at each node, until a node without children is reached. That node is
        # expanded. `root.finished` is False, so each node on the way has a child that is not finished.
        node = root
        while node.children:
            node = node.chosen(exploration, rule)
        continued = await search.grown(task, [node.beginning], expand, f"tree/{number}")
        node.children = [TreeNode(b, node) for b in continued]
        for child in node.children:
            # Each new child counts as a visit of all nodes above it, so one expansion makes several visits.
            child.back_up(search.worth(child.beginning))
    tree_adds_up(root, task.id)
    return await search.ended(task, [x.beginning for x in root.leaves()])
