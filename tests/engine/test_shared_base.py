"""Several adapters over one base: each policy computes and learns what it would alone, and the base is held once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from posttrain.build.build_run import probe_ids
from posttrain.config.model_settings import Lora
from posttrain.config.run import Optimizer
from posttrain.core.exchange.scores import Reads
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner.frozen_reference import freeze
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, base_digest, load_policy, named_tensors, with_adapter
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.role.sync import Sync
from posttrain.system.errors import ConfigError
from tests.engine.engine_parts import ALPHABET, packed, tiny

KINDS: Mapping[str, Lora] = {
    "all": Lora(rank=4),
    "one layer": Lora(rank=2, alpha=2, targets=("down_proj",)),
    "rslora": Lora(rank=3, rslora=True, targets=("q_proj", "v_proj")),
    "dora": Lora(rank=2, dora=True),
}
PAIRS = [("all", "all"), ("all", "one layer"), ("dora", "rslora"), ("one layer", "dora")]
FEW = [PAIRS[0], *(pytest.param(x, marks=pytest.mark.prove) for x in PAIRS[1:])]
"""`PAIRS`, of which `make test` has the first."""


def alone(lora: Lora, seed: int, dtype: str = "float32") -> Policy:
    """A policy with a base of its own: the same one, built again."""
    model = tiny(dtype=dtype)
    return with_adapter(load_policy(model, ALPHABET, 0), replace(model, lora=lora), seed)


def together(*loras: Lora, dtype: str = "float32") -> list[Policy]:
    """The same policies over one base; the seeds of their adapters are 0, 1, 2 ..."""
    first = alone(loras[0], 0, dtype)
    return [first, *(first.beside(lora, seed) for seed, lora in enumerate(loras[1:], 1))]


def learn(learner: HFLearner, adam: StageOptimizer, seed: int) -> None:
    """One step that raises the log-probs of random tokens, and fits the value head to them."""
    learner.train_mode(True)
    scores = learner.forward(packed(3, seed=seed), Reads(value=True))
    assert scores.value is not None
    (scores.value.sub(1).square().sum() - scores.logp.sum()).backward()
    adam.step()
    learner.train_mode(False)


def optimizer(learner: HFLearner) -> StageOptimizer:
    return StageOptimizer(learner.parameters(), Optimizer(lr=0.01, warmup=0))


def storage_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all tensors of these modules, memory that several share counted once."""
    found: dict[int, int] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            held = tensor.untyped_storage()
            found[held.data_ptr()] = held.nbytes()
    return sum(found.values())


def bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in tensors.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pair", FEW)
def test_each_computes_and_learns_what_it_does_alone(pair: tuple[str, str], dtype: str) -> None:
    """Log-probs, values and all trained numbers, bit for bit, while the two take turns."""
    loras = [KINDS[name] for name in pair]
    shared = [HFLearner(p) for p in together(*loras, dtype=dtype)]
    apart = [HFLearner(alone(lora, seed, dtype)) for seed, lora in enumerate(loras)]
    steps = [[optimizer(x) for x in learners] for learners in (shared, apart)]
    for turn in range(4):
        for i in (0, 1) if turn % 2 else (1, 0):
            learn(shared[i], steps[0][i], turn)
            learn(apart[i], steps[1][i], turn)
    for one, other in zip(shared, apart, strict=True):
        assert np.array_equal(one.score(packed(4)), other.score(packed(4)))
        assert np.array_equal(one.value(packed(4)), other.value(packed(4)))
        assert one.fingerprint() == other.fingerprint()
        assert all(torch.equal(p, other.parameters()[n]) for n, p in one.parameters().items())
    assert not np.array_equal(shared[0].score(packed(4)), shared[1].score(packed(4)))


@settings(max_examples=12)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=4),
    turns=st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
@pytest.mark.prove
def test_training_one_changes_no_bit_of_the_others_nor_of_the_base(kinds: list[str], turns: list[int]) -> None:
    policies = together(*(KINDS[k] for k in kinds))
    learners = [HFLearner(p) for p in policies]
    adams, base = [optimizer(x) for x in learners], base_digest(policies[0])
    for turn in turns:
        at = turn % len(learners)
        before = [bits(adapter_modules.adapter_tensors(p.module)) for p in policies]
        learn(learners[at], adams[at], turn)
        for i, p in enumerate(policies):
            now = adapter_modules.adapter_tensors(p.module)
            assert all(torch.equal(now[n], t) for n, t in before[i].items()) == (i != at)
    assert {base_digest(p) for p in policies} == {base}


@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
@pytest.mark.parametrize("pair", FEW)
def test_an_engine_each_serves_its_own_version(pair: tuple[str, str], kernels: Any) -> None:
    """The fused engines join the base's own weights in memory: both learners still compute the same bits."""
    policies = [replace(p, kernels=kernels) for p in together(*(KINDS[name] for name in pair))]
    learners = [HFLearner(p) for p in policies]
    before = [x.score(packed(3)) for x in learners]
    engines = [
        EmbeddedEngine(p.twin().module, slots=4, context=p.context, version=-2, kernels=kernels) for p in policies
    ]
    syncs = [Sync(x, e, probe_ids(x.policy)) for x, e in zip(learners, engines, strict=True)]
    for i, sync in enumerate(syncs):
        asyncio.run(sync.push(i))
    assert all(np.array_equal(x.score(packed(3)), b) for x, b in zip(learners, before, strict=True))
    learn(learners[0], optimizer(learners[0]), 0)
    other = asyncio.run(engines[1].score(probe_ids(policies[1])))
    served = [asyncio.run(syncs[0].push(7)), learners[1].fingerprint()]
    assert [e.version for e in engines] == [7, 1] and served[0] == learners[0].fingerprint() != served[1]
    assert np.array_equal(asyncio.run(engines[1].score(probe_ids(policies[1]))), other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_one_base_and_the_adapters(dtype: str) -> None:
    """Two policies, an engine and a reference of each: one base. Engines have adapters of their own; the references,
    whose adapters have learned nothing yet, have nothing."""
    policies = together(KINDS["all"], KINDS["rslora"], dtype=dtype)
    own = [sum(t.nbytes for t in adapter_modules.adapter_tensors(p.module).values()) for p in policies]
    bare = adapter_modules.without_adapters(policies[0].module)
    base = storage_bytes([bare])
    buffers = sum(b.nbytes for b in bare.buffers())
    assert storage_bytes(p.module for p in policies) == base + sum(own) + buffers
    assert all(freeze(HFLearner(p)).digest for p in policies)
    engines = [p.twin().module for p in policies]
    for p, module in zip(policies, engines, strict=True):
        EmbeddedEngine(module, slots=4, context=p.context, kernels="reference")
    assert storage_bytes([*(p.module for p in policies), *engines]) == base + 2 * sum(own) + 3 * buffers


def test_each_is_exported_as_it_is(tmp_path: Any) -> None:
    policies = together(KINDS["all"], KINDS["one layer"])
    for i, p in enumerate(policies):
        learner = HFLearner(p)
        learn(learner, optimizer(learner), i)
        p.save(tmp_path / str(i))
        again = HFLearner(load_policy(tiny(path=str(tmp_path / str(i))), None, 0))
        np.testing.assert_allclose(again.score(packed(3)), learner.score(packed(3)), atol=2e-5)
    names = [set(dict(named_tensors(p.module))) for p in policies]
    assert names[0] != names[1]


def test_weights_that_train_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="no other policy can share"):
        load_policy(tiny(), ALPHABET, 0).beside(KINDS["all"], 0)
