"""Shapes of models: the counts are those of transformers' own classes, and those that were published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from posttrain.config.model_settings import Lora
from posttrain.engine.adapters.adapter_modules import attach
from posttrain.plan.lengths import Lengths
from posttrain.plan.machines import device
from posttrain.plan.models import MODELS, shape_by_name
from posttrain.plan.serving import Decoding
from posttrain.plan.shapes import FAMILIES, read_shape, shape_of
from posttrain.plan.work import Work
from posttrain.system.errors import ConfigError

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 80},
    "qwen3_moe": {**EXPERTS, "num_experts": 8},
    "deepseek_v3": {**EXPERTS, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1, "attention_bias": True,
                 "use_qk_norm": True},
    "gpt_oss": {"num_local_experts": 4},
}  # fmt: skip
PUBLISHED = {
    "gpt2": 124_439_808, "pythia-1.4b": 1_414_647_808, "SmolLM2-135M": 134_515_008, "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496, "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512, "Qwen3-8B": 8_190_735_360, "Qwen3-30B-A3B": 30_532_122_624,
    "Mistral-7B-v0.3": 7_248_023_552, "Mixtral-8x7B": 46_702_792_704, "gemma-2-9b": 9_241_705_984,
    "Phi-3-mini": 3_821_079_552, "OLMo-2-7B": 7_298_617_344, "gpt-oss-20b": 20_914_757_184,
}  # fmt: skip
"""Parameters as the hub counts them in the published weights."""


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """From the config as it is saved, which leaves out what is a default."""
    config = AutoConfig.for_model(family, **{**SMALL, **MORE.get(family, {})})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert read_shape(tmp_path).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_are_those_of_transformers(family: str) -> None:
    """By name, inputs, outputs and number. Experts that a router chooses are parameters of another form."""
    config = AutoConfig.for_model(family, **{**SMALL, **MORE.get(family, {})})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = dict[tuple[str, int, int], int]()
    for name, layer in model.named_modules():
        if isinstance(layer, (torch.nn.Linear, Conv1D)) and re.search(r"\.(layers|h)\.", name):
            sides = layer.weight.shape if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
            key = (str(name).rpartition(".")[2], int(sides[0]), int(sides[1]))
            theirs[key] = theirs.get(key, 0) + 1
    lengths = Lengths(prompt=8, mean=8, most=8)
    work = Work(shape=shape_of(config.to_dict()), lengths=lengths, prompts=1, micro_tokens=64)
    assert theirs == {(n.rpartition(".")[2], i, o): count for n, (i, o, count) in work.linear.items() if count}


PASTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The list of targets that recipes of the field print for every model: what a model does not have is passed over."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "targets",
    [("all-linear",), PASTED, ("attn.c_proj",), ("self_attn.o_proj", "no_proj"), ("c_proj", "dense"), ("no_proj",)],
    ids="+".join,
)
def test_adapters_are_put_where_peft_puts_them(family: str, targets: tuple[str, ...]) -> None:
    config = AutoConfig.for_model(family, **{**SMALL, **MORE.get(family, {})})
    lengths, lora = Lengths(prompt=8, mean=8, most=8), Lora(rank=8, targets=targets)
    work = Work(shape=shape_of(config.to_dict()), lengths=lengths, prompts=1, micro_tokens=64, lora=lora)
    try:
        attach(model := AutoModelForCausalLM.from_config(config), lora, seed=0)
    except ConfigError:
        # A model without such a layer is refused by the plan too. What else is refused is said when a run starts.
        ends = tuple(f".{t}" for t in targets)
        if targets != ("all-linear",) and not any(f".{n}".endswith(ends) for n, _ in model.named_modules()):
            with pytest.raises(ConfigError, match=f"targets={','.join(targets)}: a plan counts all-linear, "):
                _ = work.adapter_parameters
        return
    assert work.adapter_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    assert shape_by_name(name).parameters == PUBLISHED[name]


def test_every_model_of_the_table_has_a_shape() -> None:
    assert len(MODELS) >= 30
    for name in MODELS:
        shape = shape_by_name(name.upper())
        assert 0 < shape.active <= shape.parameters + shape.vocabulary * shape.hidden
        assert shape.cache_bytes() <= shape.cache_bytes(shared=False)
    assert shape_by_name("DeepSeek-V3").cache_bytes() == 2 * 61 * (512 + 64)


def test_what_a_token_does_not_use_is_whole_experts() -> None:
    """gpt-oss-20b uses 4 of 32 experts in each of 24 layers, and each has biases."""
    shape = shape_by_name("gpt-oss-20b")
    weights, biases = 3 * 2880 * 2880, 2 * 2880 + 2880
    unused = shape.parameters - shape.parts["embedding"] - shape.active
    assert unused == 24 * (32 - 4) * (weights + biases)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "bert"}, "is no decoder whose shape is known"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"hidden_size": -1}, "hidden_size=-1 must be a whole number of at least 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None must be"),
        ({"vocab_size": True}, "vocab_size=True must be"),
    ],
)
def test_what_is_no_decoder_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of({"model_type": "llama", **SMALL, **changed})


def test_a_folder_without_a_config_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no config.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": "llama", **SMALL}}))
    assert read_shape(tmp_path).hidden == 64
    with pytest.raises(ConfigError, match="or give its folder"):
        shape_by_name("Qwen2.5-8B")
    with pytest.raises(ConfigError, match="no device 'H1000' is known"):
        device("H1000")


def test_a_decoding_step_waits_for_what_takes_longest() -> None:
    """Llama-3.1-8B on one H100, by hand: 16.06 GB of weights and 131,072 bytes a token at 3.35 TB/s."""
    few = Decoding(shape_by_name("Llama-3.1-8B"), device("H100"), devices=1, sequences=1, length=1000)
    assert few.reading == pytest.approx((2 * few.shape.active + 131_072_000) / 3.35e12)
    assert few.bound == "bandwidth" and few.fitting == int((80e9 - 2 * 8_030_261_248) / 131_072_000)
    many = Decoding(few.shape, few.device, devices=1, sequences=few.fitting + 1, length=1000)
    assert many.bound == "memory"
    short = Decoding(few.shape, few.device, devices=1, sequences=2000, length=1)
    assert short.bound == "arithmetic"
    with pytest.raises(ConfigError, match="sequences=0 must be at least 1"):
        Decoding(few.shape, few.device, devices=1, sequences=0, length=1)
