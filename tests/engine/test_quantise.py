"""Frozen weights in 8 or 4 bits: what they are, what is computed with them, what they take, where they are refused."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import posttrain
from posttrain.build.build_run import probe_ids
from posttrain.config import overrides as dotted
from posttrain.config.model_settings import Lora
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.adapters.quantise import Int8Linear, is_quantised, make_float, rounded
from posttrain.engine.adapters.saved_adapter import write_adapter
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, base_digest, load_policy
from posttrain.recipe.recipes import recipe
from posttrain.record.run_reader import run_file
from posttrain.role.sync import Sync
from posttrain.system.errors import ConfigError, InvariantError
from tests.engine.engine_parts import ALPHABET, packed, tiny
from tests.peak import peak_bytes

LORA = Lora(rank=4)


TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: posttrain[nf4]")
KINDS = ["int8", pytest.param("nf4", marks=TORCHAO)]


def few_bits(
    kind: str = "int8", arch: str = "qwen3", dtype: str = "float32", lora: Lora = LORA, **sizes: Any
) -> Policy:
    """A tiny policy with an adapter, that has learned something, over quantised weights."""
    policy = load_policy(tiny(arch, dtype=dtype, lora=lora, quantize=kind, **sizes), ALPHABET, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in adapter_modules.adapter_tensors(policy.module).items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return policy


# --- the numbers ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(rows=st.integers(1, 5), columns=st.integers(1, 40), size=st.floats(1e-6, 1e4), seed=st.integers(0, 99))
def test_each_number_is_the_nearest_multiple_of_its_rows_scale(rows: int, columns: int, size: float, seed: int) -> None:
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    w[0, 0] = 0
    codes, scale = rounded(w)
    gap = (w.double() - codes.double() * scale.double()[:, None]).abs()
    assert bool((gap <= scale.double()[:, None] * (0.5 + 1e-5)).all())
    assert codes.abs().max() <= 127 and codes.dtype == torch.int8


def test_a_row_of_tiny_numbers_is_as_exact_as_any() -> None:
    codes, scale = rounded(torch.tensor([[1e-8, -6e-9, 0.0]]))
    assert codes.tolist() == [[127, -76, 0]] and float(scale) == pytest.approx(1e-8 / 127)


def test_a_row_of_zeros_stays_zeros() -> None:
    codes, scale = rounded(torch.zeros(2, 3))
    assert not codes.any() and bool((scale > 0).all())


@TORCHAO
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_as_near_as_torchaos(dtype: torch.dtype) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    layer = nn.Linear(48, 32, dtype=dtype)
    w = layer.weight.detach().double()
    codes, scale = rounded(layer.weight.detach())
    quantize_(layer, Int8WeightOnlyConfig())
    theirs: Any = layer.weight
    torch.testing.assert_close(scale * 127, theirs.scale.float().flatten() * 127.5, rtol=1e-2, atol=0)
    stood = codes.double() * scale.double()[:, None]
    ours, other = (float((x - w).abs().max()) for x in (stood, theirs.dequantize().double()))
    assert 0 < ours <= other * 1.02


@pytest.mark.parametrize("bias", [True, False])
def test_product_and_gradient_are_those_of_the_float_weight(bias: bool) -> None:
    """In float64, where they are equal."""
    torch.manual_seed(0)
    eight_bit = Int8Linear.of(nn.Linear(24, 16, bias=bias))
    plain = nn.Linear(24, 16, bias=bias).double()
    plain.weight.data = eight_bit.float_weight(torch.float64)
    if bias:
        plain.bias.data = eight_bit.bias.double()
        eight_bit.bias.data = eight_bit.bias.double()
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    one, two = eight_bit(x), plain(again)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    for y in (one, two):
        y.square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-12, atol=1e-12)


# --- in a policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen3", "llama", "gemma"])
def test_only_the_decoders_linear_layers_are_rounded(arch: str, dtype: str) -> None:
    policy, before = few_bits("int8", arch, dtype), load_policy(tiny(arch, dtype=dtype), ALPHABET, 0)
    held, was = adapter_modules.base_tensors(policy.module), adapter_modules.base_tensors(before.module)
    rounded_names = {n for n, t in held.items() if t.dtype == torch.int8}
    assert len(rounded_names) == 7 * 2
    for name, tensor in was.items():
        assert name in rounded_names or torch.equal(held[name], tensor)
    assert set(held) == set(was) | {n.removesuffix("weight") + "scale" for n in rounded_names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_trains_and_its_gradient_is_that_over_float_weights(dtype: str, kind: str) -> None:
    learner = HFLearner(few_bits(kind, dtype=dtype))
    own = set(adapter_modules.adapter_tensors(learner.policy.module))
    assert set(learner.parameters()) == {*own, "value_head.weight", "value_head.bias"}
    if dtype == "bfloat16":
        return
    other = HFLearner(learner.policy.clone())
    make_float(other.policy.module, torch.float32)
    for one in (learner, other):
        one.forward(packed(4)).logp.sum().backward()
    for name in own:
        torch.testing.assert_close(
            learner.parameters()[name].grad, other.parameters()[name].grad, rtol=1e-3, atol=2e-5, msg=name
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_serves_the_same_numbers(dtype: str, kind: str) -> None:
    policy = few_bits(kind, dtype=dtype)
    learner, base = HFLearner(policy), base_digest(policy)
    engine = EmbeddedEngine(policy.twin().module, slots=4, context=policy.context, version=-2)
    served = asyncio.run(Sync(learner, engine, probe_ids(policy), dtype=dtype).push(0))
    assert served == learner.fingerprint() and not engine.fused
    assert base_digest(policy) == base
    exact = learner.exact(packed(3))
    assert exact is not None
    bound = 1e-4 if dtype == "float32" else 0.2
    np.testing.assert_allclose(learner.score(packed(3)), exact, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_over_the_float_weights_is_found(kind: str) -> None:
    """The fault that this setting could have: what is sampled from is not what is trained on."""
    policy = few_bits(kind)
    other = load_policy(tiny(lora=LORA), ALPHABET, 0)
    engine = EmbeddedEngine(other.module, slots=4, context=policy.context, version=-2)
    with pytest.raises(InvariantError, match="fingerprint"):
        asyncio.run(Sync(HFLearner(policy), engine, probe_ids(policy)).push(0))


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.3), pytest.param("nf4", 0.2, marks=TORCHAO)])
def test_memory_in_training_is_that_of_the_codes(kind: str, share: float) -> None:
    """Weights of a quarter of the bytes or an eighth, and a backward pass that keeps no float copy of them."""
    sizes = {"hidden": 128, "layers": 4, "ffn": 512, "heads": 4, "kv_heads": 4}
    lora = Lora(rank=2, targets=("q_proj", "down_proj"))
    one = HFLearner(few_bits(kind, lora=lora, **sizes))
    two = HFLearner(load_policy(tiny(lora=lora, **sizes), ALPHABET, 0))
    held = [sum(t.nbytes for t in adapter_modules.base_tensors(x.policy.module).values()) for x in (one, two)]
    layer = max(t.nbytes for t in adapter_modules.base_tensors(two.policy.module).values())
    assert one.policy.size == two.policy.size and held[0] < share * held[1]

    def work(learner: HFLearner) -> None:
        learner.forward(packed(2)).logp.sum().backward()

    for learner in (one, two):
        work(learner)  # its gradients and caches are there afterwards
    peaks = [peak_bytes(lambda learner=learner: work(learner)) for learner in (one, two)]
    assert peaks[0] <= peaks[1] + (2 if kind == "int8" else 8) * layer, (peaks, layer)


@pytest.mark.parametrize("kind", KINDS)
def test_twins_share_the_codes(kind: str) -> None:
    policy = few_bits(kind)
    twin = policy.twin()
    ours, theirs = adapter_modules.base_tensors(policy.module), adapter_modules.base_tensors(twin.module)
    assert all(theirs[n] is t for n, t in ours.items() if isinstance(t, nn.Parameter))
    beside = policy.beside(Lora(rank=2, targets=("q_proj",)), 1)
    assert base_digest(beside) == base_digest(policy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_merged_is_plain_and_computes_the_same(tmp_path: Path, dtype: str, kind: str) -> None:
    learner = HFLearner(few_bits(kind, dtype=dtype))
    learner.policy.save(tmp_path / "m")
    again = load_policy(tiny(path=str(tmp_path / "m"), dtype=dtype), None, 0)
    assert not is_quantised(again.module) and is_quantised(learner.policy.module)
    bound = 2e-5 if dtype == "float32" else 0.2
    np.testing.assert_allclose(HFLearner(again).score(packed(3)), learner.score(packed(3)), atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_alone_is_saved_and_read_over_the_same_weights(tmp_path: Path, kind: str) -> None:
    load_policy(tiny(), ALPHABET, 0).save(tmp_path / "base")
    model = tiny(path=str(tmp_path / "base"), lora=LORA, quantize=kind)  # type: ignore[arg-type]
    policy = load_policy(model, None, 0)
    with torch.no_grad():
        for name, tensor in adapter_modules.adapter_tensors(policy.module).items():
            if "lora_B" in name:
                tensor.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    write_adapter(policy, tmp_path / "a", str(tmp_path / "base"))
    again = load_policy(tiny(path=str(tmp_path / "a"), quantize=kind), None, 0)
    assert HFLearner(again).fingerprint() == HFLearner(policy).fingerprint()


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.quantize=int8", "all weights train"),
        ("model.quantize=int3 model.lora=4", "int8, nf4"),
        ("model.quantize=int8 model.lora=4 model.lora.dora=true", "DoRA"),
        ("model.quantize=int8 model.lora=4 engine=vllm", "engine=embedded"),
    ],
)
def test_wrong_settings_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dotted.apply(recipe("grpo"), words.split())


def test_it_is_refused_for_weights_that_train_and_for_other_layers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all weights train"):
        load_policy(tiny(quantize="int8"), ALPHABET, 0)
    with pytest.raises(ConfigError, match="Conv1D"):
        load_policy(tiny("gpt2", lora=LORA, quantize="int8"), ALPHABET, 0)
    load_policy(tiny(), ALPHABET, 0).save(tmp_path / "m")
    with pytest.raises(ConfigError, match="all weights train"):
        posttrain.run("grpo", f"model={tmp_path / 'm'}", "model.quantize=int8", out=tmp_path / "r", quiet=True)
    assert not (tmp_path / "r").exists()


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_four_bits_without_torchao_are_refused() -> None:
    with pytest.raises(ConfigError, match="posttrain.nf4"):
        few_bits("nf4")


@TORCHAO
def test_weights_that_make_no_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 64"):
        few_bits("nf4", hidden=24, heads=2, kv_heads=1, ffn=40)


# --- in a run ---------------------------------------------------------------------------------------------------------

SMALL = (
    *("rl.prompts=2", "rl.siblings=4", "rl.sampling.max_tokens=6", "evaluation.samples=1", "env.heldout=2"),
    *("rl.eval_every=0", "rl.checkpoint_every=1", "slots=8", "threads=1", "rl.optimizer.lr=0.01"),
    *("model.lora.rank=4", "rl.steps=2"),
)


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("built", [True, False])
def test_a_run_trains_goes_on_branches_and_exports(tmp_path: Path, built: bool, kind: str) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("def odd(task, text):\n    return float(sum(map(ord, text)) % 2)\n")
    words = [*SMALL, f"model.quantize={kind}", f"env.rewards={reward}:odd"]
    if not built:
        full = [w for w in words if not w.startswith(("model.quantize", "model.lora"))]
        posttrain.run("grpo", *full, out=tmp_path / "full", quiet=True)
        words.append(f"model={posttrain.export(tmp_path / 'full', tmp_path / 'model')}")
    run = tmp_path / "run"
    posttrain.run("grpo", *words, out=run, quiet=True)
    kept = run / "model" / "base.safetensors"
    assert kept.exists() == built
    if built:
        assert (torch.int8 if kind == "int8" else torch.uint8) in {t.dtype for t in load_file(kept).values()}
    posttrain.run(resume=run, steps=3, quiet=True)
    merged = posttrain.export(run, tmp_path / "merged")
    card = (Path(merged) / "README.md").read_text()
    assert "few bits" in card
    policy = load_policy(tiny(path=str(merged), context=None), None, 0)
    assert not is_quantised(policy.module)
    if not built:
        again = load_policy(
            tiny(path=str(posttrain.export(run, tmp_path / "alone", adapter=True)), context=None), None, 0
        )
        assert again.lora is not None and not is_quantised(again.module)
    if built:
        more = tmp_path / "more"
        branch = [w for w in words if not w.startswith(("model.quantize", "model.lora"))]
        posttrain.run("grpo", *branch, f"model={run}", out=more, quiet=True)
        assert run_file(more).run.model.quantize == kind
