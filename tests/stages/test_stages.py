"""Stages: what a run without held-out tasks does, and what a stage began with."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import posttrain
from posttrain.config.run import Optimizer
from posttrain.core.measure.interval import Score
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GRPO
from posttrain.record import run_reader
from posttrain.record.checkpoint import scan
from posttrain.stages import Progress, Stages
from posttrain.stages.interrupt import Interrupted, Stopper
from posttrain.stages.progress import StageState
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver
from posttrain.stages.stage_result import measured_words, result_of, waited_out
from posttrain.system import files
from posttrain.system.errors import ConfigError, InvariantError
from tests.tiny import only_rl, play, tiny_parts, tiny_run


def test_the_best_mean_reward_is_told_with_its_sign() -> None:
    """Of rewards below 0 too, such as the scores of a reward model."""
    state, stage = StageState(step=3), SimpleNamespace(patience=1)
    driver: Any = SimpleNamespace(state=state, stage=stage, heldout_loss=None, agreement=None)
    reports: list[Any] = [SimpleNamespace(reward=Score(x, x - 1, x + 1, 4)) for x in (-0.7, -0.9)]
    assert waited_out(driver, reports[0]) == ""
    assert "held-out mean reward was highest after step 3 (-0.700)" in waited_out(driver, reports[1])


@pytest.mark.parametrize(
    ("before", "reward_before", "says"),
    [
        (None, 0.59, "; held-out mean reward 0"),
        (0.2, 0.59, "; held-out mean reward 0, accuracy 0.000"),
        (0.5, 0.5, "; held-out accuracy 0.000"),
        (None, None, "; held-out accuracy 0.000"),
    ],
)
def test_grades_that_are_all_0_are_grades(before: float | None, reward_before: float | None, says: str) -> None:
    """As pass or fail are told only stages that did not begin with grades."""
    stage = tiny_run().stage("rl")
    nothing = Score(0.0, 0.0, 0.1, 4)
    report: Any = SimpleNamespace(
        accuracy=nothing, reward=nothing, greedy=None, pass_at={}, graded=False, proxy=None, failed=0, abstained=0
    )
    driver: Any = SimpleNamespace(
        state=StageState(step=3, before=before, reward_before=reward_before), stage=stage, seconds=lambda: 1.0,
        clock=SimpleNamespace(total={}, most={}), parts=SimpleNamespace(run=SimpleNamespace(stages=(stage,))),
        heldout_loss=None, agreement=None,
    )  # fmt: skip
    assert measured_words(result_of(driver, report)) == says


@pytest.mark.prove
def test_training_without_measuring(tmp_path: Path) -> None:
    """env.heldout=0: every step runs, nothing is evaluated, and nothing pretends to have been."""
    run = tiny_run(eval_every=1)
    run = replace(run, env=replace(run.env, heldout=0))
    results = asyncio.run(play(tiny_parts(tmp_path / "run", run)))
    assert [r.steps for r in results] == [6, 3]
    assert all(r.accuracy is None and r.greedy is None and r.pass_at == {} for r in results)
    assert not any("eval/accuracy" in s.gauges for s in run_reader.steps(tmp_path / "run"))


def test_a_target_needs_something_to_measure() -> None:
    run = tiny_run(target=0.9, eval_every=1)
    with pytest.raises(ConfigError, match="never measured"):
        replace(run, env=replace(run.env, heldout=0))


# --- what a stage began with ------------------------------------------------------------------------------------------

MUTANTS = {
    "the start is kept anew": ("sequence", " and p.running is None", " or p.running is None", "would take their place"),
    "the start is not read": ("role_parts", "if checkpoint is None:", "if True:", "reference came back changed"),
    "another start is read": (
        "role_parts",
        "name or starts(",
        'name or "rl" or starts(',
        "reference came back changed",
    ),
}
"""Planted changes: the module, what is replaced, by what, and what is said of it."""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one stage with a KL to its start."""
    folder = tmp_path_factory.mktemp("runs") / "compared"
    grpo = replace(GRPO, pull=KL(coef=0.1))
    run = only_rl(tiny_run(algorithm=grpo, optimizer=Optimizer(lr=0.02, warmup=0)))
    posttrain.run(replace(run, keep_checkpoints=9, deterministic=True), out=folder, quiet=True)
    return folder


