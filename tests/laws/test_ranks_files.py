"""Files of a learner over ranks: models read by rows without a whole copy, and checkpoints written beside training.

All processes are started once, and every test reads what they found.
"""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from law_ranks import over_ranks, trainer
from rank_files import ASKED, CASE, Beside, ByRows, Memory, killed_while_writing
from rank_wider import parts

from posttrain.engine.parallel.sharded_checkpoint import load_sharded

pytestmark = pytest.mark.prove


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return over_ranks({"rows": ByRows(), "memory": Memory(), "beside": Beside()}, tmp_path_factory.mktemp("ranks"))


def given(found: list[dict[str, Any]], task: str) -> list[Any]:
    """What the task returned on each rank."""
    out = [one[task] for one in found]
    assert not any(isinstance(x, str) for x in out), next(x for x in out if isinstance(x, str))
    return out


def test_a_model_read_by_rows_is_the_model(found: list[dict[str, Any]]) -> None:
    """Tied weights, several files, bfloat16, a new adapter, copies: the same bits, and scores to rounding."""
    for said in given(found, "rows"):
        assert min(n for key, n in said.items() if "files" in key) > 1
        same = {key: x for key, x in said.items() if isinstance(x, dict)}
        assert len(same) >= 2 * len(ASKED) * 2
        for key, x in same.items():
            assert x["fingerprint"] and x["parameters"] and x["scores"] < 1e-5, (key, x)
        assert "model.lora.dora=true reads whole weights" in said["refused"][0]
        assert "rows are read from the directory of a model" in said["refused"][1]
        assert "do not have the same weight files" in said["stale"]
        assert all("fused layers of Qwen3ForCausalLM differ from its own" in why for why in said["wrong layers"])


def test_no_rank_has_a_whole_copy(found: list[dict[str, Any]]) -> None:
    """To read its part of the model a rank needs little more than the memory of the part; with the checks at load,
    whose passes bring one layer after the other together, some times of it; and then it holds its part. To send it a
    rank needs a bucket, of 8 MiB of all ranks here, and rank 0 theirs and what it joins."""
    every = given(found, "memory")
    for rank, said in enumerate(every):
        words = ("all", "by rows, own", "read", "by rows", "held", "sent", "whole")
        sizes = {word: f"{said[word] / 1e6:.0f} MB" for word in words}
        print(f"rank {rank}: {sizes}")
    for rank, said in enumerate(every):
        assert said["by rows, own"] < 0.3 * said["all"]
        assert said["read"] < 0.5 * said["all"], rank
        assert said["by rows"] < 1.25 * said["all"], rank
        assert said["held"] < said["by rows, own"] + 25e6, rank
        assert said["sent"] < (said["all"] if rank == 0 else 15e6), rank


def test_a_checkpoint_is_written_beside_training(found: list[dict[str, Any]]) -> None:
    """It holds what was there when it was begun, whatever is trained meanwhile; a failure is told."""
    for said in given(found, "beside"):
        for word in ("four", "two by two"):
            assert said[word] == 0.0 and said[f"{word}, version"] == 2 and said[f"{word}, moved"] > 1e-4
            assert said[f"{word}, failed"]


def test_a_killed_writer_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=killed_while_writing, args=(rank, tmp_path)) for rank in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(200)
    assert [p.exitcode for p in processes] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "second").exists() and list(tmp_path.glob(".staged-second-*"))
    t = trainer(CASE, None)
    assert load_sharded(tmp_path / "first", *parts(t)) == 1
    assert all(bool(torch.isfinite(p).all()) for p in parts(t)[0].parameters().values())
