"""The comparison of digests sees what changed, and nothing else; two takes of one run are equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.config.overrides import apply
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.recipe.recipes import RECIPES
from scripts import digests
from scripts.digests import Difference, Play, compare, play, told

BEFORE = {
    "recipe/a/0": {"record/rl/gauge/loss": ["1:aa", "2:bb"], "kept/rl/w": ["cc"]},
    "recipe/a/1": {"kept/rl/w": ["dd"]},
}


def changed(**parts: list[str]) -> dict[str, digests.Parts]:
    return {**BEFORE, "recipe/a/0": {**BEFORE["recipe/a/0"], **{n.replace("__", "/"): x for n, x in parts.items()}}}


def test_equal_takes_do_not_differ() -> None:
    assert compare(BEFORE, json.loads(json.dumps(BEFORE))) == []


def test_a_difference_is_named_by_run_part_and_step() -> None:
    after = changed(record__rl__gauge__loss=["1:aa", "2:xx"])
    assert compare(BEFORE, after) == [Difference("recipe/a/0", "record/rl/gauge/loss", "differs at 2")]
    assert list(told(compare(BEFORE, after))) == ["recipe/a/0: 1 parts", "  record/rl/gauge/loss differs at 2"]
    assert [d.how for d in compare(BEFORE, changed(record__rl__gauge__loss=["1:aa"]))] == ["has 1 entries, had 2"]


def test_what_is_new_or_gone_differs() -> None:
    after = changed(record__rl__gauge__more=["1:ee"])
    assert [(d.part, d.how) for d in compare(BEFORE, after)] == [("record/rl/gauge/more", "is new")]
    assert [(d.part, d.how) for d in compare(after, BEFORE)] == [("record/rl/gauge/more", "is gone")]
    assert [(d.run, d.how) for d in compare(BEFORE, {"recipe/a/0": BEFORE["recipe/a/0"]})] == [
        ("recipe/a/1", "is gone")
    ]


def test_a_rename_is_honoured_and_hides_no_other_change() -> None:
    after = {
        "recipe/a/0": {"record/rl/gauge/objective": ["1:aa", "2:bb"], "kept/rl/w": ["cc"]},
        "recipe/a/1": BEFORE["recipe/a/1"],
    }
    renamed = {"gauge/loss$": "gauge/objective"}
    assert compare(BEFORE, after, renamed) == []
    after["recipe/a/0"]["record/rl/gauge/objective"] = ["1:aa", "2:xx"]
    assert [d.part for d in compare(BEFORE, after, renamed)] == ["record/rl/gauge/objective"]


def test_what_is_intended_is_said_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after = changed(kept__rl__w=["xx"], record__rl__gauge__loss=["1:xx", "2:bb"])
    found = compare(BEFORE, after, {}, {"* kept/*": "another initial scale"})
    assert [(d.part, d.why) for d in found] == [("kept/rl/w", "another initial scale"), ("record/rl/gauge/loss", "")]
    for name, data in (("before", BEFORE), ("after", after)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    command = ["digests", "compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")]
    monkeypatch.setattr("sys.argv", command)
    assert digests.main() == 1
    monkeypatch.setattr("sys.argv", [*command[:2], command[2], command[2]])
    assert digests.main() == 0


@pytest.mark.prove
def test_a_run_leaves_the_same_digests_twice_and_others_with_another_seed(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(digests.REWARDS)
    small = (
        "model.hidden=16",
        "model.heads=2",
        "model.kv_heads=1",
        "model.ffn=16",
        "rl.prompts=2",
        "rl.siblings=2",
        "rl.steps=1",
    )
    one = Play(
        "one",
        "arithmetic",
        ("sft.steps=1", "sft.batch=2", *small, "env.heldout=2", "evaluation.samples=1", "env.rewards={rewards}:spread"),
    )
    first, second = play(one, tmp_path), play(one, tmp_path)
    assert "stopped" not in first and compare({"one": first}, {"one": second}) == []
    other = compare({"one": first}, {"one": play(replace(one, words=(*one.words, "seed=5")), tmp_path)})
    assert {d.part.split("/")[0] for d in other} >= {"kept", "record", "episodes"}


def test_the_first_steps_of_each_recipe_are_settings_that_it_has() -> None:
    for one in digests.recipes():
        words = [w for w in one.words if "{" not in w]
        cut = apply(RECIPES[one.recipe].build(), words).stages
        assert {s.steps for s in cut if not isinstance(s, StepLabeling)} == {3}, one.name


def test_a_run_that_is_refused_says_so(tmp_path: Path) -> None:
    parts = play(Play("none", "arithmetic", ("rl.siblings=1",)), tmp_path)
    assert list(parts) == ["stopped"] and "siblings=1" in parts["stopped"][0]
