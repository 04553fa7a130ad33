"""What the engine does with its cache: finds beginnings again, cuts prefill into chunks, gives way, takes new weights
on the way."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.core.types import SampledTurn
from posttrain.engine.cpu import compile_native
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.model.policy_model import named_tensors
from posttrain.system.errors import EngineError
from tests.engine.embedded_parts import V, ask, engine, module, one_thread, prompts, reference_logp, sampling

__all__ = ["one_thread"]

BLOCK_BYTES = 16 * 2 * 2 * 2 * 8 * 4
"""16 rows of keys and values: two layers, two heads, eight wide, float32."""


def same(a: list[SampledTurn], b: list[SampledTurn]) -> None:
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x.ids, y.ids)
        assert np.abs(x.logp - y.logp).max() < 2e-5


def long(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, n).astype(np.int32)


async def ticks(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def test_no_turn_of_an_episode_is_computed_twice() -> None:
    e, plain = engine(context=200), module()

    async def episode() -> int:
        ids = long(21)
        for turn in range(3):
            said = await e.generate(ids, sampling(max_tokens=13), turn)
            assert np.abs(reference_logp(plain, ids, said, sampling()) - said.logp).max() < 2e-5
            ids = np.concatenate([ids, said.ids, long(9, turn + 1)])
        return len(ids)

    length = asyncio.run(episode())
    computed = e.gauges()["engine/positions_linear"]
    assert computed.sum == computed.count == length - 9 - 1
    assert e.blocks_in_use == 0


def test_prompts_with_one_beginning_compute_it_once() -> None:
    """All at once: the second waits for the blocks the first is computing; later ones find them."""
    e, alone = engine(slots=8, context=160), engine(slots=1, context=160, retain=0)
    shared = long(80)
    asked = [np.concatenate([shared, long(10, i + 1)]) for i in range(6)]
    together = asyncio.run(ask(e, asked, sampling(max_tokens=5)))
    assert e.gauges()["engine/positions_linear"].sum == 80 + 6 * 10 + 6 * 4
    same(together, asyncio.run(ask(alone, asked, sampling(max_tokens=5))))
    asyncio.run(ask(e, [np.concatenate([shared, long(10, 99)])], sampling(max_tokens=5)))
    gauges = e.gauges()
    assert gauges["engine/positions_linear"].sum == 10 + 4
    assert gauges["engine/prefix_hits"].mean == 80 / 90


def test_siblings_of_a_long_prompt_cost_one_prefill() -> None:
    e = engine(slots=16, context=256)
    asyncio.run(ask(e, [long(250)] * 16, sampling(max_tokens=4)))
    assert e.gauges()["engine/positions_linear"].sum == 250 + 16 * 3


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral", "gemma2"])
def test_chunks_of_a_prompt_are_the_prompt(family: str) -> None:
    """200 tokens in passes of 70: the first chunk and later ones attend densely, the last raggedly."""
    e, plain = engine(family, context=256, budget=70), module(family)
    asked = [long(200), long(7), long(150, 1)]
    for prompt, said in zip(asked, asyncio.run(ask(e, asked, sampling())), strict=True):
        assert np.abs(reference_logp(plain, prompt, said, sampling()) - said.logp).max() < 5e-5
    assert e.gauges()["engine/positions_linear"].mean == 1


def test_a_long_prompt_does_not_hold_up_who_is_speaking() -> None:
    e = engine(slots=2, context=256, budget=16)
    heard: list[int] = []

    async def main() -> None:
        first = asyncio.create_task(
            e.generate(long(5), sampling(max_tokens=60), 0, heard=lambda ids, logp: heard.append(len(ids)))
        )
        await ticks(4)
        before = len(heard)
        second = asyncio.create_task(e.generate(long(150, 1), sampling(max_tokens=1), 1))
        await second
        assert len(heard) - before >= 150 // 15
        said = await first
        assert sum(heard) == len(said.ids) == 60

    asyncio.run(main())


def test_who_is_heard_is_who_is_answered() -> None:
    e = engine(slots=3)
    heard: dict[int, list[tuple[int, float]]] = {i: [] for i in range(5)}

    async def main() -> list[SampledTurn]:
        def listen(i: int):
            return lambda ids, logp: heard[i].extend(zip(ids.tolist(), logp.tolist(), strict=True))

        return await asyncio.gather(
            *[e.generate(p, sampling(stop_ids=(3,)), i, heard=listen(i)) for i, p in enumerate(prompts(5))]
        )

    for i, said in enumerate(asyncio.run(main())):
        assert heard[i] == list(zip(said.ids.tolist(), said.logp.tolist(), strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_who_gives_way_loses_nothing(deterministic: bool) -> None:
    """Twelve sequences of up to five blocks in a cache of eight: the youngest are computed again and say the same."""
    e = engine(slots=12, context=80, cache_bytes=8 * BLOCK_BYTES, deterministic=deterministic)
    asked, contract = prompts(12, longest=20), sampling(max_tokens=55, top_k=9, top=2)
    small = asyncio.run(ask(e, asked, contract))
    gauges = e.gauges()
    assert gauges["engine/preempted"].sum > 3
    assert gauges["engine/kv"].mean < 1.2
    large = asyncio.run(ask(engine(slots=12, context=80, deterministic=deterministic), asked, contract))
    same(small, large)
    for a, b in zip(small, large, strict=True):
        assert a.kept is not None and b.kept is not None and a.top is not None and b.top is not None
        assert np.array_equal(a.kept.ids, b.kept.ids) and np.array_equal(a.top.ids, b.top.ids)
        if deterministic:
            assert a.logp.tobytes() == b.logp.tobytes()
    assert e.blocks_in_use == 0


def test_nobody_ends_later_than_a_younger_one() -> None:
    """Equal lengths: the youngest give way, so answers come in order of arrival."""
    e = engine(slots=6, context=80, cache_bytes=8 * BLOCK_BYTES)
    ended: dict[int, int] = {}

    async def one(i: int) -> None:
        await e.generate(long(5, i), sampling(max_tokens=60), i)
        ended[i] = e._counters._steps

    async def main() -> None:
        await asyncio.gather(*[one(i) for i in range(6)])

    asyncio.run(main())
    assert [ended[i] for i in range(6)] == sorted(ended.values())
    assert ended[0] == 60 < ended[5]


def test_siblings_without_room_to_fork_take_turns() -> None:
    """The prompt fills all blocks but one, so siblings cannot speak side by side."""
    e = engine(slots=4, context=64, cache_bytes=5 * BLOCK_BYTES)
    prompt = long(50)
    said = asyncio.run(ask(e, [prompt] * 4, sampling(max_tokens=10)))
    same(said, asyncio.run(ask(engine(slots=4), [prompt] * 4, sampling(max_tokens=10))))
    assert e.blocks_in_use == 0


def test_a_sibling_is_not_admitted_to_a_prompt_that_makes_room_for_it() -> None:
    """One long turn and the prompt fill the cache: each sibling waits for a block, and the prompt stays until the last
    has begun."""
    e = engine(slots=2, context=64, cache_bytes=4 * BLOCK_BYTES)

    async def main() -> None:
        longest = e.generate(long(5), sampling(max_tokens=43), 0)
        siblings = [e.generate(long(16, 1), sampling(max_tokens=1), i) for i in range(1, 61)]
        await asyncio.wait_for(asyncio.gather(longest, *siblings), 20)

    asyncio.run(main())
    assert e.blocks_in_use == 0
    gauges = e.gauges()
    assert gauges["engine/shared"].sum == 59 * 16
    assert gauges["engine/positions_linear"].sum == 5 + 42 + 16


def test_blocks_computed_twice_at_once_are_held_once() -> None:
    """A prompt and one that begins with it are computed in one pass. The short turn ends, and its block is no spare
    one: the long turn holds what comes after it."""
    e = engine(slots=3, context=64, cache_bytes=5 * BLOCK_BYTES)
    whole = long(33)
    asked, contracts = [whole[:16], whole, long(5, 1)], [sampling(max_tokens=n) for n in (1, 25, 20)]
    same(asyncio.run(ask(e, asked, contracts)), asyncio.run(ask(engine(slots=1), asked, contracts)))
    assert e.blocks_in_use == 0


def test_siblings_who_said_the_same_have_it_cached_once_and_go_on() -> None:
    """Greedy siblings of other lengths: what the longer ones said after the shorter ones' end is found by their next
    turns too."""
    e, lengths = engine(slots=4, context=160), (20, 36, 60, 60)
    said = asyncio.run(ask(e, [long(21)] * 4, [sampling(greedy=True, max_tokens=n) for n in lengths]))
    e.gauges()
    later = [np.concatenate([long(21), s.ids, long(4, 2 + i)]) for i, s in enumerate(said)]
    asyncio.run(ask(e, later, sampling(max_tokens=1)))
    assert e.gauges()["engine/positions_linear"].sum <= 4 * (4 + 1)  # less where what they add begins alike


def check_held(e: EmbeddedEngine) -> None:
    """Whoever holds a block of the tree holds the one before it."""
    owners, nodes = e._scheduler.blocks.owners, e._scheduler.tree._nodes.values()
    assert all(owners(n.parent.block) > 1 for n in nodes if n.parent is not None and owners(n.block) > 1)


def check_mixed(prompt: np.ndarray, said: SampledTurn, models: dict[int, torch.nn.Module]) -> None:
    """Every token has the log-prob its own version gives it after everything before."""
    for version, model in models.items():
        at = said.version == version
        assert np.abs(reference_logp(model, prompt, said, sampling()) - said.logp)[at].max(initial=0) < 2e-5  # type: ignore[arg-type]


def test_weights_in_flight() -> None:
    """What is being said goes on under the new weights over a cache they computed; no old block is found again."""
    e = engine(slots=3, context=96, update="inflight")
    models = {0: module(), 2: module(seed=1)}
    asked = [*prompts(5), long(70)]

    async def main() -> list[SampledTurn]:
        running = [asyncio.create_task(e.generate(p, sampling(), i)) for i, p in enumerate(asked)]
        await ticks(9)
        await e.load(2, named_tensors(models[2]))
        return list(await asyncio.gather(*running))

    said = asyncio.run(main())
    assert sum(len(set(s.version.tolist())) == 2 for s in said) == 3
    for prompt, s in zip(asked, said, strict=True):
        assert np.all(np.diff(s.version) >= 0)
        check_mixed(prompt, s, models)
    assert e.blocks_in_use == 0


def test_stale_blocks_are_an_option_with_a_gap() -> None:
    e = engine(slots=2, context=96, update="stale")
    asked = prompts(2)

    async def main() -> list[SampledTurn]:
        running = [asyncio.create_task(e.generate(p, sampling(), i)) for i, p in enumerate(asked)]
        await ticks(9)
        await e.load(1, named_tensors(module(seed=1)))
        return list(await asyncio.gather(*running))

    said = asyncio.run(main())
    gap = e.gauges()["engine/stale_gap"]
    assert gap.count == 2 and gap.mean > 1e-3
    newer = module(seed=1)
    off = [
        np.abs(reference_logp(newer, p, s, sampling()) - s.logp)[s.version == 1].max()
        for p, s in zip(asked, said, strict=True)
    ]
    assert min(off) > 1e-3
    again = [np.concatenate([p, s.ids]) for p, s in zip(asked, said, strict=True)]
    for p, s in zip(again, asyncio.run(ask(e, again, sampling())), strict=True):
        check_mixed(p, s, {1: newer})
    assert "engine/stale_gap" not in e.gauges()


def test_equal_weights_leave_no_stale_gap() -> None:
    e = engine(slots=2, context=96, update="stale")

    async def main() -> None:
        running = [asyncio.create_task(e.generate(p, sampling(), i)) for i, p in enumerate(prompts(2))]
        await ticks(9)
        await e.load(1, named_tensors(module()))
        await asyncio.gather(*running)

    asyncio.run(main())
    assert e.gauges()["engine/stale_gap"].mean < 1e-4


def test_a_stale_block_would_be_seen() -> None:
    """The tree is made to forget the version: a prompt cached before an update is found after it, and the log-probs are
    wrong."""
    prompt = np.concatenate([long(48), long(4, 1)])
    newer, off = module(seed=1), {}
    for planted in (False, True):
        e = engine()
        asyncio.run(ask(e, [prompt], sampling()))
        if planted:
            e._scheduler.tree.renew = lambda version: None  # type: ignore[method-assign]
        asyncio.run(e.load(1, named_tensors(newer)))
        (said,) = asyncio.run(ask(e, [prompt], sampling()))
        off[planted] = np.abs(reference_logp(newer, prompt, said, sampling()) - said.logp).max()
    assert off[False] < 2e-5 and off[True] > 1e-3


def test_a_paused_engine_holds_its_tongue() -> None:
    e = engine()

    async def main() -> SampledTurn:
        running = asyncio.create_task(e.generate(long(5), sampling(max_tokens=10), 0))
        await ticks(4)
        e.pause()
        await ticks(30)
        assert not running.done()
        with pytest.raises(EngineError, match="paused"):
            await e.load(1, named_tensors(module()))
        e.resume()
        return await running

    same([asyncio.run(main())], asyncio.run(ask(engine(), [long(5)], sampling(max_tokens=10))))


def test_the_cache_does_not_grow_with_what_has_ended() -> None:
    e = engine(slots=8, context=64)
    asyncio.run(ask(e, prompts(100, seed=5), sampling()))
    before = e.cache_size
    asyncio.run(ask(e, prompts(400, seed=6), sampling()))
    assert e.cache_size <= before * 1.3
    assert e.blocks_in_use == 0


@pytest.mark.skipif(isinstance(compile_native.find(), str), reason="lanes belong to the compiled kernels")
def test_passes_fill_their_lanes_without_changing_a_word(tmp_path: Path) -> None:
    """Where most of 64 slots speak, the beginnings of prompts come in whole vectors of positions; on 8 slots nothing of
    it applies."""
    e = engine(slots=64, timeline=True)
    lengths = np.random.default_rng(3).integers(10, 40, 120).tolist()
    asked, contracts = [long(7, seed=i) for i in range(120)], [sampling(max_tokens=n) for n in lengths]
    same(asyncio.run(ask(e, asked, contracts)), asyncio.run(ask(engine(slots=8), asked, contracts)))
    assert e.timeline is not None
    e.timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    passes = [x["args"]["positions"] for x in events if x["name"] == "step"][1:]
    beyond = [n for n in passes if n > 64]
    assert beyond and all(n % compile_native.LANES == 0 for n in beyond)
    needed = e.gauges()["engine/positions_linear"]
    alike = sum(7 + n - 1 for n in lengths) - needed.count  # prompts that begin with the same tokens
    assert needed.sum == needed.count and 0 <= alike < 0.02 * needed.count


def test_a_timeline_of_requests(tmp_path: Path) -> None:
    e = engine(slots=2, timeline=True)
    asyncio.run(ask(e, prompts(5), sampling(max_tokens=4)))
    assert e.timeline is not None
    e.timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    of = {name: [x for x in events if x["name"] == name] for name in ("queued", "prefill", "speak", "step")}
    assert [len(of[n]) for n in ("queued", "prefill", "speak")] == [5, 5, 5]
    assert {x["tid"] for x in of["speak"]} == {1, 2}
    assert len(of["step"]) == e.gauges()["engine/steps"].sum
    assert e.clock()["engine/step"] > 0


def test_a_timeline_shows_who_gave_way(tmp_path: Path) -> None:
    """A sequence that lost its slot is queued until it has another, and speaks there; no row shows two at once."""
    e = engine(slots=4, context=96, cache_bytes=8 * BLOCK_BYTES, timeline=True)
    asyncio.run(ask(e, [long(5, i) for i in range(6)], sampling(max_tokens=60)))
    gave_way = int(e.gauges()["engine/preempted"].sum)
    assert e.timeline is not None and gave_way > 0
    e.timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    phases = [x for x in events if x["name"] in ("queued", "prefill", "speak")]
    assert sum(x["name"] == "queued" for x in phases) == 6 + gave_way
    assert all((x["tid"] == 0) == (x["name"] == "queued") for x in phases)
    for request in range(6):
        told = [
            x["name"] for x in sorted((x for x in phases if x["args"]["request"] == request), key=lambda x: x["ts"])
        ]
        assert told == ["queued", "prefill", "speak"] or (
            told[0] == "queued" and told[-1] == "speak" and "queued" in told[1:]
        )
    for row in range(1, 5):
        spans = sorted((x["ts"], x["ts"] + x["dur"]) for x in phases if x["tid"] == row)
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_leaves_the_books_in_order(seed: int) -> None:
    """Requests of all lengths, siblings, continuations, cancellations and weight updates on a cache that is too
    small."""
    rng = np.random.default_rng(seed)
    update = ("drain", "inflight")[seed % 2]
    slots, blocks, budget = int(rng.integers(2, 6)), int(rng.integers(7, 13)), int(rng.integers(8, 60))
    e = engine(slots=slots, context=96, cache_bytes=blocks * BLOCK_BYTES, budget=budget, update=update)
    models = {v: module(seed=v) for v in range(4)}
    beginnings = [long(40, i) for i in range(2)]
    done: list[tuple[np.ndarray, SampledTurn]] = []

    async def episode(i: int) -> None:
        ids = np.concatenate([beginnings[i % 2][: rng.integers(0, 40)], long(int(rng.integers(1, 9)), 10 + i // 3)])
        for turn in range(2):
            said = await e.generate(ids, sampling(max_tokens=int(rng.integers(1, 24)), stop_ids=(1,)), i * 10 + turn)
            done.append((ids, said))
            ids = np.concatenate([ids, said.ids, long(3, i)])
            if len(ids) > 80:
                return

    async def sibling(i: int) -> None:
        """A short turn after a prompt of whole blocks, of which four are asked."""
        ids = long((16, 32)[i % 2], 50 + i // 4)
        done.append((ids, await e.generate(ids, sampling(max_tokens=int(rng.integers(1, 3))), 1000 + i)))

    async def main() -> None:
        running = [asyncio.create_task(job(i)) for i in range(40) for job in (episode, sibling)]
        for version in (1, 2, 3):
            for _ in range(int(rng.integers(5, 40))):
                await ticks(1)
                check_held(e)
            for t in rng.choice(running, 8, replace=False):  # type: ignore[arg-type]
                t.cancel()
            await e.load(version, named_tensors(models[version]))
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert not [x for x in ended if isinstance(x, Exception)]

    asyncio.run(asyncio.wait_for(main(), 30))
    assert len(done) > 20
    for prompt, said in done:
        check_mixed(prompt, said, models)
        assert update == "inflight" or len(set(said.version.tolist())) == 1
    scheduler = e._scheduler
    assert e.blocks_in_use == 0 and scheduler.blocks.spare == len(scheduler.tree)
    assert not scheduler.prompts and not scheduler._users and not scheduler._caching and not scheduler._waits
    assert scheduler.blocks.capacity <= scheduler.blocks.most
    spare = scheduler.blocks.spare
    assert scheduler.tree.evict(10**6) == spare and not scheduler.blocks.spare


def test_options_that_cannot_work() -> None:
    with pytest.raises(EngineError, match="budget=0"):
        EmbeddedEngine(module(), slots=1, context=8, budget=0)
