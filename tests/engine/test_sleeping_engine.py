"""An engine that sleeps while the learner works: its cache is freed, and nothing else is different."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from posttrain.core.types import SampledTurn
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.cache.cache_blocks import Blocks
from posttrain.engine.embedded.policy_mixture import Mixture
from posttrain.engine.embedded.speculation import Draft
from posttrain.engine.model.policy_model import load_policy, named_tensors
from posttrain.engine.pool.worker_side import memory
from posttrain.system.errors import EngineError, InvariantError
from tests.engine.embedded_parts import V, ask, engine, module, one_thread, prompts, sampling
from tests.engine.engine_parts import ALPHABET, tiny

__all__ = ["one_thread"]


def same(a: list[SampledTurn], b: list[SampledTurn]) -> bool:
    return all(np.array_equal(x.ids, y.ids) and np.array_equal(x.logp, y.logp) for x, y in zip(a, b, strict=True))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "a draft model": {"speculate": lambda: Draft(module(seed=1), 2)},
    "a mixture of two": {"mixture": lambda: Mixture(module(seed=1), 0.5)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_one_that_is_always_awake_says(kind: str) -> None:
    """Waves with new weights between them: the same tokens, log-probs and counters, and no byte of cache in between."""
    made = list[EmbeddedEngine]()
    for _ in range(2):
        options: dict[str, Any] = {n: x() if callable(x) else x for n, x in KINDS[kind].items()}
        made.append(engine(**options))
    sleeper, awake = made
    for wave in range(3):
        asked = prompts(7, seed=wave)
        found = [asyncio.run(ask(e, asked, sampling(max_tokens=12))) for e in made]
        assert same(*found)
        assert sleeper.gauges() == awake.gauges()
        size = sleeper.cache_size
        assert size == awake.cache_size > 0
        # Beside its own cache an engine with a draft model frees that of the draft model.
        freed = sum(p.rows * p.row_bytes for p in sleeper._pools)
        assert (freed > size) == (kind == "a draft model")
        sleeper.sleep()
        assert sleeper.cache_size == 0 and all(not p.rows for p in sleeper._pools)
        clock = sleeper.clock()
        assert clock["engine/freed"] == freed and clock["engine/sleep"] > 0
        assert ("engine/wake" in clock) == (wave > 0), "it woke for its second and third wave"
        sleeper.sleep()
        assert "engine/sleep" not in sleeper.clock(), "an engine that sleeps stays asleep"
        for e in made:
            weights = list(named_tensors(module(seed=wave + 2)))
            asyncio.run(e.load(wave + 1, weights))
        ours, theirs = (asyncio.run(e.score(np.arange(9, dtype=np.int32) % V)) for e in made)
        assert np.array_equal(ours, theirs)
        assert sleeper.cache_size == 0, "new weights and their check need no cache"
    sleeper.wake()
    assert sleeper.cache_size == awake.cache_size


@pytest.mark.prove
def test_the_memory_of_the_cache_is_given_back_to_the_system() -> None:
    """Resident bytes of this process, before and after: at least nine tenths of what was cached."""
    policy = load_policy(tiny(hidden=256, heads=4, kv_heads=4, layers=4, ffn=64, context=160), ALPHABET, 0)
    e = EmbeddedEngine(policy.module, slots=64, context=160, retain=64 * 160)
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, 26, 140).astype(np.int32) for _ in range(64)]
    asyncio.run(ask(e, asked, sampling(max_tokens=8, greedy=True)))
    written = 64 * 140 * e._pool.row_bytes
    assert e.cache_size >= written > 60 << 20
    gc.collect()
    before = memory()
    if not before:
        pytest.skip("this system does not tell how much memory a process has")
    e.sleep()
    freed = before - memory()
    print(f"{written / 2**20:.0f} MiB were cached, {freed / 2**20:.0f} MiB were given back")
    assert freed > 0.9 * written


def test_it_does_not_sleep_in_the_middle_of_a_turn() -> None:
    e = engine()

    async def early() -> None:
        turns = [asyncio.ensure_future(e.generate(p, sampling(), i)) for i, p in enumerate(prompts(6))]
        for _ in range(3):
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="before every turn has ended"):
            e.sleep()
        turns[-1].cancel()  # one that was queued, and is not taken from the queue before the next admission
        await asyncio.gather(*turns, return_exceptions=True)
        e.sleep()
        assert e.cache_size == 0 and e.blocks_in_use == 0

    asyncio.run(early())
    blocks = Blocks(4)
    blocks.grow(2)
    blocks.take(1)
    with pytest.raises(InvariantError, match="1 cache blocks have owners"):
        blocks.clear()
