"""GROUP SOURCE: where a step's groups come from. `StepGroups` plays them in the step, `GroupQueue` ahead of it.

In a `GroupQueue` groups are asked one by one, in the order of the prompts, and taken in the same order. How many may be
on their way follows from `plan.staleness.capacity`. So three things hold, however long each group takes:

- no token is older than the bound, because a group is not asked earlier;
- the groups of a step are the next ones that were asked, so nothing is chosen by how fast it was answered;
- which groups are asked is a function of what was sampled, never of time.

With `deterministic` new weights wait until every group that was asked has ended. Then each group is sampled by one
version, and the run can be repeated bit for bit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from posttrain.core.exchange.role_status import RoleRow
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.stop import StepNumber
from posttrain.core.types import Group, SampledTurn, Task
from posttrain.ladder.rollout_request import PassRate, RolloutRequest
from posttrain.plan.staleness import capacity
from posttrain.record.queued_groups import QueuedGroup
from posttrain.role.prompt_order import Prompts
from posttrain.role.rollout import Rollout


@dataclass(frozen=True)
class TakenGroups:
    """The groups that a step takes, with what is known of their sampling."""

    played: tuple[Group, ...]
    passed: tuple[bool, ...]
    """Whether the filter lets each of them pass."""
    begun: int
    """The version of the sampler when the first of them was asked."""
    versions: tuple[int, ...]
    """The versions that their tokens may have: the learner's at the beginning of the last steps, oldest first."""
    engine: Gauges
    """The engine's counters for them."""


class GroupSource(Protocol):
    """The source of the groups of a step."""

    @property
    def versions(self) -> Sequence[int]:
        """Versions of the learner at the beginning of the last steps."""
        ...

    @property
    def cursor(self) -> int:
        """Prompts whose groups were handed to a step so far, those a filter refused included."""
        ...

    async def take(self, index: int, request: RolloutRequest, version: int, seen: PassRate) -> TakenGroups:
        """The groups of step `index`, whose learner has weights `version`.

        Args:
            seen: groups of earlier steps, and how many of them passed.
        """
        ...

    async def proceed(self) -> None:
        """Called after a step's updates and before its weights are sent: groups that are being played may go on."""

    async def learned(self) -> None:
        """Called at the end of each step, with its weights in place."""

    def clock(self) -> Mapping[str, float]:
        """Returns how full the source was when the last step came for its groups. The number depends on time, so no
        digest covers it."""
        ...

    async def close(self) -> None:
        """Cancel the groups that are being played."""


@dataclass
class StepGroups:
    """Plays a step's groups for that step: samples and updates alternate."""

    rollout: Rollout
    prompts: Prompts
    sampling: Sampling
    stream: str
    versions: deque[int]
    """Versions of the learner at the beginning of the last steps. As many as this deque has room for."""

    @property
    def cursor(self) -> int:
        return self.prompts.cursor

    async def take(self, index: int, request: RolloutRequest, version: int, seen: PassRate) -> TakenGroups:
        self.versions.append(version)
        rollout, metered = self.rollout, MeteredSampler(self.rollout.sampler)
        # Several versions are remembered where tokens may be older than the weights that learn from them. There a check
        # (`ProbeCheck`) samples turns of its own on this engine, whose counters hold these too.
        if shared := len(self.versions) > 1:
            rollout = replace(rollout, sampler=metered)
        played, passed = await rollout.until(self.prompts, request, self.sampling, self.stream, seen)
        # Once a step: all of its groups were drawn by the pass rates at its beginning.
        self.prompts.learn(played)
        engine = self.rollout.sampler.gauges()
        if shared:
            engine = {**engine, "engine/tokens": Gauge(metered.tokens, metered.turns)}
        return TakenGroups(played, passed, version, tuple(self.versions), engine)

    async def proceed(self) -> None: ...
    async def learned(self) -> None: ...
    async def close(self) -> None: ...
    def clock(self) -> Mapping[str, float]:
        return {}


class MeteredSampler:
    """A sampler that counts the tokens and turns of one caller. Groups that are played at once share an engine, and its
    own counters are sums over all of them. The rest of `Sampler` is that of `inner`."""

    def __init__(self, inner: Sampler, tokens: int = 0, turns: int = 0) -> None:
        self.inner, self.tokens, self.turns = inner, tokens, turns

    def __getattr__(self, name: str) -> Any:
        # Only what is not defined here comes to `__getattr__`, so `generate` is counted and the rest passes through.
        return getattr(self.inner, name)

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        turn = await self.inner.generate(ids, sampling, place)
        self.tokens, self.turns = self.tokens + len(turn.ids), self.turns + 1
        return turn


