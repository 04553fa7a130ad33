"""Policies: built and loaded alike, saved and read back, and a sentence for everything that can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPT2Model,
    GraniteConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from posttrain.config.run import Model
from posttrain.engine.cpu import compile_native
from posttrain.engine.files.fingerprint import ROW, Spot, fingerprint, fingerprints
from posttrain.engine.layers import attention
from posttrain.engine.model.policy_model import (
    Policy,
    check_read_out,
    load_policy,
    named_tensors,
    prepared,
    read_out,
)
from posttrain.engine.model.stop_tokens import resolve_stops
from posttrain.engine.model.tiny_models import build_module, characters, raw_bytes
from posttrain.system.errors import ConfigError, DataError, EngineError, InvariantError
from tests.engine.engine_parts import ALPHABET, ARCHS, policy, tiny
from tests.vocabularies import train_bpe, train_byte_level, train_unigram

TEXTS = [
    "the cat sat on the mat, and 12 + 30 = 42.",
    "a dog ran over the hill; 7 * 6 = 42!",
    "über naïve cafés\n\ttwo  spaces",
] * 20
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bpe": lambda: train_bpe(TEXTS, 400),
    "unigram": lambda: train_unigram(TEXTS, 120),
    "byte_level": lambda: train_byte_level(TEXTS, 400),
}


def write(folder: Path, arch: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Path:
    """A checkpoint as somebody else would have made it."""
    build_module(tiny(arch), tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "good", "qwen3", characters(ALPHABET))


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def load(path: Path | str, **changes: object) -> Policy:
    return load_policy(Model(path=str(path), **changes), None, 0)  # type: ignore[arg-type]


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | changes).items() if v != "absent"}))


# --- building --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_built_weights_are_a_function_of_the_seed_alone(arch: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = load_policy(tiny(arch), ALPHABET, 3)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    two, other = load_policy(tiny(arch), ALPHABET, 3), load_policy(tiny(arch), ALPHABET, 4)
    marks = [fingerprint(named_tensors(p.module)) for p in (one, two, other)]
    assert marks[0] == marks[1] != marks[2]
    assert (one.context, one.stop_ids, one.tokenizer_digest) == (64, (len(ALPHABET),), two.tokenizer_digest)
    assert any("'<eos>' (24)" in line for line in one.describe()) and not one.module.training


def test_characters_and_bytes() -> None:
    text = "1+2 = 3\na"
    letters, octets = characters(ALPHABET), raw_bytes()
    assert [ALPHABET[i] for i in letters.encode(text)] == list(text) and letters.decode(letters.encode(text)) == text
    wild = "naïve 雪\x00\r\n  <pad"
    assert (
        len(octets.encode(wild)) == len(wild.encode())
        and octets.decode(octets.encode(wild)) == wild
        and len(octets) == 258
    )
    for tokenizer in (letters, octets):
        assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, None}) == 3
    with pytest.raises(Exception, match="UNK"):
        letters.encode("é")
    with pytest.raises(ConfigError, match=r"repeated \['a'\]"):
        characters("aba")
    assert load_policy(tiny(), None, 0).tokenizer.decode([72]) and "Z" not in ALPHABET


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden": 30}, "cannot be split over model.heads=4: use a multiple of 4"),
        ({"kv_heads": 3}, "use a divisor of 4"),
        ({"arch": "gpt2", "kv_heads": 2}, "set model.kv_heads=4"),
        ({"hidden": 12}, "must be even"),
        ({"layers": 0}, "model.layers=0"),
        ({"device": "cuda:77"}, "model.device='cuda:77' cannot be used here"),
        ({"device": "mps"}, "cannot be used here (torch is built without it). Use model.device=cpu"),
        ({"device": "toaster"}, "is no device: use cpu, cuda"),
        ({"device": "cpu:0"}, "is no device: use cpu, cuda"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(replace(tiny(), **changes), ALPHABET, 0)  # type: ignore[arg-type]
    assert says in str(caught.value)


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_round_trip(arch: str, kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]()
    first = load(write(tmp_path / "theirs", arch, tokenizer))
    assert [first.tokenizer.encode(t) for t in TEXTS[:3]] == [tokenizer.encode(t) for t in TEXTS[:3]]
    assert kind == "unigram" or first.tokenizer.decode(first.tokenizer.encode(TEXTS[2])) == TEXTS[2]
    first.save(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert fingerprints(named_tensors(again.module)) == fingerprints(named_tensors(first.module))
    assert (again.stop_ids, again.context, again.tokenizer_digest, again.template_digest) == (
        first.stop_ids,
        64,
        first.tokenizer_digest,
        first.template_digest,
    )
    module, words = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours"),
        AutoTokenizer.from_pretrained(tmp_path / "ours"),
    )
    ids = torch.tensor([words.encode("the cat sat")])
    said = module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)[0]
    ours = first.greedy(ids[0], len(said) - ids.shape[1])
    assert module.config._attn_implementation != attention.NAME and words.decode(said) == first.tokenizer.decode(ours)


def test_bfloat16_round_trip_and_clone(tmp_path: Path) -> None:
    p = policy(dtype=torch.bfloat16)
    p.save(tmp_path / "m")
    assert load(tmp_path / "m", dtype="bfloat16").dtype == torch.bfloat16
    other = p.clone()
    with torch.no_grad():
        other.module.get_input_embeddings().weight.zero_()
    assert other.module.lm_head.weight is other.module.get_input_embeddings().weight
    assert float(p.module.get_input_embeddings().weight.detach().abs().sum()) > 0


def test_a_vocabulary_of_three_tokens_is_saved(tmp_path: Path) -> None:
    load_policy(tiny(), "0", 0).save(tmp_path / "m")
    assert len(load(tmp_path / "m").tokenizer) == 3


def test_a_model_without_a_generation_config_is_a_policy() -> None:
    """Code of a model's own may give it none."""
    p = policy()
    p.module.generation_config = None
    assert prepared(tiny(), p.module, p.tokenizer, resolve_stops(p.tokenizer, None), "", []).stop_ids == p.stop_ids


