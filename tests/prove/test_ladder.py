"""The main job on three seeds: each stage does what the one before cannot. Preferences and reinforcement add what
imitation of 40 % wrong answers does not reach."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import posttrain

pytestmark = pytest.mark.prove

MINUTES = 5.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ladder(seed: int, tmp_path: Path) -> None:
    """Held-out accuracy sampled at temperature 1 rises with every stage, the intervals of the first three apart, and
    ends >= 0.90 and >= 0.20 above the accuracy before RLVR."""
    begun = time.process_time()
    result = posttrain.run("ladder", f"seed={seed}", out=tmp_path / "run", quiet=True)
    stages = {s.name: s for s in result.stages}
    rl, dpo, continued = stages["rl"], stages["dpo"], stages["sft_continued"]
    pretrain, sft, cot = (stages[name].accuracy for name in ("pretrain", "sft", "cot"))
    assert pretrain is not None and sft is not None and cot is not None
    assert dpo.accuracy is not None and dpo.before is not None and dpo.agreement is not None
    assert rl.accuracy is not None and rl.before is not None and continued.accuracy is not None
    seconds = sum(s.seconds for s in result.stages)
    cpu = time.process_time() - begun
    print(
        f"\nseed {seed}: pretraining {pretrain[0]:.3f}, SFT {sft[0]:.3f}, CoT {cot[0]:.3f}, DPO {dpo.before:.3f} ->"
        f" {dpo.accuracy[0]:.3f}, {dpo.agreement[0]:.3f} of held-out pairs"
        f" ordered as judged; before RL {rl.before:.3f}, after {rl.accuracy[0]:.3f} [{rl.accuracy[1]:.3f},"
        f" {rl.accuracy[2]:.3f}], greedy {rl.greedy:.3f}, SFT continued instead {continued.accuracy[0]:.3f};"
        f" {seconds:.0f} s in stages, {cpu:.0f} s of processor time"
    )
    assert pretrain[2] < sft[1] and sft[2] < cot[1], "imitation of answers, then of chains, adds to what was there"
    assert dpo.accuracy[0] - dpo.before >= 0.04 and dpo.agreement[1] > 0.8
    assert 0.10 <= rl.before <= 0.80
    assert rl.accuracy[0] >= 0.90
    assert rl.accuracy[0] - rl.before >= 0.20
    assert continued.accuracy[0] < rl.accuracy[1], "imitating for RL's wall time did as well"
    assert cpu < MINUTES * 60 and seconds < MINUTES * 60
