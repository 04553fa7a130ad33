"""ROLLOUT: samples episodes, has them judged, and keeps the log-prob of every sampled token. An episode is a coroutine
over a `Transcript`; the engine batches the requests that are ready. A failed rollout is data: if the environment or a
verifier breaks, the episode gets a `failed` verdict, never a reward of 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from posttrain.core import abilities, seeds
from posttrain.core.exchange.request_owner import DEADLY, RequestOwner, UnanswerableTurn, asked_for
from posttrain.core.exchange.role_status import RoleRow
from posttrain.core.gauge import Gauges, merge
from posttrain.core.ports import Dialogue, Environment, EpisodeJudge, PairRenderer, Sampler, Talk
from posttrain.core.redact_secrets import scrubbed, scrubbed_data
from posttrain.core.sampling import Sampling
from posttrain.core.stop import EpisodeLimits
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, Segment, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.rollout_request import PassRate, RolloutRequest
from posttrain.role.episode_conversation import Conversation, Player, tokens_upto
from posttrain.role.judging import SiblingVerdicts, attempt_of, judged, with_judges
from posttrain.role.learning.demonstrations import fitting, recited
from posttrain.system.concurrency import settled, together
from posttrain.system.errors import InvariantError, PosttrainError
from posttrain.verifier.timed_calls import contained


class EpisodePlayer(Protocol):
    """Plays episodes of one environment, elsewhere than in this process."""

    async def play(self, task: Task, talk: Talk, others: bool) -> Stop:
        """As `core.ports.Environment.play`. `others`: whether other seats have players of their own."""
        ...

    def gauges(self) -> Gauges:
        """Gauges that the environment counted there since the last call."""
        ...

    def clock(self) -> Mapping[str, float]:
        """Numbers that depend on time, since the last call."""
        ...

    def rows(self) -> Sequence[RoleRow]:
        """Rows that say what the player's processes do now."""
        ...


