"""Small models of real architectures, and their tokenizers, built in code. They run the code of downloaded checkpoints.

A tokenizer has one token per character or byte, `<eos>`, and a `<pad>` that is another token.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from posttrain.config.run import BUILT_CONTEXT, MIXTURES, Model
from posttrain.core import seeds
from posttrain.engine.layers import attention
from posttrain.system.errors import ConfigError

EOS, PAD = "<eos>", "<pad>"


def characters(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`, in its order, then EOS and PAD. Encoding any other character raises.

    Example: characters("01+").encode("1+0") == [1, 2, 0]; EOS is 3, PAD 4.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
        raise ConfigError(
            f"an alphabet lists every character once, and at least one: got {len(alphabet)} characters, repeated"
            f" {twice}"
        )
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*alphabet, EOS, PAD])}))
    # [\s\S] is any character, line ends too; a dot would leave those out.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return wrap(core)


def raw_bytes() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, so that any text can be encoded, then EOS and PAD: 258 tokens."""
    # A BPE without merges. Sorted, because the alphabet has no fixed order and ids must not change from run to run.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*letters, EOS, PAD])}, merges=[]))
    # No space is put before a text, so that decoding gives the text back exactly.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return wrap(core)


def wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    """A core as a tokenizer of transformers. Its decoding changes no spaces."""
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def digest(text: str) -> str:
    """Hex digest (32 characters) of a tokenizer's or template's full text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no progress bars."""
    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


ROTARY = {
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "gemma": GemmaConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
}
"""The config class of each architecture with rotary positions. `config` builds GPT-2, with learned ones, itself."""
OWN_HEAD = ("llama", "mixtral")
"""Architectures whose head is not tied to the embeddings."""


def build_module(model: Model, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """`model.arch` at the sizes of `model`, float32 on CPU. Its weights depend only on `seed`, sizes and vocabulary."""
    attention.register()
    with generators_kept():
        # `torch.manual_seed` would also seed accelerators.
        torch.default_generator.manual_seed(seeds.torch_seed(seed, "weights"))
        return AutoModelForCausalLM.from_config(
            config(model, tokenizer), attn_implementation=attention.NAME, dtype=torch.float32
        )


def config(model: Model, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """The architecture's own config class with the sizes of `model`, without dropout. In a mixture every layer has
    experts. The standard deviation of the initial weights is 0.5 / sqrt(hidden): at these widths transformers' 0.02 is
    so small that the first hundred steps learn little."""
    context = BUILT_CONTEXT if model.context is None else model.context
    settings = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "initializer_range": 0.5 * model.hidden**-0.5,
    }
    if model.arch == "gpt2":
        return GPT2Config(
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=model.ffn,
            n_positions=context,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            summary_first_dropout=0.0,
            **settings,
        )
    if model.arch == "qwen3_moe":
        settings |= {"num_experts": model.experts, "moe_intermediate_size": model.ffn, "norm_topk_prob": True}
    if model.arch == "mixtral":
        settings |= {"num_local_experts": model.experts, "sliding_window": None}
    if model.arch in MIXTURES:
        settings |= {"num_experts_per_tok": model.experts_per_token}
    return ROTARY[model.arch](
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.hidden // model.heads,
        intermediate_size=model.ffn,
        max_position_embeddings=context,
        tie_word_embeddings=model.arch not in OWN_HEAD,
        **settings,
    )


@contextmanager
def generators_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore afterwards the random generators of Python, numpy, torch on CPU and on these devices."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(list(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
