"""`posttrain eval` of a reward model: agreement, calibration and length of its scores of judged completions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reward_parts import reward_run

import posttrain
from posttrain.api.reward_report import evaluate_reward_model, is_reward_model
from posttrain.cli import main
from posttrain.core.env import Env
from posttrain.core.errors import ConfigError
from posttrain.core.run import Run
from posttrain.role.ranked import ScoredJudgements
from tests.tiny import only_rl, tiny_run

pytestmark = pytest.mark.prove


def replies() -> Run:
    """A reward model on the world with a planted taste."""
    return replace(reward_run(steps=6), env=Env(name="replies", args={"numbers": 2}, heldout=40))


def file_of(folder: Path, rows: int = 30) -> Path:
    """Pairs in which the chosen completion is the longer one."""
    path = folder / "pairs.jsonl"
    pairs = [{"prompt": f"<{i},7>", "chosen": "hi 7 ty", "rejected": "7"} for i in range(8, 8 + rows)]
    path.write_text("".join(json.dumps(p) + "\n" for p in pairs))
    return path


def test_a_run_is_scored_on_its_held_out_judgements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agreement is the one that the run itself measured at its end."""
    done = posttrain.run(replies(), out=tmp_path / "run", quiet=True)
    report = evaluate_reward_model(tmp_path / "run")
    assert done.stages[0].agreement is not None
    assert report.agreement.mean == pytest.approx(done.stages[0].agreement[0]) and report.agreement.prompts == 40
    assert 0 <= report.calibration.error <= 1 and report.surface.removed["flattery"] == 0.0
    assert main(["eval", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert f"run: orders {report.agreement} of 40 pairs as they were judged (pair)" in said
    assert "expected calibration error" in said and "length alone, the longer the better" in said


def test_every_row_of_a_file_that_is_named_is_scored(tmp_path: Path) -> None:
    """Of a run and of the directory that it was exported to: the same figures."""
    posttrain.run(replies(), out=tmp_path / "run", quiet=True)
    path = file_of(tmp_path)
    one = evaluate_reward_model(tmp_path / "run", f"env.prompts={path}")
    posttrain.export(tmp_path / "run", tmp_path / "model")
    two = evaluate_reward_model(tmp_path / "model", f"env.prompts={path}")
    assert one.agreement.prompts == two.agreement.prompts == 30
    assert (one.longer.mean, two.longer.mean) == (1.0, 1.0)
    assert one.agreement == two.agreement and one.calibration.error == pytest.approx(two.calibration.error, abs=1e-5)


def test_flattery_is_counted_and_taken_out(tmp_path: Path) -> None:
    """Of pairs whose chosen side flatters, flattery alone tells all; what it explains of the scores is said."""
    rows = [{"prompt": f"<{i},7>", "chosen": "7 ty you are right", "rejected": "7 hi ty"} for i in range(8, 28)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = replace(replies(), env=Env(name="prompts", prompts=str(tmp_path / "pairs.jsonl"), heldout=8))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    report = evaluate_reward_model(tmp_path / "run")
    assert report.flattering.mean == 1.0 and set(report.surface.removed) == {"length", "flattery"}
    assert "flattery" in "\n".join(report.surface.lines())


def test_what_holds_none_is_told(tmp_path: Path) -> None:
    posttrain.run(only_rl(tiny_run(steps=1)), out=tmp_path / "policy", quiet=True)
    posttrain.run(replies(), out=tmp_path / "run", quiet=True)
    posttrain.export(tmp_path / "run", tmp_path / "model")
    assert [is_reward_model(tmp_path / n) for n in ("policy", "run", "model", "none")] == [False, True, True, False]
    with pytest.raises(ConfigError, match="say which judged completions it is to score"):
        evaluate_reward_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="has no judged completions"):
        evaluate_reward_model(tmp_path / "run", "env=calculator")
    assert main(["eval", str(tmp_path / "model"), "env=replies", "--samples", "4"]) == 2


def test_pairs_are_those_inside_a_unit_that_were_judged_differently() -> None:
    """A ranking of three has three pairs; completions of no unit have none."""
    x = np.zeros(6)
    found = ScoredJudgements(x, np.array([2.0, 1.0, 0.0, 1.0, 1.0, 0.0]), x, x, np.array([0, 0, 0, 1, 1, -1]))
    better, worse = found.pairs()
    assert list(zip(better.tolist(), worse.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2)]