@dataclass(eq=False)
class AskedGroup:
    """A group in the queue."""

    task: Task
    visit: int
    index: int
    """Index of the task in its source."""
    cursor: int
    """Cursor of the prompts, after the task was taken from them."""
    begun: int
    """The sampler's version when it was asked."""
    sampler: MeteredSampler
    group: asyncio.Future[Group]

    @property
    def said(self) -> Gauge:
        """Tokens per turn that the engine said for it so far (a sum of tokens, a count of turns)."""
        return Gauge(self.sampler.tokens, self.sampler.turns)

    @property
    def ended(self) -> Group | None:
        """The group, where it has ended well."""
        # `exception()` raises for a cancelled future, so that is asked first.
        done = self.group.done() and not self.group.cancelled() and self.group.exception() is None
        return self.group.result() if done else None


@dataclass(eq=False)
class GroupQueue:
    """Plays groups ahead of the updates, by at most `staleness` steps."""

    rollout: Rollout
    prompts: Prompts
    sampling: Sampling
    stream: str
    request: RolloutRequest
    """The request of every step of the stage."""
    index: int
    """The step that takes the next groups."""
    steps: int
    """Steps of the stage."""
    staleness: int
    deterministic: bool
    asks_again: bool
    """Whether groups that have not ended when new weights come are given up and asked again."""
    versions: deque[int]
    """Versions of the learner at the beginning of the last steps. As many as this deque has room for."""
    idle: Callable[[], Awaitable[None]]
    """Waits until the engine needs no time of this process. An engine in this process has then ended the turns that
    were begun; an engine elsewhere has received the turns that were asked. Where turns are paused it does not wait:
    they stop because the learner computes in the same thread."""
    cursor: int = 0
    _waiting: deque[AskedGroup] = field(default_factory=deque[AskedGroup])
    _taken: int = 0
    _played: int = 0
    """Groups of the present step so far: those that passed the filter (`_taken`), and all."""
    _last: tuple[Group, ...] = ()
    """Groups of the last step, until the pass rates have learned from them."""
    _given_up: list[AskedGroup] = field(default_factory=list[AskedGroup])
    _lost: int = 0
    """Groups that were given up since the last step began."""
    _full: Mapping[str, float] = field(default_factory=dict[str, float])
    """How full it was when the last step began."""
    _error: Exception | None = None
    """What went wrong when `_again` asked for another group."""

    async def take(self, index: int, request: RolloutRequest, version: int, seen: PassRate) -> TakenGroups:
        self.index, self._taken, self._played = index, 0, 0
        self.versions.append(version)
        # Order: first groups that were given up are asked again in their places. Then new groups fill the room left.
        self._ask_given_up()
        self._admit()
        self._full = {"queue/groups": float(len(self._waiting)), "queue/ended": float(self._ended)}
        played, passed, begun, tokens_said = list[Group](), list[bool](), list[int](), Gauge(0, 0)
        while self._taken < request.groups and len(played) < request.most * request.groups:
            if self._error is not None:
                raise self._error
            # Always the oldest group, even where later ones have ended. Short answers end first, so taking what has
            # ended would choose by length. The group stays in the queue while we wait, so that a checkpoint holds it.
            asked = self._waiting[0]
            group = await asked.group
            self._waiting.popleft()
            played.append(group)
            passed.append(not self._refuses(group))
            begun.append(asked.begun)
            tokens_said, self.cursor = tokens_said + asked.said, asked.cursor
            # Taking one makes no room: it counted as waiting and now as taken, or, if refused, as neither. A group
            # that ends as refused makes room, and `_again` uses it.
            self._taken, self._played = self._taken + passed[-1], len(played)
        # An engine in this process gets no time while the learner computes. So turns that were begun end first.
        await self.idle()
        self._last = tuple(played)
        engine = {"engine/tokens": tokens_said}
        if self.asks_again:
            engine, self._lost = engine | {"rollout/asked_again": Gauge(self._lost, 1)}, 0
        # `min(begun)`: no token of the step is older than the oldest group.
        return TakenGroups(self._last, tuple(passed), min(begun), tuple(self.versions), engine)

    async def proceed(self) -> None:
        # Episodes may wait for a tool that ended while the learner computed. Now their turns are said, and the tools
        # that these turns call work while the next step is learned.
        await self.idle()

    async def learned(self) -> None:
        if self.deterministic:
            await self.rest()
        self._ask_given_up()
        # With `deterministic`, every group that the old pass rates ask for has been
        # asked by now, also those that replace refused groups.
        self.prompts.learn(self._last)
        self._last = ()

    async def ready(self) -> None:
        """Called before new weights come. Groups that have not ended are waited for (`deterministic`), given up
        (`asks_again`), or go on."""
        if self.deterministic:
            await self.rest()
        elif self.asks_again:
            # Given-up groups keep their places in the queue: they are asked again, in the same order.
            given_up = [a for a in self._waiting if not a.group.done()]
            for asked in given_up:
                # Cancelled here and awaited below: an episode that still ran would say turns under the new weights.
                asked.group.cancel()
            await asyncio.gather(*(a.group for a in given_up), return_exceptions=True)
            self._given_up += given_up
            self._lost += len(given_up)

    def _ask_given_up(self) -> None:
        """Ask groups that were given up again, in their places. Weights are also pushed between steps, so both the end
        of a step and the beginning of one come here."""
        for asked in self._given_up:
            asked.sampler, asked.group = self._play(asked.task, asked.visit)
            asked.begun = asked.sampler.version
        self._given_up = []

    async def rest(self) -> None:
        """Wait until every group that was asked has ended. A failure is raised when its step takes it."""
        # A group that ends may be refused by the filter, which makes room for another one: so admit and wait in turn.
        self._admit()
        while running := [a.group for a in self._waiting if not a.group.done()]:
            await asyncio.wait(running)
            self._admit()

    def clock(self) -> Mapping[str, float]:
        return self._full

    @property
    def _ended(self) -> int:
        """Number of groups in the queue that have ended."""
        # A copy, here and in `row`: another thread may ask while the queue changes.
        return sum(a.group.done() for a in list(self._waiting))

    def row(self) -> RoleRow:
        """Describes the groups that the queue holds now. Any thread may call it."""
        waiting = list(self._waiting)
        return RoleRow(
            name="queue",
            doing="asks ahead" if waiting else "empty",
            depth=f"{len(waiting)} groups, {self._ended} ended",
            more=f"of step {self.index} and later; the oldest was asked under version {waiting[0].begun}"
            if waiting
            else "",
        )

    async def close(self) -> None:
        # A cancelled episode still cleans up its environment, so the end of each is awaited.
        running = [a.group for a in self._waiting]
        for group in running:
            group.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def queued(self) -> tuple[tuple[QueuedGroup, ...], tuple[Group, ...]]:
        """The queue as it is now, in order, and the groups of it that have ended."""
        rows, ended = list[QueuedGroup](), list[Group]()
        for a in self._waiting:
            row, group = QueuedGroup(index=a.index, visit=a.visit, cursor=a.cursor, begun=a.begun), a.ended
            rows.append(row if group is None else row.ended(group, a.said))
            ended += [] if group is None else [group]
        return tuple(rows), tuple(ended)

    def restore(self, queued: Sequence[QueuedGroup], ended: Sequence[Group]) -> None:
        """The queue of a checkpoint. Groups that had not ended are asked again, in their places."""
        groups = iter(ended)
        for q in queued:
            task = self.prompts.source.task(q.index)
            if not q.siblings:  # it had not ended
                self._ask(task, q.visit, q.index, q.cursor)
                continue
            # A future that has its result already: the group is not played
            # again, and `take` handles it like any other group.
            group = next(groups)
            ended_group = asyncio.get_running_loop().create_future()
            ended_group.set_result(group)
            sampler = MeteredSampler(self.rollout.sampler, q.tokens, q.turns)
            self._waiting.append(AskedGroup(task, q.visit, q.index, q.cursor, q.begun, sampler, ended_group))

    def _refuses(self, group: Group | None) -> bool:
        """Whether the filter refuses this group; False where it has not ended."""
        return self.request.mixed and group is not None and not group.mixed

    def _room(self) -> int:
        """Number of groups that may still be asked now. No more are asked for a step than it may play."""
        wanted, most = self.request.groups, self.request.most
        # Groups that ended and that the filter refuses fill no place of a step, so they do not count as waiting.
        bound = capacity(
            staleness=self.staleness,
            prompts=wanted,
            left=self.steps - self.index + 1,
            taken=self._taken,
            waiting=sum(not self._refuses(a.ended) for a in self._waiting),
        )
        # The second bound is on groups that the filter refuses. They fill no place in
        # `capacity`, so without it a filter that lets nothing pass would ask for ever. It is `most` times the wanted
        # groups for the present step, and the wanted ones for each step ahead.
        return min(bound, (most + self.staleness) * wanted - self._played - len(self._waiting))

    def _admit(self) -> None:
        """Ask further groups as long as there is room."""
        while self._room() > 0:
            task, visit = next(self.prompts)
            self._ask(task, visit, self.prompts.index, self.prompts.cursor)

    def _ask(self, task: Task, visit: int, index: int, cursor: int) -> None:
        """Start a group, and put it at the end of the queue."""
        sampler, playing = self._play(task, visit)
        self._waiting.append(AskedGroup(task, visit, index, cursor, sampler.version, sampler, playing))

    def _play(self, task: Task, visit: int) -> tuple[MeteredSampler, asyncio.Future[Group]]:
        """Start to play a group: (the sampler that counts its tokens, the group when it has ended)."""
        sampler = MeteredSampler(self.rollout.sampler)
        at = StepNumber(self.index, self.steps)
        rollout, request = replace(self.rollout, sampler=sampler), replace(self.request, at=at)
        playing = asyncio.ensure_future(rollout.group(task, visit, request, self.sampling, self.stream))
        # Only the filter makes room when a group ends: without it every ended group has a place in some step.
        if self.request.mixed:
            playing.add_done_callback(lambda _: self._again())
        return sampler, playing

    def _again(self) -> None:
        """A group has ended. Where the filter refuses it, another one is asked at once."""
        if self._error is None:
            try:
                self._admit()
            # Nobody waits for this callback, so the error is kept, and the next `take` raises it.
            except Exception as error:
                self._error = error
