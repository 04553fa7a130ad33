"""Judging: each answer is judged once, and again if a reward source broke. Equal answers share one verdict. The
environment judges an answer as soon as its episode has ended, judges that read tokens once all of a group have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from posttrain.core.abilities import Together
from posttrain.core.gauge import Gauges
from posttrain.core.ports import Attempt, Environment, EpisodeJudge
from posttrain.core.redact_secrets import redacted
from posttrain.core.stop import StepNumber
from posttrain.core.types import Episode, Segment, Stop, Task
from posttrain.core.verdict import Judged, State, Verdict, failed
from posttrain.environment.templates.rendering_differences import TAIL, opening
from posttrain.system.concurrency import together
from posttrain.system.errors import ConfigError, InvariantError
from posttrain.verifier.timed_calls import contained

JUDGE_RETRIES = 2
"""How often a source that failed is asked again."""
UNCONTAINED = "sandbox=none"
"""The note in a verdict when the policy's programs ran without a sandbox."""


@runtime_checkable
class ComparingJudge(Protocol):
    """An `EpisodeJudge` whose verdict about an episode may depend on the others of its group."""

    @property
    def compares(self) -> bool:
        """True where the verdict depends on the others: where it failed on some, it is asked again about all."""
        ...


@runtime_checkable
class MeasuredJudge(Protocol):
    """An `EpisodeJudge` whose verdicts may be measured and not paid."""

    @property
    def measured(self) -> bool:
        """True where its verdicts are measured. Then no episode is excluded where the judge itself fails."""
        ...


def attempt_of(
    task: Task,
    turns: Sequence[str],
    stop: Stop,
    segments: Sequence[Segment],
    text: Callable[[np.ndarray], str],
    upto: Callable[[int], int],
    state: Any = None,
) -> Attempt:
    """The attempt. Where the prompt ends in a tag that opens a thought, each turn begins with it, so that a verifier
    reads the whole thought.

    Args:
        text: decodes token ids.
        upto: the number of spoken tokens up to a character of the last of `turns`.
    """
    # The last turn begins at the last spoken token that follows a token which was not spoken.
    mask, ids = (segments[-1].mask, segments[-1].ids) if segments else (np.zeros(0, bool), np.zeros(0, np.int32))
    begin = max(np.flatnonzero(mask & ~np.append(False, mask[:-1])), default=0)
    opened = opening(text(ids[max(0, begin - TAIL) : begin])) if begin else ""
    spoken_ids = tuple(i for s in segments for i in s.ids[s.mask].tolist())
    # The opening tag is put in front of each turn. So character n of a turn as the
    # verifier sees it is character n - len(opened) of the turn as it was said.
    return Attempt(task, tuple(opened + t for t in turns), stop, lambda n: upto(n - len(opened)), state, spoken_ids)


async def judged(environment: Environment, attempt: Attempt, alone: bool = True) -> tuple[Judged, ...]:
    """The environment's verdicts on an attempt. It is asked up to `JUDGE_RETRIES` times again while a source fails.

    Secrets are removed from the verdicts' texts, since these go into the record.

    Args:
        alone: whether no other judge follows. Then the environment gives at least one verdict.
    """
    verdicts = await contained(environment.judge(attempt))
    # An environment judges by all of its sources in one call, so the working sources are asked again with a broken one.
    for _ in range(JUDGE_RETRIES):
        if not _broken(verdicts):
            break
        verdicts = await contained(environment.judge(attempt))
    if not verdicts and alone and not attempt.batched:
        raise InvariantError(
            f"environment {environment.name!r} returned no verdict for task {attempt.task.id!r}: judge() must return"
            " one per source"
        )
    if "none" in environment.abilities.contained:
        verdicts = tuple(replace(j, verdict=_stamped(j.verdict)) for j in verdicts)
    return tuple(replace(j, verdict=redacted(j.verdict)) for j in verdicts)


