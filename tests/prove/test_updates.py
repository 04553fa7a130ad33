"""Sampled rows of docs/several-updates.md, where trust regions act, and corrections on answers that are stale."""

from __future__ import annotations

from pathlib import Path

import pytest

import posttrain
from benchmarks.updates import ArmRow, play, start
from benchmarks.updates_regions import EPOCHS, MINIBATCHES, PROMPTS
from posttrain.core import reader
from tests import faulty

pytestmark = pytest.mark.prove
STEPS = 4


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ArmRow]:
    folder = tmp_path_factory.mktemp("updates")
    model = start(0, folder)
    return {arm: play(arm, "hot", 0, model, folder, STEPS) for arm in ("no_clip", "clip", "gspo", "seq_is", "vcpo")}


def test_trust_regions_act(rows: dict[str, ArmRow]) -> None:
    """A clip silences tokens and a sequence clip with narrow bounds most of them; without one the ratio has a tail."""
    assert MINIBATCHES * EPOCHS == 16 and PROMPTS % MINIBATCHES == 0
    assert rows["no_clip"].clipped == 0 < rows["clip"].clipped < 0.5 < rows["gspo"].clipped
    assert rows["no_clip"].tail > rows["clip"].tail > 1
    assert all(r.stopped == "" and r.moved is not None and r.moved > 0.01 for r in rows.values())


def test_the_step_shrinks_with_the_effective_sample_size(rows: dict[str, ArmRow]) -> None:
    """VCPO uses a part of the learning rate where ratios are spread, and then moves less than the same arm without."""
    full, part = rows["seq_is"], rows["vcpo"]
    assert full.share == 1 > part.share > 0.1
    assert full.moved is not None and part.moved is not None and part.moved < full.moved


STALE = ("tis", "icepop", "decoupled_ppo", "a3po", "m2po", "v_trace", "aipo", "vcpo")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty.start(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", STALE)
def test_corrections_run_on_stale_answers(name: str, tiny: Path, tmp_path: Path) -> None:
    """Two versions behind, every line that is made for it runs through, no check objects, and its number is not 1."""
    words = (f"algorithm={name}", "rl.minibatches=2", "rl.siblings=6", "rl.staleness=2")
    posttrain.run(faulty.smallest(None, tiny, tmp_path, steps=5), *words, out=tmp_path / "run", quiet=True)
    assert faulty.named(tmp_path / "run") is None
    last = reader.steps(tmp_path / "run")[-1].gauges
    assert last["rollout/versions_behind"].mean > 0
    gauge = "optim/share" if name == "vcpo" else "policy/ratio" if name in ("m2po", "aipo") else "correction/used"
    assert abs(last[gauge].mean - 1) > 1e-5
