"""What is said of judged data that can be read and still may teach something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.config.run import Env
from posttrain.core.abilities import LintFinding
from posttrain.environment.make import environment
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.evaluation.check_environment import check


def env(tmp_path: Path, rows: list[Any], heldout: int = 0, **args: Any) -> PromptsEnv:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    built = environment(Env(name="prompts", prompts=str(path), heldout=heldout, args=args), 0)
    assert isinstance(built, PromptsEnv)
    return built


def found(built: PromptsEnv, **about: Any) -> dict[str, LintFinding]:
    return {f.name: f for f in built.lint(**about)}


def pair(i: int, chosen: str, rejected: str, prompt: str = "") -> dict[str, str]:
    return {"prompt": prompt or f"p{i}", "chosen": chosen, "rejected": rejected}


def test_healthy_pairs_warn_of_nothing(tmp_path: Path) -> None:
    rows = [pair(i, f"right {i}" + " x" * (i % 2), f"wrong {i}" + " x" * ((i + 1) % 2)) for i in range(40)]
    seen = found(env(tmp_path, rows, heldout=8), length=lambda task, text: len(text), context=100)
    assert not [f.name for f in seen.values() if f.warns]
    assert "0.500 [0.35" in seen["length bias"].seen and "of 40 pairs (40 prompts)" in seen["length bias"].seen


def test_the_longer_side_is_chosen(tmp_path: Path) -> None:
    seen = found(env(tmp_path, [pair(i, "a long answer", "short") for i in range(30)]))["length bias"]
    assert seen.warns and seen.seen.startswith("the chosen side is the longer one in 1.000 [0.886, 1.000]")
    few = found(env(tmp_path, [pair(i, "a long answer", "short") for i in range(5)]))["length bias"]
    assert not few.warns


def test_pairs_that_differ_in_spaces_and_pairs_that_contradict(tmp_path: Path) -> None:
    rows = [pair(0, "Yes", "yes "), pair(1, "a", "b"), pair(2, "b", "a"), pair(1, "b", "a")]
    seen = found(env(tmp_path, rows))
    assert seen["identical pairs"].seen.startswith("1 of 4 pairs") and seen["identical pairs"].warns
    assert (
        seen["contradictory pairs"].seen.startswith("2 of 4 pairs")
        and "rows.jsonl:2" in seen["contradictory pairs"].seen
    )


def test_held_out_pairs_that_are_trained_on(tmp_path: Path) -> None:
    rows = [pair(i, f"right {i}", f"wrong {i}") for i in range(40)]
    assert not found(env(tmp_path, rows, heldout=8))["duplicates across the split"].warns
    for words in ("P{}", " p{}", "p{} ", "P{} "):  # each prompt in four more spellings: some are on the other side
        rows += [pair(i, f"Right  {i}", f"wrong {i}", words.format(i)) for i in range(40)]
    assert found(env(tmp_path, rows, heldout=20))["duplicates across the split"].warns


def test_the_same_long_pair_after_another_prompt(tmp_path: Path) -> None:
    answers = [(f"right {i} {'x ' * 30}", f"wrong {i}") for i in range(40)]
    rows = [pair(0, *answer, f"{words} {i}") for words in ("ask", "tell me") for i, answer in enumerate(answers)]
    assert found(env(tmp_path, rows, heldout=20))["duplicates across the split"].warns
    short = [{**row, "chosen": "yes", "rejected": "no"} for row in rows]
    assert not found(env(tmp_path, short, heldout=20))["duplicates across the split"].warns


def test_one_side_over_the_context(tmp_path: Path) -> None:
    rows = [pair(0, "a" * 50, "b"), pair(1, "a", "b"), pair(2, "a" * 50, "b" * 50)]
    seen = found(env(tmp_path, rows), length=lambda task, text: len(str(task.prompt)) + len(text), context=20)
    assert (
        seen["one side over the context"].seen.startswith("1 of 3 pairs")
        and "rows.jsonl:1" in seen["one side over the context"].seen
    )


def test_labels_of_one_class(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "completion": "a", "label": True} for i in range(3)]
    assert found(env(tmp_path, rows))["labels"].warns
    assert not found(env(tmp_path, [*rows, {**rows[0], "prompt": "q", "label": False}]))["labels"].warns


def test_the_command_looks_at_judged_data_alone(tmp_path: Path) -> None:
    rows = [pair(i, "a long answer", "short") for i in range(30)] + [pair(99, "x", "x")]
    built = env(tmp_path, rows, heldout=5, leave_out="identical")
    report = check(built)
    assert (report.passed and report.tasks == 30 and set(report.marked(report.findings[-1].mark))) or report.findings
    marks = {f.probe: f.mark.value for f in report.findings}
    assert marks["length bias"] == "warn" and marks["left out"] == "warn" and "gold" not in marks
