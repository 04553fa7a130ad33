"""The checks of groups that are asked ahead: each says nothing of what is right, and stops what is wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.checks.sampling import stale_logprobs, staleness_checks
from posttrain.checks.sampling.sampler_checks import said_by_these_weights
from posttrain.checks.sampling.sampler_draws import Bets
from posttrain.checks.sampling.stale_logprobs import ProbeCheck
from posttrain.core.batch import Batch
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge
from posttrain.core.ports import TaskSource
from posttrain.core.sampling import Sampling
from posttrain.core.streams import START
from posttrain.core.types import Episode, Group, Segment, Stop, Task
from posttrain.diagnose.gauges.rollout_gauges import ages
from posttrain.role.events import PlayedEvent
from posttrain.role.prompt_order import Prompts
from posttrain.system.errors import InvariantError


class Numbers:
    """So many tasks, or tasks without end."""

    def __init__(self, count: int | None) -> None:
        self.count = count

    def task(self, index: int) -> Task:
        return Task(f"t{index}", f"{index}")


def group(task: Task, visit: int = 0, versions: tuple[tuple[int, ...], ...] = ((0, 0),)) -> Group:
    """One sibling of as many turns as there are tuples of versions."""
    said = np.array([v for turn in versions for v in turn], np.int32)
    n = len(said)
    segment = Segment(
        np.arange(n + 1, dtype=np.int32),
        np.arange(n + 1) > 0,
        np.append(np.float32(np.nan), np.full(n, -1, np.float32)).astype(np.float32),
        np.append(-1, said).astype(np.int32),
        Sampling(stop_ids=()),
    )
    turns = tuple(map(len, versions))
    return Group(task, visit, (Episode(task, visit, 0, (segment,), Stop.LENGTH, (), turns=turns),))


@given(st.one_of(st.none(), st.integers(1, 30)), st.integers(0, 5), st.integers(0, 70), st.integers(1, 20))
@settings(max_examples=60)
def test_the_walk_is_that_of_the_prompts(count: int | None, seed: int, begin: int, step: int) -> None:
    """The walk that the check computes is the one that is asked, from any cursor; any loss or repetition stops it."""
    source = cast("TaskSource", Numbers(count))
    prompts = Prompts(source, seed, cursor=begin)
    played = [group(*next(prompts)) for _ in range(step)]
    staleness_checks.next_of_the_walk(played, begin, source, seed)
    for wrong in ([*played[1:], group(*next(prompts))], [played[0], *played], played[::-1]):
        names = [staleness_checks.name_of(g) for g in wrong]
        if names != [staleness_checks.name_of(g) for g in played][: len(names)]:
            with pytest.raises(InvariantError, match="lost, learned twice, or overtaken"):
                staleness_checks.next_of_the_walk(wrong, begin, source, seed)


TASK = Task("t", "t")


def test_versions_only_grow() -> None:
    crossed = group(TASK, versions=((3, 3, 4), (4,)))
    staleness_checks.versions_only_grow([crossed], drained=False, whole=False)
    staleness_checks.versions_only_grow([group(TASK, versions=((3, 3), (4, 4)))], drained=True, whole=False)
    staleness_checks.versions_only_grow([group(TASK, versions=((3, 3), (3,)))], drained=True, whole=True)
    with pytest.raises(InvariantError, match="several versions"):
        staleness_checks.versions_only_grow([crossed], drained=True, whole=False)
    with pytest.raises(InvariantError, match="before, and the run cannot"):
        staleness_checks.versions_only_grow([group(TASK, versions=((3, 3), (4, 4)))], drained=True, whole=True)
    with pytest.raises(InvariantError, match="never falls"):
        staleness_checks.versions_only_grow([group(TASK, versions=((4, 3),))], drained=False, whole=False)


def test_a_group_is_as_old_as_it_was_asked() -> None:
    staleness_checks.as_old_as_asked([group(TASK, versions=((2, 3),))], [2], exactly=False)
    staleness_checks.as_old_as_asked([group(TASK, versions=((2, 2),))], [2], exactly=True)
    for versions, exactly in (((1, 2), False), ((2, 3), True), ((3, 3), True)):
        with pytest.raises(InvariantError, match="the sampler had version 2"):
            staleness_checks.as_old_as_asked([group(TASK, versions=(versions,))], [2], exactly=exactly)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
@settings(max_examples=60)
def test_ages_are_counted_from_versions(steps: list[int], data: st.DataObject) -> None:
    """Steps that left the weights as they were make nothing older, in the record and in the check."""
    promised = tuple(int(v) for v in np.cumsum(steps))
    said = np.array(data.draw(st.lists(st.sampled_from(promised), min_size=1, max_size=9)), np.int32)
    behind = Experience(1, 0, (), (), 1, versions=promised).behind(said)
    told = ages(behind, len(promised) - 1)
    staleness_checks.ages_as_stamped(told, said, promised)
    wrong = {**told, "rollout/versions_behind": Gauge(told["rollout/versions_behind"].sum + 1, len(said))}
    with pytest.raises(InvariantError, match="the tokens' versions say"):
        staleness_checks.ages_as_stamped(wrong, said, promised)


def test_the_promised_versions_are_those_that_were_seen() -> None:
    staleness_checks.promised_as_begun((4, 5, 6), [6])
    staleness_checks.promised_as_begun((4, 5, 6), [3, 4, 5, 6])
    with pytest.raises(InvariantError, match="not counted as the weights changed"):
        staleness_checks.promised_as_begun((5, 6, 6), [4, 5, 6])


def test_weights_are_pushed_between_steps() -> None:
    staleness_checks.pushed_between_steps(3, 3, None, "Inside a step")
    staleness_checks.pushed_between_steps(3, 5, 5, "After a step")
    for now, pushed in ((4, None), (4, 5), (3, 5)):
        with pytest.raises(InvariantError, match="should have"):
            staleness_checks.pushed_between_steps(3, now, pushed, "Then")


def test_no_more_is_asked_than_steps_will_take() -> None:
    staleness_checks.asked_within_bound(waiting=8, staleness=2, prompts=4, left=9)
    for waiting, left in ((9, 9), (5, 1), (1, 0)):
        with pytest.raises(InvariantError, match=f"{waiting} groups are asked ahead"):
            staleness_checks.asked_within_bound(waiting, staleness=2, prompts=4, left=left)


def test_a_resumed_stage_asks_on() -> None:
    staleness_checks.asks_on(12, 12)
    with pytest.raises(InvariantError, match="12 prompts of the stage were asked"):
        staleness_checks.asks_on(12, 0)


def test_a_group_that_waited_is_the_one_that_ended() -> None:
    one, other = group(TASK, versions=((2, 2),)), group(TASK, versions=((3, 3),))
    known = {staleness_checks.name_of(one): staleness_checks.digest_of(one)}
    staleness_checks.unchanged_in_the_queue(known, [one, group(Task("u", "u"))])
    with pytest.raises(InvariantError, match="has changed since it ended"):
        staleness_checks.unchanged_in_the_queue(known, [other])
    e = one.episodes[0]
    louder = replace(e.segments[0], logp=e.segments[0].logp / 2)
    with pytest.raises(InvariantError, match="has changed since it ended"):
        staleness_checks.unchanged_in_the_queue(known, [replace(one, episodes=(replace(e, segments=(louder,)),))])


def test_what_is_replayed_was_learned_from() -> None:
    one, other = group(TASK, versions=((2, 2),)), group(Task("u", "u"))
    learned = {staleness_checks.name_of(g): (staleness_checks.digest_of(g), 3) for g in (one, other)}
    staleness_checks.learned_before([other, replace(one, discount=0.5)], learned, step=5, age=2)
    with pytest.raises(InvariantError, match="twice"):
        staleness_checks.learned_before([one, one], learned, step=5, age=2)
    with pytest.raises(InvariantError, match="learned from in step 3, and replay.age=2"):
        staleness_checks.learned_before([one], learned, step=6, age=2)
    with pytest.raises(InvariantError, match="in none of the last steps"):
        staleness_checks.learned_before([group(Task("v", "v"))], learned, step=5, age=2)
    with pytest.raises(InvariantError, match="has changed since"):
        staleness_checks.learned_before([group(TASK, versions=((3, 3),))], learned, step=5, age=2)


def test_what_other_weights_began_is_read_first() -> None:
    """A cache that old weights made shows in what new ones say after it; where caches are kept, nothing is said."""
    pure, crossed, old = (group(TASK, versions=(v,)) for v in ((5, 5), (4, 5), (4, 4)))
    of = lambda g: g.episodes[0].segments[0]  # noqa: E731
    assert stale_logprobs.fresh_segments([old, pure, crossed], 5) == [of(crossed), of(pure)]
    assert stale_logprobs.fresh_segments([old, pure, crossed], 5, stale=True) == [of(pure)]
    assert stale_logprobs.fresh_segments([old], 5) == []


def test_the_start_of_a_step_is_the_learner() -> None:
    segments = list(group(TASK).episodes[0].segments)
    batch = cast("Any", Batch.of(segments, [0], streams={START: np.full(2, -1, np.float32)}))
    stale_logprobs.start_is_the_learner(batch, np.full(2, -1, np.float32), "float32", lambda: None)
    with pytest.raises(InvariantError, match="not the learner's"):
        stale_logprobs.start_is_the_learner(batch, np.full(2, -1.1, np.float32), "float32", lambda: None)


def test_a_version_that_was_not_promised_is_refused() -> None:
    said_by_these_weights([group(TASK, versions=((3, 4),))], (3, 4))
    with pytest.raises(InvariantError, match="tokens said by version 2"):
        said_by_these_weights([group(TASK, versions=((2, 4),))], (3, 4))


def test_a_probe_of_older_weights_is_given_up() -> None:
    """With `sync_every` the learner may go on before a probe has ended. Its turns are of weights that are gone."""

    async def work() -> bool:
        check = ProbeCheck(Bets())
        check._version = 3
        check._saying = asking = asyncio.ensure_future(asyncio.sleep(3600, [group(TASK)]))
        roles = SimpleNamespace(stage=SimpleNamespace(most_behind=1), trainer=SimpleNamespace(version=4))
        event = PlayedEvent(Experience(1, 3, (group(TASK),), (True,), 1))
        assert check.on_event(cast("Any", roles), event) is None and check._saying is None
        await asyncio.gather(asking, return_exceptions=True)
        return asking.cancelled()

    assert asyncio.run(work())
