"""Our sides of the benchmarks still start and play: they build the library's parts themselves, and nothing else would
tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import grpo_work, head
from benchmarks.side import ROOT, Worker

SMALL = grpo_work.Size(hidden=32, layers=1, heads=2, kv_heads=2, ffn=64, search=1, tries=1, repeats=1)


def side(script: str, job: str, folder: Path, *more: str) -> Worker:
    return Worker(script, [sys.executable, str(ROOT / "benchmarks" / script), job, *more], 1, folder / "err")


@pytest.mark.parametrize("regime", ["equal", pytest.param("heavy", marks=pytest.mark.prove)])
def test_grpo_step_takes_steps_of_the_forced_lengths(tmp_path: Path, regime: str) -> None:
    grpo_work.save_checkpoint(SMALL, tmp_path)
    wanted = int(grpo_work.lengths_PG(regime, 2).sum())
    with side("grpo_ours.py", grpo_work.Job(str(tmp_path), regime, 2, 1).dump(), tmp_path) as ours:
        assert ours.listen()["ready"]
        for _ in range(4):
            told = ours.timed(do="step")
            assert told["spoken"] == wanted and 0 < max(told["roles"].values()) <= told["seconds"]


@pytest.mark.parametrize(
    ("do", "regime"),
    [
        ("ours", "heavy"),
        pytest.param("siblings", 32, marks=pytest.mark.prove),
        pytest.param("turns", 93, marks=pytest.mark.prove),
    ],
)
def test_rollout_plays(tmp_path: Path, do: str, regime: str | int) -> None:
    grpo_work.save_checkpoint(SMALL, tmp_path, 1024)
    job = {"checkpoint": str(tmp_path), "threads": 1, "slots": 4, "context": 1024, "options": {}}
    with side("rollout_ours.py", json.dumps(job), tmp_path) as ours:
        assert ours.listen()["load_seconds"] > 0
        told = ours.timed(do=do, regime=regime, requests=6, salt=1)
        assert told["spoken"] > 0 and told["seconds"] > 0 and told["extra"]["gauges"]["engine/positions_linear"]


@pytest.mark.parametrize(
    ("regime", "other"),
    [("heavy", "naive"), ("half", "unshared"), pytest.param("half", "naive", marks=pytest.mark.prove)],
)
def test_a_learners_step_has_the_gradient_of_another(tmp_path: Path, regime: str, other: str) -> None:
    grpo_work.save_checkpoint(SMALL, tmp_path)
    norms, shared = dict[str, float](), dict[str, float]()
    for name in ("ours", other):
        job = grpo_work.Job(str(tmp_path), regime, 2, 1, share=name == "ours").dump()
        with side("learner_side.py", name, tmp_path, job) as one:
            told = [one.timed(do="step", micro=3) for _ in range(2)]
            assert told[1]["process_seconds"] > 0 and told[1]["peak_mb"] >= told[1]["before_mb"] > 0
            norms[name], shared[name] = told[0]["norm"], told[1]["extra"].get("learner/shared", 0)
    assert norms["ours"] == pytest.approx(norms[other], rel=1e-3)
    assert shared["ours"] > 0 == shared[other]
    if regime == "half":
        assert 1 / (1 - shared["ours"]) == pytest.approx(2 * 16 / 17)


def test_the_head_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["head.py", "--quick"])
    head.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert {(x["vocabulary"], x["form"]) for x in told} == {(v, f) for v in (258, 20_000) for f in ("torch", "naive")}
    assert all(x["forward_backward"] > x["forward"] > 0 and x["peak_mib"] > 0 for x in told)
