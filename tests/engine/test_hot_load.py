"""Adapters as files for vLLM, without vLLM: what is written computes what the learner computes, and what is read back
is compared with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from posttrain.config.engines import VLLM
from posttrain.config.model_settings import Lora
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.files.fingerprint import fingerprints
from posttrain.engine.layers.attention import PackedLayout, using
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy, named_tensors
from posttrain.engine.vllm.adapter_load import HotLoad, lora_arguments, rank_for, without_negative_zeros, write_base
from posttrain.engine.vllm.launch import arguments
from posttrain.system.errors import ConfigError, EngineError
from tests.engine.engine_parts import ALPHABET, tiny
from tests.tiny import MODEL, tiny_run


def learned(dtype: str = "float32", **kind: Any) -> Policy:
    """A tiny policy whose adapter has learned something."""
    policy = load_policy(tiny(dtype=dtype, lora=Lora(rank=3, alpha=5, **kind)), ALPHABET, 0)
    with torch.no_grad():
        for name, tensor in adapter_modules.adapter_tensors(policy.module).items():
            if "lora_B" in name:
                tensor.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return policy


def loaded(policy: Policy) -> HotLoad:
    found = HotLoad.of(policy)
    assert found is not None
    return found


def given(policy: Policy) -> list[tuple[str, Tensor]]:
    return [(n, t.detach()) for n, t in adapter_modules.adapter_tensors(policy.module).items()]


def served(policy: Policy, hot: HotLoad) -> dict[str, str]:
    """What a right engine reads back."""
    own = adapter_modules.adapter_tensors(policy.module)
    base = fingerprints((n, without_negative_zeros(t)) for n, t in named_tensors(policy.module) if n not in own)
    return {**base, **fingerprints((n, without_negative_zeros(t)) for n, t in hot.sent(given(policy)).items())}


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"targets": ("q_proj", "down_proj")}])
def test_the_files_are_an_adapter_with_the_scale_inside(tmp_path: Path, kind: dict[str, Any]) -> None:
    """Read by PEFT, whose own scale is then 1."""
    policy = learned(**kind)
    size = loaded(policy).write(tmp_path / "a", given(policy))
    assert size == sum(t.nbytes for _, t in given(policy))
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0, "nobody else reads it"
    again: Any = PeftModel.from_pretrained(adapter_modules.without_adapters(policy.module), str(tmp_path / "a")).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad(), using(PackedLayout([12])):
        ours, theirs = (m(input_ids=ids, use_cache=False).logits for m in (policy.module, again))
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_engine_has_the_learners_fingerprint(dtype: str) -> None:
    policy = learned(dtype)
    hot = loaded(policy)
    assert hot.confirm([{"digests": served(policy, hot)}], given(policy)) == HFLearner(policy).fingerprint()
    assert {n for n, _, _ in hot.wanted()} == {n for n, _ in named_tensors(policy.module)}
    assert {str(t.dtype) for t in hot.sent(given(policy)).values()} == {f"torch.{dtype}"}


@pytest.mark.parametrize(("part", "said"), [("lora_B", "another adapter"), ("base_layer", "weights beneath")])
@pytest.mark.parametrize("lost", [True, False])
def test_another_one_is_refused(part: str, said: str, lost: bool) -> None:
    policy = learned()
    hot = loaded(policy)
    digests = served(policy, hot)
    name = next(n for n in digests if part in n)
    digests = {n: d for n, d in digests.items() if n != name} if lost else {**digests, name: "0" * 32}
    with pytest.raises(EngineError, match=said):
        hot.confirm([{"digests": digests}], given(policy))


def test_a_negative_zero_beneath_is_no_difference() -> None:
    """Products of a layer cannot show it."""
    policy = learned()
    name, tensor = next((n, t) for n, t in named_tensors(policy.module) if "base_layer" in n)
    with torch.no_grad():
        tensor.view(-1)[0] = -0.0
    hot = loaded(policy)
    assert hot.beneath[name] != hot.served_beneath[name]
    assert hot.confirm([{"digests": served(policy, hot)}], given(policy)) == HFLearner(policy).fingerprint()


def test_the_base_is_written_without_the_adapter(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    policy, plain = learned(), load_policy(tiny(), ALPHABET, 0)
    write_base(policy, tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    own = dict(named_tensors(plain.module))
    assert held.keys() == own.keys() and all(torch.equal(held[n], t) for n, t in own.items())


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_vllm_makes_room_for_the_next_of_its_ranks(rank: int, room: int) -> None:
    assert rank_for(Lora(rank=rank)) == lora_arguments(Lora(rank=rank))["max_lora_rank"] == room


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="Set engine.update=drain"):
        replace(tiny_run(), engine=VLLM(update="inflight"), model=replace(MODEL, lora=Lora(rank=2)))
    with pytest.raises(ConfigError, match="up to 512"):
        rank_for(Lora(rank=513))
    with pytest.raises(EngineError, match="layers q_proj, up_proj"):
        loaded(learned()).refuse(["m.0.q_proj.lora_A.default.weight", "m.0.up_proj.lora_B.default.weight"])
    with pytest.raises(ConfigError, match="--max-loras"):
        arguments(["--enable-lora", "--max-loras=2"])
    assert lora_arguments(None) == {} and HotLoad.of(load_policy(tiny(), ALPHABET, 0)) is None
