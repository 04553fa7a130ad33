"""Decodes ids to text as they arrive. It holds back incomplete characters, and text that may become a stop string.

Together the pieces are the text of all ids, with one exception: byte-fallback decoders change earlier characters when
invalid bytes follow, and text that was sent is not changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property

from transformers import PreTrainedTokenizerFast

HALF = "\ufffd"
"""Character that a decoder writes for invalid or incomplete UTF-8."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # A token of one byte in byte-fallback vocabularies: `<0xE2>`.
_SPACE = "\u2581"
"""Character that stands for a space in the vocabularies of SentencePiece."""


class TokenText:
    """The text of ids, and the bytes of each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._added = {i: t.content for i, t in tokenizer.added_tokens_decoder.items()}
        # The decoder is a tree of steps. It is enough to know which kinds of steps it has, so its JSON text is
        # searched.
        decoder = json.dumps(json.loads(self._backend.to_str()).get("decoder"), ensure_ascii=False)
        self._byte_level, self._fallback = '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
        self._spaces = _SPACE in decoder

    @cached_property
    def longest(self) -> int:
        """Most bytes of text in one token; only approximately, if the tokenizer normalises text first."""
        pieces = (*self._backend.get_vocab(with_added_tokens=False), *self._added.values())
        # A byte-level vocabulary writes each byte as one letter.
        return max(len(p) if self._byte_level else len(p.encode()) for p in pieces)

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, also of incomplete characters. Empty for an id that is no token."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        # Decoding a token alone does not give its bytes, because a part of a character is decoded to U+FFFD.
        if self._byte_level and all(c in _byte_of() for c in piece):
            return bytes(_byte_of()[c] for c in piece)
        if self._fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode() if self._spaces else self.text([token]).encode()


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others are numbered from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Decoder:
    """Decodes one growing text. `add` returns text that is complete; `finish` returns the rest.

    A token's text depends on the tokens before it (a space, an incomplete character). So a piece is the text of a short
    window of tokens with the new one, minus the text of the window without it.
    """

    def __init__(self, words: TokenText) -> None:
        self._words = words
        self._ids: list[int] = []
        self._window, self._read = 0, 0
        """Indices of `_ids`: where the window begins, and where the tokens begin whose text was not returned yet."""
        self._said = ""
        """The text that was returned."""

    def add(self, token: int) -> str:
        """The text that this token completes; '' while a character is incomplete."""
        self._ids.append(token)
        before, now = self._around()
        # If the last character is incomplete, or the decoder removed a space, the next token is waited for.
        if now.endswith(HALF) or len(now) <= len(before):
            return ""
        # The new window begins with the tokens of this piece, so that it stays a few tokens long.
        piece = now[len(before) :]
        self._window, self._read = self._read, len(self._ids)
        self._said += piece
        return piece

    def finish(self) -> str:
        """The rest: bytes that are no complete character, as the decoder writes them."""
        # All ids as a whole, in case the windows left something out. Text that was sent and now differs (byte fallback)
        # stays: then only the rest of the window can be added.
        whole = self._words.text(self._ids)
        if whole.startswith(self._said):
            return whole[len(self._said) :]
        before, now = self._around()
        return now[len(before) :]

    def _around(self) -> tuple[str, str]:
        """(the text of the window's tokens up to `_read`, the text of the whole window)."""
        window = self._ids[self._window :]
        return self._words.text(window[: self._read - self._window]), self._words.text(window)


def begun(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of a text that may be the beginning of a mark, of which none is whole there."""
    lengths = (n for m in marks for n in range(1, min(len(m), len(text) + 1)) if text.endswith(m[:n]))
    return max(lengths, default=0)


class Stops:
    """Finds the first stop string in a growing text, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str, armed: bool = True) -> str:
        """The text that can be sent now: up to a stop string, which is removed, or up to the possible start of one.

        Args:
            armed: whether a stop string that ends in this piece ends the text.
        """
        if self.found or not self._stops:
            return "" if self.found else piece
        text, held = self._held + piece, len(self._held)
        # A stop string that was not found before ends in the new piece, so it begins at most len(s) - 1 characters
        # before the piece.
        places = (text.find(s, max(0, held - len(s) + 1)) for s in self._stops) if armed else ()
        stop_place = min((i for i in places if i >= 0), default=-1)
        if stop_place >= 0:
            self.found, self._held = True, ""
            return text[:stop_place]
        held_back = begun(text, self._stops)
        self._held = text[len(text) - held_back :]
        return text[: len(text) - held_back]

    def finish(self) -> str:
        """The text that was held back and is no stop string."""
        held, self._held = self._held, ""
        return held
