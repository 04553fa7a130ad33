"""Engines under the conformance suite: each with the policy it serves, the learner that holds the same weights, and the
ways in which the suite may spoil it to see that its checks bite.

`POSTTRAIN_ENGINES` (a comma list, default `embedded`) says which engines run; an engine that is asked for and cannot be
built is an error, never a skip.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from posttrain.build.build_run import probe_ids
from posttrain.config.engines import KernelChoice
from posttrain.config.run import Model
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import SampledTurn, Segment
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.cache import cached_model
from posttrain.engine.embedded.cache.prefix_tree import PrefixTree
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.engine.vllm.sampler_requests import ExpectedTensors
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
    lossy: Callable[[], AbstractContextManager[None]]
    """Inside it, one tensor of an update is lost behind the adapter's own checks."""
    inflight: Callable[[], AbstractContextManager[None]]
    """Inside it, running turns go on under new weights."""
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
        randomize(self.policy, seed)
        await Sync(self.learner, self.sampler, probe_ids(self.policy)).push(self.sampler.version + 1)

    async def say(
        self, prompts: Sequence[np.ndarray], contract: Sampling, places: Sequence[int] | None = None
    ) -> list[SampledTurn]:
        """All prompts at once."""
        at = self.places(len(prompts)) if places is None else places
        return await asyncio.gather(
            *[self.sampler.generate(ids, contract, place) for ids, place in zip(prompts, at, strict=True)]
        )

    def gap(self, segments: Sequence[Segment]) -> np.ndarray:
        """float64 [M]: |log-prob of the learner - that of the engine| of every spoken token."""
        return gap(self.learner, segments)


def gap(learner: HFLearner, segments: Sequence[Segment]) -> np.ndarray:
    mu = np.concatenate([s.logp[s.mask] for s in segments])
    return np.abs(learner.score(Packed.of(list(segments))).astype(np.float64) - mu)


