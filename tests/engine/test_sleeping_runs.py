"""Whole runs whose engine sleeps while the learner works: what is learned and recorded is what it is without."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from posttrain.config.engines import Embedded
from posttrain.config.placement import Processes
from posttrain.config.run import Optimizer, Run
from posttrain.config.stages.preference_settings import OnlinePreference
from posttrain.core.gauge import Step
from posttrain.core.sampling import Sampling
from posttrain.ladder.preference_rows import NASH_MD
from posttrain.record import checkpoint, step_format
from posttrain.record.run_reader import episode_files, record_digest, steps
from posttrain.role.trainer import Trainer
from posttrain.role.weights.saved_weights import OPTIMIZER, WEIGHTS
from posttrain.system.errors import ConfigError
from tests.tiny import play, tiny_parts, tiny_run


def asleep(run: Run) -> Run:
    return replace(run, engine=Embedded(sleep=True))


def learned(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bytes, bytes, list[int], list[Step]]:
    """(record, weights, optimizer, bytes of all caches whenever the learner took a step, steps) of a whole run."""
    parts = tiny_parts(folder, run)
    (engines,) = cast("Any", parts.sleep).args
    step, sizes = Trainer.step, list[int]()

    def stepped(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        sizes.append(sum(e.here.cache_size for e in engines))
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", stepped)
        asyncio.run(play(parts))
    parts.close()
    last = checkpoint.find(folder).folder
    return record_digest(folder), (last / WEIGHTS).read_bytes(), (last / OPTIMIZER).read_bytes(), sizes, steps(folder)


def online() -> Run:
    """Pairs of the policy's samples and those of an opponent, which has an engine of its own."""
    stage = OnlinePreference(
        name="online",
        algorithm=NASH_MD,
        sampling=Sampling(max_tokens=6),
        optimizer=Optimizer(lr=1e-3, warmup=1),
        prompts=6,
        steps=3,
        eval_every=0,
        checkpoint_every=1,
    )
    return replace(tiny_run(), stages=(tiny_run().stages[0], stage))


@pytest.mark.prove
@pytest.mark.parametrize(
    "run",
    [tiny_run(eval_every=1, minibatches=2), pytest.param(online(), marks=pytest.mark.prove)],
    ids=["reinforcement", "pairs with an opponent"],
)
def test_a_run_with_a_sleeping_engine_is_the_run_without(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record, weights and optimizer, bit for bit. Whenever the learner works there is no cache; how long it took to
    free it and to make it anew is in the clock."""
    *whole, sizes, _ = learned(tmp_path / "awake", run, monkeypatch)
    *found, slept, taken = learned(tmp_path / "asleep", asleep(run), monkeypatch)
    assert found == whole
    imitated = run.stages[0].steps
    assert all(sizes[imitated:]) and not any(slept), "there is a cache to free, and it is freed"
    clocks = [s.clock for s in taken if s.stage != run.stages[0].name]
    if run.stages[-1].name == "rl":
        assert all({"engine/sleep", "engine/freed", "engine/step"} <= c.keys() for c in clocks)
        assert all(c["engine/wake"] > 0 for c in clocks[1:])


@pytest.mark.prove
def test_where_weights_stay_what_was_cached_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a push every other step, prompts of the step before could be found in the cache, and now are not. The
    answers and what is learned from them are the same."""
    run = replace(tiny_run(steps=4, sync_every=2, checkpoint_every=2), deterministic=True)
    folders = tmp_path / "awake", tmp_path / "asleep"
    _, *whole, _, _ = learned(folders[0], run, monkeypatch)
    _, *found, _, _ = learned(folders[1], asleep(run), monkeypatch)
    assert found == whole
    read = [[step_format.read_columns(row.path) for row in episode_files(f)] for f in folders]
    for a, b in zip(*read, strict=True):
        assert a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def test_where_it_cannot_sleep_is_said_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rl.staleness asks .* set rl.staleness=0, or engine.sleep=false"):
        asleep(tiny_run(staleness=1))
    with pytest.raises(ConfigError, match=r"placement=processes has none there: set engine.sleep=false"):
        asleep(replace(tiny_run(), placement=Processes()))
    asleep(tiny_run(staleness=0))
