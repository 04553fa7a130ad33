"""Law 5 for what a contract does before the temperature: the engine's log-prob of what it said is the learner's.

Transcripts of several turns, some with nothing seen between them, because the rules read the past: repetition penalty
the whole sequence, bad sequences and min_tokens the turn.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.config.run import Model
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import Segment, Stop
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.environment.templates.renderer import Renderer
from posttrain.role.learning.logprob_tolerance import LEAST
from posttrain.system.errors import InvariantError

ALPHABET = "0123456789+-=;<>"
STOP = (15, 16)
"""`>` and the EOS."""
RULES: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.8},
    "reward": {"repetition_penalty": 0.7},
    "bias": {"logit_bias": ((3, 2.0), (15, -1.0), (0, 0.5))},
    "allowed": {"allowed_ids": (0, 1, 2, 3, 4, 10, 15)},
    "bad_tokens": {"bad_ids": ((7,), (8,), (17,))},
    "bad_sequences": {"bad_ids": (*((a, b) for a in range(0, 10, 2) for b in range(10)), (1, 3, 5), (11, 1, 1))},
    "min_tokens": {"min_tokens": 3},
    "stop": {"stop": ("1", "=;", "++")},
    "top": {"top": 3, "allowed_ids": (0, 5), "repetition_penalty": 1.3},
}
RULES["all"] = {
    "temperature": 0.8,
    "repetition_penalty": 1.2,
    "logit_bias": ((3, 1.0),),
    "allowed_ids": (*range(12), 15),
    "bad_ids": ((7,), (1, 2), (2, 1, 1)),
    "min_tokens": 2,
    "stop": ("33",),
}
RULES["all_truncated"] = RULES["all"] | {"top_k": 8, "top_p": 0.9, "min_p": 0.01}


def policy(arch: str = "qwen3", dtype: str = "float32") -> Policy:
    model = Model(arch=arch, hidden=32, layers=2, heads=2, kv_heads=2, ffn=64, context=96, dtype=dtype)  # type: ignore[arg-type]
    return load_policy(model, ALPHABET, seed=3)


def parts(arch: str = "qwen3", dtype: str = "float32", sharp: float = 2.0) -> tuple[Policy, HFLearner, EmbeddedEngine]:
    p = policy(arch, dtype)
    learner = HFLearner(p)
    with torch.no_grad():
        for weight in p.module.parameters():
            weight.mul_(sharp)
    tokenizer: Any = p.tokenizer
    return (
        p,
        learner,
        EmbeddedEngine(p.clone().module, slots=6, context=p.context, text=Renderer(tokenizer, STOP).decode),
    )


async def played(engine: EmbeddedEngine, p: Policy, s: Sampling, count: int = 12) -> list[Segment]:
    """Three turns each: the second right after the first, the third after an observation."""

    async def one(i: int) -> Segment:
        t = Transcript(s)
        t.see(p.tokenizer.encode(("<3+4>", "<1+2+3>", "<9>", "<22-2>")[i % 4], add_special_tokens=False))
        for turn in range(3):
            if turn == 2:
                t.see([2, 12])
            t.say(await engine.generate(t.ids, s, seeds.key(0, "rules", i, turn)))
        return t.segment()

    return await asyncio.gather(*(one(i) for i in range(count)))


def contract(name: str) -> Sampling:
    return Sampling(**{"max_tokens": 9, "stop_ids": STOP} | RULES[name])


def gap(segments: list[Segment], learner: HFLearner) -> np.ndarray:
    mu = np.concatenate([s.logp[s.mask] for s in segments])
    return np.abs(learner.score(Packed.of(segments)).astype(np.float64) - mu)


@pytest.mark.parametrize("arch", ["qwen3", "gemma"])
@pytest.mark.parametrize("name", RULES)
def test_sampler_and_learner_agree(arch: str, name: str) -> None:
    p, learner, engine = parts(arch)
    segments = asyncio.run(played(engine, p, contract(name)))
    worst = gap(segments, learner)
    assert worst.max() < 5e-5 < LEAST["float32"].worst, f"{arch} {name}: {worst.max():.2e}"
    if name == "top":
        said = np.concatenate([s.top.logp[:, :2] for s in segments if s.top is not None])
        assert np.abs(np.exp(said).sum(1) - 1).max() < 1e-6, "two tokens are allowed, and they are the most probable"
        top = learner.top(Packed.of(segments), 2)
        assert np.abs(top.logp - said).max() < 5e-5


@pytest.mark.parametrize("name", ["penalty", "bias", "bad_sequences", "min_tokens", "all", "all_truncated"])
def test_bfloat16_agrees_within_its_noise(name: str) -> None:
    p, learner, engine = parts(dtype="bfloat16", sharp=1.0)
    seen = gap(asyncio.run(played(engine, p, contract(name))), learner)
    assert seen.max() < LEAST["bfloat16"].worst and seen.mean() < LEAST["bfloat16"].mean, (
        f"{name}: worst {seen.max():.2e}, mean {seen.mean():.2e}"
    )


@pytest.mark.parametrize("name", ["penalty", "reward", "bias", "allowed", "bad_tokens", "bad_sequences", "min_tokens"])
def test_a_rule_the_learner_leaves_out_is_noticed(name: str) -> None:
    """So the law can fail: every option moves the distribution of what was said."""
    p, learner, engine = parts()
    segments = asyncio.run(played(engine, p, contract(name)))
    wrong = [replace(s, sampling=Sampling(stop_ids=STOP), in_turn=None) for s in segments]
    assert gap(wrong, learner).max() > LEAST["float32"].worst


def test_a_turn_read_from_the_wrong_place_is_noticed() -> None:
    """Two turns side by side taken for one: min_tokens then bans no stop id in the second, and its log-probs are
    others."""
    p, learner, engine = parts()
    segments = asyncio.run(played(engine, p, contract("min_tokens")))
    for s in segments:
        assert s.in_turn is not None and int((s.in_turn == 0).sum()) == 3
    merged = [replace(s, in_turn=_merged(s)) for s in segments]
    assert gap(merged, learner).max() > LEAST["float32"].worst
    other = [replace(s, sampling=replace(s.sampling, min_tokens=9)) for s in segments]
    with pytest.raises(InvariantError, match="which its contract bans at that place"):
        gap(other, learner)


def _merged(s: Segment) -> np.ndarray:
    """Positions in runs of the mask, as if a turn ended only where something was seen."""
    at = np.flatnonzero(s.mask)
    begins = at[np.append(True, np.diff(at) > 1)]
    return (at - begins[np.searchsorted(begins, at, side="right") - 1]).astype(np.int32)


def test_turns_end_as_the_contract_says() -> None:
    """Of every turn: no stop id before min_tokens, no bad sequence, only allowed ids, and the stop string at its
    end."""
    p, _, engine = parts()
    s = contract("all")
    reasons: list[Stop] = []

    async def one(i: int) -> None:
        said = await engine.generate(np.int32([14, 3]), s, i)
        ids = said.ids.tolist()
        text = p.tokenizer.decode(ids)
        reasons.append(said.stop)
        assert not set(ids[:2]) & set(STOP) and set(ids) <= set(s.allowed_ids or ()) and 7 not in ids
        assert "12" not in text and "211" not in text
        assert (said.stop is Stop.SAID) == (ids[-1] in STOP)
        assert (said.stop is Stop.STRING) == text.endswith("33") and "33" not in text[:-1]

    async def many() -> None:
        await asyncio.gather(*(one(i) for i in range(80)))

    asyncio.run(many())
    assert {Stop.SAID, Stop.STRING, Stop.LENGTH} <= set(reasons)