def randomize(policy: Policy, seed: int) -> None:
    """Weights whose distributions are far from uniform, the same for the same seed."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for p in policy.module.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * (1.5 / p.shape[-1] ** 0.5))


def segment(prompt: np.ndarray, said: SampledTurn, contract: Sampling) -> Segment:
    """What a rollout makes of one turn."""
    transcript = Transcript(contract)
    transcript.see(prompt)
    transcript.say(said)
    return transcript.segment()


def contract(**changes: Any) -> Sampling:
    return Sampling(**({"max_tokens": 12, "stop_ids": ()} | changes))


def new_policy() -> Policy:
    built = load_policy(MODEL, None, 0)
    assert built.context == CONTEXT
    return replace(built, module=built.module.eval())


LOST = "model.layers.1.self_attn.o_proj.weight"


def _embedded(kernels: KernelChoice = "auto", device: str = "cpu") -> Subject:
    policy = new_policy()
    engine = EmbeddedEngine(
        policy.clone().module,
        slots=SLOTS,
        context=CONTEXT,
        kernels=kernels,
        device=device,
        text=lambda ids: str(policy.tokenizer.decode(ids.tolist())),
    )

    @contextmanager
    def stale() -> Iterator[None]:
        renew = PrefixTree.renew
        PrefixTree.renew = lambda self, version: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            PrefixTree.renew = renew  # type: ignore[method-assign]

    @contextmanager
    def lossy() -> Iterator[None]:
        replace_all = cached_model.replace_weights

        def all_but_one(module: torch.nn.Module, tensors: Iterable[tuple[str, Any]]) -> None:
            before = module.get_parameter(LOST).clone()
            replace_all(module, tensors)
            with torch.no_grad():
                module.get_parameter(LOST).copy_(before)

        cached_model.replace_weights = all_but_one
        try:
            yield
        finally:
            cached_model.replace_weights = replace_all

    return Subject(
        "embedded",
        engine,
        policy,
        HFLearner(policy),
        stale,
        lossy,
        _set(engine, "_update", "inflight"),
        lambda: not engine._scheduler.busy and not engine._scheduler.queue,
    )


def _set(engine: Any, name: str, value: object) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def other() -> Iterator[None]:
        before = getattr(engine, name)
        setattr(engine, name, value)
        try:
            yield
        finally:
            setattr(engine, name, before)

    return other


def _lossy(engine: Any) -> Callable[[], AbstractContextManager[None]]:
    """For the vLLM adapters: what they send has passed their checks and then loses a tensor."""

    class Lossy(ExpectedTensors):
        def checked(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            return (x for x in super().checked(tensors) if x[0] != LOST)

    @contextmanager
    def lossy() -> Iterator[None]:
        expected = engine._expected
        engine._expected = Lossy(expected.own)
        try:
            yield
        finally:
            engine._expected = expected

    return lossy


def _vllm(workers: int = 1) -> Subject:
    from posttrain.engine.vllm.inprocess import VLLMEngine

    policy = new_policy()
    engine = VLLMEngine(policy, slots=SLOTS, cache_bytes=64 << 20, eager=True, workers=workers)

    @contextmanager
    def stale() -> Iterator[None]:
        """One salt for all versions, and a cache that only pretends to have been emptied."""
        reset, salt = engine._engine.reset_prefix_cache, engine._salt
        engine._engine.reset_prefix_cache = lambda **_: True
        engine._salt = lambda: "one for all"  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine._engine.reset_prefix_cache, engine._salt = reset, salt  # type: ignore[method-assign]
            assert reset()

    def idle() -> bool:
        return not engine.busy and not engine._engine.has_unfinished_requests()

    inflight = _set(engine, "inflight", True)
    return Subject("vllm", engine, policy, HFLearner(policy), stale, _lossy(engine), inflight, idle, engine.close)


def _vllm_server(workers: int = 1) -> Subject:
    from posttrain.engine.vllm.spawn_server import SpawnedServer
    from posttrain.engine.vllm.vllm_server import VLLMServer
    from posttrain.verifier.http_client import Endpoint

    policy = new_policy()
    own = SpawnedServer(policy, slots=SLOTS, cache_bytes=64 << 20, eager=True, workers=workers)
    endpoint = Endpoint(own.url, "rollout")
    engine = VLLMServer(policy, endpoint, share=own.folder / "share", timeout=60, ended=own.ended, workers=workers)

    @contextmanager
    def stale() -> Iterator[None]:
        """One salt for all versions, and a cache that is not emptied."""

        async def nothing() -> None: ...

        empty, salt = engine._empty_cache, engine._salt
        engine._empty_cache, engine._salt = nothing, lambda: "one for all"  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine._empty_cache, engine._salt = empty, salt  # type: ignore[method-assign]

    def idle() -> bool:
        """The server can empty its prefix cache: no request of anybody holds a block."""
        with urllib.request.urlopen(
            urllib.request.Request(f"{own.url}/reset_prefix_cache", method="POST"), timeout=60
        ) as answer:
            return not engine.busy and json.load(answer)["success"]

    refuses = {"bad_sequences": "no sequences of several tokens"}
    lossy, inflight = _lossy(engine), _set(engine, "inflight", True)
    return Subject("vllm-server", engine, policy, HFLearner(policy), stale, lossy, inflight, idle, own.close, refuses)


BUILDERS: dict[str, Callable[[], Subject]] = {
    "embedded": _embedded,
    "embedded-torch": lambda: _embedded("torch"),
    "embedded-reference": lambda: _embedded("reference"),
    "embedded-cuda": lambda: _embedded(device="cuda"),
    "vllm": _vllm,
    "vllm-server": _vllm_server,
    "vllm-workers": lambda: _vllm(2),
    "vllm-server-workers": lambda: _vllm_server(2),
}
BESIDE: dict[str, tuple[str, ...]] = {
    "embedded": ("embedded-torch", "embedded-reference", *(["embedded-cuda"] if torch.cuda.is_available() else []))
}
"""Engines that run, where the one before the colon does, the tests marked `beside`: what may differ between two ways of
computing."""


@cache
def subject(name: str) -> Subject:
    """The engine of this name, built once a process."""
    if name not in BUILDERS:
        raise LookupError(f"POSTTRAIN_ENGINES names {name!r}; the suite knows {', '.join(BUILDERS)}")
    return BUILDERS[name]()
