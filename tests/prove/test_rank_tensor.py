"""Runs over ranks whose layers are cut by columns and rows (`--parallel tensor`): the run of one process, also where it
is cut and gone on with in another way; and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.api import main
from posttrain.config.run import Run
from posttrain.system.errors import ConfigError
from tests.killing import cut_run
from tests.over_ranks import BOUND, apart, drawn, is_that_of_one_process, run_of, same_bits
from tests.prove.test_rank_runs import STAGES

pytestmark = pytest.mark.prove

TENSOR: dict[str, Any] = {"nproc": 2, "parallel": "tensor"}
ROWS: dict[str, Any] = {"nproc": 2}
ALONE: dict[str, Any] = {}


def run_of_heads(**model: Any) -> Run:
    """The run of `run_of`, with heads of keys that two ranks can share."""
    return run_of({"kv_heads": 2} | model)


PARTS = drawn(["trained", "cut", "others"], 1)
"""What is played here."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("tensor") / "whole"
    main.run(run_of_heads(), out=folder, quiet=True)
    return folder


@pytest.mark.skipif("trained" not in PARTS, reason="not drawn")
def test_columns_and_rows_train_to_what_one_process_comes_to(whole: Path, tmp_path: Path) -> None:
    """Imitation, and reinforcement with a reference; and twice the same bits."""
    for name in ("tensor", "again"):
        main.run(run_of_heads(), out=tmp_path / name, quiet=True, **TENSOR)
    is_that_of_one_process(whole, tmp_path / "tensor")
    same_bits(tmp_path / "tensor", tmp_path / "again")


WAYS = {
    "tensor to tensor": (TENSOR, TENSOR),
    "tensor to one": (TENSOR, ALONE),
    "one to tensor": (ALONE, TENSOR),
    "tensor to rows": (TENSOR, ROWS),
    "rows to tensor": (ROWS, TENSOR),
}


@pytest.mark.skipif("cut" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("way", drawn(WAYS, 1))
def test_a_run_that_was_cut_goes_on_in_another_way(
    way: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, then = WAYS[way]
    folder = tmp_path / way
    cut_run(run_of_heads(), folder, monkeypatch, **first)
    main.run(resume=folder, quiet=True, **then)
    is_that_of_one_process(whole, folder)


@pytest.mark.skipif("others" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_are_computed_again(how: str, tmp_path: Path) -> None:
    """The first pass of all asks for a gradient."""
    run = replace(made := run_of_heads(gradient_checkpointing=how), stages=made.stages[:1])
    main.run(run, out=tmp_path / "one", quiet=True)
    main.run(run, out=tmp_path / "tensor", quiet=True, **TENSOR)
    assert apart(tmp_path / "one", tmp_path / "tensor") <= BOUND


@pytest.mark.skipif("others" not in PARTS, reason="not drawn")
def test_preferences(tmp_path: Path) -> None:
    run = replace(run_of_heads(), stages=(run_of_heads().stages[0], STAGES["dpo"]))
    main.run(run, out=tmp_path / "one", quiet=True)
    main.run(run, out=tmp_path / "tensor", quiet=True, **TENSOR)
    assert apart(tmp_path / "one", tmp_path / "tensor") <= BOUND


REFUSED: dict[str, Run] = {
    "has no plan of columns and rows": run_of({"arch": "gpt2", "kv_heads": 2}),
    "2 ranks cannot share model.kv_heads=1": run_of(),
}


@pytest.mark.skipif("others" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_cannot_be_cut_so_is_refused_by_name(why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        main.run(REFUSED[why], out=tmp_path / "run", quiet=True, **TENSOR)
    assert not (tmp_path / "run").exists()
