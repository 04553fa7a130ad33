"""Law 5: the sampler's log-prob of what it said equals the learner's under the same `Sampling`, for every option.

Hence an unchanged policy has ratio 1 whatever the sampler's options, and after a push the sampler scores like the
learner.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from posttrain.build.build_run import probe_ids
from posttrain.config.run import Model
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import Segment
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.role.learning.logprob_tolerance import LEAST
from posttrain.role.sync import Sync

OPTIONS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.6),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.1),
    "all": Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02),
}
PROMPTS = ("<3+4>", "<1+2+3>", "<9+9+9+9>", "<5>")


def policy(arch: str = "qwen3", dtype: str = "float32") -> Policy:
    model = Model(arch=arch, hidden=32, layers=2, heads=2, kv_heads=2, ffn=64, context=64, dtype=dtype)  # type: ignore[arg-type]
    return load_policy(model, "0123456789+-=;<>", seed=3)


def sharpen(learner: HFLearner, by: float) -> None:
    """Larger weights, so that the distributions are not flat."""
    with torch.no_grad():
        for p in learner.policy.module.parameters():
            p.mul_(by)


async def said(engine: EmbeddedEngine, p: Policy, sampling: Sampling, siblings: int = 4) -> list[Segment]:
    contract = Sampling(**{**vars(sampling), "max_tokens": 12}).resolve(p.stop_ids)

    async def one(prompt: str, i: int) -> Segment:
        transcript = Transcript(contract)
        transcript.see(p.tokenizer.encode(prompt, add_special_tokens=False))
        transcript.say(await engine.generate(transcript.ids, contract, seeds.key(0, "agree", prompt, i)))
        return transcript.segment()

    return await asyncio.gather(*(one(prompt, i) for prompt in PROMPTS for i in range(siblings)))


def gap(segments: list[Segment], learner: HFLearner) -> np.ndarray:
    mu = np.concatenate([s.logp[s.mask] for s in segments])
    return np.abs(learner.score(Packed.of(segments)).astype(np.float64) - mu)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("arch", ["qwen3", "llama", "gpt2", "gemma"])
def test_sampler_and_learner_agree(arch: str, name: str) -> None:
    """Every option, four architectures, float32: far inside the canary's bound."""
    p = policy(arch)
    learner = HFLearner(p)
    sharpen(learner, 2.0)
    engine = EmbeddedEngine(p.clone().module, slots=8, context=p.context)
    worst = gap(asyncio.run(said(engine, p, OPTIONS[name])), learner)
    assert worst.max() < 5e-5 < LEAST["float32"].worst, f"{arch} {name}: {worst.max():.2e}"


@pytest.mark.parametrize("name", ["plain", "cold"])
def test_bfloat16_agrees_within_its_noise(name: str) -> None:
    """The printed bound of bfloat16 holds with room to spare on a small model."""
    p = policy(dtype="bfloat16")
    learner = HFLearner(p)
    engine = EmbeddedEngine(p.clone().module, slots=8, context=p.context)
    seen = gap(asyncio.run(said(engine, p, OPTIONS[name])), learner)
    print(f"\nbfloat16 {name}: worst {seen.max():.2e}, mean {seen.mean():.2e}")
    assert seen.max() < LEAST["bfloat16"].worst and seen.mean() < LEAST["bfloat16"].mean


def test_after_a_push_the_sampler_scores_like_the_learner() -> None:
    """Before the push it scores like the old weights, so the law can fail."""
    p = policy()
    learner = HFLearner(p)
    engine = EmbeddedEngine(p.clone().module, slots=8, context=p.context)
    sharpen(learner, 1.5)
    assert gap(asyncio.run(said(engine, p, Sampling())), learner).max() > LEAST["float32"].worst
    asyncio.run(Sync(learner, engine, probe_ids(p)).push(1))
    segments = asyncio.run(said(engine, p, Sampling()))
    assert gap(segments, learner).max() < 5e-5
    assert all((s.version[s.mask] == 1).all() for s in segments)


def test_another_contract_is_noticed() -> None:
    """Scoring under another temperature than the one sampled from breaks the agreement."""
    p = policy()
    learner = HFLearner(p)
    sharpen(learner, 2.0)
    engine = EmbeddedEngine(p.clone().module, slots=8, context=p.context)
    segments = asyncio.run(said(engine, p, OPTIONS["cold"]))
    wrong = [Segment(s.ids, s.mask, s.logp, s.version, Sampling(stop_ids=p.stop_ids)) for s in segments]
    assert gap(wrong, learner).max() > LEAST["float32"].worst
