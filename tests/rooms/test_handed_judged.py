"""Judged rows that a Python program has in memory: they reach the stages that learn from judgements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.core import reader
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.judgements import Pair
from posttrain.core.preference_ladder import DPO, KTO, ODPO, TPO
from posttrain.core.preference_stage import Preference
from posttrain.core.reward_model import RewardModel
from posttrain.core.run import Env, Optimizer, Run
from posttrain.core.stage import Stage
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
    from dataclasses import replace

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
        assert len([s for s in reader.steps(folder) if s.stage == "learn"]) == 2
        digests.append(reader.record_digest(folder))
    assert len({*digests}) == 1


@pytest.mark.prove
def test_a_run_goes_on_with_the_rows_that_it_keeps(tmp_path: Path) -> None:
    posttrain.run(built(GIVEN["pairs"][1]), env=posttrain.prompts(PAIRS), out=tmp_path / "a", quiet=True)
    posttrain.run("learn.steps=4", resume=tmp_path / "a", quiet=True)
    assert [s.index for s in reader.steps(tmp_path / "a") if s.stage == "learn"] == [1, 2, 3, 4]


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
        with posttrain.api.request.requested(
            built(GIVEN["pairs"][1]), ["env.heldout=0"], posttrain.api.request.RunOptions(handed=handed(data))
        ) as request:
            (env,) = request.environments
            import numpy as np

            drawn = env.abilities.judgements.draw(env.train.task(0), "pair", np.random.default_rng(0))
            assert isinstance(drawn, Pair) and drawn.rejected == "no" and drawn.task.prompt == tuple(asked)


def handed(data: Any) -> Any:
    from posttrain.api.handed import HandedObjects

    return HandedObjects(env=data)


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
