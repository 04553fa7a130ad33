"""Tokenizers made in code: one token per character or byte, for the built models.

Both are `PreTrainedTokenizerFast` with `<eos>` and a `<pad>`, which are different tokens. They save
and load like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

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
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return wrap(core)


def raw_bytes() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, so that any text can be encoded, then EOS and PAD: 258 tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*letters, EOS, PAD])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return wrap(core)


def wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def digest(text: str) -> str:
    """Hex digest (32 characters) of a tokenizer's or template's full text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
