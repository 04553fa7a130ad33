"""What the world answers can always be written: a character that a tokenizer has no token for is shown as another one.

A tokenizer of characters or words has no token for what it was not made with, and what a tool says (an error that
quotes the policy) is known to nobody beforehand. Were it refused in the middle of an episode, that episode would leave
the batch as if we had failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.core.errors import DataError

WILD = "é雪ßЖ\U0001f9ee"
"""Characters of many scripts: a tokenizer that writes each of them writes everything."""
STAND_INS = "?_.#-*0ax "
"""What is shown instead, the first of these that the tokenizer has."""


class Writable:
    """Texts as a tokenizer can write them.

    Args:
        encode: text to ids, nothing added; raises whatever it likes where it cannot.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._has: dict[str, bool] = {}
        self.everything = all(self._ids(c) for c in WILD)
        """Whether every text can be written."""
        self._drops = any(self._ids(c) == [] for c in WILD)
        self.stand_in = next((c for c in STAND_INS if self._ids(c)), "")

    def text(self, text: str) -> str:
        """The text where it can be written, else with a `stand_in` for each character that has no token.

        Raises:
            DataError: even so it cannot be written.
        """
        if all(self._writes(c) for c in set(text)) or not (self.everything or self._drops or self._ids(text) is None):
            return text
        shown = "".join(c if self._writes(c) else self.stand_in for c in text)
        if self._ids(shown) is None or (shown != text and not self.stand_in):
            raise DataError(
                f"this tokenizer has no tokens for {text!r:.80}, and none that could stand in for them. What tools and"
                " other worlds answer can be any text: use a tokenizer that writes all of it (bytes, byte fallback, or"
                " an <unk> token)"
            )
        return shown

    def check(self) -> None:
        """DataError where some text cannot be written, not even with stand-ins."""
        self.text(f"{WILD} ok")

    def _writes(self, character: str) -> bool:
        """Whether it has a token. Where unknown ones are dropped, space and control characters may be: tokenizers do so
        on purpose."""
        if self.everything:
            return not "\ud800" <= character <= "\udfff"
        if character not in self._has:
            ids = self._ids(character)
            self._has[character] = bool(ids) or (
                ids == [] and not (character.isprintable() and not character.isspace())
            )
        return self._has[character]

    def _ids(self, text: str) -> list[int] | None:
        """None where the tokenizer raises, as it does for half a surrogate pair."""
        try:
            return list(self._encode(text))
        except Exception:  # the tokenizers library raises plain exceptions for what a vocabulary lacks
            return None
