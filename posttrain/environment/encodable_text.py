"""Makes every observation encodable: a character without a token is replaced by another one.

A tokenizer of characters or words has no token for text it was not built with, such as the error of a tool that quotes
the policy. If such a text were refused, the episode would fail, although the policy is not to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from posttrain.core.types import Message
from posttrain.system.errors import DataError


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this file and `environment.templates` use."""

    chat_template: Any
    bos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool, **more: Any
    ) -> str: ...


EXACT: Mapping[str, bool] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
"""Options with which every id is decoded as it stands."""

PROBES = "é雪ßЖ\U0001f9ee"
"""Characters of many scripts. A tokenizer that encodes each of them is assumed to encode every text."""
STAND_INS = "?_.#-*0ax "
"""Candidates for the replacement. The first one that the tokenizer has is used."""


class Writable:
    """Replaces the characters that a tokenizer cannot encode.

    Args:
        encode: text to ids, with nothing added. It may raise any Exception if it cannot encode the text.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._has: dict[str, bool] = {}
        self.everything = all(self._ids(c) for c in PROBES)
        """True if every text can be encoded."""
        self._drops = any(self._ids(c) == [] for c in PROBES)
        """True if the tokenizer drops unknown characters, and raises no error for them."""
        self.stand_in = next((c for c in STAND_INS if self._ids(c)), "")

    def text(self, text: str) -> str:
        """The text, with `stand_in` in place of each character that has no token. DataError if even that has none."""
        # A tokenizer of whole words refuses single characters, and may encode the text all the same. Then it stays too.
        if all(self._writes(c) for c in set(text)) or not (self.everything or self._drops or self._ids(text) is None):
            return text
        shown = "".join(c if self._writes(c) else self.stand_in for c in text)
        # Even if each character has a token, the tokenizer may refuse the whole text.
        if self._ids(shown) is None or (shown != text and not self.stand_in):
            raise DataError(
                f"this tokenizer has no tokens for {text!r:.80}, and none that could stand in for them. What tools and"
                " other worlds answer can be any text: use a tokenizer that writes all of it (bytes, byte fallback, or"
                " an <unk> token)"
            )
        return shown

    def check(self) -> None:
        """DataError if some text cannot be encoded even with stand-ins."""
        self.text(f"{PROBES} ok")

    def _writes(self, character: str) -> bool:
        """Returns whether the character has a token. White space and control characters that the tokenizer drops count
        as encodable, because tokenizers drop those on purpose."""
        if self.everything:
            # Half of a surrogate pair has no UTF-8, so not even a tokenizer of bytes writes it.
            return not "\ud800" <= character <= "\udfff"
        if character not in self._has:
            ids = self._ids(character)
            dropped_on_purpose = ids == [] and not (character.isprintable() and not character.isspace())
            self._has[character] = bool(ids) or dropped_on_purpose
        return self._has[character]

    def _ids(self, text: str) -> list[int] | None:
        """The ids; None if the tokenizer raises, as it does for half of a surrogate pair."""
        try:
            return list(self._encode(text))
        except Exception:  # the tokenizers library raises plain exceptions for what a vocabulary lacks
            return None


def leading_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Special ids before plain text, found by encoding a probe with and without them."""
    probe = _probe(tokenizer)
    full = tokenizer.encode(probe, add_special_tokens=True)
    bare = tokenizer.encode(probe, add_special_tokens=False)
    # Special tokens may stand before and behind the text. Those before the text's own ids are the leading ones.
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    raise DataError(
        f"this tokenizer encodes {probe!r} as {bare} alone but as {full} with special tokens; its special tokens cannot"
        " be told apart"
    )


def _probe(tokenizer: Tokenizer) -> str:
    """A text that the tokenizer can encode. A character tokenizer has only its alphabet."""
    for text in ("0", "a", *(tokenizer.decode([i], **EXACT) for i in range(64))):
        try:
            if text and tokenizer.encode(text, add_special_tokens=False):
                return text
        except Exception:  # the tokenizers library raises plain exceptions for what a vocabulary lacks
            continue
    raise DataError(
        "this tokenizer can write neither 0, nor a, nor any of its first 64 tokens; it is no tokenizer of text"
    )
