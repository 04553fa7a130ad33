"""What the engine counts, as (sum, count) gauges.

`engine/tokens`              tokens of delivered turns, per turn
`engine/steps`               steps, each counted once
`engine/occupancy`           share of slots that said a token, per step
`engine/positions_linear`    positions the layers' matrices computed, per position needed
`engine/positions_attention` query-key pairs attended, per pair needed (full attention; a window sees fewer of both)
`engine/shared`              prompt tokens taken from a sibling's prefill, per prompt token asked for
Needed is every token of every distinct sequence once; idle rows, padding and prompts computed again are not.
"""

from __future__ import annotations

import numpy as np

from posttrain.core.types import Gauge, Gauges
from posttrain.engine.attention import PackedLayout
from posttrain.engine.embedded.scheduler import Plan, Scheduler


class Counters:
    """Sums since the last `take`."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._reset()

    def _reset(self) -> None:
        self._tokens = self._turns = self._steps = self._spoke = 0
        self._linear = np.zeros(2)
        self._attention = np.zeros(2)
        self._prefilled = 0

    def said(self, tokens: int) -> None:
        self._tokens += tokens
        self._turns += 1

    def step(self, plan: Plan, spoke: int) -> None:
        self._steps += 1
        self._spoke += spoke

    def forward(self, plan: Plan, dense: PackedLayout | None) -> None:
        ragged = int(plan.lengths.sum())
        triangle = sum(n * (n + 1) // 2 for n in plan.dense)
        computed = 0 if dense is None else sum(b * n * (n + 1) // 2 for b, n in dense.shapes)
        self._linear += (len(plan.ids), len(plan.rows))
        self._attention += (ragged + computed, ragged + triangle)
        self._prefilled += len(plan.rows) - len(plan.speaking)

    def take(self, scheduler: Scheduler) -> Gauges:
        again = np.array([(n, n * (n + 1) // 2) for n in scheduler.evicted]).reshape(-1, 2).sum(0)
        linear, attention = self._linear - (0, again[0]), self._attention - (0, again[1])
        out = {
            "engine/tokens": Gauge(self._tokens, self._turns),
            "engine/steps": Gauge(self._steps, self._steps),
            "engine/occupancy": Gauge(self._spoke / self._slots, self._steps),
            "engine/positions_linear": Gauge(*linear.tolist()),
            "engine/positions_attention": Gauge(*attention.tolist()),
            "engine/shared": Gauge(scheduler.shared, scheduler.shared + self._prefilled),
        }
        self._reset()
        scheduler.shared, scheduler.evicted = 0, []
        return out
