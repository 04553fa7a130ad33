"""Judged rows that a Python program has in memory: they reach the stages that learn from judgements."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.build.build_environments import make_environment
from posttrain.build.build_run import make_policy
from posttrain.config.run import Env, Optimizer, Run
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.core.judgements import Kind, Pair
from posttrain.environment.templates.renderer import Renderer
from posttrain.ladder.preference_rows import DPO, KTO, ODPO, TPO
from posttrain.record import run_reader
from posttrain.stages.preference.judged_batches import FittingTasks
from posttrain.system.errors import ConfigError, DataError
from tests.tiny import MODEL

SUMS = [(a, b) for a in range(4) for b in range(4)]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in SUMS]
MARGINS = [{**row, "margin": 1 + i % 3} for i, row in enumerate(PAIRS)]
LABELS = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b + wrong), "label": not wrong} for a, b in SUMS for wrong in (0, 1)
]
RANKED = [{"prompt": f"{a}+{b}=", "completions": [str(a + b), str(a + b + 1), "no"]} for a, b in SUMS]
RATED = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b), "ratings": {"helpfulness": a, "verbosity": b}} for a, b in SUMS
]
GIVEN: dict[str, tuple[list[dict[str, Any]], Stage]] = {
    "pairs": (PAIRS, Preference(name="learn", algorithm=DPO)),
    "margins": (MARGINS, Preference(name="learn", algorithm=ODPO)),
    "labels": (LABELS, Preference(name="learn", algorithm=KTO)),
    "rankings": (RANKED, Preference(name="learn", algorithm=TPO)),
    "a reward model of pairs": (PAIRS, RewardModel(name="learn")),
    "a reward model of rankings": (RANKED, RewardModel(name="learn", judgement="ranking")),
    "a reward model of ratings": (RATED, RewardModel(name="learn", judgement="rating", attributes=("helpfulness",))),
    "a reward model of labels": (LABELS, RewardModel(name="learn", judgement="label")),
}


def built(stage: Stage) -> Run:
    small: dict[str, Any] = {"steps": 2, "batch": 6, "optimizer": Optimizer(lr=1e-3, warmup=1), "checkpoint_every": 0}
    return Run(recipe="tiny", model=MODEL, env=Env(heldout=3), stages=(replace(stage, **small),), slots=8, threads=1)


def forms(rows: list[dict[str, Any]]) -> dict[str, Any]:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    return {"list": rows, "frame": pandas.DataFrame(rows), "data set": datasets.Dataset.from_list(rows)}


@pytest.mark.prove
@pytest.mark.parametrize("name", GIVEN)
def test_every_form_in_memory_gives_the_run_of_every_other(name: str, tmp_path: Path) -> None:
    """Lists of dicts, data frames and data sets train the same steps, and the rows stay in the run folder."""
    rows, stage = GIVEN[name]
    digests = []
    for form, given in forms(rows).items():
        folder = tmp_path / form
        posttrain.run(built(stage), env=posttrain.prompts(given), out=folder, quiet=True)
        assert len([s for s in run_reader.steps(folder) if s.stage == "learn"]) == 2
        digests.append(run_reader.record_digest(folder))
    assert len({*digests}) == 1


@pytest.mark.prove
def test_a_run_goes_on_with_the_rows_that_it_keeps(tmp_path: Path) -> None:
    posttrain.run(built(GIVEN["pairs"][1]), env=posttrain.prompts(PAIRS), out=tmp_path / "a", quiet=True)
    posttrain.run("learn.steps=4", resume=tmp_path / "a", quiet=True)
    assert [s.index for s in run_reader.steps(tmp_path / "a") if s.stage == "learn"] == [1, 2, 3, 4]


def test_columns_of_other_names_and_conversations(tmp_path: Path) -> None:
    """Names of columns are arguments; messages work in memory as in a file, in a data frame too."""
    asked = [{"role": "user", "content": "1+1="}]
    rows = [
        {
            "question": asked,
            "better": [{"role": "assistant", "content": str(n)}],
            "worse": [{"role": "assistant", "content": "no"}],
        }
        for n in range(6)
    ]
    for given in forms(rows).values():
        data = posttrain.prompts(given, prompt_column="question", chosen_column="better", rejected_column="worse")
        assert data.env.args == {"prompt_column": "question", "chosen_column": "better", "rejected_column": "worse"}
        with posttrain.build.request.run_request.requested(
            built(GIVEN["pairs"][1]),
            ["env.heldout=0"],
            posttrain.build.request.run_request.RunOptions(handed=handed(data)),
        ) as request:
            (env,) = request.environments
            import numpy as np

            drawn = env.abilities.judgements.draw(env.train.task(0), "pair", np.random.default_rng(0))
            assert isinstance(drawn, Pair) and drawn.rejected == "no" and drawn.task.prompt == tuple(asked)


def handed(data: Any) -> Any:
    from posttrain.build.request.user_objects import UserObjects

    return UserObjects(env=data)


@pytest.mark.prove
def test_what_is_wrong_is_said_with_its_row(tmp_path: Path) -> None:
    bad = [*PAIRS[:3], {**PAIRS[3], "rejected": PAIRS[3]["chosen"]}]
    with pytest.raises(DataError, match=r"row 4.*"):
        posttrain.run(built(GIVEN["pairs"][1]), env=posttrain.prompts(bad), out=tmp_path / "no", quiet=True)
    with pytest.raises(ConfigError, match="did you mean 'chosen_column'"):
        posttrain.prompts(PAIRS, chosen_colum="better")
    left = posttrain.prompts(bad, leave_out="identical")
    posttrain.run(
        built(GIVEN["pairs"][1]), "env.heldout=0", "learn.batch=3", env=left, out=tmp_path / "left", quiet=True
    )


def filed(folder: Path, rows: list[dict[str, Any]], stage: Stage, heldout: int = 0) -> Run:
    """The run of these rows in a file."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return replace(built(stage), env=Env(name="prompts", prompts=str(folder / "rows.jsonl"), heldout=heldout))


