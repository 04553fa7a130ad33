"""A push to engines elsewhere: the learner computes its half of the checks while they install the weights, and the
log-probs of the probe come with their answer. What is checked stays the same, and what is wrong stops the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.build.build_run import probe_ids
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.role.sync import Sync
from posttrain.stages.run_parts import turns_reach
from posttrain.system.errors import InvariantError
from tests.engine.pool_parts import Script, scripted_pool
from tests.laws.test_agreement import policy, sharpen

pytestmark = pytest.mark.prove
STRANGE = 3
"""The version at which an engine or the learner does something wrong: the second of which the scores come along."""


def parts(script: Script, engine: type[EmbeddedEngine], count: int = 1) -> tuple[HFLearner, EnginePool, Sync]:
    p = policy()
    learner, ids = HFLearner(p), probe_ids(p)
    pool = scripted_pool(
        script, count, make=lambda: engine(p.clone().module, slots=8, context=p.context), tolerance=1e-3
    )
    return learner, pool, Sync(learner, pool, ids, elsewhere=turns_reach)


async def pushes(learner: HFLearner, sync: Sync, last: int = STRANGE) -> list[str]:
    found = list[str]()
    for version in range(1, last + 1):
        sharpen(learner, 1.02)
        found.append(await sync.push(version))
    return found


def test_the_learner_computes_while_engines_install_and_scores_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    script = Script(calls=order)
    learner, pool, sync = parts(script, EmbeddedEngine, count=2)
    load, mark = EmbeddedEngine.load, HFLearner.fingerprint

    async def loaded(self: EmbeddedEngine, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        for _ in range(50):
            await asyncio.sleep(0)
        order.append("has loaded")
        return await load(self, version, tensors)

    def marked(self: HFLearner) -> str:
        order.append("learner")
        return mark(self)

    monkeypatch.setattr(EmbeddedEngine, "load", loaded)
    monkeypatch.setattr(HFLearner, "fingerprint", marked)

    async def play() -> None:
        served = await pushes(learner, sync)
        assert len(set(served)) == STRANGE and served[-1] == mark(learner) and pool.version == STRANGE
        assert script.calls.count("score") == 2, "each engine was asked once, after the first push"
        kept = [what for what in order if what in ("install", "learner", "has loaded")]
        assert kept == ["install", "install", "learner", "has loaded", "has loaded"] * STRANGE
        await pool.score(sync.probe_ids)
        assert script.calls.count("score") == 4, "scores that came along are used once"

    asyncio.run(play())


def moved(engine: EmbeddedEngine) -> None:
    """One number of its weights changes after its fingerprint was made, as by a stale cache."""
    with torch.no_grad():
        next(iter(engine._module.parameters())).view(-1)[:200].add_(0.3)


class Skips(EmbeddedEngine):
    """Leaves a tensor out of the version `STRANGE`."""

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        given = list(tensors)
        if version == STRANGE:
            given[0] = (given[0][0], given[0][1] * 1.5)
        return await super().load(version, given)


class Differs(EmbeddedEngine):
    """Serves the version `STRANGE`, and computes with something else."""

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        served = await super().load(version, tensors)
        if version == STRANGE:
            moved(self)
        return served


class OneDiffers(Differs):
    """The same of every second engine alone."""

    made = 0

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        OneDiffers.made += 1
        self.strange = OneDiffers.made % 2 == 0

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        if self.strange:
            return await super().load(version, tensors)
        return await EmbeddedEngine.load(self, version, tensors)


@pytest.mark.parametrize(
    ("engine", "count", "says"),
    [
        (Skips, 1, r"weight sync of version 3 failed: .*A tensor was skipped, stale or changed on the way"),
        (Skips, 2, r"weight sync of version 3 failed"),
        (Differs, 1, r"after the push of version 3 the sampler scores a canary otherwise than the learner"),
        (OneDiffers, 2, r"gives other log-probs than engine 0 for the same tokens"),
    ],
)
def test_an_engine_that_serves_something_else_stops_the_run(
    engine: type[EmbeddedEngine], count: int, says: str
) -> None:
    learner, pool, sync = parts(Script(), engine, count)
    with pytest.raises(InvariantError, match=says):
        asyncio.run(pushes(learner, sync))
    assert pool.version == STRANGE


def test_what_stops_the_learner_meanwhile_is_told_and_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, pool, sync = parts(Script(), EmbeddedEngine)
    scores, asked = HFLearner.packed_score, count(1)

    def broken(self: HFLearner, packed: Any) -> np.ndarray:
        if next(asked) == STRANGE:
            raise InvariantError("frozen weights have changed")
        return scores(self, packed)

    monkeypatch.setattr(HFLearner, "packed_score", broken)

    async def play() -> None:
        with pytest.raises(InvariantError, match="frozen weights have changed"):
            await pushes(learner, sync)
        watching = {pool._watching, asyncio.current_task()}
        assert not [t for t in asyncio.all_tasks() if t not in watching and "_work" not in str(t.get_coro())]

    asyncio.run(play())
