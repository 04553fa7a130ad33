"""Files of a learner over ranks: models read by rows without a whole copy.

All processes are started once, and every test reads what they found.
"""

from __future__ import annotations

from typing import Any

import pytest
from law_ranks import over_ranks
from rank_files import ASKED, ByRows, Memory

pytestmark = pytest.mark.prove


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return over_ranks({"rows": ByRows(), "memory": Memory()}, tmp_path_factory.mktemp("ranks"))


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