def test_a_save_that_reads_back_differently_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = policy()
    real = AutoModelForCausalLM.from_pretrained

    def stale(*args: object, **kwargs: object) -> torch.nn.Module:
        module = real(*args, **kwargs)
        with torch.no_grad():
            module.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-7
        return module

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", stale)
    with pytest.raises(InvariantError, match=r"1 tensors were read back differently.*layers\.1\.mlp\.up_proj"):
        p.save(tmp_path / "m")


def test_dropout_is_off_and_no_embedding_row_is_frozen(tmp_path: Path) -> None:
    tokenizer = characters(ALPHABET)
    tokenizer.pad_token = tokenizer.eos_token
    path = write(tmp_path / "m", "gpt2", tokenizer)
    edit(path / "config.json", attn_pdrop=0.1, resid_pdrop=0.2, pad_token_id=tokenizer.eos_token_id)
    p = load(path)
    assert any("attn_pdrop=0.1" in line for line in p.describe())
    assert all(part.p == 0 for part in p.module.modules() if isinstance(part, torch.nn.Dropout))
    assert p.module.get_input_embeddings().padding_idx is None and p.stop_ids == (tokenizer.eos_token_id,)


# --- stop tokens -----------------------------------------------------------------------------------------------------


def test_stops_come_from_tokenizer_then_generation_config(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[25, 24, 3], _from_model_config="absent")
    assert load(folder).stop_ids == (24, 25, 3)
    edit(folder / "generation_config.json", eos_token_id=99)
    with pytest.raises(DataError, match=r"stop ids \[99\].*correct eos_token_id"):
        load(folder)


def test_leftover_eos_of_the_config_is_not_a_stop(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=[2, 25])
    assert load(folder).stop_ids == (24, 25)


def test_tokenizer_without_eos(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token="absent")
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "generation_config.json", eos_token_id="absent")
    with pytest.raises(DataError, match='no EOS token.*Set "eos_token" in tokenizer_config.json'):
        load(folder)
    edit(folder / "generation_config.json", eos_token_id=25, _from_model_config="absent")
    assert load(folder).stop_ids == (25,)


