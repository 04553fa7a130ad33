"""Bugs where what several sequences begin with is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.faults.planting import fault

Real = Callable[..., Any]
SHOWS = ("env.args.min_terms=6", "env.args.max_terms=6")
"""Prompts that are long enough to be shared."""


@fault(
    "tree_leaks_a_sibling",
    seam="posttrain.engine.layers.shared_prefixes:TreeLayout",
    what="the tree of shared beginnings lets an answer attend to the first token of another answer",
    harm="log-probs and gradients of an answer depend on its siblings, which the sampler never saw",
    source="pain 10",
    shows=SHOWS,
)
def _(real: Real) -> Real:
    def layout(tree: Any, **how: Any) -> Any:
        siblings = dict[bytes, list[Any]]()
        for run in tree.runs:
            siblings.setdefault(run.above.tobytes(), []).append(run)
        last = {run.start: same[i - 1] for same in siblings.values() for i, run in enumerate(same)}
        return real(replace(tree, runs=tuple(_beside(run, last[run.start]) for run in tree.runs)), **how)

    return layout


def _beside(run: Any, other: Any) -> Any:
    """The run with the other's first position in place of the last one above it."""
    return run if other is run or not len(run.above) else replace(run, above=np.append(run.above[:-1], other.start))


@fault(
    "positions_begin_again_after_prefix",
    seam="posttrain.engine.layers.shared_prefixes:Sharing._shared",
    what="behind a beginning that is computed once, position ids begin at 0 again",
    harm="an answer is scored as if its prompt stood beside it, not before it",
    source="pain 10",
    shows=SHOWS,
)
def _(real: Real) -> Real:
    def shared(self: Any, ids_N: Any, positions_N: Any, tree: Any, *routing: Any) -> Any:
        wrong = np.array(positions_N)
        for run in tree.runs:
            wrong[tree.first_U[run.start : run.start + run.length]] -= len(run.above)
        return real(self, ids_N, wrong, tree, *routing)

    return shared
