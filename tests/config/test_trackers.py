"""recipe.trackers: the same numbers elsewhere, a missing package said before the run, a failing one never fatal."""

from __future__ import annotations

import importlib.util
import math
import sqlite3
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import posttrain
from posttrain.build.trackers import (
    COLUMNS,
    CompletionTables,
    GuardedTracker,
    Trackio,
    check_trackers,
    make_trackers,
    scalars,
)
from posttrain.config.run import Reinforce, Run
from posttrain.core.gauge import Gauge, Step
from posttrain.record.external_access import asks
from posttrain.record.run_reader import read_episodes, steps
from posttrain.system.errors import ConfigError, RunFolderError


def run_with(*names: str) -> Run:
    return Run(recipe="r", stages=(Reinforce(name="rl"),), trackers=names)  # pyright: ignore[reportArgumentType]


SHORT = ("sft=none", "rl.steps=2", "rl.prompts=2", "rl.siblings=2", "rl.eval_every=0", "env.heldout=4", "threads=1")
STEPS = [
    Step("rl", i, i, {"rollout/reward": Gauge(i, 4), "bad": Gauge(math.nan, 1)}, {"learn": 0.5}, ()) for i in (1, 2)
]


def drive(name: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (tracker,) = make_trackers(run_with(name), folder)
    for step in STEPS:
        tracker.log(step)
    tracker.say("hello")
    tracker.close({"final/rl": 0.75})


def test_scalars_are_means_by_stage_and_finite() -> None:
    assert scalars(STEPS[0]) == {"rl/rollout/reward": 0.25, "rl/clock/learn": 0.5}


def test_tensorboard_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drive("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rl/rollout/reward")] == [(1, 0.25), (2, 0.5)]
    assert events.Scalars("final/rl")[0].value == 0.75 and "rl/bad" not in events.Tags()["scalars"]


def test_variables_of_trackers_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "all"))
    drive("tensorboard", tmp_path / "run")
    assert list((tmp_path / "all" / "run").glob("events*")) and not (tmp_path / "run" / "trackers").exists()


def test_wandb_takes_its_own_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    own = {"MODE": "offline", "SILENT": "true", "PROJECT": "mine", "NAME": "first", "RUN_ID": "abc", "TAGS": "a,b"}
    for name, value in own.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    (tmp_path / "run").mkdir()
    (tracker,) = make_trackers(run_with("wandb"), tmp_path / "run")
    wandb: Any = tracker._inner._run  # type: ignore[attr-defined]
    assert (wandb.project, wandb.name, wandb.id, wandb.tags) == ("mine", "first", "abc", ("a", "b"))
    tracker.close({})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_completions_go_to_trackers_only_where_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(name)
    for variable, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("TRACKIO_DIR", str(tmp_path / "t"))):
        monkeypatch.setenv(variable, value)
    words = (*SHORT, f"trackers={name}", "log_completions=3")
    posttrain.run("arithmetic", *words, out=tmp_path / "run", quiet=True)
    assert "failed" not in capsys.readouterr().err
    assert "sends settings, numbers, prompts and completions" in asked_of("wandb", 3)
    assert "prompts" not in asked_of("wandb", 0)
    rows = CompletionTables(tmp_path / "run", 3).rows(next(iter(steps(tmp_path / "run"))))
    said = [r.episode for r in read_episodes(tmp_path / "run" / "episodes" / "rl-000001.npz")][:3]
    assert [(r[0], r[2], r[3]) for r in rows] == [(1, e.text, e.reward) for e in said] and len(rows[0]) == len(COLUMNS)
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "run" / "trackers" / "tensorboard"))
        events.Reload()
        assert len([t for t in events.Tags()["tensors"] if t.startswith("rl/completions/")]) == 3


def asked_of(name: str, count: int) -> str:
    return " ".join(a.what for a in asks(replace(run_with(name), log_completions=count)))


