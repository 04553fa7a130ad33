"""Asking ahead of learning: nothing is lost or doubled, no sample is older than promised, nothing waits for ever,
whatever takes how long."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.gauge import Gauge
from posttrain.core.ports import TaskSource
from posttrain.core.sampling import Sampling
from posttrain.core.types import Group, Task
from posttrain.ladder.rollout_request import PassRate, RolloutRequest
from posttrain.plan.staleness import capacity
from posttrain.record.queued_groups import QueuedGroup
from posttrain.role.group_queue import GroupQueue
from posttrain.role.prompt_order import Prompts


async def idle() -> None:
    """An engine that says nothing in this process."""


class Numbers:
    """Tasks without end, named by their index."""

    count = None

    def task(self, index: int) -> Task:
        return Task(str(index), "")


@dataclass
class PlayedGroup:
    """What the queue reads of a group, and the version that it began and ended under."""

    task: Task
    mixed: bool
    first: int
    last: int


@dataclass
class Server:
    """A sampler that serves a version. Nothing else of it is used."""

    version: int = 0

    def gauges(self) -> dict[str, Gauge]:
        return {}


@dataclass
class DelayedRollout:
    """Plays a group by waiting for as many turns of the event loop as a schedule says."""

    sampler: Any
    delays: Sequence[int]
    refuses: Sequence[bool]
    asked: list[int] = field(default_factory=list[int])

    async def group(self, task: Task, visit: int, request: RolloutRequest, sampling: Sampling, stream: str) -> Any:
        number = int(task.id)
        self.asked.append(number)
        begun = self.sampler.version
        for _ in range(self.delays[number % len(self.delays)]):
            await asyncio.sleep(0)
        return PlayedGroup(task, not self.refuses[number % len(self.refuses)], begun, self.sampler.version)


@dataclass(frozen=True)
class Schedule:
    """Who is slow, and what a filter refuses."""

    delays: tuple[int, ...]
    learner: tuple[int, ...]
    refuses: tuple[bool, ...]
    staleness: int
    prompts: int
    steps: int
    sync_steps: int = 1
    most: int = 4
    again: bool = False

    def queue(self, deterministic: bool, first: int = 1) -> tuple[GroupQueue, DelayedRollout, Server]:
        server = Server()
        rollout = DelayedRollout(server, self.delays, self.refuses)
        source = cast("TaskSource", Numbers())
        request = RolloutRequest(groups=self.prompts, siblings=1, mixed=True, most=self.most)
        versions = deque[int](maxlen=self.staleness + self.sync_steps)
        more = (
            Sampling(),
            "train",
            request,
            first,
            self.steps,
            self.staleness,
            deterministic,
            self.again,
            versions,
            idle,
        )
        return GroupQueue(cast("Any", rollout), Prompts(source, 0), *more), rollout, server


@dataclass
class Taken:
    """What each step took, and how old it was."""

    steps: list[list[PlayedGroup]] = field(default_factory=list[list[PlayedGroup]])
    oldest: int = 0
    begun: list[set[int]] = field(default_factory=list[set[int]])


async def learn_all(s: Schedule, queue: GroupQueue, server: Server, deterministic: bool, until: int = 10**9) -> Taken:
    """The loop of a stage whose learner makes version n in step n."""
    out = Taken()
    for index in range(queue.index, min(s.steps, until) + 1):
        taken = await queue.take(index, queue.request, index - 1, PassRate())
        groups = cast("list[PlayedGroup]", list(taken.played))
        out.steps.append(groups)
        for g, passed in zip(groups, taken.passed, strict=True):
            assert passed is g.mixed and g.first in taken.versions, "every version was promised"
            out.oldest = max(out.oldest, index - 1 - g.first) if passed else out.oldest
        out.begun.append({g.first for g in groups} | ({g.last for g in groups} if deterministic else set()))
        for _ in range(s.learner[index % len(s.learner)]):
            await asyncio.sleep(0)
        if index % s.sync_steps == 0:
            await queue.ready()
            server.version = index
        await queue.learned()
        queue.index = index + 1
    return out


SCHEDULES = st.builds(
    Schedule,
    delays=st.lists(st.integers(0, 40), min_size=1, max_size=9).map(tuple),
    learner=st.lists(st.integers(0, 60), min_size=1, max_size=4).map(tuple),
    refuses=st.one_of(st.just((False,)), st.lists(st.booleans(), min_size=1, max_size=7).map(tuple)),
    staleness=st.integers(1, 5),
    prompts=st.integers(1, 5),
    steps=st.integers(1, 12),
    sync_steps=st.integers(1, 3),
    again=st.booleans(),
)


@given(SCHEDULES, st.booleans())
@settings(max_examples=200)
def test_nothing_is_lost_or_doubled_and_nothing_is_too_old(s: Schedule, deterministic: bool) -> None:
    async def work() -> tuple[Taken, DelayedRollout]:
        queue, rollout, server = s.queue(deterministic)
        async with asyncio.timeout(60):
            taken = await learn_all(s, queue, server, deterministic)
        await queue.close()
        return taken, rollout

    taken, rollout = asyncio.run(work())
    numbers = [int(g.task.id) for step in taken.steps for g in step]
    assert numbers == list(range(len(numbers))), "the groups that are taken are the next ones that were asked"
    once = list(range(len(set(rollout.asked))))
    assert sorted(rollout.asked) == once or (s.again and sorted({*rollout.asked}) == once), "each prompt is asked once"
    assert taken.oldest <= s.staleness + s.sync_steps - 1
    for step in taken.steps:
        assert sum(g.mixed for g in step) == s.prompts or len(step) == s.most * s.prompts
    if not any(s.refuses):
        assert len(set(rollout.asked)) == s.steps * s.prompts, "nothing is asked that no step will take"


@given(SCHEDULES)
@settings(max_examples=100)
def test_what_is_sampled_by_which_version_is_no_matter_of_time(s: Schedule) -> None:
    """With `deterministic`, other delays give the same groups under the same versions, one version each."""

    def work(one: Schedule) -> list[list[tuple[str, int, int]]]:
        async def run() -> Taken:
            queue, _, server = one.queue(True)
            taken = await learn_all(one, queue, server, True)
            await queue.close()
            return taken

        return [[(g.task.id, g.first, g.last) for g in step] for step in asyncio.run(run()).steps]

    told = work(s)
    rng = random.Random(repr(s))
    other = Schedule(
        tuple(rng.randrange(40) for _ in range(7)), (rng.randrange(9),), s.refuses, s.staleness, s.prompts, s.steps,
        s.sync_steps,
    )  # fmt: skip
    assert told == work(other)
    assert all(first == last for step in told for _, first, last in step)
    if not any(s.refuses) and s.sync_steps == 1:
        assert [{v for _, v, _ in step} for step in told] == [{max(0, n - s.staleness)} for n in range(s.steps)]


@given(SCHEDULES, st.integers(1, 11))
@settings(max_examples=60)
def test_a_queue_that_was_saved_goes_on(s: Schedule, cut: int) -> None:
    """Cut after a step and taken up again: with `deterministic`, the groups and versions of an uncut run."""

    async def whole() -> Taken:
        queue, _, server = s.queue(True)
        out = await learn_all(s, queue, server, True)
        await queue.close()
        return out

    async def in_two() -> Taken:
        queue, _, server = s.queue(True)
        out = await learn_all(s, queue, server, True, until=cut)
        rows = queue._waiting  # the real one keeps episodes (core.queued); here a group is what was played
        ended = [cast("Group", a.group.result()) for a in rows]
        at = [
            QueuedGroup(index=a.index, visit=a.visit, cursor=a.cursor, begun=a.begun, siblings=1) for a in rows
        ]  # fmt: skip
        cursor, versions, walked = queue.prompts.cursor, queue.versions, queue.cursor
        await queue.close()
        again, _, later = s.queue(True, first=min(cut, s.steps) + 1)
        again.prompts.cursor, again.cursor, later.version = cursor, walked, server.version
        again.versions.extend(versions)
        again.restore(at, ended)
        rest = await learn_all(s, again, later, True)
        await again.close()
        return Taken([*out.steps, *rest.steps])

    said = [[[(g.task.id, g.first) for g in step] for step in asyncio.run(f()).steps] for f in (whole, in_two)]
    assert said[0] == said[1]


def test_a_failure_is_raised_by_the_step_that_would_learn_from_it() -> None:
    @dataclass
    class Fails(DelayedRollout):
        async def group(self, task: Task, *more: Any, **named: Any) -> Any:
            if task.id == "5":
                raise ValueError("asked in vain")
            return await super().group(task, *more, **named)

    async def work() -> int:
        s = Schedule((1,), (1,), (False,), staleness=2, prompts=2, steps=9)
        queue, _, server = s.queue(False)
        queue.rollout = cast("Any", Fails(server, s.delays, s.refuses))
        with pytest.raises(ValueError, match="asked in vain"):
            await learn_all(s, queue, server, False)
        await queue.close()
        return server.version

    assert asyncio.run(work()) == 2


def test_a_push_between_two_steps_gives_up_no_group_for_good() -> None:
    """With `ask_again` a group that is given up outside of a step, such as before an evaluation, is asked again."""

    async def work() -> list[list[str]]:
        s = Schedule((30,), (0,), (False,), staleness=2, prompts=2, steps=4, again=True)
        queue, _, server = s.queue(False)
        out = list[list[str]]()
        for index in range(1, 5):
            taken = await queue.take(index, queue.request, index - 1, PassRate())
            out.append([g.task.id for g in taken.played])
            server.version = index
            await queue.learned()
            await queue.ready()
        await queue.close()
        return out

    assert asyncio.run(work()) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]


def test_prompts_that_run_out_are_told_by_the_next_step() -> None:
    """Where the filter refuses a group and no other can be asked, the reason is not lost in the background."""

    class Ends(Numbers):
        def task(self, index: int) -> Task:
            if index >= 6:
                raise ValueError("no task is left")
            return super().task(index)

    async def work() -> None:
        s = Schedule((3,), (9,), (False, True), staleness=1, prompts=2, steps=9)
        queue, _, server = s.queue(False)
        queue.prompts.source = cast("Any", Ends())
        with pytest.raises(ValueError, match="no task is left"):
            await learn_all(s, queue, server, False)
        await queue.close()

    asyncio.run(work())


def test_what_is_not_wanted_any_more_is_cancelled() -> None:
    given_up = list[str]()

    @dataclass
    class Endless(DelayedRollout):
        async def group(self, task: Task, *more: Any, **named: Any) -> Any:
            try:
                await asyncio.sleep(0 if int(task.id) < 2 else 3600)
            except asyncio.CancelledError:
                given_up.append(task.id)
                raise
            return PlayedGroup(task, True, 0, 0)

    async def work() -> None:
        s = Schedule((1,), (1,), (False,), staleness=3, prompts=2, steps=9)
        queue, _, server = s.queue(False)
        queue.rollout = cast("Any", Endless(server, s.delays, s.refuses))
        await learn_all(s, queue, server, False, until=1)
        await queue.close()

    asyncio.run(work())
    assert sorted(given_up) == [str(n) for n in range(2, 8)]


def sizes() -> Iterator[tuple[int, int, int]]:
    yield from ((k, p, left) for k in range(4) for p in (1, 3) for left in (1, 2, 9))


def test_capacity_is_that_of_the_steps_on_their_way() -> None:
    for staleness, prompts, left in sizes():
        ahead = min(staleness + 1, left) * prompts
        assert capacity(staleness=staleness, prompts=prompts, left=left, taken=0, waiting=0) == ahead
        assert capacity(staleness=staleness, prompts=prompts, left=left, taken=prompts, waiting=ahead) == 0
    assert capacity(staleness=0, prompts=8, left=5, taken=8, waiting=0) == 0, "without staleness nothing is asked ahead"


def test_waves_are_as_large_as_the_rate_lets_them_have_to_be() -> None:
    assert PassRate().wave(32) == 32
    assert PassRate(50, 20).wave(32) == 80
    assert PassRate(50, 50).wave(32) == 32 and PassRate(50, 49).wave(32) == 33
    assert PassRate(50, 0).wave(32) == 3200
    assert PassRate(8, 2).halved().and_then(4, 3) == PassRate(8, 4)


def test_groups_that_were_given_up_are_counted_once_however_often_weights_come() -> None:
    s = Schedule((0, 0, 500, 500), (0,), (False,), staleness=2, prompts=2, steps=4, again=True)

    async def lost() -> float:
        queue, _, _ = s.queue(False)
        await queue.take(1, queue.request, 0, PassRate())
        await queue.ready()
        first = queue._lost
        await queue.ready()
        await queue.close()
        return queue._lost / first

    assert asyncio.run(lost()) == 1.0
