"""Checks that a saved model was read back as it was saved: its weights and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from posttrain.engine.files.fingerprint import fingerprints
from posttrain.system.errors import InvariantError


def same_weights(ours: Iterable[tuple[str, Tensor]], again: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    saved, read = fingerprints(ours), fingerprints(again)
    if wrong := sorted(n for n in saved.keys() | read.keys() if saved.get(n) != read.get(n)):
        raise InvariantError(
            f"{folder}: {len(wrong)} tensors were read back differently from what was saved: {', '.join(wrong[:4])}."
            " The disk or the format failed; do not use this folder"
        )


def same_tokenizer(ours: PreTrainedTokenizerFast, again: PreTrainedTokenizerFast, folder: Path) -> None:
    vocabulary = ours.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)[:200]
    texts = [ours.convert_tokens_to_string(tokens), "".join(tokens), ours.decode(list(range(min(200, len(ours)))))]
    same = (
        again.get_vocab() == vocabulary
        and again.eos_token_id == ours.eos_token_id
        and again.chat_template == ours.chat_template
    )
    if not same or any(_ids(ours, text) != _ids(again, text) for text in texts):
        raise InvariantError(
            f"{folder}: the tokenizer read back ({type(again).__name__}) encodes differently from the one saved "
            f"({type(ours).__name__}); do not use this folder"
        )


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int] | str:
    """The ids of the text, or the error message (a character tokenizer refuses characters it does not have)."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:
        return str(error)