@dataclass
class Rollout:
    """Plays episodes of one environment on one engine with one seed."""

    sampler: Sampler
    environment: Environment
    dialogue: Callable[[str], Dialogue]
    """A new encoder for one episode of the named task."""
    seed: int
    renderer: PairRenderer | None = None
    """Writes demonstrations as tokens, for groups that hold some."""
    limits: EpisodeLimits = EpisodeLimits()
    """The limits of every episode."""
    judges: tuple[EpisodeJudge, ...] = ()
    """Judges that read tokens. They are called, besides the environment, once all episodes of a group have ended."""
    players: Mapping[str, Player] = field(default_factory=dict[str, Player])
    """Players of the seats other than the trained one, by the seat's name. If empty, the policy plays them too, with
    the episode's sampling settings."""
    opponents: Mapping[int, Player] = field(default_factory=dict[int, Player])
    """Players that play siblings in the place of the policy, by the sibling's number: the whole episode, the other
    seats too where there are no `players`."""

    plays: EpisodePlayer | None = None
    """The player of the episodes; None: the environment, in this process. It judges the answers either way."""
    right: float | None = None
    """The smallest outcome of a right answer, where it is named (`Env.right`)."""

    async def episode(
        self,
        task: Task,
        visit: int,
        sibling: int,
        sampling: Sampling,
        stream: str,
        talks: dict[int, Conversation] | None = None,
        judging: SiblingVerdicts | None = None,
    ) -> Episode:
        """Play and judge one episode. Broken invariants and wrong configs are raised; other failures become data.

        Args:
            talks: gets the episode's conversation under its sibling number, so that aborted ones can be counted.
            judging: judges all siblings, and shares verdicts between equal ones.
        """

        # Law 8: the key of a turn's random numbers. Nothing in it depends on who else is playing.
        def place(*turn: seeds.Coordinate) -> int:
            return seeds.key(self.seed, stream, task.id, visit, sibling, *turn)

        policy = self.opponents.get(sibling) or Player(self.sampler, self.dialogue, sampling)
        talk = Conversation(policy, task.id, self.limits, place, self.players)
        if talks is not None:
            talks[sibling] = talk
        try:
            with asked_for(RequestOwner(stream, task.id, visit, sibling)):
                stop = await self._play(task, talk)
        # Our own errors: a broken invariant or a wrong config concerns the whole run, not this episode.
        except PosttrainError:
            raise
        except Exception as error:
            # What the user's code raises fails this episode, and never stops the run. With the verdict `failed` the
            # answer leaves baseline and batch and does not count as wrong.
            source = DEADLY if isinstance(error, UnanswerableTurn) else "environment"
            why = scrubbed(f"{type(error).__name__}: {error}")
            verdicts: tuple[Judged, ...] = (Judged(source, 1.0, Verdict.failed(source, why)),)
            return self._episode(task, visit, sibling, talk, talk.segments(), Stop.ERROR, verdicts, why)
        segments = talk.segments()
        text, upto = self.dialogue(task.id).text, talk.spoken_upto
        attempt = attempt_of(task, talk.turns, stop, segments, text, upto, talk.state)
        # The greedy answer is played without `talks`. It is no sibling, so it has no number among them.
        member = sibling if talks is not None else None
        verdicts = await (
            judged(self.environment, attempt, not self.judges)
            if judging is None
            else judging.judge(attempt, segments, member)
        )
        return self._episode(task, visit, sibling, talk, segments, stop, (*verdicts, *talk.paid), "")

    async def _play(self, task: Task, talk: Conversation) -> Stop:
        """Play until the environment or the time limit ends the episode. The environment cleans up either way."""
        try:
            async with asyncio.timeout(self.limits.seconds) as clock:
                if self.plays is not None:
                    return await self.plays.play(task, talk, bool(self.players))
                return await contained(self.environment.play(task, talk))
        except TimeoutError:
            # The environment may raise a TimeoutError of its own: that is a failure, and not our time limit.
            if not clock.expired():
                raise
            return Stop.TIME

    def gauges(self) -> Gauges:
        """Gauges that the environment counted since the last call, here and where it is played."""
        here = self.environment.gauges()
        return here if self.plays is None else merge(here, self.plays.gauges())

    def clock(self) -> Mapping[str, float]:
        """Numbers that depend on time, from processes that play episodes elsewhere; empty where none do."""
        return {} if self.plays is None else self.plays.clock()

    def _episode(
        self,
        task: Task,
        visit: int,
        sibling: int,
        talk: Conversation,
        segments: tuple[Segment, ...],
        stop: Stop,
        verdicts: tuple[Judged, ...],
        error: str,
    ) -> Episode:
        """A played episode as it may be recorded: its state has no secrets."""
        text, state = "\n".join(talk.turns), scrubbed_data(talk.state)
        further_fields = (tuple(talk.lengths), talk.cut, talk.others, self.right)
        return Episode(task, visit, sibling, segments, stop, verdicts, text, error, state, *further_fields)

    async def show(
        self, task: Task, visit: int, sibling: int, sampling: Sampling, style: str | None, judging: SiblingVerdicts
    ) -> Episode:
        """An episode whose turns come from a demonstration instead of the policy. It is judged like any other."""
        if self.renderer is None:
            raise InvariantError("groups are shown demonstrations, and the rollout has no renderer to write them with")
        # The stream "shown" is separate, so a demonstration changes no random number of a sampled sibling.
        rng = seeds.generator(self.seed, "shown", task.id, visit, sibling)
        demonstrations = abilities.demonstrations(self.environment)
        # Without a style the last one, which is the most elaborate (`Shown.style`). 0.0: never a wrong text.
        prompt, completion = demonstrations.write(task, style or demonstrations.styles[-1], rng, 0.0)
        dialogue = self.dialogue(task.id)
        if isinstance(completion, str):
            prompt_ids, ids = self.renderer.pair(prompt, completion, task.id, task.tools)
            transcript = Transcript(sampling)
            transcript.see(prompt_ids)
            transcript.show(ids)
            upto = partial(tokens_upto, dialogue.text, ids)
            turns, state, paid = [dialogue.text(ids)], None, list[Judged]()
        else:
            arguments = self.dialogue(task.id), task, prompt, completion, sampling
            recital = await recited(self.environment, self.renderer, *arguments)
            transcript, turns, upto, state, paid = (
                recital.transcript,
                recital.turns,
                recital.spoken_upto,
                recital.state,
                recital.paid,
            )
        segments, text = (fitting(transcript.segment(), task, self.sampler.context),), "\n".join(turns)
        attempt = attempt_of(task, turns, Stop.SAID, segments, dialogue.text, upto, state)
        verdicts = (*await judging.judge(attempt, segments, sibling), *paid)
        clean_state = scrubbed_data(state)
        return Episode(
            task, visit, sibling, segments, Stop.SAID, verdicts, text, state=clean_state, right_at=self.right
        )

    async def group(self, task: Task, visit: int, request: RolloutRequest, sampling: Sampling, stream: str) -> Group:
        """Play all siblings of one prompt concurrently. With `request.shown` the last ones are demonstrations, with
        `request.greedy` there is one argmax answer besides them. With `request.extra`, that many more are started, and
        the rest aborted once the wanted number has ended. This favours short answers; `Group.aborted` counts how many
        were lost to it."""
        shown, greedy = request.shown, request.greedy
        # Siblings 0 to started - 1 are sampled, and demonstrations have the numbers behind them: no two share random
        # numbers, also where some are aborted.
        wanted = request.siblings - (shown.siblings if shown else 0)
        started, talks = wanted + request.extra, dict[int, Conversation]()
        judging = SiblingVerdicts(self.environment, not self.judges)
        # `settled` waits for the first `wanted` episodes that end, cancels the rest, and returns in order of numbers.
        sampled = settled(
            [self.episode(task, visit, i, sampling, stream, talks, judging) for i in range(started)], wanted
        )
        numbers = range(started, started + shown.siblings) if shown else ()
        others_playing = [self.show(task, visit, i, sampling, shown.style if shown else None, judging) for i in numbers]
        if greedy:
            # In a random stream of its own, and without `talks`: it is no sibling, and is never aborted.
            argmax = replace(sampling, greedy=True, top=0)
            others_playing.append(self.episode(task, visit, 0, argmax, f"{stream}/greedy", None, judging))
        try:
            ended, others = await together([sampled, together(others_playing)])
        finally:
            await judging.close()
        # The engine spent time on an aborted sibling's turns, so its tokens are counted from its conversation.
        aborted_tokens = sum(talk.engine_tokens for i, talk in talks.items() if i not in {e.sibling for e in ended})
        aborted = started - len(ended)
        # The greedy answer is the last of `others`, so the first `request.siblings` are the siblings.
        siblings, logged = await judging.together((*ended, *others)[: request.siblings], request.at)
        episodes = await with_judges(self.judges, (*siblings, *others[len(others) - greedy :]))
        # Judges read the greedy answer in one call with the siblings. Here it is taken out of them.
        greedy_answer = episodes.pop() if greedy else None
        return Group(task, visit, tuple(episodes), greedy_answer, aborted, aborted_tokens, logged)

    async def until(
        self,
        prompts: Iterator[tuple[Task, int]],
        request: RolloutRequest,
        sampling: Sampling,
        stream: str,
        seen: PassRate = PassRate(),
    ) -> tuple[tuple[Group, ...], tuple[bool, ...]]:
        """Play groups until enough of them pass the filter. Returns them in prompt order, and which of them passed.

        Groups are played in waves. A wave's size follows from how many groups are missing and from the pass rate so
        far. A wave ends with its last answer, so fewer waves leave the engine idle for less time. Sizes depend on what
        was sampled, never on time. If more groups pass than are wanted, the first ones are used (`Experience.groups`).

        Args:
            seen: groups of earlier steps, and how many of them passed.
        """
        played, passed = list[Group](), list[bool]()
        most = request.most * request.groups
        while (missing := request.groups - sum(passed)) > 0 and len(played) < most:
            # Earlier steps tell the first wave how many will pass; each wave then adds what it found.
            rate = seen.and_then(len(played), sum(passed))
            wave = [next(prompts) for _ in range(min(rate.wave(missing), most - len(played)))]
            groups = await together([self.group(task, visit, request, sampling, stream) for task, visit in wave])
            played += groups
            passed += [not request.mixed or group.mixed for group in groups]
        return tuple(played), tuple(passed)
