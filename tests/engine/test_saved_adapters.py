"""Adapters on disk are PEFT's: PEFT reads what we write, we read what PEFT writes, and strange ones are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain.config.model_settings import Lora
from posttrain.engine.adapters.saved_adapter import CONFIG, WEIGHTS, saved_adapter, write_adapter
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.locate_model import check_source
from posttrain.engine.model.policy_model import load_policy
from posttrain.role.learning.logprob_tolerance import packed_text
from posttrain.system.errors import ConfigError, DataError
from tests.engine.engine_parts import ALPHABET, tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory."""
    folder = tmp_path_factory.mktemp("model") / "base"
    load_policy(tiny(), ALPHABET, 0).save(folder)
    return folder


def written_by_peft(base: Path, folder: Path, **changes: Any) -> Path:
    """An adapter of somebody else, with numbers in B, as PEFT writes it."""
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj"], **changes)
    adapted: Any = get_peft_model(model, config)
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_B" in name:
                tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(folder)
    return folder


def changed(folder: Path, **settings: Any) -> Path:
    """The same adapter with other settings in its config."""
    file = folder / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_one_of_somebody_else_computes_what_peft_computes(base: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    folder = written_by_peft(base, tmp_path / "a", **kind)
    policy = load_policy(tiny(path=str(folder)), None, 0)
    theirs: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)).eval()
    ids = torch.arange(12)
    with torch.no_grad():
        wanted = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)
    assert policy.lora == Lora(
        rank=3, alpha=6, targets=("q_proj", "up_proj"), rslora="use_rslora" in kind, dora="use_dora" in kind
    )
    text = packed_text(np.arange(12, dtype=np.int32))
    ours = HFLearner(policy).score(text)
    np.testing.assert_allclose(ours, wanted[:-1].gather(1, ids[1:, None])[:, 0].numpy(), atol=2e-5)
    assert not np.allclose(ours, HFLearner(load_policy(tiny(path=str(base)), None, 0)).score(text))


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}, {"targets": ("down_proj",)}])
def test_what_is_written_is_read_again_to_the_bit_and_by_peft(base: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    policy = load_policy(tiny(path=str(base), lora=Lora(rank=2, **kind)), None, 0)
    learner = HFLearner(policy)
    with torch.no_grad():
        for name, tensor in learner.parameters().items():
            if "lora_B" in name:
                tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    write_adapter(policy, tmp_path / "a", str(base))
    again = load_policy(tiny(path=str(tmp_path / "a")), None, 0)
    assert HFLearner(again).fingerprint() == learner.fingerprint()
    theirs: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "a")).eval()
    text, ids = packed_text(np.arange(12, dtype=np.int32)), torch.arange(12)
    with torch.no_grad():
        wanted = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(learner.score(text), wanted.numpy(), atol=2e-5)


def test_it_is_known_by_its_config_and_a_model_is_not_one(base: Path, tmp_path: Path) -> None:
    found = saved_adapter(written_by_peft(base, tmp_path / "a"))
    assert found is not None and found.base == str(base) and found.lora.rank == 3
    assert saved_adapter(base) is None and saved_adapter(tmp_path / "nothing") is None
    again = saved_adapter(changed(tmp_path / "a", use_rslora=1, init_lora_weights="gaussian"))
    assert again is not None and again.lora.rslora, "PEFT takes any true value"


def test_dropout_is_switched_off_and_said(base: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny(path=str(written_by_peft(base, tmp_path / "a", lora_dropout=0.1))), None, 0)
    assert any("dropout is off (0.1" in note for note in policy.notes)


def test_another_adapter_than_the_saved_one_is_refused(base: Path, tmp_path: Path) -> None:
    folder = written_by_peft(base, tmp_path / "a")
    with pytest.raises(ConfigError, match="there is an adapter already"):
        load_policy(replace(tiny(path=str(folder)), lora=Lora(rank=5)), None, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"peft_type": 3}, "only LORA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"bias": "all"}, "bias"),
        ({"base_model_name_or_path": ""}, "names no model"),
        ({"base_model_name_or_path": None}, "names no model"),
        ({"base_model_name_or_path": 7}, "names no model"),
        ({"r": "8"}, "must be numbers"),
        ({"r": True}, "must be numbers"),
        ({"r": 0}, "rank=0"),
        ({"lora_alpha": 1e400}, "must be > 0"),
        ({"target_modules": "(a+)+$"}, "a list of names"),
        ({"target_modules": ["(a+)+$"]}, "a list of names"),
        ({"target_modules": []}, "at least one layer"),
        ({"some_new_setting": True}, "some_new_setting"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ],
)
def test_strange_settings_are_refused(base: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = changed(written_by_peft(base, tmp_path / "a"), **settings)
    with pytest.raises((DataError, ConfigError), match=message):
        load_policy(tiny(path=str(folder)), None, 0)


def test_the_base_may_be_a_hub_id_and_the_hub_is_asked_for_it_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "hub" / "models--some--model"
    shutil.copytree(base, kept / "snapshots" / "abc")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = changed(written_by_peft(base, tmp_path / "a"), base_model_name_or_path="some/model")
    check_source("model.path", str(folder))
    changed(folder, base_model_name_or_path="some/other")
    with pytest.raises(ConfigError, match=r"base_model_name_or_path=some/other: .*hf download some/other"):
        check_source("model.path", str(folder))
    changed(folder, base_model_name_or_path="some--other")
    with pytest.raises(ConfigError, match="no hub id"):
        check_source("model.path", str(folder))
    changed(folder, base_model_name_or_path="some/model", revision="v2")
    with pytest.raises(DataError, match="revision 'v2' of some/model"):
        check_source("model.path", str(folder))


@pytest.mark.parametrize("rank", [10**9, 10**30])
def test_a_rank_beyond_every_layer_is_refused_before_it_takes_memory(base: Path, tmp_path: Path, rank: int) -> None:
    with pytest.raises(DataError, match=f"describes no adapter: model.lora.rank={rank}: must be 1 to 65,536"):
        load_policy(tiny(path=str(changed(written_by_peft(base, tmp_path / "a"), r=rank))), None, 0)


@pytest.mark.parametrize("damage", ["missing", "cut", "pickle", "other names", "other shapes", "over an adapter"])
def test_damaged_ones_are_refused(base: Path, tmp_path: Path, damage: str) -> None:
    folder = written_by_peft(base, tmp_path / "a")
    file = folder / WEIGHTS
    held = load_file(file)
    if damage in ("missing", "pickle"):
        file.unlink()
    if damage == "pickle":
        torch.save(held, folder / "adapter_model.bin")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    if damage == "other names":
        save_file({n.replace("q_proj", "k_proj"): t for n, t in held.items()}, file)
    if damage == "other shapes":
        save_file({n: t[:1].clone() for n, t in held.items()}, file)
    if damage == "over an adapter":
        changed(folder, base_model_name_or_path=str(folder))
    with pytest.raises((DataError, ConfigError)):
        load_policy(tiny(path=str(folder)), None, 0)
