"""Judging: each answer once, asked again where a source failed on our side; answers that are alike share one
verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.errors import InvariantError
from posttrain.core.ports import Attempt, Environment
from posttrain.core.redact import redacted
from posttrain.core.types import Segment
from posttrain.core.verdict import Judged, State, Verdict

JUDGE_RETRIES = 2
UNCONTAINED = "sandbox=none"
"""What a verdict says where nothing contained the policy's programs."""


async def judged(environment: Environment, attempt: Attempt) -> tuple[Judged, ...]:
    """Judge, asking again where a source failed on our side. What the verdicts say goes into the record without our
    secrets."""
    verdicts = await environment.judge(attempt)
    for _ in range(JUDGE_RETRIES):
        if not any(j.verdict.state is State.FAILED for j in verdicts):
            break
        verdicts = await environment.judge(attempt)
    if not verdicts:
        raise InvariantError(
            f"environment {environment.name!r} returned no verdict for task {attempt.task.id!r}: judge() must return"
            " one per source"
        )
    if "none" in environment.abilities.contained:
        verdicts = tuple(replace(j, verdict=_stamped(j.verdict)) for j in verdicts)
    return tuple(replace(j, verdict=redacted(j.verdict)) for j in verdicts)


@dataclass
class SiblingVerdicts:
    """The verdicts of one prompt's siblings: equal answers are scored once, so that no text has two rewards within a
    group.

    A score that wavers (a model, a race, a clock) would make credit of chance between siblings that said the same.
    Answers are equal where everything that a verifier may read of them is: the same tokens seen and said, segment by
    segment, and the same stop reason. An episode whose world left a state (`Talk.leave`) is judged by itself even then:
    what the state stands for (a database, a box, an object of another library) is this episode's own, and may differ
    where the tokens do not. What is played is never shared, nor what the world paid for turns. A verdict that failed on
    our side is shared too: it was asked for `JUDGE_RETRIES` times again.
    """

    environment: Environment
    _begun: dict[tuple[Any, ...], asyncio.Task[tuple[Judged, ...]]] = field(
        default_factory=dict[tuple[Any, ...], asyncio.Task[tuple[Judged, ...]]]
    )

    async def judge(self, attempt: Attempt, segments: Sequence[Segment]) -> tuple[Judged, ...]:
        """The verdicts of an attempt, or those of the sibling that said the same."""
        if attempt.state is not None:
            return await judged(self.environment, attempt)
        name = (attempt.stop, attempt.turns, *((s.ids.tobytes(), s.mask.tobytes()) for s in segments))
        if name not in self._begun:
            self._begun[name] = asyncio.create_task(judged(self.environment, attempt))
        # one sibling may be given up while another waits for the same verdict
        return await asyncio.shield(self._begun[name])

    async def close(self) -> None:
        """End the judging that nobody waits for any more."""
        for task in self._begun.values():
            task.cancel()
        await asyncio.gather(*self._begun.values(), return_exceptions=True)


def _stamped(verdict: Verdict) -> Verdict:
    """Every record of a run whose programs nothing contained says so."""
    return (
        verdict
        if UNCONTAINED in verdict.why
        else replace(verdict, why="; ".join(filter(None, (verdict.why, UNCONTAINED))))
    )
