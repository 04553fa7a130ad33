"""`posttrain eval` of a reward model: agreement, calibration and length of its scores of judged completions."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.api.reward_transfer import transfer
from posttrain.build.build_reward_models import reward_policy
from posttrain.cli import main
from posttrain.config.env import Env
from posttrain.config.run import Optimizer, Run, Supervised
from posttrain.core import abilities
from posttrain.core.judgements import Label
from posttrain.engine.learner.learner import HFLearner
from posttrain.environment.make import environment
from posttrain.environment.templates.renderer import Renderer
from posttrain.evaluation.reward_report import evaluate_reward_model, is_reward_model
from posttrain.stages.preference.judged_batches import AgreementReport, batch_of
from posttrain.stages.reward_model.reward_model_batches import ScoredJudgements
from posttrain.system.errors import ConfigError
from tests.role.reward_parts import reward_run
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
    assert main(["summary", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "of held-out pairs as judged" in said and "held-out accuracy" not in said, "no table of dashes"
    assert main(["plot", str(tmp_path / "run"), "--out", str(tmp_path / "plot.svg")]) == 0
    assert "ranking/loss" in (tmp_path / "plot.svg").read_text()
    assert main(["plot", str(tmp_path / "run"), "--gauge", "eval/accuracy", "--out", str(tmp_path / "p.svg")]) == 2
    assert "did you mean 'eval/accuracy'" not in capsys.readouterr().err
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert "their held-out share of pairs ordered as judged is between" in " ".join(capsys.readouterr().out.split())


def test_the_average_of_its_weights_is_scored(tmp_path: Path) -> None:
    run = replies()
    posttrain.run(run, "rm.optimizer.ema=0.9", out=tmp_path / "run", quiet=True)
    assert main(["eval", str(tmp_path / "run"), "--ema"]) == 0
    one, two = (evaluate_reward_model(tmp_path / "run", ema=on) for on in (False, True))
    assert one.calibration != two.calibration
    # The run measured its weights, so that figure is not in the card of the average.
    cards = [posttrain.export(tmp_path / "run", tmp_path / f"{on}", ema=on) / "README.md" for on in (False, True)]
    assert ["was not measured" in card.read_text() for card in cards] == [False, True]


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


def imitation(**changes: Any) -> Run:
    """A policy that was shown a few replies; tiny, so it says anything."""
    sft = Supervised(name="sft", style="reply", eval=False, optimizer=Optimizer(lr=5e-3), batch=16, **changes)
    return replace(replies(), stages=(sft,))


def test_transfer_is_the_agreement_on_what_each_policy_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two policies, a run and a model directory: what one finds by scoring every answer alone, pair by pair."""
    posttrain.run(replies(), out=tmp_path / "rm", quiet=True)
    posttrain.run(imitation(steps=60), out=tmp_path / "one", quiet=True)
    posttrain.run(imitation(steps=120, wrong=1.0), out=tmp_path / "two", quiet=True)
    posttrain.export(tmp_path / "two", tmp_path / "model")
    how: dict[str, Any] = {"samples": 4, "max_tokens": 16}
    one, two = transfer(tmp_path / "rm", [tmp_path / "one", tmp_path / "model"], **how)
    assert 0 < one.agreement.mean < 1 and one.agreement.low < one.agreement.mean < one.agreement.high
    assert one.answers + one.left_out == two.answers + two.left_out == 4 * 40
    assert one.worth != two.worth and one.agreement.prompts <= 40

    world = environment(replies().env, 0)
    utility = abilities.judgements(world).utility
    policy = reward_policy(tmp_path / "rm")
    tokenizer: Any = policy.tokenizer
    learner, renderer = HFLearner(policy), Renderer(tokenizer, policy.stop_ids, policy.context)
    shares: list[float] = []
    for g in posttrain.evaluate(tmp_path / "one", quiet=True, **how).groups:
        told: list[tuple[float, float]] = []
        for e in g.episodes:
            if e.text.strip() and not e.stop.cut:
                alone = batch_of([Label(task=g.task, completion=e.text, good=True)], renderer, policy.context)
                assert utility is not None
                told.append((utility(g.task, e.text), float(learner.rewards(alone)[0])))
        pairs = [
            (b, a) if a[0] < b[0] else (a, b) for a, b in itertools.combinations(told, 2) if abs(a[0] - b[0]) > 1e-9
        ]
        if pairs:
            shares.append(float(np.mean([0.5 * (np.sign(a[1] - b[1]) + 1) for a, b in pairs])))
    assert len(shares) == one.agreement.prompts and one.agreement.mean == pytest.approx(np.mean(shares), abs=1e-6)

    words = ["eval", str(tmp_path / "rm"), "--answers", str(tmp_path / "one"), "--samples", "4", "--max-tokens", "16"]
    assert main(words) == 0
    assert f"answers of {tmp_path / 'one'}: orders {one.agreement} of the pairs" in capsys.readouterr().out


def test_what_cannot_be_compared_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    posttrain.run(replies(), out=tmp_path / "rm", quiet=True)
    posttrain.run(imitation(steps=1), out=tmp_path / "one", quiet=True)
    with pytest.raises(ConfigError, match="sample 2 at least"):
        transfer(tmp_path / "rm", [tmp_path / "one"], samples=1)
    with pytest.raises(ConfigError, match="no two of its answers to a prompt are worth different things"):
        transfer(tmp_path / "rm", [tmp_path / "one"], samples=2, max_tokens=1)
    assert main(["eval", str(tmp_path / "one"), "--answers", str(tmp_path / "one")]) == 2
    assert "--answers is about a reward model" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "rm"), "--samples", "2"]) == 2
    assert "name a policy whose answers are scored" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "rm"), "--temperature", "0"]) == 2
    assert "leave --temperature out" in capsys.readouterr().err


def test_a_model_that_scores_by_the_truth_agrees_with_it() -> None:
    """Agreement 1 of the worth itself, 0 of its negative, .5 of a constant; a prompt of equal answers has no pair."""
    worth, unit = np.array([0.1, 0.4, 0.4, 0.9, 0.3, 0.3]), np.array([0, 0, 0, 1, 1, 2])
    found = [AgreementReport.of(score, worth, unit) for score in (worth, -worth, 0 * worth)]
    assert [(f.accuracy.mean, f.accuracy.prompts) for f in found if f is not None] == [(1, 2), (0, 2), (0.5, 2)]


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
