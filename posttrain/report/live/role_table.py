"""Present activity of every role of a placed run, as a table for a terminal and in a few words for a plain line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from posttrain.core.exchange.role_status import RoleRow
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.engine.pool.pool_turns import BusyTime
from posttrain.report.console import Group, table
from posttrain.role.roles import RoleCosts
from posttrain.stages.run_parts import RunParts

WAITS = ("rollout", "evaluate")
"""Roles of the clock in which the learner waits for answers, where its engines are in other processes."""
COLUMNS = ("role", "does", "holds", "tokens in flight", "for", "idle", "")


@dataclass
class RoleWatch:
    """Reads what the roles of one stage do at present.

    Nothing that it reads waits for the event loop. So a thread that draws may ask it, also while the learner computes.

    Args:
        clock: that of the stage.
    """

    pool: EnginePool
    parts: RunParts
    clock: RoleCosts
    _meters: tuple[BusyTime, ...] = field(init=False)
    _begun: float = field(init=False)
    _waited: float = field(init=False)

    def __post_init__(self) -> None:
        # Read now and subtracted later, so that the shares are of this stage alone.
        self._meters = tuple(e.meter.read() for e in self.pool.engines)
        self._begun, self._waited = time.monotonic(), self._waits()

    def rows(self) -> list[RoleRow]:
        """The rows of the table: engines, turns that no engine has yet, processes that play episodes, queue,
        learner."""
        engines = self.pool.rows()
        busy_times = [e.meter.read() - before for e, before in zip(self.pool.engines, self._meters, strict=True)]
        # The pool lists its engines first. What it lists behind them has no meter.
        engine_rows = [replace(row, idle=busy.idle_share) for row, busy in zip(engines, busy_times, strict=False)]
        queue = self.parts.queue
        plays = self.parts.rollout.plays
        elsewhere = () if plays is None else plays.rows()
        return [
            *engine_rows,
            *engines[len(engine_rows) :],
            *elsewhere,
            *(() if queue is None else (queue.row(),)),
            self._learner(),
        ]

    def line(self) -> str:
        """The roles in a few words, for a line that is printed between two steps."""
        # The learner is the last of the rows that have an idle share.
        idle, queue = [r.idle for r in self.rows() if r.idle is not None], self.parts.queue
        return (
            f"{self.pool.line()}, idle {sum(idle[:-1]) / len(idle[:-1]):.0%}"
            + ("" if queue is None else f"; queue: {queue.row().depth}")
            + f"; learner idle {idle[-1]:.0%}"
        )

    def _learner(self) -> RoleRow:
        """The learner's row."""
        now, seconds = self.clock.now, time.monotonic() - self._begun
        waited = self._waits() - self._waited
        role, age = now or ("between steps", None)
        return RoleRow(
            name="learner",
            doing=f"waits ({role})" if role in WAITS else role,
            age=age,
            idle=min(1.0, waited / seconds) if seconds > 0 else 0.0,
            more=f"version {self.parts.version}",
        )

    def _waits(self) -> float:
        """Seconds that the learner has waited by the clock."""
        return sum(self.clock.spent(role) for role in WAITS)


def drawn(rows: Sequence[RoleRow]) -> Group:
    """The table as rich draws it."""
    cells = [
        (
            r.name,
            r.doing,
            r.depth,
            "" if r.tokens is None else f"{r.tokens:,}",
            "" if r.age is None else f"{r.age:.1f} s",
            "" if r.idle is None else f"{r.idle:.0%}",
            r.more,
        )
        for r in rows
    ]
    return table("", COLUMNS, cells, words=("role", "does", "holds", ""), one_line=True)
