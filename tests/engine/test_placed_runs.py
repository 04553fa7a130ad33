"""Whole runs whose engines are elsewhere, as a user starts them."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.api import main
from posttrain.config.placement import Local, Processes
from posttrain.core.exchange.experience import Experience
from posttrain.core.exchange.request_owner import DEADLY
from posttrain.core.gauge import Step
from posttrain.core.types import Segment
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.record import run_reader, step_format
from posttrain.stages.reinforce import reinforce_stage
from tests import faulty
from tests.engine.run_parts import SMALL, mine, model_at, moved, play
from tests.killing import POISON, DeadlyParts, cut_run
from tests.laws.test_placement import outcome, placed, played
from tests.mutants import FAULTS
from tests.tiny import tiny_run

pytestmark = pytest.mark.prove
TINY = ("sft.steps=4", "sft.batch=8", "rl.steps=3", "rl.prompts=4", "rl.siblings=3", "rl.eval_every=0", "env.heldout=4")


def test_the_command_line_places_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("placement=processes", "placement.engines=2", "placement.cores=1", "placement.delta=true")
    play(tmp_path / "run", "arithmetic", *SMALL, *TINY, *words)
    said = capsys.readouterr().out
    assert "2 engines in processes of their own; engine: embedded" in said
    assert re.search(r"2 of 2 engines ready, \d+ turns and \d+ tokens in flight", said)
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert all({"engine/step", "engine/deaths", "sync/transfer", "sync/install"} <= s.clock.keys() for s in steps)
    assert all(0 <= s.clock["engine/idle"] <= 1 and s.clock["engine/in_flight"] > 0 for s in steps)
    assert re.search(r"in flight, idle \d+%; learner idle \d+%", said), "what every role does now"
    assert run_reader.run_file(tmp_path / "run").run.placement == Processes(engines=2, cores=1, delta=True)
    assert not [p for p in Path("/dev/shm").iterdir() if f"-{os.getpid()}-" in p.name], "no weights are left"


def test_a_cut_run_goes_on_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun in one process, gone on in two others, the same bits."""
    whole = played(placed(Local()), tmp_path / "whole")
    cut_run(placed(Local()), tmp_path / "cut", monkeypatch)
    main.run("placement=processes", "placement.engines=2", resume=tmp_path / "cut", quiet=True)
    assert outcome(tmp_path / "cut") == whole


def test_weights_in_files_as_deltas_change_no_bit(tmp_path: Path) -> None:
    local = played(placed(Local()), tmp_path / "local")
    assert played(placed(Processes(engines=2, transport="file", delta=True)), tmp_path / "placed") == local


def test_engines_have_what_is_asked_ahead_before_the_learner_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all groups of a step have ended before it begins, so that nothing of it is waited for."""
    pools, seen, begin, step = list[EnginePool](), list[tuple[int, int]](), EnginePool.__init__, reinforce_stage.learn

    def watched(self: EnginePool, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        pools.append(self)

    async def slow(roles: Any, e: Experience) -> Step:
        seen.append(
            (sum(not a.group.done() for a in roles.groups._waiting), sum(len(x.held) for x in pools[-1].engines))
        )
        time.sleep(0.3)  # as a learner that computes: the engine is ready long before
        return await step(roles, e)

    monkeypatch.setattr(EnginePool, "__init__", watched)
    monkeypatch.setattr(reinforce_stage, "learn", slow)
    run = tiny_run(steps=5, staleness=1, checkpoint_every=0)
    main.run(replace(run, placement=Processes()), out=tmp_path / "run", quiet=True)
    assert len(seen) == 5 and any(groups for groups, _ in seen)
    assert all(turns for groups, turns in seen if groups), f"(groups asked ahead, turns that engines have): {seen}"


def test_a_task_that_kills_engines_ends_on_the_dead_letter_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of one task kills whatever engine reads it. Its episodes fail by name, and all others are those of a
    run without it."""
    run = placed(Processes(engines=2, deaths=2), steps=2)
    main.run(replace(run, placement=Local()), out=tmp_path / "whole", quiet=True)
    rows = [r for r in run_reader.episode_files(tmp_path / "whole") if (r.stage, r.kind) == ("rl", "train")]
    first = step_format.from_columns(step_format.read_columns(rows[0].path))
    task = first[0].episode.task.id
    monkeypatch.setenv(POISON, " ".join(map(str, prompt_of(first[0].episode.segments[0]))))
    monkeypatch.setattr("posttrain.build.spawn_engines.EngineParts", DeadlyParts)
    main.run(run, out=tmp_path / "poisoned", quiet=True)
    rows = [r for r in run_reader.episode_files(tmp_path / "poisoned") if (r.stage, r.kind) == ("rl", "train")]
    found = step_format.from_columns(step_format.read_columns(rows[0].path))
    failed = [e.episode for e in found if e.episode.reward is None]
    assert {e.task.id for e in failed} == {task}
    assert all(e.verdicts[0].source == DEADLY and "2 engines died" in e.error for e in failed)
    others = {(e.episode.task.id, e.episode.sibling): e.episode for e in found if e.episode.task.id != task}
    assert others and all(
        np.array_equal(e.episode.segments[0].ids, others[(e.episode.task.id, e.episode.sibling)].segments[0].ids)
        for e in first
        if e.episode.task.id != task
    )
    note = next(n for s in run_reader.steps(tmp_path / "poisoned") for n in s.notes if n.startswith("dead letter"))
    assert f"task {task!r}, visit 0, sibling" in note and "2 engines died" in note


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty.start(tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_whose_engine_is_killed_is_healthy(staleness: int, model: Path, tmp_path: Path) -> None:
    """The run in which faults between learner and engines are planted (tests/prove/test_trust.py), without them."""
    run = faulty.smallest(FAULTS["dead_engine_counted_twice"], model, tmp_path, steps=6, staleness=staleness)
    posttrain.run(run, out=tmp_path / "healthy", quiet=True)
    steps = run_reader.steps(tmp_path / "healthy")
    assert [s.index for s in steps] == [*range(1, 7)]
    assert sum(s.clock["engine/deaths"] for s in steps) == 1
    assert not [n for s in steps for n in s.notes if n.startswith("rule ")]


def test_an_adapter_reaches_engines_elsewhere(tmp_path: Path) -> None:
    """The base weights are in the process; each push brings the adapter alone."""
    words = mine(tmp_path / "mine")
    play(tmp_path / "run", *words, f"model={model_at(tmp_path / 'model')}", "model.lora.rank=2", "placement=processes")
    assert moved(tmp_path / "run")


def prompt_of(segment: Segment) -> list[int]:
    return [int(i) for i in segment.ids[: int(np.argmax(segment.mask))]]
