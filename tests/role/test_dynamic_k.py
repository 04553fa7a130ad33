"""Over-sampling a group and aborting its rest: what is kept, what is counted, and the bias that it buys its speed
with."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from posttrain.config.run import Optimizer
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.record.run_reader import steps as read_steps
from posttrain.system.concurrency import LoopThread, settled
from posttrain.system.errors import ConfigError
from tests.tiny import only_rl, play, tiny_parts, tiny_run


async def after(ticks: int, value: int) -> int:
    for _ in range(ticks):
        await asyncio.sleep(0)
    return value


def test_the_first_to_end_are_kept_in_their_order() -> None:
    ticks = [9, 2, 30, 4, 30, 1]
    assert asyncio.run(settled([after(t, i) for i, t in enumerate(ticks)], 3)) == [1, 3, 5]
    assert asyncio.run(settled([after(t, i) for i, t in enumerate(ticks)], 6)) == [0, 1, 2, 3, 4, 5]


def test_a_loop_in_a_thread_is_closed_with_it() -> None:
    thread, last = LoopThread("test"), list[int]()

    async def ends() -> None:
        last.append(await after(2, 1))

    async def main() -> None:
        assert await thread.run(after(3, 7)) == 7

    asyncio.run(main())
    loop, worker = thread._loop, next(t for t in threading.enumerate() if t.name == "test")
    thread.close(ends)
    worker.join(10)
    assert loop is not None and loop.is_closed() and last == [1]
    asyncio.run(main())  # a new loop, where it is used again
    thread.close()


def test_a_failure_is_raised_as_itself() -> None:
    async def fails() -> int:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        asyncio.run(settled([after(50, 0), fails(), after(50, 1)], 1))
    with pytest.raises(ConfigError, match="no"):  # also where enough others end at the same moment
        asyncio.run(settled([after(0, 0), after(0, 1), fails()], 1))


@pytest.mark.prove
def test_a_run_keeps_as_many_siblings_as_it_asked_for(tmp_path: Path) -> None:
    """Every canary on the way holds: masks cover what the engine delivered, aborted turns aside."""
    run = only_rl(tiny_run(oversample=3, steps=3))
    parts = tiny_parts(tmp_path, run)
    asyncio.run(play(parts))
    stage = run.stages[-1]
    steps = [s for s in read_steps(tmp_path) if s.stage == stage.name]
    assert len(steps) == 3
    for step in steps:
        aborted = step.gauges["rollout/aborted"]
        assert aborted.sum / aborted.count == pytest.approx(3 / (stage.siblings + 3))  # type: ignore[union-attr]
        assert step.gauges["rollout/tokens"].count == aborted.count - aborted.sum
    assert parts.sampler.blocks_in_use == 0  # type: ignore[attr-defined]


def test_what_is_kept_is_shorter_than_what_is_said() -> None:
    """By enumeration: lengths 1, 2 or 4 with probability 1/2, 1/4, 1/4, two siblings kept of four. The mean of the kept
    is below the mean of all, and a reward that grows with length is underestimated; without extras it is not."""
    lengths, chance = np.array([1, 2, 4]), np.array([0.5, 0.25, 0.25])
    truth = float(lengths @ chance)

    def kept_mean(started: int) -> float:
        total = 0.0
        for draw in itertools.product(range(3), repeat=started):
            said = lengths[list(draw)]
            kept = asyncio.run(settled([after(10 * int(n), int(n)) for n in said], 2))
            total += float(np.mean(kept)) * float(np.prod(chance[list(draw)]))
        return total

    assert kept_mean(2) == pytest.approx(truth)
    expected = sum(
        float(np.mean(np.sort(lengths[list(d)])[:2])) * float(np.prod(chance[list(d)]))
        for d in itertools.product(range(3), repeat=4)
    )
    assert kept_mean(4) == pytest.approx(expected)
    assert expected < 0.75 * truth


@pytest.mark.prove
def test_the_bias_of_a_run_is_that_of_the_shortest(tmp_path: Path) -> None:
    """Eight siblings kept of twelve in a real run whose policy hardly moves: their mean length is that of the eight
    shortest of twelve drawn from the lengths of the run without extras, a third below them."""

    def lengths(extra: int) -> np.ndarray:
        contract, still = Sampling(max_tokens=40), Optimizer(lr=1e-6, warmup=1)
        run = only_rl(tiny_run(oversample=extra, siblings=8, prompts=16, steps=2, sampling=contract, optimizer=still))
        parts, said = tiny_parts(tmp_path / str(extra), replace(run, slots=192)), list[int]()
        generate = parts.sampler.generate

        async def heard(ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
            answer = await generate(ids, sampling, place)
            said.append(len(answer.ids))
            return answer

        parts.sampler.generate = heard  # type: ignore[method-assign]
        asyncio.run(play(parts))
        tokens = [s.gauges["rollout/tokens"] for s in read_steps(tmp_path / str(extra)) if "rollout/tokens" in s.gauges]
        return np.array(said) if not extra else np.array([sum(g.sum for g in tokens) / sum(g.count for g in tokens)])

    every, kept = lengths(0), float(lengths(4)[0])
    drawn = np.sort(np.random.default_rng(0).choice(every, (4000, 12)), 1)[:, :8]
    assert kept == pytest.approx(drawn.mean(), rel=0.12)
    assert drawn.mean() < 0.75 * every.mean()


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="oversample=-1"):
        tiny_run(oversample=-1)
