"""Stop strings: which token of a turn completes one.

It is the first token with which the text of the turn contains a stop string. The first `min_tokens` tokens complete
none: the string must end behind their text. All tokens of the turn are decoded together. So a string may span tokens,
and a token may hold several characters or a part of one. It does not matter how a character was cut into tokens.
Nothing is stored between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from posttrain.core.sampling import Sampling
from posttrain.system.errors import EngineError

Text = Callable[[np.ndarray], str]
"""Decodes token ids, special tokens included."""
UNFINISHED = "\ufffd"
"""The character that a tokenizer writes for bytes that are not a character yet."""
MARGIN = 4
"""Characters at the start of a window that may differ from the whole text, such as a dropped space."""


class Strings:
    """The stop strings of each slot. Slots without any cost nothing."""

    def __init__(self) -> None:
        self.text: Text | None = None
        """Decodes ids. Without it, contracts with stop strings are refused."""
        self.wanted: dict[int, tuple[tuple[str, ...], int]] = {}
        """Slot -> (stop strings, `min_tokens`: so many first tokens of the turn complete none)."""

    def put(self, s: int, sampling: Sampling) -> None:
        """Slot `s` waits for the stop strings of `sampling` from now on."""
        self.clear(s)
        if sampling.stop:
            check_strings(sampling, self.text)
            self.wanted[s] = (sampling.stop, sampling.min_tokens)

    def clear(self, s: int) -> None:
        """Slot `s` waits for no stop string."""
        self.wanted.pop(s, None)

    def ended(self, at: np.ndarray, ids: np.ndarray, said: np.ndarray) -> np.ndarray:
        """bool [len(at)]: whether the token each slot said last completes a stop string.

        Args:
            at: slots. ids: int32 [slots, C], the turn of every slot. said: int64 [slots], its length.
        """
        out = np.zeros(len(at), bool)
        for i, s in enumerate(at.tolist()) if self.wanted else ():
            if (waits := self.wanted.get(s)) is not None and self.text is not None:
                stop, least = waits
                out[i] = said[s] > least and completes(ids[s, : said[s]], stop, self.text, least)
        return out


def check_strings(sampling: Sampling, text: Text | None) -> None:
    """EngineError where the contract has stop strings and no function decodes tokens."""
    if sampling.stop and text is None:
        raise EngineError(
            f"sampling.stop={sampling.stop}: this engine was built without a text function, so it cannot see stop"
            " strings. Pass text=, or set stop=none and name stop_ids"
        )


def completes(ids: np.ndarray, stop: Sequence[str], text: Text, least: int = 0) -> bool:
    """Returns whether a turn ends with the last of these tokens. It must not have ended at an earlier one.

    Only the end of the turn is decoded: as much as the longest string needs, and until no character is cut. A string
    found there is confirmed in the whole text. Worked example: under stop=(";",) the turn "a" "b;" ends with its second
    token. With least=2 the turn "a" "b;" "c;" ends with its third.
    """
    if len(ids) <= least:
        return False
    # Decoding a whole turn at each of its tokens would cost time in proportion to its square.
    near = _end(ids, max(map(len, stop)) + MARGIN, text)
    if not any(s in near for s in stop):
        return False
    # A string must end behind the text of the first `least` tokens, and may begin in that text, with all but its last
    # character. A character that these tokens leave unfinished is not a part of their text.
    turn_text, before = text(ids), len(text(ids[:least]).rstrip(UNFINISHED)) if least else 0
    return any(turn_text.find(s, max(0, before - len(s) + 1)) >= 0 for s in stop)


def _end(ids: np.ndarray, characters: int, text: Text) -> str:
    """The text of the last tokens: without a cut character, and with at least `characters` characters before the last
    token. The whole turn's text where no such end is found."""
    # As many tokens as characters are enough for most texts. Some tokens hold less than a character, and a window may
    # begin within one: then it is doubled.
    window = characters
    while window < len(ids) - 1:
        near = ids[len(ids) - 1 - window :]
        text_of_window = text(near)
        if UNFINISHED not in text_of_window and len(text(near[:-1])) >= characters:
            return text_of_window
        window *= 2
    return text(ids)
