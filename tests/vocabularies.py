"""Trained tokenizers of every common family, for the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.engine.model.tiny_models import EOS, PAD, wrap


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


def _plain_bytes(core: Tokenizer) -> Tokenizer:
    """Byte tokens as ordinary vocabulary entries. As special tokens they would also match the literal text `<0x0A>`."""
    plain = json.loads(core.to_str())
    plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] in (EOS, PAD)]
    return Tokenizer.from_str(json.dumps(plain))
