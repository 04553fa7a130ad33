"""New weights of an engine that lets its turns end first: they come whatever happens to those turns, and no turn is
said by two."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.model.policy_model import named_tensors
from tests.engine.embedded_parts import engine, module, one_thread, prompts, sampling

__all__ = ["one_thread"]

BLOCK_BYTES = 16 * 2 * 2 * 2 * 8 * 4
"""16 rows of keys and values: two layers, two heads, eight wide, float32."""


async def ticks(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def load(e: EmbeddedEngine, version: int) -> asyncio.Task[str]:
    return asyncio.create_task(e.load(version, named_tensors(module(seed=version))))


@pytest.mark.parametrize("paused", [False, True])
def test_new_weights_come_when_the_last_turn_is_cancelled(paused: bool) -> None:
    """Also where the engine was paused while they waited."""
    e = engine(slots=2)

    async def main() -> None:
        last = asyncio.create_task(e.generate(prompts(1)[0], sampling(max_tokens=50), 1))
        await ticks(3)
        loading = load(e, 1)
        await ticks(5)
        assert not loading.done()
        if paused:
            e.pause()
            await ticks(2)
        last.cancel()
        await asyncio.wait_for(loading, 5)
        e.resume()
        said = await asyncio.wait_for(e.generate(prompts(1)[0], sampling(max_tokens=3), 2), 5)
        assert set(said.version.tolist()) == {1}

    asyncio.run(main())
    assert e.blocks_in_use == 0


def test_new_weights_that_wait_for_a_paused_engine_come_once_it_goes_on() -> None:
    e = engine(slots=2)

    async def main() -> None:
        last = asyncio.create_task(e.generate(prompts(1)[0], sampling(max_tokens=20), 1))
        await ticks(3)
        loading = load(e, 1)
        await ticks(3)
        e.pause()
        await ticks(30)
        assert not loading.done() and not last.done()
        e.resume()
        await asyncio.wait_for(loading, 5)
        assert set((await last).version.tolist()) == {0}
        assert e.version == 1

    asyncio.run(main())


def test_who_gave_way_ends_under_the_weights_it_began_with() -> None:
    """Six turns in a cache for three: those that wait for a slot to go on in have begun as well, and new weights wait
    for them."""
    e = engine(slots=6, context=80, cache_bytes=8 * BLOCK_BYTES)

    async def main() -> None:
        turns = [
            asyncio.create_task(e.generate(np.arange(5, dtype=np.int32) + i, sampling(max_tokens=60), i))
            for i in range(6)
        ]
        while e._scheduler.counts.preempted < 2:
            await ticks(1)
        late = asyncio.create_task(e.generate(prompts(1)[0], sampling(max_tokens=5), 9))
        await asyncio.wait_for(load(e, 1), 20)
        assert [set(s.version.tolist()) for s in await asyncio.gather(*turns)] == [{0}] * 6
        assert set((await late).version.tolist()) == {1}

    asyncio.run(main())
    assert e.blocks_in_use == 0


def test_who_gave_way_before_its_first_word_does_not_hold_up_who_has_spoken() -> None:
    """At the head of the queue stands one that has said nothing and so waits for the new weights; behind it, one that
    they wait for."""
    e = engine(slots=2, context=80, budget=4)

    async def main() -> None:
        first = asyncio.create_task(e.generate(prompts(1, longest=4)[0], sampling(max_tokens=40), 1))
        await ticks(5)
        second = asyncio.create_task(e.generate(np.arange(30, dtype=np.int32), sampling(max_tokens=3), 2))
        await ticks(3)
        loading = load(e, 1)
        await ticks(2)
        scheduler = e._scheduler
        (spoken,), (silent,) = np.flatnonzero(scheduler.slots.generating).tolist(), list(scheduler._waits)
        scheduler.preempt(spoken)
        scheduler.preempt(silent)
        assert [r.begun is None for r in scheduler.queue] == [True, False]
        await asyncio.wait_for(loading, 5)
        assert set((await first).version.tolist()) == {0}
        assert set((await second).version.tolist()) == {1}

    asyncio.run(main())


@pytest.mark.parametrize("paused", [False, True])
def test_who_gave_way_and_is_cancelled_holds_up_nothing(paused: bool) -> None:
    e = engine(slots=2)

    async def main() -> None:
        turn = asyncio.create_task(e.generate(prompts(1)[0], sampling(max_tokens=40), 1))
        await ticks(5)
        loading = load(e, 1)
        await ticks(2)
        e.pause()
        await ticks(2)
        e._scheduler.preempt(int(np.flatnonzero(e._scheduler.slots.generating)[0]))
        if not paused:
            e.resume()
        turn.cancel()
        await asyncio.wait_for(loading, 5)

    asyncio.run(main())
    assert e.blocks_in_use == 0
