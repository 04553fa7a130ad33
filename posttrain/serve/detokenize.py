"""Ids to text as they come: no half characters, nothing that may still turn out to be a stop string.

Concatenated pieces are the text of the whole, on every kind of tokenizer; except that byte-fallback decoders take back
characters when invalid bytes follow, and what was shown is not taken back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property

from transformers import PreTrainedTokenizerFast

HALF = "\ufffd"
"""What a decoder writes for bytes that are no character, or none yet."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenText:
    """A tokenizer as the server reads it: text of ids, and each token's own bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._added = {i: t.content for i, t in tokenizer.added_tokens_decoder.items()}
        decoder = json.dumps(json.loads(self._backend.to_str()).get("decoder"), ensure_ascii=False)
        self._byte_level, self._fallback, self._spaces = (
            '"ByteLevel"' in decoder,
            '"ByteFallback"' in decoder,
            _SPACE in decoder,
        )

    @cached_property
    def longest(self) -> int:
        """Bytes of text that one token can stand for, at most; for a text that the tokenizer changes first, more or
        less."""
        pieces = (*self._backend.get_vocab(with_added_tokens=False), *self._added.values())
        return max(len(p) if self._byte_level else len(p.encode()) for p in pieces)

    def text(self, ids: Sequence[int]) -> str:
        """Special tokens stay visible."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def bytes(self, token: int) -> bytes:
        """What a token adds to the UTF-8 of a text, half characters included; empty for an id that is no token."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level and all(c in _byte_of() for c in piece):
            return bytes(_byte_of()[c] for c in piece)
        if self._fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return (
            piece.replace(_SPACE, " ").encode()
            if self._spaces
            else self._backend.decode([token], skip_special_tokens=False).encode()
        )


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others come after 255 in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


class Decoder:
    """One growing text. `add` returns what has become certain; `finish` the rest.

    A token's text depends on the tokens just before it (a space, a half character), so each piece is what a short
    window of tokens says with it beyond what the window says without it.
    """

    def __init__(self, words: TokenText) -> None:
        self._words = words
        self._ids: list[int] = []
        self._window, self._read = 0, 0
        self._said = ""

    def add(self, token: int) -> str:
        """The text that this token makes certain; '' while a character is incomplete."""
        self._ids.append(token)
        before, now = (
            self._words.text(self._ids[self._window : self._read]),
            self._words.text(self._ids[self._window :]),
        )
        if now.endswith(HALF) or len(now) <= len(before):
            return ""
        piece = now[len(before) :]
        self._window, self._read = self._read, len(self._ids)
        self._said += piece
        return piece

    def finish(self) -> str:
        """What is left: bytes that never became a character, as the decoder writes them."""
        whole = self._words.text(self._ids)
        if whole.startswith(self._said):
            return whole[len(self._said) :]
        before, now = (
            self._words.text(self._ids[self._window : self._read]),
            self._words.text(self._ids[self._window :]),
        )
        return now[len(before) :]


class Stops:
    """Finds the first stop string in a growing text, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str, armed: bool = True) -> str:
        """The text that may be shown now: up to a stop string, which is left out, or up to where one may have begun.

        Args:
            armed: whether a stop string that ends in this piece ends the text.
        """
        if self.found or not self._stops:
            return "" if self.found else piece
        text, held = self._held + piece, len(self._held)
        found = (text.find(s, max(0, held - len(s) + 1)) for s in self._stops) if armed else ()
        at = min((i for i in found if i >= 0), default=-1)
        if at >= 0:
            self.found, self._held = True, ""
            return text[:at]
        keep = max(
            (n for s in self._stops for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back for nothing."""
        held, self._held = self._held, ""
        return held
