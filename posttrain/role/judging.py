"""Judging: each answer once, asked again where a source failed on our side. Answers that are alike share one verdict.

The environment judges an answer as soon as it is there. Judges that read tokens (`core.ports.EpisodeJudge`) are asked
when all episodes of a group have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.errors import ConfigError, InvariantError
from posttrain.core.ports import Attempt, Environment, EpisodeJudge
from posttrain.core.redact import redacted
from posttrain.core.types import Episode, Segment
from posttrain.core.verdict import Judged, State, Verdict, failed

JUDGE_RETRIES = 2
UNCONTAINED = "sandbox=none"
"""What a verdict says where nothing contained the policy's programs."""


async def judged(environment: Environment, attempt: Attempt) -> tuple[Judged, ...]:
    """Judge, asking again where a source failed on our side. What the verdicts say goes into the record without our
    secrets."""
    verdicts = await environment.judge(attempt)
    for _ in range(JUDGE_RETRIES):
        if not _broken(verdicts):
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
        name = (attempt.stop, attempt.turns, *_tokens(segments))
        if name not in self._begun:
            self._begun[name] = asyncio.create_task(judged(self.environment, attempt))
        # one sibling may be given up while another waits for the same verdict
        return await asyncio.shield(self._begun[name])

    async def close(self) -> None:
        """End the judging that nobody waits for any more."""
        for task in self._begun.values():
            task.cancel()
        await asyncio.gather(*self._begun.values(), return_exceptions=True)


async def with_judges(judges: Sequence[EpisodeJudge], episodes: Sequence[Episode]) -> list[Episode]:
    """The finished episodes of one group, with what these judges say of them behind their own verdicts.

    Each judge is asked once about all of them. Equal ones share its verdicts, as in `SiblingVerdicts`.
    """
    out = list(episodes)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, e in enumerate(episodes):
        if not failed(e.verdicts):
            alike.setdefault((i,) if e.state is not None else (e.stop, *_tokens(e.segments)), []).append(i)
    if not judges or not alike:
        return out
    asked = [episodes[same[0]] for same in alike.values()]
    given = await asyncio.gather(*(_verdicts(judge, asked) for judge in judges))
    for judge, found in zip(judges, given, strict=True):
        for same, verdicts in zip(alike.values(), found, strict=True):
            for i in same:
                out[i] = _with(out[i], judge, verdicts)
    return out


async def _verdicts(judge: EpisodeJudge, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
    """One judge's verdicts about each episode; it is asked again about those with which it failed."""
    out = await _asked(judge, episodes)
    for _ in range(JUDGE_RETRIES):
        again = [i for i, verdicts in enumerate(out) if _broken(verdicts)]
        if not again:
            break
        for i, verdicts in zip(again, await _asked(judge, [episodes[i] for i in again]), strict=True):
            out[i] = verdicts
    return [tuple(replace(j, verdict=redacted(j.verdict)) for j in verdicts) for verdicts in out]


async def _asked(judge: EpisodeJudge, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
    """What one call says. A call that breaks, or answers about another number of episodes, failed with all of them."""
    try:
        found = [tuple(verdicts) for verdicts in await judge.judge(episodes)]
    except (ConfigError, InvariantError):
        raise
    except Exception as error:
        return [(Judged(judge.name, 1.0, Verdict.failed("raised", f"{type(error).__name__}: {error}")),)] * len(
            episodes
        )
    if len(found) != len(episodes):
        why = f"returned verdicts about {len(found)} episodes of {len(episodes)}: return one tuple for each, in order"
        return [(Judged(judge.name, 1.0, Verdict.failed("count", why)),)] * len(episodes)
    return found


def _with(episode: Episode, judge: EpisodeJudge, verdicts: tuple[Judged, ...]) -> Episode:
    """The episode with these verdicts behind its own; InvariantError where they cannot stand there."""
    if not verdicts:
        raise InvariantError(
            f"judge {judge.name!r} returned no verdict for task {episode.task.id!r}: return at least one, or abstain"
        )
    taken = {j.source for j in episode.verdicts}
    for j in verdicts:
        if j.source in taken:
            raise InvariantError(
                f"judge {judge.name!r} and another source both give verdicts as {j.source!r}: rename one of them"
            )
        if j.end is not None and not 1 <= j.end <= episode.spoken:
            raise InvariantError(
                f"judge {judge.name!r}: a verdict about task {episode.task.id!r} ends at spoken token {j.end} of "
                f"{episode.spoken}. Count the tokens where `mask` is True, from 1, over all segments"
            )
    return replace(episode, verdicts=(*episode.verdicts, *verdicts))


def _broken(verdicts: Sequence[Judged]) -> bool:
    return any(j.verdict.state is State.FAILED for j in verdicts)


def _tokens(segments: Sequence[Segment]) -> tuple[tuple[bytes, bytes], ...]:
    """What was seen and said, segment by segment, as something that can be compared."""
    return tuple((s.ids.tobytes(), s.mask.tobytes()) for s in segments)


def _stamped(verdict: Verdict) -> Verdict:
    """Every record of a run whose programs nothing contained says so."""
    return (
        verdict
        if UNCONTAINED in verdict.why
        else replace(verdict, why="; ".join(filter(None, (verdict.why, UNCONTAINED))))
    )
