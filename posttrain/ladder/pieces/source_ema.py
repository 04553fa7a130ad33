"""A moving baseline for each source of tasks."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.ladder.pieces.baseline import Ema


@dataclass(frozen=True, kw_only=True)
class SourceEma(Ema):
    """A moving average for each `source` of the tasks, as `Ema` is for all of them (RAE, SPIRAL 2506.24119).

    The source is a column of the task; tasks without it share one average. Of a game it names the game and the role
    that the policy plays: rewards of roles differ whatever the policy does, and one average over all roles would be
    credit for the role.
    """

    each_source = True

    def words(self) -> str:
        return f"r - b_s, then b_s <- {self.decay:g} b_s + {1 - self.decay:g} r, one b_s for each source s of tasks"