def test_completions_need_a_tracker_and_the_record() -> None:
    for more in ({}, {"trackers": ("wandb",), "record_episodes": False}):
        with pytest.raises(ConfigError, match="they are read from the run's record and go to trackers"):
            replace(run_with(), log_completions=2, **more)  # type: ignore[arg-type]


def test_wandb_offline_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    drive("wandb", tmp_path / "run")
    where = tmp_path / "run" / "trackers" / "wandb"
    first = (where / "id").read_text()
    drive("wandb", tmp_path / "run")
    assert (where / "id").read_text() == first and len(first) == 32
    assert "failed" not in capsys.readouterr().err
    assert list(where.rglob(f"run-{first}.wandb")), "W&B wrote no offline run"


def test_trackio_locally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio")
    drive("trackio", tmp_path / "run")
    assert "failed" not in capsys.readouterr().err
    (store,) = (tmp_path / "store").glob("*.db")
    with sqlite3.connect(store) as db:
        rows = [m for (m,) in db.execute("select metrics from metrics order by id")]
    assert "rl/rollout/reward" in str(rows[0]) and len(rows) == 3


def test_a_missing_package_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=(
            r"trackers=tensorboard,wandb: tensorboard wandb is not installed\. Run: .* -m pip install tensorboard wandb"
        ),
    ):
        check_trackers(run_with("tensorboard", "wandb"))
    assert make_trackers(run_with(), Path()) == []


class Failing:
    calls = 0

    def log(self, step: Step) -> None:
        self.calls += 1
        raise ConnectionError("gone")

    def say(self, line: str) -> None: ...

    def close(self, summary: Mapping[str, float]) -> None:
        self.calls += 1


def test_a_failing_tracker_is_reported_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    failing = Failing()
    guarded = GuardedTracker("wandb", failing)
    guarded.log(STEPS[0])
    guarded.log(STEPS[1])
    guarded.close({})
    assert failing.calls == 1
    assert (
        capsys.readouterr().err
        == "tracker wandb failed and is left out from here on (steps.jsonl has everything): ConnectionError('gone')\n"
    )


def test_a_damaged_record_is_no_failure_of_a_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged, tables = list[int](), list[int]()
    inner = SimpleNamespace(log=lambda s: logged.append(s.index), table=lambda s, rows: tables.append(s.index))

    def rows(self: CompletionTables, step: Step) -> list[list[Any]]:
        if step.index < 3:
            raise RunFolderError("rl-000001.npz is damaged")
        return [[step.index, "p", "c", 1.0, 0.0, "stop"]]

    monkeypatch.setattr(CompletionTables, "rows", rows)
    guarded = GuardedTracker("wandb", inner, CompletionTables(tmp_path, 1))  # type: ignore[arg-type]
    for step in (*STEPS, replace(STEPS[0], index=3)):
        guarded.log(step)
    assert (logged, tables) == ([1, 2, 3], [3])
    assert capsys.readouterr().err == (
        "tracker wandb gets no completions of rl step 1: the run's own record of them cannot be read:"
        " RunFolderError('rl-000001.npz is damaged')\n"
    )


def test_all_that_trackio_gets_has_the_step_of_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    logged = list[dict[str, Any]]()
    run = SimpleNamespace(log=logged.append)
    fake = SimpleNamespace(init=lambda **_: run, finish=lambda: None, Table=lambda dataframe: dataframe)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    tracker = Trackio(run_with(), tmp_path)
    tracker.log(STEPS[1])
    tracker.table(STEPS[1], [[2, "p", "c", 1.0, 0.0, "stop"]])
    assert [x["rl/step"] for x in logged] == [2, 2] and list(logged[1]["rl/completions"].columns) == list(COLUMNS)


@pytest.mark.prove
def test_trackers_are_closed_where_a_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was logged is lost, and another run of the program may begin."""
    closed = list[dict[str, float]]()
    monkeypatch.setattr(GuardedTracker, "close", lambda self, summary: closed.append(dict(summary)))

    def stops(step: Step) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        posttrain.run("arithmetic", *SHORT, "trackers=tensorboard", on_step=stops, out=tmp_path / "run", quiet=True)
    assert closed == [{}]