@dataclass
class SiblingVerdicts:
    """The verdicts of one prompt's siblings. Equal answers are judged once, so that none has two rewards in a group: a
    score that varies (a model, a race, a clock) would give them different credit by chance.

    Two answers are equal if everything a verifier may read is equal: the tokens seen and said in each segment, and the
    stop reason. An episode with a final state of its own (`Talk.leave`) is always judged alone: the state (a database,
    a sandbox, an object of another library) may differ even if the tokens are equal. Episodes are never shared, and
    neither are the rewards an environment pays for turns. A failed verdict is shared too, after its `JUDGE_RETRIES`.
    """

    environment: Environment
    alone: bool = True
    """Whether no other judge reads the episodes."""
    _begun: dict[tuple[Any, ...], asyncio.Task[tuple[Judged, ...]]] = field(
        default_factory=dict[tuple[Any, ...], asyncio.Task[tuple[Judged, ...]]]
    )
    _attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    """By sibling: what `together` hands to sources that judge the whole group."""

    async def judge(
        self, attempt: Attempt, segments: Sequence[Segment], sibling: int | None = None
    ) -> tuple[Judged, ...]:
        """The verdicts of an attempt, or those of an equal one. For a sibling, sources that judge the whole group are
        asked in `together`."""
        # Until the whole group is judged the attempt is kept, and the environment leaves those sources out.
        if sibling is not None and self.environment.abilities.together is not None:
            self._attempts[sibling] = attempt
            attempt = replace(attempt, batched=True)
        if attempt.state is not None:
            return await judged(self.environment, attempt, self.alone)
        # A batched attempt has fewer verdicts, so it does not share them with one that is not batched.
        answer_key = (attempt.batched, attempt.stop, attempt.turns, *_tokens(segments))
        if answer_key not in self._begun:
            # A task, and not a coroutine that the first asker awaits: if that sibling is cancelled, the verdict stays.
            self._begun[answer_key] = asyncio.create_task(judged(self.environment, attempt, self.alone))
        # One sibling may be cancelled while another waits for the same verdict.
        return await asyncio.shield(self._begun[answer_key])

    async def together(self, episodes: Sequence[Episode], at: StepNumber) -> tuple[list[Episode], Gauges]:
        """The ended episodes with the verdicts of sources that judge the whole group, and what these logged."""
        judge_together, out = self.environment.abilities.together, list(episodes)
        ended = [i for i, e in enumerate(episodes) if e.sibling in self._attempts and e.stop is not Stop.ERROR]
        if judge_together is None or not ended:
            return out, {}
        attempts = [self._attempts[episodes[i].sibling] for i in ended]
        verdicts_by_attempt, logged = await judged_together(judge_together, attempts, at)
        # Equal answers get the verdicts of the first of them.
        first_verdicts: dict[tuple[Any, ...], tuple[Judged, ...]] = {}
        for i, verdicts in zip(ended, verdicts_by_attempt, strict=True):
            e = out[i]
            # The key `(i,)` is unique: an episode with a state shares its verdicts with no other.
            answer_key = (i,) if e.state is not None else (e.stop, e.text, *_tokens(e.segments))
            out[i] = replace(e, verdicts=(*e.verdicts, *first_verdicts.setdefault(answer_key, verdicts)))
        return out, logged

    async def close(self) -> None:
        """Cancel the judging that nobody waits for any more."""
        for task in self._begun.values():
            task.cancel()
        await asyncio.gather(*self._begun.values(), return_exceptions=True)


async def judged_together(
    together: Together, attempts: Sequence[Attempt], at: StepNumber
) -> tuple[list[tuple[Judged, ...]], Gauges]:
    """The verdicts of sources that judge a whole group, asked again up to `JUDGE_RETRIES` times while one fails."""
    verdicts_by_attempt, logged = await together(attempts, at)
    for _ in range(JUDGE_RETRIES):
        if not any(_broken(verdicts) for verdicts in verdicts_by_attempt):
            break
        verdicts_by_attempt, logged = await together(attempts, at)
    return [
        tuple(replace(j, verdict=redacted(j.verdict)) for j in verdicts) for verdicts in verdicts_by_attempt
    ], logged


