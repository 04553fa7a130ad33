"""The surface that users' commands and scripts depend on, frozen: every dotted path of the shipped recipes.

A path that disappears or changes its meaning breaks somebody's command. After an intended change, write the new one
with

    POSTTRAIN_UPDATE=1 python -m pytest tests/test_surface.py

and say in the change what users have to do.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from posttrain.config.overrides import address, surface
from posttrain.config.run import Run
from posttrain.ladder.both_ladders import LADDERS, algorithm_type, learns_from
from posttrain.recipe.recipes import RECIPES, recipe
from posttrain.system.dataclass_json import from_plain, to_plain

GOLDEN = Path(__file__).parent / "golden"
CHOICES = {kind: f"algorithm-{learns_from(kind)}" for kind in LADDERS}
"""The golden file with the algorithms of each ladder, their pieces and their numbers.

These are the same in every stage that learns from it, so they stand there once, and a new algorithm changes one file.
"""


@cache
def surfaces() -> dict[str, list[str]]:
    """The lines of each golden file: one for each recipe, and one for each ladder."""
    out: dict[str, list[str]] = {}
    for name in sorted(RECIPES):
        run, lines, inside = recipe(name), list[str](), dict[str, list[str]]()
        ladders = {s.name: CHOICES[kind] for s in run.stages if (kind := algorithm_type(type(s))) is not None}
        for path, valid in surface(run):
            stage, _, rest = path.partition(".")
            if stage not in ladders or rest.split(".")[0] != "algorithm":
                lines.append(f"{path} = {valid}")
                continue
            if rest == "algorithm":
                lines.append(f"{path} = the paths of surface-{ladders[stage]}.txt")
            inside.setdefault(stage, []).append(f"{rest} = {valid}")
        for stage, taken in inside.items():
            assert out.setdefault(ladders[stage], taken) == taken, (
                f"{name}: {stage} has other algorithms than its ladder"
            )
        out[name] = lines
    return out


@pytest.mark.parametrize("name", [*sorted(RECIPES), *CHOICES.values()])
def test_paths_are_what_they_were(name: str) -> None:
    now = "".join(f"{line}\n" for line in surfaces()[name])
    path = GOLDEN / f"surface-{name}.txt"
    if os.environ.get("POSTTRAIN_UPDATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(now)
    assert path.exists(), (
        f"no golden surface of {name}; write it with POSTTRAIN_UPDATE=1 python -m pytest {Path(__file__).name}"
    )
    before, after = path.read_text().splitlines(), now.splitlines()
    gone, new = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    assert not gone and not new, "the surface changed (POSTTRAIN_UPDATE=1 accepts it):\n" + "\n".join(
        [*(f"- {x}" for x in gone), *(f"+ {x}" for x in new)]
    )


def test_every_path_is_its_own_address() -> None:
    for run in map(recipe, RECIPES):
        for path, _ in surface(run):
            assert ".".join(address(run, path)) == path


def test_a_shipped_recipe_survives_json() -> None:
    for name in RECIPES:
        run = recipe(name)
        assert run.recipe == name and from_plain(Run, json.loads(json.dumps(to_plain(run)))) == run
