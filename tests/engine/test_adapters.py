"""Adapters: they begin as nothing, learn what the chain rule says, are served as they are, and leave the base alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.build.build_run import probe_ids
from posttrain.config import overrides as dotted
from posttrain.config.model_settings import ALL_LINEAR, Lora
from posttrain.config.run import Optimizer
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, base_digest, load_policy, named_tensors
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.recipe.recipes import recipe
from posttrain.role.sync import Sync
from posttrain.system.errors import ConfigError, InvariantError
from tests.engine.engine_parts import ALPHABET, ARCHS, packed, tiny

KINDS: Mapping[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "two layers": {"targets": ("q_proj", "down_proj")},
}


def adapted(arch: str = "qwen3", dtype: str = "float32", **kind: Any) -> Policy:
    """A tiny policy with an adapter that does nothing yet."""
    return load_policy(tiny(arch, dtype=dtype, lora=Lora(rank=4, **kind)), ALPHABET, 0)


def spoken(learner: HFLearner) -> None:
    """Give B numbers, as learning does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in learner.parameters().items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)


def learn(learner: HFLearner, steps: int = 3) -> None:
    adam = StageOptimizer(learner.parameters(), Optimizer(lr=0.01, warmup=0))
    for _ in range(steps):
        learner.train_mode(True)
        learner.forward(packed(3)).logp.sum().neg().backward()
        adam.step()
        learner.train_mode(False)


# --- what it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_it_begins_as_the_model_that_was_loaded(arch: str) -> None:
    plain, batch = load_policy(tiny(arch), ALPHABET, 0), packed(3)
    assert np.array_equal(HFLearner(plain).score(batch), HFLearner(adapted(arch)).score(batch))
    assert base_digest(adapted(arch)) == fingerprint(named_tensors(plain.module)), "and the base has its names"


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapter_and_the_value_head_train(kind: str) -> None:
    learner = HFLearner(adapted(**KINDS[kind]))
    own = adapter_modules.adapter_tensors(learner.policy.module)
    assert own and set(learner.parameters()) == {*own, "value_head.weight", "value_head.bias"}
    assert {s.name for s in learner.shards()} == set(own), "and only its tensors travel"


def test_adapters_are_float32_over_a_bfloat16_base() -> None:
    module = adapted(dtype="bfloat16").module
    own = adapter_modules.adapter_tensors(module)
    assert {t.dtype for t in own.values()} == {torch.float32}
    assert {t.dtype for n, t in named_tensors(module) if n not in own} == {torch.bfloat16}


