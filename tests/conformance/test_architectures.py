"""vLLM serves each architecture that posttrain builds, and every tensor of it is found again: several engines in one
process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posttrain.build.build_run import probe_ids
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.vllm.inprocess import VLLMEngine
from posttrain.role.learning.logprob_tolerance import LEAST
from posttrain.role.sync import Sync
from tests.conformance import subjects
from tests.conformance.subjects import contract, randomize, segment

pytestmark = pytest.mark.skipif("vllm" not in subjects.ENGINES, reason="needs vLLM: make test-vllm")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen3", "llama", "gpt2", "gemma"])
def test_weights_arrive_are_found_again_and_score_alike(arch: str, dtype: str) -> None:
    serves(dtype, arch=arch, kv_heads=2 if arch == "gpt2" else 1)


def serves(dtype: str, workers: int = 1, **model: Any) -> None:
    """Two updates: the second one repacks what the first one packed."""
    policy = load_policy(replace(subjects.MODEL, dtype=dtype, **model), None, 0)  # type: ignore[arg-type]
    engine = VLLMEngine(policy, slots=8, cache_bytes=32 << 20, eager=True, workers=workers)
    learner = HFLearner(policy)

    async def main() -> None:
        sync = Sync(learner, engine, probe_ids(policy), dtype)
        for version in (0, 1):
            randomize(policy, version)
            await sync.push(version)
        prompt, wanted = np.array(policy.tokenizer.encode("3+4=", add_special_tokens=False), np.int32), contract()
        said = await asyncio.gather(*[engine.generate(prompt, wanted, i) for i in range(20)])
        gap = subjects.gap(learner, [segment(prompt, s, wanted) for s in said])
        assert gap.max() < LEAST[dtype].worst and gap.mean() < LEAST[dtype].mean

    try:
        asyncio.run(main())
    finally:
        engine.close()
