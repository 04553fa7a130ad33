"""Probe of judged pairs: how much of what was preferred one surface feature of the text tells."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.judgements import Pair
from posttrain.core.measure.interval import Score
from posttrain.core.seeds import generator
from posttrain.core.types import Task
from posttrain.environment.check.probe import Answer, Mark, Probe
from posttrain.environment.check.subject import Subject
from posttrain.environment.judged.length_bias import surface_baselines

PAIRS = 1000
"""The most training pairs from which the baselines learn, and the most held-out pairs on which they are tried."""
FEWEST = 20
"""Fewer pairs on either side tell nothing."""
TOO_MUCH = 0.9
"""A single feature that tells so large a share of the pairs leaves little else to learn."""


async def surface(s: Subject) -> Answer:
    offered = s.env.abilities.judgements
    if offered is None or "pair" not in offered.kinds:
        return Mark.SKIP, "the environment has no judged pairs"

    def pairs(tasks: Sequence[Task], name: str) -> list[Pair]:
        drawn = [offered.draw(t, "pair", generator(s.env.seed, f"check/{name}", i)) for i, t in enumerate(tasks)]
        return [p for p in drawn if isinstance(p, Pair)]

    count = s.env.train.count
    known = pairs([s.env.train.task(i) for i in range(PAIRS if count is None else min(PAIRS, count))], "known")
    held = pairs(s.env.heldout[:PAIRS], "held")
    if min(len(known), len(held)) < FEWEST:
        return Mark.SKIP, f"{len(known)} training and {len(held)} held-out pairs: fewer than {FEWEST} tell nothing"
    best = surface_baselines(known, held)[0]
    detail = f"of {len(held)} held-out pairs the best single feature, the {best.feature}, tells {best.accuracy}"
    limit = TOO_MUCH
    if (utility := offered.utility) is not None:
        truth = Score.of([float(utility(p.task, p.chosen) > utility(p.task, p.rejected)) for p in held])
        detail += f"; the true utility tells {truth}"
        limit = min(limit, truth.low)
    return Mark.WARN if best.accuracy.high > limit else Mark.OK, detail


PREFERENCES = (
    Probe(
        "surface of pairs",
        "no single feature of the text, such as its length, tells which side was preferred",
        "a reward model would learn the feature and look good: balance the pairs over it, or debias; compare every"
        " accuracy with this one",
        surface,
    ),
)
