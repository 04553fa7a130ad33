"""Digests of tasks: what JSON cannot have is named before a run begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.build.weight_lineage import tasks_digest
from posttrain.core.abilities import Abilities
from posttrain.core.types import Task
from posttrain.system.errors import DataError


@pytest.mark.parametrize("board", [{(0, 1): "x"}, {1: "x", "row": 2}])
def test_a_task_with_keys_that_json_does_not_have_is_named(board: dict[Any, str]) -> None:
    world: Any = SimpleNamespace(abilities=Abilities(), heldout=[Task("h3", "2+2", "4", {"board": board})])
    assert tasks_digest(world), "without its info"
    with pytest.raises(DataError, match="task 'h3'.*Write them as texts"):
        tasks_digest(world, info=True)
