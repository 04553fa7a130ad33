"""Every shipped recipe whose groups come from a queue of bound 0 is the recipe as shipped, by digest: weights,
optimizer, record, episodes and results of the first steps of each of its stages.

Left out are the engine's counters: in a step without a queue they are the engine's own, else those of the groups.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.config.run import Reinforce
from posttrain.recipe.recipes import RECIPES
from scripts.digests import REWARDS, Parts, Play, play, recipes
from tests.late import through_the_queue

pytestmark = pytest.mark.prove

SAMPLED = {name for name, r in RECIPES.items() if any(isinstance(s, Reinforce) for s in r.build().stages)}
PLAYS = {p.name.split("/")[1]: p for p in recipes() if p.name.endswith("/0")}


def taken(one: Play, scratch: Path) -> Parts:
    """Digests of everything the run leaves but the engine's counters."""
    found = {part: told for part, told in play(one, scratch).items() if "/gauge/engine/" not in part}
    assert "stopped" not in found, found["stopped"]
    return found


@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_a_recipe_through_a_queue_of_bound_0_is_the_recipe(name: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    shipped = taken(PLAYS[name], tmp_path)
    with through_the_queue() as made:
        queued = taken(PLAYS[name], tmp_path)
    assert made, "its groups came from a queue"
    assert {"record", "episodes", "result", "checkpoints"} <= {part.split("/")[0] for part in shipped}
    assert {part for part in shipped.keys() | queued.keys() if shipped.get(part) != queued.get(part)} == set()


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    """The comparison means something."""
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    one = PLAYS["grpo"]
    other = replace(one, words=tuple("seed=1" if w == "seed=0" else w for w in one.words))
    first, second = taken(one, tmp_path), taken(other, tmp_path)
    assert {part for part in first if first[part] != second.get(part)}
