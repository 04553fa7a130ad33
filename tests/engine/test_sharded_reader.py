"""The index of a sharded checkpoint is a pickle: one that would run a program is refused before it does."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.run import Optimizer
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.sharded_checkpoint import load_sharded, save_sharded
from posttrain.engine.parallel.sharded_index import IndexReader
from posttrain.system import files
from posttrain.system.errors import RunFolderError
from tests.engine.engine_parts import policy

INDEX = ".metadata"


class Hostile:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def parts() -> tuple[HFLearner, StageOptimizer]:
    learner = HFLearner(policy())
    return learner, StageOptimizer(learner.parameters(), Optimizer(warmup=0))


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    learner, optimizer = parts()
    save_sharded(tmp_path / "saved", learner, optimizer, 3)
    before = learner.fingerprint()
    with torch.no_grad():
        for p in learner.parameters().values():
            p.add_(1.0)
    assert learner.fingerprint() != before
    assert load_sharded(tmp_path / "saved", learner, optimizer) == 3 and learner.fingerprint() == before


def test_an_index_that_runs_a_program_is_refused_before_it_does(tmp_path: Path) -> None:
    learner, optimizer = parts()
    saved, marker = tmp_path / "saved", tmp_path / "was run"
    save_sharded(saved, learner, optimizer, 0)

    def hostile(staged: Path) -> None:
        for file in saved.iterdir():
            if file.name not in (files.DIGESTS, INDEX):
                (staged / file.name).write_bytes(file.read_bytes())
        (staged / INDEX).write_bytes(pickle.dumps(Hostile(marker)))

    files.write_directory(tmp_path / "hostile", hostile)  # with digests of its own
    for read in (
        lambda: IndexReader(tmp_path / "hostile").read_metadata(),
        lambda: load_sharded(tmp_path / "hostile", learner, optimizer),
    ):
        with pytest.raises(RunFolderError, match=r"names (posix|nt)\.mkdir, which torch does not write"):
            read()
        assert not marker.exists()


@pytest.mark.parametrize("written", [b"", b"no pickle", pickle.dumps([1, 2])])
def test_an_index_that_is_none_is_named(written: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(written)
    with pytest.raises(RunFolderError, match=r"\.metadata .*Go on from another one"):
        IndexReader(tmp_path).read_metadata()
