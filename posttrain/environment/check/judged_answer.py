"""One answer that a probe gave, and what its sources said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.core.types import Task
from posttrain.core.verdict import Judged, State, outcome


@dataclass(frozen=True)
class JudgedAnswer:
    """One answer and its verdicts."""

    task: Task
    turns: tuple[str, ...]
    judged: tuple[Judged, ...]

    @property
    def scores(self) -> Mapping[str, float]:
        """Scores by source, without weights. Only those that enter the outcome."""
        out: dict[str, float] = {}
        for j in self.judged:
            if j.counts and j.verdict.score is not None:
                out[j.source] = out.get(j.source, 0.0) + j.verdict.score
        return out

    @property
    def outcome(self) -> float | None:
        return outcome(self.judged)

    @property
    def failed(self) -> Judged | None:
        """The first `failed` verdict, if any."""
        return next((j for j in self.judged if j.verdict.state is State.FAILED), None)

    @property
    def said(self) -> str:
        """The last turn, for messages."""
        text = self.turns[-1] if self.turns else ""
        return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