LONG = [*PAIRS[:4], {**PAIRS[4], "rejected": "7" * 80}, *PAIRS[5:9], {**PAIRS[9], "chosen": "8" * 61}, *PAIRS[10:]]
"""Rows 5 and 10 do not fit into a context of 64 tokens, each with one side alone."""
JUDGED = {"a preference stage": Preference(name="learn"), "a reward model": RewardModel(name="learn")}


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("heldout", [0, 15])
def test_a_completion_that_does_not_fit_is_refused_with_its_row(tmp_path: Path, name: str, heldout: int) -> None:
    """Before anything is written, in whichever split the row is."""
    run = filed(tmp_path, LONG, JUDGED[name], heldout)
    said = r"rows\.jsonl:(5|10): a completion with its prompt has (66|85) tokens, and the context is 64; it is one of 2"
    with pytest.raises(DataError, match=said) as refused:
        posttrain.run(run, out=tmp_path / "run", quiet=True)
    assert "learn.too_long=skip" in str(refused.value)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["a preference stage", "a reward model"])
def test_what_does_not_fit_is_left_out_whole_and_counted(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is the one of a file without these rows' tasks; held-out rows are left out of what is measured, too."""
    run = filed(tmp_path, LONG, replace(JUDGED[name], too_long="skip"))
    done = posttrain.run(run, out=tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "learn: 2 of 16 judgements are left out, because they do not fit into 64 tokens, such as:" in said
    assert "rows.jsonl:5: a completion with its prompt has" in said
    assert len(done.stages) == 1
    held = filed(tmp_path, LONG, replace(JUDGED[name], too_long="skip"), heldout=10)
    result = posttrain.run(held, out=tmp_path / "held", quiet=True).stages[0]
    assert result.agreement is not None


def test_tasks_that_fit_are_counted(tmp_path: Path) -> None:
    """By the row: of two sides one that is too long leaves out both; a source without end has none to look through."""
    run = filed(tmp_path, LONG, Preference(name="learn", too_long="skip"))
    with closing(make_environment(run)) as env:
        policy = make_policy(run, env)
        tokenizer: Any = policy.tokenizer
        renderer = Renderer(tokenizer, policy.stop_ids, policy.context)
        found = FittingTasks.of(env, "pair", renderer, 64)
        assert found is not None and (found.count, found.left_out, found.asked) == (14, 2, 16)
        assert {found.task(i).prompt for i in range(14)} == {
            r["prompt"] for i, r in enumerate(PAIRS) if i not in (4, 9)
        }
        none = FittingTasks.of(env, "pair", renderer, 3)
        assert none is not None and (none.count, none.left_out) == (0, 16)
        every = FittingTasks.of(env, "pair", renderer, 100)
        assert every is not None and (every.count, every.left_out, every.first) == (16, 0, "")
    with closing(make_environment(replace(run, env=Env(name="arithmetic", heldout=4)))) as world:
        assert FittingTasks.of(world, "pair", renderer, 3) is None


@pytest.mark.parametrize(("kind", "left_out"), [("pair", 3), ("label", 1)])
def test_every_completion_that_a_step_may_draw_has_to_fit(tmp_path: Path, kind: Kind, left_out: int) -> None:
    """A prompt with one wrong answer that fits, a right one that does, and a right one that is too long: a first draw
    of pairs may miss it, and a later one takes it. A label is about its own row."""
    texts = {s: ["no", str(sum(s)), f"{sum(s)}" + "!" * (80 if s == SUMS[2] else 1)] for s in SUMS}
    rows = [
        {"prompt": f"{a}+{b}=", "completion": text, "label": text != "no"} for (a, b) in SUMS for text in texts[a, b]
    ]
    run = filed(tmp_path, rows, Preference(name="learn", too_long="skip"))
    with closing(make_environment(run)) as env:
        policy = make_policy(run, env)
        tokenizer: Any = policy.tokenizer
        found = FittingTasks.of(env, kind, Renderer(tokenizer, policy.stop_ids, policy.context), 64)
        assert found is not None and (found.left_out, found.asked) == (left_out, len(rows))
        assert "rows.jsonl:9" in found.first, "the row that is too long"


@pytest.mark.prove
def test_what_may_teach_something_else_is_said_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lint of judged data, with the policy's own tokenizer: what is well is left out, but for the lengths."""
    rows = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b} is it", "rejected": "no"} for a, b in SUMS]
    posttrain.run(filed(tmp_path, rows, GIVEN["pairs"][1]), out=tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "note: length bias: the chosen side is the longer one in 1.000 [0.806, 1.000] of 16 pairs" in said
    assert "identical pairs" not in said and "duplicates across the split" not in said
    one = {**PAIRS[3], "prompt": PAIRS[2]["prompt"], "chosen": PAIRS[2]["rejected"], "rejected": PAIRS[2]["chosen"]}
    posttrain.run(filed(tmp_path, [*PAIRS, one], GIVEN["pairs"][1]), out=tmp_path / "two")
    assert "note: contradictory pairs: 2 of 17 pairs" in " ".join(capsys.readouterr().out.split())
