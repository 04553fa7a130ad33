"""The counts of the engine, as (sum, count) gauges.

`engine/tokens`              tokens of delivered turns, per turn
`engine/steps`               steps, each counted once
`engine/occupancy`           share of slots that said a token, per step
`engine/positions_linear`    positions the layers' matrices computed, per position needed
`engine/positions_attention` query-key pairs attended, per pair needed (full attention; a window sees fewer of both)
`engine/shared`              prompt tokens shared with another request's prefill, per prompt token asked for
`engine/prefix_hits`         prompt tokens found in the prefix tree, per prompt token looked for there
`engine/kv`                  blocks that sequences hold, per block their tokens fill, summed over steps
`engine/preempted`           sequences preempted for older ones, per delivered turn
`engine/straggler`           longest turn, per mean turn
`engine/accepted`            drafted tokens that were said, per drafted token (speculative decoding)
`engine/stale_gap`           |log-prob over stale blocks - over fresh ones| at a weight update, per token compared

Every token of every distinct sequence is needed once. Idle rows, padding, rejected drafts and prompts computed again
are not needed. Seconds are in `EngineCounters.clock` instead, because no digest may cover them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from posttrain.core.gauge import Gauge, Gauges
from posttrain.engine.layers.attention import PackedLayout

if TYPE_CHECKING:
    from posttrain.engine.embedded.cache.forward_plan import Plan
    from posttrain.engine.embedded.schedule.scheduler import Scheduler


@dataclass
class SchedulerCounts:
    """Sums since the gauges were last read. They end with their scheduler, which is replaced after a failure."""

    shared: int = 0
    """Prompt tokens that were not computed, because another request of the same prompt had computed them."""
    found: int = 0
    """Prompt tokens found in the prefix tree."""
    asked: int = 0
    """Prompt tokens looked up in the prefix tree. A resumed request's tokens count again."""
    again: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(from, to): ranges of positions that are computed again, because their cache was freed."""
    preempted: int = 0


class EngineCounters:
    """The engine's sums since the last `take`."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._seconds: dict[str, float] = {}
        self._reset()

    def _reset(self) -> None:
        self._tokens = self._turns = self._steps = self._spoke = self._longest = 0
        self._linear, self._attention = np.zeros(2), np.zeros(2)
        """Each [2]: the amount that was computed, and the part of it that was needed."""
        self._prefilled = 0
        """Prompt tokens that were computed."""
        self._drafted = self._accepted = 0
        self._kv = np.zeros(2)
        """[2]: blocks that sequences hold, and blocks that their tokens fill."""
        self.stale = Gauge(0, 0)

    def said(self, tokens: int) -> None:
        """Count a delivered turn of that many tokens."""
        self._tokens += tokens
        self._turns += 1
        self._longest = max(self._longest, tokens)

    def step(self, scheduler: Scheduler, spoke: int) -> None:
        """Count a step in which `spoke` slots say a token."""
        self._steps += 1
        self._spoke += spoke
        # Every eighth step, since both numbers need a look at all blocks.
        if scheduler.blocks.capacity and self._steps % 8 == 1:
            self._kv += (scheduler.blocks.in_use, scheduler.filled)

    def forward(self, plan: Plan, dense: PackedLayout | None) -> None:
        """Count a pass. `dense` is the layout of its dense pieces, padding included."""
        # Pairs of query and key. A sequence of n tokens has n (n + 1) / 2 of them.
        # The last n positions of a sequence of T have n T - n (n - 1) / 2.
        ragged = int(plan.lengths.sum())
        dense_needed = sum(n * (n + 1) // 2 for n in plan.dense)
        dense_computed = 0 if dense is None else sum(b * n * (n + 1) // 2 for b, n in dense.shapes)
        chunks = sum(n * len(rows) - n * (n - 1) // 2 for rows, n in plan.chunks)
        self._linear += len(plan.ids), len(plan.rows)
        self._attention += ragged + dense_computed + chunks, ragged + dense_needed + chunks
        self._prefilled += len(plan.rows) - plan.front

    def drafts(self, plan: Plan, said: int, needed: np.ndarray) -> None:
        """Count a pass with drafts, of which `said` were accepted. `needed`: indices of the positions of generating
        slots without those of rejected drafts."""
        # `forward` has counted every position as needed. Here the rejected drafts are taken off again.
        computed = plan.front
        self._drafted += computed - len(plan.generating)
        self._accepted += said
        self._linear[1] -= computed - len(needed)
        self._attention[1] -= int(plan.lengths[:computed].sum() - plan.lengths[needed].sum())

    def spent(self, name: str, seconds: float) -> None:
        """Add to a measurement of `clock`: seconds, or bytes for `engine/freed`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def clock(self) -> dict[str, float]:
        """Seconds since the last call: `engine/step` in forward passes and draws, `engine/queue` that requests waited
        for a slot, `engine/sleep` and `engine/wake`; and `engine/freed`, the bytes that sleeping freed."""
        taken, self._seconds = self._seconds, {}
        return taken

    def take(self, scheduler: Scheduler) -> Gauges:
        """The gauges since the last call, with the scheduler's counts; all sums begin again at 0."""
        counts, scheduler.counts = scheduler.counts, SchedulerCounts()
        # Positions that are computed a second time are work, and were needed once only. Position p sees p + 1 rows.
        self._linear[1] -= sum(b - a for a, b in counts.again)
        self._attention[1] -= sum((b * (b + 1) - a * (a + 1)) // 2 for a, b in counts.again)
        out = {
            "engine/tokens": Gauge(self._tokens, self._turns),
            "engine/steps": Gauge(self._steps, self._steps),
            "engine/occupancy": Gauge(self._spoke / self._slots, self._steps),
            "engine/positions_linear": Gauge(*self._linear.tolist()),
            "engine/positions_attention": Gauge(*self._attention.tolist()),
            "engine/shared": Gauge(counts.shared, counts.shared + self._prefilled),
            "engine/prefix_hits": Gauge(counts.found, counts.asked),
            "engine/kv": Gauge(*self._kv.tolist()),
            "engine/preempted": Gauge(counts.preempted, self._turns),
            "engine/straggler": Gauge(self._longest * self._turns, self._tokens),  # longest / (tokens / turns)
        }
        if self._drafted:
            out["engine/accepted"] = Gauge(self._accepted, self._drafted)
        if self.stale.count:
            out["engine/stale_gap"] = self.stale
        self._reset()
        return out