def test_the_gradient_is_that_of_the_full_weights_through_the_chain_rule() -> None:
    """dL/dB = scale * dL/dW A', dL/dA = scale * B' dL/dW, in float64."""
    learner = HFLearner(adapted())
    spoken(learner)
    module = learner.policy.module.double()
    full = HFLearner(replace(learner.policy.plain(), lora=None))
    for one in (learner, full):
        one.forward(packed(4)).logp.sum().backward()
    whole: dict[str, Tensor] = {n: p.grad for n, p in full.policy.module.named_parameters() if p.grad is not None}
    for name, layer in adapter_modules.layers(module).items():
        parts: Any = layer
        a, b, scale = parts.lora_A["default"].weight, parts.lora_B["default"].weight, parts.scaling["default"]
        outer = whole[f"{name}.weight"]
        torch.testing.assert_close(b.grad, scale * outer @ a.t(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(a.grad, scale * b.t() @ outer, rtol=1e-10, atol=1e-12)


@settings(max_examples=8)
@given(rank=st.integers(1, 40), alpha=st.floats(0.5, 64), rslora=st.booleans())
def test_the_scale_is_the_papers(rank: int, alpha: float, rslora: bool) -> None:
    lora = Lora(rank=rank, alpha=alpha, rslora=rslora, targets=("q_proj",))
    module = load_policy(tiny(lora=lora), ALPHABET, 0).module
    wanted = alpha / rank**0.5 if rslora else alpha / rank
    assert lora.scale == pytest.approx(wanted)
    assert all(x.scaling["default"] == pytest.approx(wanted) for x in adapter_modules.layers(module).values())  # type: ignore[index]


# --- the base ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
def test_a_merged_copy_computes_the_same_and_holds_no_adapter(kind: str, arch: str) -> None:
    if arch == "gpt2" and kind in ("dora", "two layers"):
        pytest.skip("gpt2 names its layers otherwise, and PEFT's DoRA needs Linear")
    learner = HFLearner(adapted(arch, **KINDS[kind]))
    spoken(learner)
    before = learner.fingerprint()
    plain = learner.policy.plain()
    np.testing.assert_allclose(HFLearner(plain).score(packed(3)), learner.score(packed(3)), atol=2e-5)
    assert not adapter_modules.is_adapted(plain.module) and plain.lora is None
    assert (
        dict(named_tensors(plain.module)).keys()
        == dict(named_tensors(load_policy(tiny(arch), ALPHABET, 0).module)).keys()
    )
    assert learner.fingerprint() == before, "nothing was merged in place"


@pytest.mark.prove
@pytest.mark.parametrize(("dtype", "count"), [("float32", 1000), ("bfloat16", 100)])
def test_the_base_is_the_same_bits_after_a_thousand_pushes(dtype: str, count: int) -> None:
    """Each push has another adapter: an optimizer step lies before every fifth, a nudge of one number before the
    others. At the end the numbers beneath it are read, in the learner and in the engine."""
    p = adapted(dtype=dtype)
    learner, base = HFLearner(p), base_digest(p)
    engine = EmbeddedEngine(p.twin().module, slots=4, context=p.context, version=-2)
    sync = Sync(learner, engine, probe_ids(p), dtype=dtype)
    nudged = next(t for name, t in learner.parameters().items() if "lora_B" in name)
    served = set[str]()

    async def pushes() -> None:
        for version in range(count):
            if version % 5 == 0:
                learn(learner, 1)
            else:
                with torch.no_grad():
                    nudged[version % nudged.shape[0], 0] += 0.01
            served.add(await sync.push(version))

    asyncio.run(pushes())
    assert len(served) == count, "no two pushes sent the same adapter"
    assert base_digest(p) == base == fingerprint(adapter_modules.base_tensors(engine._module).items())  # pyright: ignore[reportPrivateUsage]


def test_engine_and_frozen_copy_share_the_base() -> None:
    p = adapted()
    twin = p.twin()
    own = adapter_modules.adapter_tensors(p.module)
    for (name, one), (_, two) in zip(p.module.named_parameters(), twin.module.named_parameters(), strict=True):
        assert (one is two) == (name not in own), name


def test_two_adapters_over_one_base_learn_apart() -> None:
    p = adapted()
    one, two, alone = HFLearner(p), HFLearner(p.twin()), HFLearner(adapted())
    for learner in (one, alone):
        learn(learner)
    spoken(two)
    assert one.fingerprint() == alone.fingerprint() != two.fingerprint()


# --- serving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_serves_what_was_learned(kind: str, kernels: Any) -> None:
    p = replace(adapted(**KINDS[kind]), kernels=kernels)
    learner = HFLearner(p)
    engine = EmbeddedEngine(p.twin().module, slots=4, context=p.context, version=-2, kernels=kernels)
    sync, ids = Sync(learner, engine, probe_ids(p)), probe_ids(p)
    asyncio.run(sync.push(0))
    before = asyncio.run(engine.score(ids))
    learn(learner)
    assert asyncio.run(sync.push(1)) == learner.fingerprint()
    after = asyncio.run(engine.score(ids))
    assert np.abs(after - before).max() > 1e-3 and engine.fused == (kernels != "reference")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_leaves_the_adapter_out_is_found_at_the_first_push(kind: str, dtype: str) -> None:
    """The adapter is still nothing then, so that no log-prob differs."""
    p = adapted(dtype=dtype, **KINDS[kind])
    engine = EmbeddedEngine(p.twin().module, slots=4, context=p.context, version=-2, kernels="reference")
    for layer in adapter_modules.layers(engine._module).values():  # pyright: ignore[reportPrivateUsage]
        layer.enable_adapters(False)
    with pytest.raises(InvariantError, match="does not compute with the adapter"):
        asyncio.run(Sync(HFLearner(p), engine, probe_ids(p), dtype=dtype).push(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trial_leaves_the_learner_as_it_was(dtype: str) -> None:
    p = adapted(dtype=dtype)
    learner = HFLearner(p)
    spoken(learner)
    before = learner.fingerprint()
    engine = EmbeddedEngine(p.twin().module, slots=4, context=p.context, version=-2)
    served = asyncio.run(Sync(learner, engine, probe_ids(p), dtype=dtype).push(0))
    assert learner.fingerprint() == before == served


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["model.lora.rank=8"], Lora(rank=8)),
        (["model.lora=8"], Lora(rank=8)),
        (["model.lora=8", "model.lora.alpha=16"], Lora(rank=8, alpha=16)),
        (["model.lora.targets=q_proj,v_proj"], Lora(targets=("q_proj", "v_proj"))),
        (["model.lora.dora=true"], Lora(dora=True)),
        (["model.lora=none"], None),
    ],
)
def test_settings(words: list[str], wanted: Lora | None) -> None:
    assert dotted.apply(recipe("grpo"), words).model.lora == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.lora.rank=0", "must be 1 to 65,536"),
        ("model.lora.alpha=0", "must be > 0"),
        ("model.lora.alpha=inf", "must be > 0"),
        (f"model.lora.targets={ALL_LINEAR},q_proj", "keep one"),
        ("model.lora.ranks=4", "did you mean .rank"),
        ("model.lora=yes", "model.lora"),
        ("engine=vllm model.lora.dora=true", "vLLM serves no DoRA"),
    ],
)
def test_wrong_settings_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dotted.apply(recipe("grpo"), words.split())


@pytest.mark.parametrize(("target", "message"), [("x_proj", "q_proj, k_proj"), ("lm_head", "head can have no adapter")])
def test_layers_that_cannot_have_one_are_refused(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted(targets=(target,))


def test_a_saved_policy_is_plain_and_verified(tmp_path: Path) -> None:
    learner = HFLearner(adapted())
    spoken(learner)
    learner.policy.save(tmp_path / "m")
    again = load_policy(tiny(path=str(tmp_path / "m")), None, 0)
    np.testing.assert_allclose(HFLearner(again).score(packed(3)), learner.score(packed(3)), atol=2e-5)