def test_a_turn_end_that_does_not_stop_is_said(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<pad>{% endfor %}"
    tokenizer.save_pretrained(folder)
    p = load(folder)
    assert any("ends a turn with '<pad>' (25), which is not a stop token" in line for line in p.describe())
    assert p.template_digest != policy().template_digest
    edit(folder / "generation_config.json", eos_token_id=[24, 25], _from_model_config="absent")
    assert not load(folder).notes
    assert resolve_stops(p.tokenizer, p.module.generation_config) == (24,)


# --- what can be wrong with a path -----------------------------------------------------------------------------------


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no such directory\. Give a directory written by save_pretrained"):
        load(tmp_path / "missing")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file: give the directory"):
        load(tmp_path / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="neither a directory here nor a model.*hf download nobody/nothing"):
        load("nobody/nothing")


def test_directories_that_hold_no_policy(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"without a tokenizer.*tokenizer\.save_pretrained"):
        load(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer cannot be read"):
        load(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    with pytest.raises(DataError, match="adapter lies beside the model"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match="only LORA adapters can be loaded"):
        load(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(DataError, match=r"no config\.json there.*save_pretrained wrote"):
        load(folder)


def test_configs_of_something_else(folder: Path) -> None:
    good = (folder / "config.json").read_text()
    T5Config(d_model=8, num_layers=1, num_heads=1).save_pretrained(folder)
    with pytest.raises(DataError, match="encoder-decoder.*decoder-only"):
        load(folder)
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(DataError, match=r"names no architecture.*trust_remote_code=true"):
        load(folder)
    (folder / "config.json").write_text(good[:40])
    with pytest.raises(DataError, match=r"config\.json"):
        load(folder)


def test_weights_that_are_missing_damaged_or_of_another_shape(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=3, layer_types="absent")
    with pytest.raises(DataError, match=r"11 tensors .* would be random: model\.layers\.2"):
        load(folder)
    edit(folder / "config.json", num_hidden_layers=2, intermediate_size=50)
    with pytest.raises(DataError, match="no causal LM could be loaded"):
        load(folder)
    edit(folder / "config.json", intermediate_size=48)
    load(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        load(folder)
    weights.unlink()
    with pytest.raises(DataError, match="no causal LM could be loaded"):
        load(folder)


def test_vocabulary_mismatch(folder: Path) -> None:
    characters(ALPHABET + "xyz").save_pretrained(folder)
    with pytest.raises(DataError, match=r"id 28, but the model has 26 embedding rows.*resize_token_embeddings"):
        load(folder)
    characters(ALPHABET[:-2]).save_pretrained(folder)
    edit(folder / "generation_config.json", eos_token_id="absent")
    edit(folder / "config.json", eos_token_id=None)
    assert any("2 embedding rows have no token" in line for line in load(folder).describe())


# --- the read-out ----------------------------------------------------------------------------------------------------

WIDTHS = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}
SIZES = WIDTHS | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILY = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SIZES, **FAMILY, logit_scale=0.2),
        GraniteConfig(**SIZES, **FAMILY, logits_scaling=3.0),
        Gemma2Config(**SIZES, **FAMILY, head_dim=8, final_logit_softcapping=2.0, sliding_window=8),
    ],
    ids=lambda c: c.model_type,
)
def test_scaled_and_capped_heads(config: CohereConfig | GraniteConfig | Gemma2Config) -> None:
    attention.register()
    module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32).eval()
    with torch.no_grad():
        module.get_input_embeddings().weight.mul_(30)
    out = read_out(module)
    assert (out.scale, out.softcap) != (1.0, None)
    assert check_read_out(module, out) < 1e-4
    with pytest.raises(EngineError, match=r"its logits differ.*Use a decoder-only causal LM"):
        check_read_out(module, replace(out, scale=1.1 * out.scale, softcap=None))