async def with_judges(judges: Sequence[EpisodeJudge], episodes: Sequence[Episode]) -> list[Episode]:
    """The finished episodes of one group, with the verdicts of these judges appended. Each judge is called once with
    all of them, and equal episodes share its verdicts, as in `SiblingVerdicts`."""
    out = list(episodes)
    alike: dict[tuple[Any, ...], list[int]] = {}
    # An episode that failed already has no outcome, whatever a judge would add.
    for i, e in enumerate(episodes):
        if not failed(e.verdicts):
            alike.setdefault((i,) if e.state is not None else _as_judged(e), []).append(i)
    if not judges or not alike:
        return out
    distinct = [episodes[members[0]] for members in alike.values()]
    verdicts_by_judge = await together([_verdicts(judge, distinct) for judge in judges])
    for judge, verdicts_by_episode in zip(judges, verdicts_by_judge, strict=True):
        for members, verdicts in zip(alike.values(), verdicts_by_episode, strict=True):
            for i in members:
                out[i] = _with(out[i], judge, verdicts)
    return out


def _as_judged(e: Episode) -> tuple[Any, ...]:
    """All that a judge can read of an episode without a state."""
    return (e.stop, e.text, e.seats, e.verdicts, *_tokens(e.segments))


async def _verdicts(judge: EpisodeJudge, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
    """One judge's verdicts on each episode. It is called again for those on which it failed."""
    out = await _asked(judge, episodes)
    for _ in range(JUDGE_RETRIES):
        again = [i for i, verdicts in enumerate(out) if _broken(verdicts)]
        if not again:
            break
        # The verdicts of a comparing judge depend on the whole group, so it is asked about the whole group again.
        indices = range(len(episodes)) if isinstance(judge, ComparingJudge) and judge.compares else again
        for i, verdicts in zip(indices, await _asked(judge, [episodes[i] for i in indices]), strict=True):
            # Verdicts that did not fail stay, also where the judge was asked about the whole group again.
            if i in again:
                out[i] = verdicts
    return [tuple(replace(j, verdict=redacted(j.verdict)) for j in verdicts) for verdicts in out]


async def _asked(judge: EpisodeJudge, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
    """The verdicts of one call. If it raises, or returns another number of them, it failed on all of its episodes."""
    try:
        results = [tuple(verdicts) for verdicts in await contained(judge.judge(episodes))]
    # A wrong setting or a broken invariant is not temporary: asking again would not help, and the run must stop.
    except (ConfigError, InvariantError):
        raise
    except Exception as error:
        return _all_failed(judge, Verdict.failed("raised", f"{type(error).__name__}: {error}"), len(episodes))
    if len(results) != len(episodes):
        why = f"returned verdicts about {len(results)} episodes of {len(episodes)}: return one tuple for each, in order"
        return _all_failed(judge, Verdict.failed("count", why), len(episodes))
    return results


def _all_failed(judge: EpisodeJudge, verdict: Verdict, count: int) -> list[tuple[Judged, ...]]:
    # What is measured pays nothing, so its outage takes no reward away.
    measured = isinstance(judge, MeasuredJudge) and judge.measured
    return [(Judged(judge.name, 1.0, verdict, measured=measured),)] * count


def _with(episode: Episode, judge: EpisodeJudge, verdicts: tuple[Judged, ...]) -> Episode:
    """The episode with these verdicts appended; InvariantError if they are malformed or a source is named twice."""
    if not verdicts:
        raise InvariantError(
            f"judge {judge.name!r} returned no verdict for task {episode.task.id!r}: return at least one, or abstain"
        )
    # Only names of other sources are taken: a judge may give several verdicts, such as one for each step.
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
    """Whether a source failed, so that it is worth to ask again."""
    return any(j.verdict.state is State.FAILED for j in verdicts)


def _tokens(segments: Sequence[Segment]) -> tuple[tuple[bytes, bytes], ...]:
    """Token ids and masks of each segment, in a form that can be compared."""
    return tuple((s.ids.tobytes(), s.mask.tobytes()) for s in segments)


def _stamped(verdict: Verdict) -> Verdict:
    """The verdict with a note that no sandbox contained the policy's programs."""
    why = verdict.why if UNCONTAINED in verdict.why else "; ".join(filter(None, (verdict.why, UNCONTAINED)))
    return replace(verdict, why=why)
