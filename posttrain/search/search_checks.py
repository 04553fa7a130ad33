"""Checks of every search: one version of the weights, the right score for the choice, and the sums in a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posttrain.core.measure.answer_steps import Aggregate
from posttrain.system.errors import InvariantError

if TYPE_CHECKING:
    from posttrain.search.puct import TreeNode

APART = 1e-9
"""Relative difference that sums and products of scores may have by rounding."""


def said_by_one_version(version_T: np.ndarray, version: int, task: str) -> None:
    """InvariantError where a token was said by other weights than those the search began with."""
    if len(other := version_T[version_T != version]):
        raise InvariantError(
            f"a search for task {task!r} began with weights of version {version}, and weights of version"
            f" {int(other[0])} went on with a beginning of it: its answer is of no policy, and what it costs of none."
            " Push weights before a search begins or after it has ended"
        )


def worth_is(scores: Sequence[float], aggregate: Aggregate, worth: float, task: str) -> None:
    """InvariantError where the number by which an answer was chosen is not the aggregate of its steps' scores."""
    # This is written in another way than `answer_steps.aggregated` on purpose, so that both do not have the same error.
    ordered, logs = sorted(scores), [math.log(x) if x > 0 else -math.inf for x in scores]
    wanted = {
        "min": lambda: ordered[0],
        "product": lambda: math.exp(sum(logs)) if ordered[0] >= 0 else float(np.prod(np.array(scores))),
        "mean": lambda: float(np.mean(np.array(scores))),
        "last": lambda: scores[len(scores) - 1],
    }[aggregate]()
    # A product of many scores may be so small that a float has few digits left: below 1e-300 all are equal.
    if not math.isclose(worth, wanted, rel_tol=APART, abs_tol=1e-300):
        raise InvariantError(
            f"a search for task {task!r} chose an answer by {worth:.6g}, and the {aggregate} of its steps' scores"
            f" {[round(x, 4) for x in scores]} is {wanted:.6g}: it goes by another number than the one that was asked"
            " for. Correct what makes one score of several"
        )


def tree_adds_up(node: TreeNode, task: str) -> tuple[int, float]:
    """Checks that each node has the count and the sum of all values found at it and below it. Returns (visits, total)
    of `node`, counted again from the leaves up.

    Raises:
        InvariantError: a value did not reach a node above the place where it was found.
    """
    # This counts from the leaves up, and `back_up` goes from one node to the root. Both have to give the same numbers.
    below = [tree_adds_up(c, task) for c in node.children]
    visits = len(node.found) + sum(n for n, _ in below)
    total = math.fsum([*node.found, *(t for _, t in below)])
    if node.visits != visits or not math.isclose(node.total, total, rel_tol=APART, abs_tol=APART):
        raise InvariantError(
            f"a tree search for task {task!r}: a beginning of {len(node.beginning.ids)} tokens has {node.visits} visits"
            f" and a value of {node.total:.6g} in all, and {visits} values of {total:.6g} in all were found at it and"
            " below it: what a leaf is worth was not told to all above it, so the tree goes on at the wrong places"
        )
    return visits, total
