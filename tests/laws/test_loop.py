"""The loop between asking and learning: what is asked when is a function of steps, whatever takes how long."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.controller.loop import loop
from posttrain.core.request import PassRate


class Log:
    """Asks and learns nothing, and remembers in which order."""

    def __init__(self, waits: list[int] | None = None, stop: int = 10**9, fails: int = 0) -> None:
        self.waits, self.stop, self.fails = waits or [0], stop, fails
        self.learned = 0
        self.events: list[tuple[str, int]] = []
        self.behind: list[int] = []
        self.given_up: list[int] = []

    async def ask(self, index: int) -> int:
        self.events.append(("ask", index))
        self.behind.append(index - 1 - self.learned)
        try:
            for _ in range(self.waits[index % len(self.waits)]):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.given_up.append(index)
            raise
        if index == self.fails:
            raise ValueError("asked in vain")
        return index * 10

    async def learn(self, index: int, asked: int) -> bool:
        assert asked == index * 10
        self.events.append(("learn", index))
        await asyncio.sleep(0)
        self.learned = index
        return index < self.stop


def played(log: Log, first: int, last: int, bound: int) -> list[tuple[str, int]]:
    async def work() -> None:
        async with aclosing(loop(log.ask, first=first, last=last, bound=bound)) as steps:
            async for index, asked in steps:
                if not await log.learn(index, asked):
                    break

    asyncio.run(work())
    return log.events


def test_bound_zero_is_ask_learn_ask_learn() -> None:
    assert played(Log(), 3, 5, 0) == [(verb, i) for i in (3, 4, 5) for verb in ("ask", "learn")]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 4), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_asking_runs_ahead_by_the_bound_and_no_further(waits: list[int], bound: int, steps: int) -> None:
    log = Log(waits)
    events = played(log, 1, steps, bound)
    assert [i for verb, i in events if verb == "learn"] == list(range(1, steps + 1))
    assert sorted(i for verb, i in events if verb == "ask") == list(range(1, steps + 1))
    assert max(log.behind) <= bound
    asked_before = {
        i: len([1 for verb, _ in events[: events.index(("learn", i))] if verb == "ask"]) for i in range(1, steps + 1)
    }
    assert all(n <= min(steps, i + bound) for i, n in asked_before.items())


def test_what_is_not_wanted_any_more_is_given_up() -> None:
    log = Log([900, 1, 1, 900, 900, 900], stop=2)
    played(log, 1, 100, 3)
    assert log.learned == 2 and log.given_up == [3, 4, 5]


@pytest.mark.parametrize("bound", [0, 2])
def test_a_failure_of_asking_is_raised_where_it_would_be_learned(bound: int) -> None:
    log = Log(fails=3)
    with pytest.raises(ValueError, match="asked in vain"):
        played(log, 1, 9, bound)
    assert log.learned == 2


def test_no_step_is_no_work() -> None:
    assert played(Log(), 5, 4, 0) == []


def test_waves_are_as_large_as_the_rate_lets_them_have_to_be() -> None:
    assert PassRate().wave(32) == 32
    assert PassRate(50, 20).wave(32) == 80
    assert PassRate(50, 50).wave(32) == 32 and PassRate(50, 49).wave(32) == 33
    assert PassRate(50, 0).wave(32) == 3200
    assert PassRate(8, 2).halved().and_then(4, 3) == PassRate(8, 4)