def test_a_scale_of_nothing_is_refused() -> None:
    p = policy()
    p.module.config.logits_scaling = 0
    with pytest.raises(EngineError, match=r"its logits differ from head\(decoder\(ids\)\) by nan"):
        check_read_out(p.module, read_out(p.module))


def test_modules_without_a_head() -> None:
    with pytest.raises(EngineError, match="no separate decoder and language-model head"):
        read_out(GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10)))  # type: ignore[arg-type]


# --- fingerprints ----------------------------------------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"small": (7,), "matrix": (33, 65), "rows": (3 * ROW * 2 + 5,), "scalar": (), "empty": (0, 4)}
    out = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    return out | {
        "half": torch.randn(9, 11, generator=g).bfloat16(),
        "count": torch.arange(5),
        "flag": torch.tensor([True, False, True]),
    }


@pytest.mark.skipif(bool(compile_native.missing()), reason="no C compiler")
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_code_and_torch_give_the_same_fingerprint(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole rows, the rest after the last one, words with the highest bit, and rows drawn by a number."""
    extreme = torch.tensor([0, -1, 1, -(2**63), 2**63 - 1, 2**32, -(2**32)]).repeat(2 * ROW)
    given = [*tensors().items(), ("extreme", extreme), ("odd", extreme[1:])]
    forms = None, Spot(3, one_in=4)
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled = [fingerprints(given, spot) for spot in forms]
    finally:
        torch.set_num_threads(kept)
    monkeypatch.setattr(compile_native, "find", lambda: "none")
    assert compiled == [fingerprints(given, spot) for spot in forms]
    assert len(set(compiled[0].values())) == len(given)


def test_a_fingerprint_sees_every_bit() -> None:
    before, rng = fingerprint(tensors().items()), np.random.default_rng(0)
    seen = {before}
    for name, tensor in tensors().items():
        raw = tensor.reshape(-1).view(torch.uint8)
        for at in rng.integers(0, max(1, len(raw)), 10 if len(raw) else 0).tolist():
            changed = tensors()
            changed[name].reshape(-1).view(torch.uint8)[at] ^= 1 if name == "flag" else 1 << int(rng.integers(8))
            assert fingerprint(changed.items()) != before, (name, at)
            seen.add(fingerprint(changed.items()))
    assert len(seen) > 50


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(matrix=-t["matrix"]),
        lambda t: t.update(rows=-t["rows"]),
        lambda t: t.update(matrix=t["matrix"].flip(0)),
        lambda t: t.update(rows=t["rows"].roll(2 * ROW)),
        lambda t: t.update(rows=t["rows"].roll(1)),
        lambda t: t.update(matrix=t["matrix"].T.contiguous().view(33, 65)),
        lambda t: t.update(matrix=t["matrix"].view(65, 33)),
        lambda t: t.update(half=t["half"].view(torch.float16)),
        lambda t: t.update(small=t["matrix"], matrix=t["small"]),
        lambda t: t.pop("empty"),
    ],
)
def test_a_fingerprint_sees_moves_and_forms(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    changed = tensors()
    change(changed)
    assert fingerprint(changed.items()) != fingerprint(tensors().items())


def test_fingerprints_name_the_stale_one_and_ignore_order_and_storage() -> None:
    fresh, other = tensors(), tensors()
    other["matrix"] = other["matrix"] + 1
    mine, theirs = fingerprints(fresh.items()), fingerprints(other.items())
    assert [n for n in mine if mine[n] != theirs[n]] == ["matrix"]
    assert fingerprint(reversed(list(fresh.items()))) == fingerprint(fresh.items())
    wide = torch.zeros(4 * ROW + 3)
    wide[3:] = torch.arange(4.0 * ROW)
    strided = torch.stack([wide[3:], wide[3:]], 1)[:, 0]
    assert fingerprint([("a", wide[3:])]) == fingerprint([("a", strided)]) == fingerprint([("a", wide[3:].clone())])
    assert fingerprint([]) != fingerprint([("a", wide)])
    with pytest.raises(InvariantError, match="listed twice"):
        fingerprint([("a", wide), ("a", wide)])
