"""Law 2 over ranks: {1, 2, 4} processes with sharded weights train as one process does.

All processes are started once, and every test reads what they found.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from law_ranks import LARGE, LOSSES, SMALL, WORLDS, Case, Compare, Distance, over_ranks
from rank_tasks import FAULTS, Plant, Together, Wrong

pytestmark = pytest.mark.prove

BOUND = 1e-12
"""Largest difference in float64, of gradients and of weights, and relative of the norm before the clip."""
BOUND32 = 5e-6
"""In float32, of the gradient's largest number."""
EXACT = tuple(Case(loss, room, turned) for loss in LOSSES for room in (LARGE, SMALL) for turned in (False, True))
FURTHER = (
    Case("likelihood", SMALL, optimizer="sgd"),
    Case("likelihood", LARGE, units=1),
    Case("preference", SMALL, units=1),
    Case("policy", SMALL, arch="llama"),
)
"""Another optimizer, ranks without any unit, and a head of its own."""
ROUNDED = tuple(
    Case(loss, room, arch="qwen3", dtype=torch.float32) for loss in ("policy", "ranking") for room in (LARGE, SMALL)
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tasks = {
        "law": Compare(EXACT + FURTHER),
        "rounded": Compare(ROUNDED),
        "together": Together(),
        "wrong": Wrong(),
        "faults": Plant(),
    }
    return over_ranks(tasks, tmp_path_factory.mktemp("ranks"))


def given(found: list[dict[str, Any]], task: str) -> list[Any]:
    """What the task returned on each rank."""
    out = [one[task] for one in found]
    assert not any(isinstance(x, str) for x in out), next(x for x in out if isinstance(x, str))
    return out


def test_ranks_train_as_one_process(found: list[dict[str, Any]]) -> None:
    """Losses x micro-batches x order x ranks: the gradient before the clip, the norm, and the weights after two clipped
    updates."""
    table: dict[tuple[Case, int], Distance] = given(found, "law")[0]
    assert len(table) == len(EXACT + FURTHER) * len(WORLDS)
    worst = {word: max(getattr(d, word) for d in table.values()) for word in ("gradient", "weights", "norm", "gauges")}
    print(f"{len(table)} cases in float64: {worst}")
    wrong = {key: d for key, d in table.items() if not max(d.gradient, d.weights, d.norm) <= BOUND}
    assert not wrong, wrong
    assert worst["gauges"] < 1e-5  # a policy's gauges are summed in float32
    assert min(d.size for d in table.values()) > 1e-3


def test_ranks_train_as_one_process_in_float32(found: list[dict[str, Any]]) -> None:
    """With fused layers, tied weights and a reward head, to rounding."""
    table: dict[tuple[Case, int], Distance] = given(found, "rounded")[0]
    worst = max(d.gradient / d.size for d in table.values())
    print(f"{len(table)} cases in float32: gradients differ by {worst:.2g} of their size (bound {BOUND32:g})")
    assert worst <= BOUND32 and max(d.norm for d in table.values()) <= BOUND32


def test_every_rank_knows_the_whole(found: list[dict[str, Any]]) -> None:
    """Scores, and what observers see of the passes; each rank holds its part of the weights and no more."""
    for rank, worlds in enumerate(given(found, "together")):
        for world, seen in worlds.items():
            assert seen["scores"] < 1e-6 and seen["entropy"] < 1e-6 and seen["passes"] < 1e-12
            rows = 32 * world  # of each weight up to one row more than its share
            assert seen["own"] <= seen["all"] / world + 64 * rows, (rank, world)
    held = [worlds[4]["own"] for worlds in given(found, "together")]
    assert sum(held) == given(found, "together")[0][1]["all"]


def test_weights_come_together_on_one_rank(found: list[dict[str, Any]]) -> None:
    """In buckets, bit for bit as every rank's fingerprint says, and nothing on the other ranks; a stale part is
    refused."""
    for rank, worlds in enumerate(given(found, "together")):
        for world, seen in worlds.items():
            for bucket in (1 << 12, 1 << 26):
                assert seen[f"tensors {bucket}"] == (0 if rank else worlds[world][f"tensors {1 << 26}"])
                assert rank or seen[f"arrived {bucket}"] is True
            if world > 1:
                assert "version of the weights" in seen["stale"] and "stale" in seen["stale"]
                assert seen["sent 4096"] < seen[f"sent {1 << 26}"] / 2


def test_a_wrong_gradient_has_the_same_culprits_on_every_rank(found: list[dict[str, Any]]) -> None:
    """Nothing was updated, and no gradient is left (asserted where it was tried)."""
    for worlds in given(found, "wrong"):
        assert all(culprits == [1, 4] for culprits in worlds.values()) and 4 in worlds and 0 in worlds


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, found: list[dict[str, Any]]) -> None:
    """By a check on every rank, or by the law."""
    said = [one[name] for one in given(found, "faults")]
    by = FAULTS[name][1]
    if by == "law":
        assert all(isinstance(d, Distance) and not max(d.gradient, d.weights, d.norm) <= 1e3 * BOUND for d in said)
    else:
        assert all(isinstance(text, str) and by in text for text in said), said


def test_the_program_of_the_page_runs_under_torchrun(tmp_path: Path) -> None:
    """docs/design/shards.md: two processes, each with half of the numbers, and one loss."""
    program = Path(__file__).parent / "rank_program.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(program.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"rank (\d): loss ([\d.]+), version 5, \d+ weights, (\d+) of (\d+) numbers", done.stdout))
    (first, loss, own, whole), (second, as_there, other, _) = said
    assert (first, second, as_there) == ("0", "1", loss) and 0 < float(loss) < 3
    assert 0.4 < int(own) / int(whole) < 0.6 and 0.4 < int(other) / int(whole) < 0.6
