"""Searches share what their answers begin with: it is computed once, and it is in the cache once.

On the real engine, with steps of about twenty tokens and 64 continuations at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Task
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.cache.cache_blocks import blocks_for
from posttrain.search.play_search import beam
from posttrain.search.puct import tree_search
from posttrain.search.step_sampling import Beginning, StepSearch
from tests.engine.embedded_parts import engine
from tests.role.process_parts import Counting, needed

FORKS = 64
TASKS = [Task(id=f"t{i}", prompt="p") for i in range(4)]
PROMPT = np.arange(30, dtype=np.int32)
SEPARATORS = (0, 20)
"""Token ids that are written as the end of a step."""
ALL, FEW = 1 << 15, 1 << 13
"""Tokens of ended sequences that the cache keeps: more than a search says, and fewer."""


def text(ids: np.ndarray) -> str:
    return "".join(";" if i in SEPARATORS else chr(97 + int(i)) for i in ids)


class Drawn:
    """Scores that are a function of the tokens and say nothing of them."""

    def tokens(self, packed: Packed) -> np.ndarray:
        out = np.zeros(packed.spoken)
        for s in range(len(packed.lengths_S)):
            own = packed.segment_M == s
            out[own] = np.cumsum(0.37 * (1 + packed.target_M[own].astype(np.float64))) % 1
        return out


@dataclass
class Watched(StepSearch):
    """A search that looks at the engine's cache while it grows."""

    peaks: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Of each growth: most blocks in use, blocks that sharing needs at most, and blocks without sharing."""

    async def grown(self, task: Task, ones: Sequence[Beginning], count: int, place: str) -> list[Beginning]:
        counting: Any = self.sampler
        inner: EmbeddedEngine = counting.inner
        before, most, over = len(counting.calls), 0, False

        async def look() -> None:
            nonlocal most
            while not over:
                most = max(most, inner.blocks_in_use)
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        found = await super().grown(task, ones, count, place)
        over = True
        await looking
        calls = counting.calls[before:]
        begun = sum(blocks_for(len(PROMPT) + len(b.ids)) for b in ones)
        own = sum(blocks_for(len(said.ids)) + 1 for _, said in calls)
        alone = sum(blocks_for(len(ids) + len(said.ids)) for ids, said in calls)
        self.peaks.append((most, begun + own, alone))
        return found


def watched(retain: int = ALL, deterministic: bool = False) -> Watched:
    e = engine(slots=FORKS, context=256, text=text, retain=retain, deterministic=deterministic)
    sampling = Sampling(max_tokens=160, stop_ids=())
    return Watched(Counting(e), Drawn(), None, lambda t: PROMPT, text, sampling, ";")  # type: ignore[arg-type]


def played(kind: str, s: Watched, task: Task) -> Coroutine[Any, Any, Beginning]:
    if kind == "beam":
        return beam(s, task, width=4, expand=FORKS // 4)
    return tree_search(s, task, expansions=8, expand=FORKS)


def narrow(s: StepSearch, task: Task) -> Coroutine[Any, Any, Beginning]:
    return beam(s, task, width=2, expand=4)


@pytest.mark.parametrize("kind", ["beam", "tree"])
def test_beginnings_are_computed_once(kind: str) -> None:
    """Token positions computed / needed <= 1.02, by the engine's own counter. Twice is computed one position of each
    beginning: its last token, whose distribution the continuations are drawn from."""
    s = watched()
    counting: Any = s.sampler
    found = asyncio.run(played(kind, s, TASKS[0]))
    computed, least = counting.gauges()["engine/positions_linear"].sum, needed(counting.calls)
    begun = {ids.tobytes() for ids, _ in counting.calls}
    assert len(begun) >= 5 and len(found.ids) > 20 and found.stop is not None
    assert least <= computed <= min(1.02 * least, least + len(begun))
    assert sum(len(ids) + len(said.ids) for ids, said in counting.calls) > 2 * least, "most of it was shared"
    assert s.spent == sum(len(said.ids) for _, said in counting.calls)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["beam", "tree"])
def test_forks_are_flat_in_cache_blocks(kind: str) -> None:
    """While 64 continuations are sampled, each holds what it says itself, and their beginnings are held once. After a
    search nothing is in use, and more searches take no more memory."""
    s = watched(FEW)
    inner: EmbeddedEngine = s.sampler.inner  # type: ignore[attr-defined]
    sizes = list[int]()
    for task in TASKS:
        asyncio.run(played(kind, s, task))
        assert inner.blocks_in_use == 0
        sizes.append(inner.cache_size)
    assert len(s.peaks) >= 3 * len(TASKS)
    assert all(most <= shared for most, shared, _ in s.peaks) and max(most for most, _, _ in s.peaks) > FORKS
    deep = [(most, alone) for most, _, alone in s.peaks if alone >= 8 * FORKS]
    assert deep and all(2 * most < alone for most, alone in deep), "without sharing a fork holds its whole beginning"
    assert sizes[-1] == sizes[1], f"the cache grew: {sizes}"


def test_an_answer_is_the_same_whatever_else_is_searched() -> None:
    """The random numbers are those of task and place, so neighbours change no answer."""
    alone = [asyncio.run(narrow(watched(deterministic=True), t)).ids.tolist() for t in TASKS[:2]]

    async def both() -> list[Beginning]:
        s = watched(deterministic=True)
        return list(await asyncio.gather(*(narrow(s, t) for t in TASKS[:2])))

    assert [b.ids.tolist() for b in asyncio.run(both())] == alone
    other = asyncio.run(narrow(replace(watched(deterministic=True), seed=1), TASKS[0]))
    assert other.ids.tolist() != alone[0]
