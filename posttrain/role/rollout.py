"""ROLLOUT: samples, judges, and keeps the log-prob of every token it said.

An episode is a coroutine over a `Transcript`; thousands run at once while the engine batches whatever is ready.
A failed rollout is data: what the environment or a verifier of ours broke becomes a `failed` verdict, never a zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from posttrain.core import abilities, seeds
from posttrain.core.errors import InvariantError, PosttrainError
from posttrain.core.ports import Attempt, Dialogue, Environment, EpisodeJudge, PairRenderer, Sampler
from posttrain.core.redact import scrubbed, scrubbed_data
from posttrain.core.request import PassRate, RolloutRequest
from posttrain.core.sampling import Sampling
from posttrain.core.stop import EpisodeLimits
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.role.demonstrate import recited
from posttrain.role.judging import SiblingVerdicts, judged, with_judges
from posttrain.role.talk import Conversation, Player, tokens_upto

T = TypeVar("T")


@dataclass
class Rollout:
    """Plays episodes of one environment on one engine under one seed."""

    sampler: Sampler
    environment: Environment
    dialogue: Callable[[str], Dialogue]
    """A new encoder for one episode of the named task."""
    seed: int
    renderer: PairRenderer | None = None
    """Writes demonstrations as tokens, where groups are shown some."""
    limits: EpisodeLimits = EpisodeLimits()
    """Of every episode."""
    judges: tuple[EpisodeJudge, ...] = ()
    """Asked about the tokens of a group's episodes once all of them have ended, beside the environment."""
    players: Mapping[str, Player] = field(default_factory=dict[str, Player])
    """Of the seats that an environment asks for beside the trained one, by name. None: the policy plays them, under the
    episode's contract."""

    async def episode(
        self,
        task: Task,
        visit: int,
        sibling: int,
        sampling: Sampling,
        stream: str,
        talks: dict[int, Conversation] | None = None,
        bench: SiblingVerdicts | None = None,
    ) -> Episode:
        """Play and judge one episode. Broken invariants and config errors propagate; other failures become data.

        `talks` takes note of what is being said, by sibling, for whoever may abort it. `bench` judges the siblings.
        """

        def place(*turn: seeds.Coordinate) -> int:
            return seeds.key(self.seed, stream, task.id, visit, sibling, *turn)

        policy = Player(self.sampler, self.dialogue, sampling)
        talk = Conversation(policy, task.id, self.limits, place, self.players)
        if talks is not None:
            talks[sibling] = talk
        try:
            stop = await self._play(task, talk)
        except PosttrainError:
            raise
        except Exception as error:
            why = scrubbed(f"{type(error).__name__}: {error}")
            verdicts: tuple[Judged, ...] = (Judged("environment", 1.0, Verdict.failed("environment", why)),)
            return self._episode(task, visit, sibling, talk, Stop.ERROR, verdicts, why)
        attempt = Attempt(task, tuple(talk.turns), stop, talk.spoken_upto, talk.state)
        verdicts = await (judged(self.environment, attempt) if bench is None else bench.judge(attempt, talk.segments()))
        return self._episode(task, visit, sibling, talk, stop, (*verdicts, *talk.paid), "")

    async def _play(self, task: Task, talk: Conversation) -> Stop:
        """The environment's own end, or the clock's; it cleans up either way."""
        try:
            async with asyncio.timeout(self.limits.seconds) as clock:
                return await self.environment.play(task, talk)
        except TimeoutError:
            if not clock.expired():
                raise
            return Stop.TIME

    def _episode(
        self,
        task: Task,
        visit: int,
        sibling: int,
        talk: Conversation,
        stop: Stop,
        verdicts: tuple[Judged, ...],
        error: str,
    ) -> Episode:
        text = "\n".join(talk.turns)
        segments, state = talk.segments(), scrubbed_data(talk.state)
        counts = (tuple(talk.lengths), talk.cut, talk.others)
        return Episode(task, visit, sibling, segments, stop, verdicts, text, error, state, *counts)

    async def show(
        self, task: Task, visit: int, sibling: int, sampling: Sampling, style: str | None, bench: SiblingVerdicts
    ) -> Episode:
        """An episode that a demonstration says instead of the policy, judged like any other."""
        if self.renderer is None:
            raise InvariantError("groups are shown demonstrations, and the rollout has no renderer to write them with")
        rng = seeds.generator(self.seed, "shown", task.id, visit, sibling)
        texts = abilities.demonstrations(self.environment)
        prompt, completion = texts.write(task, style or texts.styles[-1], rng, 0.0)
        if not isinstance(completion, str):
            said = await recited(
                self.environment, self.renderer, self.dialogue(task.id), task, prompt, completion, sampling
            )
            segments, text = (said.transcript.segment(),), "\n".join(said.turns)
            attempt = Attempt(task, tuple(said.turns), Stop.SAID, said.spoken_upto, said.state)
            verdicts = (*await bench.judge(attempt, segments), *said.paid)
            return Episode(task, visit, sibling, segments, Stop.SAID, verdicts, text, state=scrubbed_data(said.state))
        seen, ids = self.renderer.pair(prompt, completion, task.id)
        transcript = Transcript(sampling)
        transcript.see(seen)
        transcript.show(ids)
        segment = transcript.segment()
        attempt = Attempt(task, (completion,), Stop.SAID, partial(tokens_upto, self.dialogue(task.id), ids))
        verdicts = await bench.judge(attempt, (segment,))
        return Episode(task, visit, sibling, (segment,), Stop.SAID, verdicts, completion)

    async def group(self, task: Task, visit: int, request: RolloutRequest, sampling: Sampling, stream: str) -> Group:
        """All siblings of one prompt, concurrently; the last ones demonstrations where those are shown, beside them the
        argmax answer.

        Those that say the same share their verdicts (`SiblingVerdicts`). With `request.extra`, so many more are
        started, and what has not ended once the wanted number has is aborted: short answers are preferred, which
        `Group.aborted` lets anyone measure.
        """
        shown, greedy = request.shown, request.greedy
        own = request.siblings - (shown.siblings if shown else 0)
        started, talks, bench = own + request.extra, dict[int, Conversation](), SiblingVerdicts(self.environment)
        said = settled([self.episode(task, visit, i, sampling, stream, talks, bench) for i in range(started)], own)
        beside = (
            [self.show(task, visit, i, sampling, shown.style, bench) for i in range(started, started + shown.siblings)]
            if shown
            else []
        )
        if greedy:
            beside.append(
                self.episode(task, visit, 0, replace(sampling, greedy=True, top=0), f"{stream}/greedy", None, bench)
            )
        try:
            ended, others = await together([said, together(beside)])
        finally:
            await bench.close()
        spoken = sum(talk.engine_tokens for i, talk in talks.items() if i not in {e.sibling for e in ended})
        episodes = await with_judges(self.judges, (*ended, *others))
        argmax = episodes.pop() if greedy else None
        return Group(task, visit, tuple(episodes), argmax, started - len(ended), spoken)

    async def until(
        self,
        prompts: Iterator[tuple[Task, int]],
        request: RolloutRequest,
        sampling: Sampling,
        stream: str,
        seen: PassRate = PassRate(),
    ) -> tuple[tuple[Group, ...], tuple[bool, ...]]:
        """Groups, in the order they were asked, until enough of them pass; and which of them do.

        They are asked in waves, each as large as the rate at which groups passed so far lets it have to be. A wave
        waits for its last answer, so the fewer there are the less the engine idles. Sizes are functions of what was
        said, never of time; where more pass than are wanted, the first ones asked are taken (`Experience.groups`).

        Args:
            seen: groups of earlier steps, and how many of them passed.
        """
        played, passed = list[Group](), list[bool]()
        most = request.most * request.groups
        while (missing := request.groups - sum(passed)) > 0 and len(played) < most:
            rate = seen.and_then(len(played), sum(passed))
            wave = [next(prompts) for _ in range(min(rate.wave(missing), most - len(played)))]
            groups = await together([self.group(task, visit, request, sampling, stream) for task, visit in wave])
            played += groups
            passed += [not request.mixed or group.mixed for group in groups]
        return tuple(played), tuple(passed)


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all, in order of results; the first failure cancels the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(w) for w in work]
    except* Exception as many:
        raise _first(many) from None
    return [t.result() for t in tasks]


async def settled(work: Sequence[Coroutine[Any, Any, T]], count: int) -> list[T]:
    """Run all until `count` have ended, cancel the rest, and return those in the order of `work`; a failure is raised
    as itself."""
    if count >= len(work):
        return await together(work)
    tasks = [asyncio.ensure_future(w) for w in work]
    ended: list[int] = []
    try:
        while len(ended) < count:
            running = [t for i, t in enumerate(tasks) if i not in ended]
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for t in done:
                t.result()
            ended += [i for i, t in enumerate(tasks) if t.done() and i not in ended]
        return [tasks[i].result() for i in sorted(ended[:count])]
    finally:
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first(many: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real cause inside nested exception groups."""
    cause: BaseException = many
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause
