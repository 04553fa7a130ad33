"""Labels of steps as PRM800K, Math-Shepherd and ProcessBench write them; judged rows in every kind of file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.config.run import Env
from posttrain.core.judgements import Pair, StepLabels
from posttrain.environment.make import environment
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.system.errors import DataError


def env(path: Path, **args: Any) -> PromptsEnv:
    built = environment(Env(name="prompts", prompts=str(path), heldout=0, args=args), 0)
    assert isinstance(built, PromptsEnv)
    return built


def rows(tmp_path: Path, data: list[Any], **args: Any) -> PromptsEnv:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in data))
    return env(path, **args)


def steps(built: PromptsEnv, row: int = 0) -> StepLabels:
    assert built.abilities.judgements is not None
    found = built.abilities.judgements.draw(built.rows[row].task, "steps", np.random.default_rng(0))
    assert isinstance(found, StepLabels)
    return found


def done(text: str, rating: int | None) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": False}


PRM = {
    "labeler": "x",
    "question": {"problem": "1+1?", "ground_truth_answer": "2"},
    "label": {
        "steps": [
            {"completions": [done("So.", 0), done("No.", -1)], "human_completion": None, "chosen_completion": 0},
            {"completions": [done("Bad.", -1)], "human_completion": done("Good.", None), "chosen_completion": None},
            {"completions": [done("It is 3.", -1)], "human_completion": None, "chosen_completion": None},
        ],
        "finish_reason": "found_error",
    },
}
SHEPHERD = {
    "input": "1+1+1? Step 1: 1+1=2 ки\nStep 2: 2+1=4 ки",
    "label": "1+1+1? Step 1: 1+1=2 +\nStep 2: 2+1=4 -",
    "task": "GSM8K",
}
BENCH = {"id": "gsm8k-0", "problem": "1+1?", "steps": ["a", "b", "c"], "label": 1, "final_answer_correct": False}


def test_prm800k(tmp_path: Path) -> None:
    found = steps(rows(tmp_path, [PRM]))
    assert found.task.prompt == "1+1?" and dict(found.task.info) == {"labeler": "x"}
    assert found.steps == ("So.", "Good.", "It is 3.") and found.labels == (0, 1, -1)


def test_a_path_of_prm800k_ends_before_a_step_without_a_label(tmp_path: Path) -> None:
    given = [{"completions": [done(t, r)], "chosen_completion": 0} for t, r in (("a", 1), ("b", None), ("c", -1))]
    found = steps(rows(tmp_path, [{**PRM, "label": {"steps": given}}]))
    assert found.steps == ("a",) and found.labels == (1,)


def test_prm800k_alone_has_a_neutral_zero(tmp_path: Path) -> None:
    label = {"steps": [{"completions": [done("So.", 0)], "chosen_completion": 0}]}
    assert steps(rows(tmp_path, [{**PRM, "label": label}])).labels == (0,)


def test_math_shepherd(tmp_path: Path) -> None:
    found = steps(rows(tmp_path, [SHEPHERD]))
    assert found.task.prompt == "1+1+1?" and found.labels == (1, -1)
    assert found.steps == ("Step 1: 1+1=2", "Step 2: 2+1=4") and dict(found.task.info) == {"task": "GSM8K"}


def test_processbench(tmp_path: Path) -> None:
    built = rows(tmp_path, [BENCH, {**BENCH, "id": "gsm8k-1", "label": -1}, {**BENCH, "id": "gsm8k-2", "label": 0}])
    assert [steps(built, i).labels for i in range(3)] == [(1, -1), (1, 1, 1), (-1,)]
    assert steps(built, 0).task.id == "gsm8k-0" and steps(built, 0).task.info["steps"] == ["a", "b", "c"]


WRONG = [
    ({**PRM, "label": {"steps": []}}, "no step has a rating"),
    ({**PRM, "label": {"steps": [{"completions": [done("a", 7)]}]}}, "rating of .* is 7, wanted -1, 0 or 1"),
    ({**PRM, "label": {"steps": [{"completions": [done("a", 1)], "chosen_completion": 3}]}}, "is 3, and there are 1"),
    ({**PRM, "label": {"steps": [{"completions": []}]}}, "has no completion"),
    ({**PRM, "label": {"steps": ["a"]}}, "is text, wanted an object"),
    ({**PRM, "question": {"problem": ""}}, "question.problem"),
    ({**SHEPHERD, "label": SHEPHERD["label"].replace("+", "?")}, "they part at step 1 of 2"),
    ({**SHEPHERD, "label": SHEPHERD["label"].replace("2+1=4", "2+1=3")}, "part at step 2 of 2"),
    ({**SHEPHERD, "label": SHEPHERD["label"][:-1]}, "part at step 2 of 2"),
    ({**SHEPHERD, "label": SHEPHERD["label"] + " more"}, "end differently"),
    ({"input": "a ки", "label": "a +"}, "no problem before 'Step 1:'"),
    ({**BENCH, "label": 3}, "is 3, wanted the index of the first wrong step of 3"),
    ({**BENCH, "steps": ["a", ""]}, r"steps\[1\]"),
    ({**BENCH, "problem": None}, "'problem' is missing"),
]


@pytest.mark.parametrize(("row", "message"), WRONG)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{message}"):
        rows(tmp_path, [row])


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=4),
    lambda v: (
        st.lists(v, max_size=2)
        | st.dictionaries(
            st.sampled_from(["problem", "steps", "completions", "rating", "text", "chosen_completion"]), v, max_size=4
        )
    ),
    max_leaves=10,
)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(["prm800k", "math_shepherd", "processbench"]),
    row=st.dictionaries(st.sampled_from(["question", "label", "input", "problem", "steps"]), junk, max_size=5),
)
def test_any_row_is_read_or_refused_in_a_sentence(tmp_path: Path, form: str, row: Any) -> None:
    try:
        found = steps(rows(tmp_path, [row], judged=form))
    except DataError as error:
        assert str(error).startswith(str(tmp_path))
        return
    assert len(found.steps) == len(found.labels) > 0


PAIRS = [
    {"prompt": [{"role": "user", "content": f"q{i}"}], "chosen": [{"role": "assistant", "content": f"yes {i}"}],
     "rejected": [{"role": "assistant", "content": f"no {i}"}], "margin": float(i)}
    for i in range(4)
]  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"pairs.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(r) for r in PAIRS))
    elif kind == "json":
        path.write_text(json.dumps(PAIRS))
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list(PAIRS)
        data.to_parquet(str(path)) if kind == "parquet" else data.save_to_disk(str(path))
    built = env(path)
    assert built.abilities.judgements is not None
    found = built.abilities.judgements.draw(built.rows[2].task, "pair", np.random.default_rng(0))
    assert isinstance(found, Pair) and (found.chosen, found.rejected, found.margin) == ("yes 2", "no 2", 2.0)
    assert found.place.endswith(("pairs.jsonl:3", f"pairs.{kind} row 3"))
