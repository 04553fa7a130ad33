"""New weights of an engine that lets its turns end first: they come whatever happens to those turns, and no turn is said by two."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from embedded_parts import engine, module, one_thread, prompts, sampling

from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.models import named_tensors

__all__ = ["one_thread"]


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