def cut(compared: Path, tmp_path: Path) -> Path:
    """A copy of it, and in it the checkpoint after the second step."""
    shutil.copytree(compared, tmp_path / "run")
    return [c.folder for c in scan(tmp_path / "run") if c.state["running"]][-1]


def kl(folder: Path) -> list[float]:
    return [s.gauges["policy/kl_reference"].mean for s in run_reader.steps(folder)]


@pytest.mark.prove
@pytest.mark.parametrize("name", MUTANTS)
def test_a_stage_that_goes_on_has_the_start_it_began_with(
    name: str, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reference is the model at its start. Each planted change makes it the policy of today, with a KL of 0."""
    where, old, new, says = MUTANTS[name]
    checkpoint = cut(compared, tmp_path)
    true: Any = importlib.import_module(f"posttrain.stages.{where}")
    text = Path(true.__file__).read_text()
    assert text.count(old) == 1
    planted: dict[str, Any] = {"__name__": "planted"}
    exec(compile(text.replace(old, new), "planted", "exec"), planted)
    name = "Stages" if where == "sequence" else "frozen_start"
    whole = getattr(true, name)
    with monkeypatch.context() as m:
        for module in [x for x in list(sys.modules.values()) if x.__name__.startswith("posttrain.")]:
            if vars(module).get(name) is whole:
                m.setattr(module, name, planted[name])
        with pytest.raises(InvariantError, match=says):
            posttrain.run(resume=checkpoint, quiet=True)
    shutil.rmtree(tmp_path / "run")
    posttrain.run(resume=cut(compared, tmp_path), quiet=True)
    assert kl(tmp_path / "run") == kl(compared) and kl(compared)[-1] > 0.01


@pytest.mark.prove
def test_a_start_that_was_replaced_in_the_folder_is_refused(compared: Path, tmp_path: Path) -> None:
    """Also with digests of its own. A folder of an older version has no fingerprint of it, and goes on."""
    checkpoint = cut(compared, tmp_path)
    start = tmp_path / "run" / "kept" / "start"
    shutil.copyfile(checkpoint / "weights.safetensors", start / "weights.safetensors")
    (start / "digests.json").write_text(
        json.dumps({"weights.safetensors": files.digest(start / "weights.safetensors")})
    )
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    with pytest.raises(InvariantError, match="weights kept as 'start' came back changed"):
        posttrain.run(resume=checkpoint, quiet=True)
    old = tmp_path / "old" / "checkpoints" / checkpoint.name
    state = json.loads((old / "state.json").read_text())
    del state["state"]["kept"], state["state"]["running"]["reference_digest"]
    (old / "state.json").write_text(json.dumps(state))
    (old / "digests.json").write_text(
        json.dumps({p.name: files.digest(p) for p in old.iterdir() if p.name != "digests.json"})
    )
    posttrain.run(resume=old, quiet=True)


@pytest.mark.prove
def test_a_signal_ends_a_stage_only_after_a_step_at_which_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that no checkpoint is written for it, since a run that goes on from there would be another one."""
    parts = tiny_parts(tmp_path / "run", only_rl(tiny_run(steps=5, checkpoint_every=0)))
    monkeypatch.setattr(ReinforceDriver, "at_rest", property(lambda driver: driver.state.step == 3))

    async def stopped() -> None:
        (stage,) = Stages(parts, Progress(), Stopper(signal.SIGTERM)).left()
        await stage.run()

    with parts.book, pytest.raises(Interrupted, match="stopped at rl step 3"):
        asyncio.run(stopped())
    assert [c.state["running"]["step"] for c in scan(tmp_path / "run")] == [3]
