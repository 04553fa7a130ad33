"""Sampled rows of docs/several-updates.md: with several optimizer steps on a batch, trust regions act and arms part."""

from __future__ import annotations

import pytest

from benchmarks.updates import ArmRow, play, start
from benchmarks.updates_regions import EPOCHS, MINIBATCHES, PROMPTS

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
