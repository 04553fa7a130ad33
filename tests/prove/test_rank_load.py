"""Runs over ranks that read their model by rows: the run of ranks that get all of it first, bit for bit, with less
memory; and what is loaded whole, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.api import main, session
from posttrain.config.model_settings import Lora
from posttrain.config.placement import Processes
from posttrain.config.run import Run
from posttrain.engine.model.policy_model import load_policy
from posttrain.system.errors import InvariantError
from tests.over_ranks import drawn, run_of, said, same_bits
from tests.rank_memory import RANKS, peaks, saved

pytestmark = pytest.mark.prove

KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "all weights": ({}, False),
    "engines in processes": ({}, True),
    "an adapter": ({"lora": Lora(rank=2)}, False),
    "an adapter, engines in processes": ({"lora": Lora(rank=2)}, True),
    "bfloat16": ({"dtype": "bfloat16"}, False),
}
"""Further settings of the model, and whether the engine is in a process of its own."""


def from_folder(folder: Path, placed: bool = False, **model: Any) -> Run:
    """The run of `run_of`, from a directory with the weights that it would build."""
    run = run_of()
    path = folder / "model"
    if not path.exists():
        load_policy(run.model, None, 0).write(path)
    run = replace(run, model=replace(run.model, path=str(path), **model))
    return replace(run, placement=Processes(engines=1)) if placed else run


PARTS = drawn(["the same bits", "by name", "memory"], 1)
"""What is played here."""


@pytest.mark.skipif("the same bits" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("word", drawn(KINDS, 1))
def test_it_is_the_run_of_ranks_that_get_the_whole_model(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, placed = KINDS[word]
    run = from_folder(tmp_path, placed, **model)
    main.run(run, out=tmp_path / "rows", nproc=2)
    who = "the engines in processes of their own" if placed else "the engine in this process"
    told = " ".join(capsys.readouterr().out.split())
    assert "each rank reads its rows of" in told and f"whole copies: {who}" in told
    monkeypatch.setattr(session, "choose_reading", lambda run, lead: (None, ()))
    main.run(run, out=tmp_path / "whole", quiet=True, nproc=2)
    same_bits(tmp_path / "rows", tmp_path / "whole")
    assert said(tmp_path / "rows") == said(tmp_path / "whole") != []


@pytest.mark.skipif("by name" not in PARTS, reason="not drawn")
def test_what_cannot_be_read_by_rows_is_loaded_whole_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DoRA reads whole weights when it begins."""
    run = from_folder(tmp_path, lora=Lora(rank=2, dora=True))
    run = replace(run, stages=(replace(run.stages[0], steps=1),))
    main.run(run, out=tmp_path / "run", nproc=2)
    told = " ".join(capsys.readouterr().out.split())
    assert "every rank gets all of it before it keeps its rows: model.lora.dora=true reads whole weights" in told


@pytest.mark.skipif("by name" not in PARTS, reason="not drawn")
def test_files_that_change_while_they_are_read_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads the whole model for its engine; then a weight of it is another one."""
    run, read = from_folder(tmp_path), session.session_policy

    def then_changed(*given: Any) -> Any:
        found = read(*given)
        path = tmp_path / "model" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.unlink()  # the model in memory may be the old file
        path.write_bytes(bytes(data))
        return found

    monkeypatch.setattr(session, "session_policy", then_changed)
    with pytest.raises(InvariantError, match="are not those of the model that rank 0 has read"):
        main.run(run, out=tmp_path / "run", quiet=True, nproc=2)


@pytest.mark.skipif("memory" not in PARTS, reason="not drawn")
def test_ranks_that_read_rows_need_less_memory(tmp_path: Path) -> None:
    """Beyond what the same run of a small model needs: a rank that reads rows needs, with the checks at load, less than
    a whole copy, and one that is sent the model several. So does rank 0 where its engine is elsewhere, though it reads
    all weights for their digest; else it needs the copy of its engine beside. A push has a bucket or two in memory."""
    for size in ("wide", "small"):
        saved(tmp_path, size)
    whole = sum(p.stat().st_size for p in (tmp_path / "wide").glob("*.safetensors"))
    found, pushed = dict[str, list[int]](), dict[str, Any]()
    for placement, ways in (("local", ("rows", "whole")), ("processes", ("rows",))):
        small = peaks(tmp_path, "small", "rows", placement)["loaded"]
        for how in ways:
            pushed = peaks(tmp_path, "wide", how, placement, "pushed" if placement == "processes" else "loaded")
            found[f"{how}, {placement}"] = [a - b for a, b in zip(pushed["loaded"], small, strict=True)]
    for word, more in found.items():
        print(f"{whole / 1e6:.0f} MB over {RANKS} ranks, {word}: {[round(x / 1e6) for x in more]} MB")
    asked, kept = pushed["allocated"] / 1e6, pushed["pushed"] / 1e6
    print(f"rank 0 in a push: {asked:.0f} MB, with what the C library keeps {kept:.0f}")
    sent = min(found["whole, local"][1:])
    assert sent > 2 * whole
    assert max(found["rows, local"][1:]) < whole
    assert max(found["rows, processes"]) < whole, "rank 0 too"
    assert found["rows, local"][0] < 3 * whole < found["whole, local"][0]
    assert pushed["allocated"] < whole / 2, "buckets of 8 MiB, of the learner and of all ranks, and a layer"
