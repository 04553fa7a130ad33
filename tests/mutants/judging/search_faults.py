"""Faults of searches at inference (`posttrain eval RUN search=...`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from posttrain.faults.planting import fault

Real = Callable[..., Any]


@fault(
    "search_min_as_product",
    seam="posttrain.search.step_sampling:aggregated",
    what="a search multiplies the scores of steps where their minimum is asked for",
    harm="short answers are chosen whatever they say",
    source="min taken as product",
    shows=("search=best_of",),
    needs="search",
)
def _(real: Real) -> Real:
    return lambda scores, how: math.prod(scores)


@fault(
    "search_before_the_push",
    seam="posttrain.evaluation.evaluate_search:served",
    what="a search begins while the weights are still being pushed",
    harm="its beginnings are those of other weights, and what goes on from them is of no policy",
    source="pain 4; fork under another version",
    shows=("search=beam",),
    needs="search",
)
def _(real: Real) -> Real:
    async def served(roles: Any) -> int:
        async def late() -> None:
            while not roles.engine.blocks_in_use:
                await asyncio.sleep(0)
            await real(roles)

        PUSHED.append(asyncio.ensure_future(late()))
        return roles.engine.version

    return served


PUSHED: list[asyncio.Future[None]] = []
"""Pushes that nobody waits for; held here, so that they are not collected."""
