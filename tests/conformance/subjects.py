"""Engines under the conformance suite: each with the policy it serves, the learner that holds the same weights, and the ways
in which the suite may spoil it to see that its checks bite.

`POSTTRAIN_ENGINES` (a comma list, default `embedded`) says which engines run; an engine that is asked for and cannot be
built is an error, never a skip.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.ports import Sampler
from posttrain.core.run import Model
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import Said, Segment
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.tree import PrefixTree
from posttrain.engine.learner import HFLearner
from posttrain.engine.models import Policy, load_policy
from posttrain.recipe.build import canary
from posttrain.role.sync import Sync

ENGINES = tuple(os.environ.get("POSTTRAIN_ENGINES", "embedded").split(","))
CONTEXT, SLOTS = 192, 32
MODEL = Model(hidden=64, layers=2, heads=2, kv_heads=1, ffn=96, context=CONTEXT)
"""Heads of 32: the smallest that every engine's attention takes."""


@dataclass
class Subject:
    """One engine, and a learner whose weights are those it serves."""

    name: str
    sampler: Sampler
    policy: Policy
    learner: HFLearner
    stale: Callable[[], AbstractContextManager[None]]
    """Inside it, what the engine cached under old weights survives new ones: the fault that the suite must see."""
    idle: Callable[[], bool]
    """Whether nothing is left of any request."""
    close: Callable[[], None] = lambda: None
    refuses: dict[str, str] = field(default_factory=dict[str, str])
    """Options of `test_contract.OPTIONS` the engine cannot serve -> what its refusal says."""
    draws: int = 0

    def places(self, count: int) -> list[int]:
        """Random numbers that no earlier request had."""
        self.draws += count
        return [seeds.key(0, "conformance", self.draws - i) for i in range(count)]

    def ids(self, text: str) -> np.ndarray:
        """int32 ids of a text: one a byte of its UTF-8."""
        return np.array(self.policy.tokenizer.encode(text, add_special_tokens=False), np.int32)

    async def publish(self, seed: int) -> None:
        """New weights, the same for the same seed: into the learner, and through the sync into the engine."""
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            for p in self.policy.module.parameters():
                if p.ndim > 1:
                    p.copy_(torch.randn(p.shape, generator=generator) * (1.5 / p.shape[-1] ** 0.5))
        await Sync(self.learner, self.sampler, canary(self.policy)).push(self.sampler.version + 1)

    async def say(self, prompts: Sequence[np.ndarray], contract: Sampling, places: Sequence[int] | None = None) -> list[Said]:
        """All prompts at once."""
        at = self.places(len(prompts)) if places is None else places
        return await asyncio.gather(*[self.sampler.generate(ids, contract, place) for ids, place in zip(prompts, at, strict=True)])

    def gap(self, segments: Sequence[Segment]) -> np.ndarray:
        """float64 [M]: |log-prob of the learner - that of the engine| of every spoken token."""
        mu = np.concatenate([s.logp[s.mask] for s in segments])
        return np.abs(self.learner.score(Packed.of(list(segments))).astype(np.float64) - mu)


def segment(prompt: np.ndarray, said: Said, contract: Sampling) -> Segment:
    """What a rollout makes of one turn."""
    transcript = Transcript(contract)
    transcript.see(prompt)
    transcript.say(said)
    return transcript.segment()


def contract(**changes: Any) -> Sampling:
    return Sampling(**({"max_tokens": 12, "stop_ids": ()} | changes))


def _policy() -> Policy:
    built = load_policy(MODEL, None, 0)
    assert built.context == CONTEXT
    return replace(built, module=built.module.eval())


def _embedded() -> Subject:
    policy = _policy()
    engine = EmbeddedEngine(
        policy.clone().module, slots=SLOTS, context=CONTEXT, text=lambda ids: str(policy.tokenizer.decode(ids.tolist()))
    )

    @contextmanager
    def stale() -> Iterator[None]:
        renew = PrefixTree.renew
        PrefixTree.renew = lambda self, version: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            PrefixTree.renew = renew  # type: ignore[method-assign]

    return Subject("embedded", engine, policy, HFLearner(policy), stale, lambda: not engine._scheduler.busy and not engine._scheduler.queue)


def _vllm() -> Subject:
    from posttrain.engine.vllm.inprocess import VLLMEngine

    policy = _policy()
    engine = VLLMEngine(policy, slots=SLOTS, cache_bytes=64 << 20, eager=True)

    @contextmanager
    def stale() -> Iterator[None]:
        """One salt for all versions, and a cache that only pretends to have been emptied."""
        reset, salt = engine._engine.reset_prefix_cache, engine._salt
        engine._engine.reset_prefix_cache = lambda: True
        engine._salt = lambda: "one for all"  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine._engine.reset_prefix_cache, engine._salt = reset, salt  # type: ignore[method-assign]
            assert reset()

    def idle() -> bool:
        return not engine.busy and not engine._engine.has_unfinished_requests()

    return Subject("vllm", engine, policy, HFLearner(policy), stale, idle, engine.close)


BUILDERS: dict[str, Callable[[], Subject]] = {"embedded": _embedded, "vllm": _vllm}


@cache
def subject(name: str) -> Subject:
    """The engine of this name, built once a process."""
    if name not in BUILDERS:
        raise LookupError(f"POSTTRAIN_ENGINES names {name!r}; the suite knows {', '.join(BUILDERS)}")
    return BUILDERS[name]()
