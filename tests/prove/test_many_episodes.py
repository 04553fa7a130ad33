"""Thousands of episodes at once, each waiting for a slow tool between its turns: the engine stays full and memory
flat."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from posttrain.config.run import Env
from posttrain.core.ports import Talk
from posttrain.core.types import Stop, Task
from posttrain.environment.gallery.calculator import CalculatorEnv
from posttrain.ladder.rollout_request import RolloutRequest
from tests.tiny import MODEL, only_rl, tiny_parts, tiny_run

pytestmark = pytest.mark.prove

EPISODES, SIBLINGS, SLOTS = 5000, 8, 64
TOOL_SECONDS = 0.05
WAVES = 3


@dataclass(frozen=True, kw_only=True)
class SlowTool(CalculatorEnv):
    """Says, waits for a tool, reads, answers."""

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        await talk.say()
        await asyncio.sleep(TOOL_SECONDS)
        talk.see("[36]")
        return (await talk.say()).stop


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_five_thousand_episodes_keep_the_engine_full(tmp_path: Path) -> None:
    run = only_rl(tiny_run())
    run = replace(run, env=Env(name="calculator", heldout=6), model=replace(MODEL, context=96), slots=SLOTS)
    parts = tiny_parts(tmp_path, run)
    env = SlowTool(heldout_count=6)
    rollout = replace(parts.rollout, environment=env)
    sampling = replace(parts.sampling(run.stages[-1]), max_tokens=16)

    async def wave(number: int) -> tuple[float, int, int]:
        groups = await asyncio.gather(
            *(
                rollout.group(env.train.task(i), number, RolloutRequest(groups=1, siblings=SIBLINGS), sampling, "many")
                for i in range(EPISODES // SIBLINGS)
            )
        )
        assert all(e.reward is not None and not e.error for g in groups for e in g.episodes)
        gauges = parts.sampler.gauges()
        said = sum(e.spoken for g in groups for e in g.episodes)
        assert gauges["engine/tokens"].sum == said, "nothing was lost, nothing said twice"
        return gauges["engine/occupancy"].mean, sum(len(g.episodes) for g in groups), said

    async def all_waves() -> list[tuple[float, int]]:
        out = []
        for number in range(WAVES):
            occupancy, count, said = await wave(number)
            assert count == EPISODES
            out.append((occupancy, resident()))
            print(f"wave {number}: occupancy {occupancy:.1%}, {said} tokens, {out[-1][1] / 2**20:.0f} MiB")
        return out

    seen = asyncio.run(all_waves())
    parts.book.close()
    assert min(occupancy for occupancy, _ in seen) >= 0.9
    assert seen[-1][1] <= 1.05 * seen[0][1], "memory grows with the waves"
    assert parts.sampler.blocks_in_use == 0  # type: ignore[attr-defined]
