"""The list of recipes, and the two that take any model and any data used one after the other as a user would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import posttrain
from posttrain.cli import main
from posttrain.recipe.recipes import KINDS, RECIPES, listed, of, recipe
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError

SHORT = ("slots=16", "env.heldout=2", "evaluation.samples=1")


def test_the_list_has_every_recipe_once_and_under_its_kind() -> None:
    lines = listed().splitlines()
    assert sorted(line.split()[0] for line in lines if re.match(r"  \w+ +[\d.]+ min ", line)) == sorted(RECIPES)
    assert [r for kind in KINDS for r in of(kind)] == list(RECIPES.values())
    assert all(r.name == name and r.shows and r.minutes > 0 and r.reaches for name, r in RECIPES.items())


def test_what_takes_any_data_takes_prompts_and_what_is_a_tutorial_draws_its_tasks() -> None:
    assert all((recipe(r.name).env.name == "prompts") == (r.kind == "yours") for r in RECIPES.values())


def test_the_list_is_printed_where_no_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert listed() in capsys.readouterr().err
    assert main(["run", "--help"]) == 0
    assert listed() in capsys.readouterr().out


def test_an_unknown_recipe_is_told_the_nearest_and_which_are_for_what() -> None:
    with pytest.raises(
        ConfigError, match=r"did you mean 'grpo'\?.* sft, grpo, verifiable, dpo, reward_model take your model and data"
    ):
        recipe("grop")


def test_recipes_are_data() -> None:
    code = (
        "import sys, posttrain.recipe.recipes; "
        "print(sorted({m.split('.')[1] for m in sys.modules if m.startswith('posttrain.')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['config', 'core', 'ladder', 'recipe', 'system']"


def test_a_model_is_taught_by_sft_and_goes_on_with_grpo(tmp_path: Path) -> None:
    """Each with data of the user's; the second with the user's model and reward."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "completion": str(n + 1)} for n in range(10, 30)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def reward(task, text):\n    return len(set(text)) / 10\n")
    prompts = f"env.prompts={tmp_path}/mine.jsonl"
    taught = posttrain.run("sft", prompts, *SHORT, "sft.steps=2", "sft.batch=8", out=tmp_path / "sft", quiet=True)
    assert taught.accuracy is not None
    model = posttrain.export(taught.folder, tmp_path / "model")
    words = (f"model={model}", prompts, f"env.rewards={tmp_path}/mine.py:reward", *SHORT)
    sizes = ("rl.steps=2", "rl.prompts=2", "rl.siblings=4", "rl.sampling.max_tokens=8")
    done = posttrain.run("grpo", *words, *sizes, out=tmp_path / "grpo", quiet=True)
    steps = [s for s in run_reader.steps(done.folder) if s.stage == "rl"]
    assert len(steps) == 2 and steps[0].gauges["reward/reward"].count == 8 and done.run.model.context is None
