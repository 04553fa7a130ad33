"""Tokenizers made in code: one token per character or byte for the built models, and trained ones
of every common family.

All are `PreTrainedTokenizerFast` with `<eos>` and a `<pad>`, which are different tokens. They save
and load like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from posttrain.core.errors import ConfigError

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


def train_byte_level(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (GPT-2, Llama 3, Qwen) with at most `size` tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS, PAD], initial_alphabet=letters, show_progress=False),
    )
    return wrap(core)


def train_bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """BPE over characters (Llama 2, Gemma) with at most `size` tokens. Spaces are `▁`; unseen
    characters become bytes."""
    core = Tokenizer(models.BPE(byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()]
    )
    special = [EOS, PAD, *(f"<0x{b:02X}>" for b in range(256))]
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    return wrap(_plain_bytes(core))


def train_unigram(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Unigram (SentencePiece's other model; T5, XLNet) with at most `size` tokens. Unseen characters become `<unk>`."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Metaspace(prepend_scheme="never")
    core.train_from_iterator(
        texts,
        trainers.UnigramTrainer(
            vocab_size=size, special_tokens=["<unk>", EOS, PAD], unk_token="<unk>", show_progress=False
        ),
    )
    return wrap(core)


def wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _plain_bytes(core: Tokenizer) -> Tokenizer:
    """Byte tokens as ordinary vocabulary entries. As special tokens they would also match the literal text `<0x0A>`."""
    plain = json.loads(core.to_str())
    plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] in (EOS, PAD)]
    return Tokenizer.from_str(json.dumps(plain))


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
