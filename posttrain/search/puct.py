"""Tree search over steps: PUCT or UCB chooses which beginning goes on, and what is found is told to all nodes above
it."""

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
    """A beginning of an answer, with the values that were found at it and below it."""

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
        """The child with the largest value + bonus, of its K children that are not finished.

        The bonus of PUCT with an even prior (1712.01815) is exploration / K * sqrt(visits of the parent) / (1 + its
        own); that of UCB (UCT, Kocsis and Szepesvari 2006) is exploration * sqrt(ln(visits of the parent) / its own).
        """
        # Children whose whole tree has ended are left out, or the search would spend its expansions where
        # nothing can grow.
        going = [c for c in self.children if not c.finished]
        return max(going, key=lambda c: c.value + exploration * self._bonus(c, rule))

    def _bonus(self, child: TreeNode, rule: TreeRule) -> float:
        if rule == "puct":
            return math.sqrt(self.visits) / (len(self.children) * (1 + child.visits))
        # A child without a visit comes first, as UCB asks for. Every child is scored when it is made, so this
        # is a guard.
        return math.sqrt(math.log(self.visits) / child.visits) if child.visits else math.inf

    @property
    def finished(self) -> bool:
        """True where nothing below this node can go on."""
        if self.beginning.stop is not None:
            return True
        return bool(self.children) and all(c.finished for c in self.children)

    def back_up(self, value: float) -> None:
        """Tell a value that was found here to this node and to all above it."""
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
    """The best answer of a tree search, of those that ended. Where none did, the best beginning is ended.

    Args:
        expansions: how often a node is given children.
        expand: continuations of a node.
        rule: which node goes on.
    """
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    for number in range(expansions):
        if root.finished or not search.goes_on(task):
            break
        # Down from the root to a node without children, choosing at each node; this one grows. `root.finished`
        # is False here, so each node on the way has a child that can go on.
        node = root
        while node.children:
            node = node.chosen(exploration, rule)
        grown = await search.grown(task, [node.beginning], expand, f"tree/{number}")
        node.children = [TreeNode(b, node) for b in grown]
        for child in node.children:
            # Every new child is a visit of its own to all nodes above it, so one expansion makes several visits.
            child.back_up(search.worth(child.beginning))
    tree_adds_up(root, task.id)
    return await search.ended(task, [x.beginning for x in root.leaves()])
