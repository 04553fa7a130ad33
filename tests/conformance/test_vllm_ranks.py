"""A run over ranks that samples from a vLLM server: no rank has a whole copy of the model.

`make test-vllm-workers`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.api import main
from posttrain.config.engines import VLLM
from posttrain.engine.model.policy_model import load_policy
from tests.conformance import subjects
from tests.over_ranks import run_of
from tests.rank_memory import peaks, saved

pytestmark = pytest.mark.skipif("vllm-server" not in subjects.ENGINES, reason="needs vLLM: make test-vllm-workers")


@pytest.mark.parametrize("workers", [1, 2])
def test_each_rank_reads_its_rows(workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what the server then computes is what the learner does: every push compares their log-probs."""
    run = run_of({"hidden": 64, "heads": 2, "kv_heads": 2})  # vLLM on CPU has no kernel for heads of 16
    load_policy(run.model, None, 0).write(tmp_path / "model")
    engine = VLLM(server=True, cache_gib=0.1, eager=True, workers=workers)
    model = replace(run.model, path=str(tmp_path / "model"))
    run = replace(run, model=model, deterministic=False, engine=engine)
    result = main.run(run, out=tmp_path / "run", nproc=2)
    told = " ".join(capsys.readouterr().out.split())
    assert "each rank reads its rows of" in told and "whole copies: the vLLM server" in told
    assert [s.name for s in result.stages] == [s.name for s in run.stages]


def test_a_push_has_a_part_of_the_weights_in_memory(tmp_path: Path) -> None:
    """On rank 0, beyond what it held before: a bucket of all ranks, one on its way to a file, and a layer."""
    saved(tmp_path, "wide")
    whole = sum(p.stat().st_size for p in (tmp_path / "wide").glob("*.safetensors"))
    found = peaks(tmp_path, "wide", "rows", "vllm", "pushed")
    asked, kept = found["allocated"] / 1e6, found["pushed"] / 1e6
    print(f"{whole / 1e6:.0f} MB: {asked:.0f}, with what the C library keeps {kept:.0f}")
    assert found["allocated"] < whole / 2
