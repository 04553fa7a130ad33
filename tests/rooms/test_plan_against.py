"""Plans held to runs: what a run says and records, the comparison, and the notes of a run that leaves its plan."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.api import plan_against
from posttrain.cli import main
from posttrain.core.gauge import Step
from posttrain.record import run_reader

QUICK = ("model.layers=1", "env.heldout=0", "record_episodes=false", "rl.prompts=4", "rl.siblings=4", "threads=1",
         "rl.eval=false", "rl.eval_every=0", "sft=none", "rl.sampling.max_tokens=16")  # fmt: skip


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of some machine in a cache folder of its own."""
    told = {"memory": 2e10, "flops": 1e11, "bandwidth": 2e10, "latency": 1e-4, "accelerator": False,
            "date": "2026-11-28", "versions": "of a test"}  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "posttrain").mkdir()
    (tmp_path / "posttrain/machine.json").write_text(json.dumps(told))


def notes_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("note: ") and "posttrain plan --against" in line]


@pytest.mark.usefixtures("probed")
def test_a_run_beside_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy run says its prediction and nothing more; its record has the peaks of both phases of an optimizer step,
    and a plan reads its factors. Without figures no prediction is made."""
    run = tmp_path / "run"
    posttrain.run("verifiable", *QUICK, "rl.steps=21", out=run)
    told = capsys.readouterr().out
    assert "plan: rl takes at most" in told and not notes_of(told)
    line = next(s for s in run_reader.steps(run) if s.stage == "rl")
    assert 0 < line.memory["score"] <= line.memory["learn/passes"] <= line.memory["learn"]
    assert line.memory["learn/update"] <= line.memory["learn"]
    assert main(["plan", "--against", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {x["name"] for x in found["memory"]} == {"rollout", "score", "learn/passes", "learn/update", "learn", "sync"}
    assert {x["name"] for x in found["seconds"]} == {"rollout", "score", "learn", "sync", "step"}
    assert all(x["measured"] > 0 for x in found["seconds"]) and found["held"] > 1e8
    assert main(["plan", "--against", str(run)]) == 0
    assert "--calibrate" in capsys.readouterr().out
    assert main(["plan", "verifiable", *QUICK, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["seconds"]
    assert main(["plan", "verifiable", *QUICK, "--calibrate", str(run), "--json"]) == 0
    by = plan_against.factors_of(str(run), None)
    assert json.loads(capsys.readouterr().out)["seconds"]["learn"] == pytest.approx(plain["learn"] * by["learn"])


@pytest.mark.usefixtures("probed")
def test_a_run_that_leaves_its_plan_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From step 14 on each waits for a second, and after step 15 it keeps 1.8 GB: two notes, and none in the record."""
    kept, waits = list[np.ndarray](), threading.Semaphore(0)

    def reward(task: Any, text: str) -> float:
        if waits.acquire(blocking=False):
            time.sleep(1.05)
        return len(text) % 3 / 2

    def grow(step: Step) -> None:
        if step.index >= 13:
            waits.release()
        if step.index == 15:
            kept.append(np.ones(1_800_000_000, np.uint8))

    posttrain.run("verifiable", *QUICK, "rl.steps=20", rewards=reward, on_step=grow, out=tmp_path / "run")
    found = notes_of(capsys.readouterr().out)
    assert len(found) == 2, found
    assert "over a tenth" in found[0] and "times what its first steps" in found[1]
    assert not any("--against" in n for s in run_reader.steps(tmp_path / "run") for n in s.notes)
