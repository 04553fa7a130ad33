"""The prompt that several completions share, and the texts of the completions.

The prompt is a column of its own, or the beginning that whole texts or conversations share.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.content import shown
from posttrain.core.types import Message
from posttrain.environment.rows.row_reader import kind_words, message_of, said_of, without_halves
from posttrain.system.errors import DataError

ANSWERS = "\n\nAssistant:"
"""Text before each answer in a dialogue that is one text, as in HH-RLHF. A prompt ends with the last one of them."""
CONTINUES = ("assistant", "tool")
"""Roles with which no conversation begins, so that such a list of messages continues the row's prompt."""
UNSPACED = (
    *("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "BOPOMOFO"),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE", "TAI ", "NEW TAI ", "YI "),
)
"""Beginnings of the Unicode names of letters of scripts that put no space between words."""


class UnfitRow(Exception):
    """A row that teaches nothing. `finding` is the word by which such rows can be left out (`JudgedColumns`). Where
    they are not, `judged_rows.read_row` raises a DataError with the row's place and this message."""

    def __init__(self, finding: str, why: str) -> None:
        super().__init__(
            f"{why}. Mend the row, or leave such rows out with env.args.leave_out={finding}; they are then counted"
        )
        self.finding = finding


@dataclass(frozen=True)
class SharedPrompt:
    """A prompt and the completions that were judged after it."""

    prompt: str | tuple[Message, ...]
    completions: tuple[str, ...]


def sides(
    prompt: str | tuple[Message, ...] | None, completions: Sequence[tuple[str, Any]], column: str
) -> SharedPrompt:
    """The prompt and the texts of `completions`, each given with the name of its column.

    A completion is text, a list with the assistant's message, or a whole conversation that ends with that message. If
    the row has no prompt, the prompt is the beginning that the completions share. Where it has one, the turns before
    the last message must begin with the prompt, or with a role of `CONTINUES` and so continue it. A prompt that is text
    must be one of the user's messages in these turns. Turns that all completions share belong to the prompt.

    Args:
        prompt: the row's own; None where it has none.
        column: the name of the prompt's column, for messages.

    Raises:
        DataError: a completion is empty, no text, or neither of these forms; there is no prompt.
        UnfitRow: the completions begin with different prompts, or whole texts are identical.
    """
    texts = [without_halves(name, _not_empty(name, value)) for name, value in completions if isinstance(value, str)]
    if not texts:
        return _from_messages(prompt, completions, column)
    if len(texts) < len(completions):
        not_text = next(name for name, value in completions if not isinstance(value, str))
        raise DataError(f"one completion is text, and {not_text!r} is not: write all as text or all as messages")
    if prompt is None:
        prompt, texts = _split(texts, [name for name, _ in completions], column)
    return SharedPrompt(prompt, tuple(texts))


def _not_empty(name: str, value: str) -> str:
    """The text itself. DataError if it is empty."""
    if not value.strip():
        raise DataError(f"{name!r} is empty; a completion has at least one character that is no space")
    return value


def _split(texts: list[str], names: list[str], column: str) -> tuple[str, list[str]]:
    """(the prompt that whole texts share, their rests). It ends with the last shared `ANSWERS`, else before a word."""
    if len(texts) < 2:
        raise DataError(f"no column {column!r} (env.args.prompt_column); give the prompt")
    # What the first and the last text in alphabetical order share, all texts share.
    low, high = min(texts), max(texts)
    shared = low[: next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))]
    if len(set(texts)) < len(texts):
        one, two, *_ = [n for n, t in zip(names, texts, strict=True) if texts.count(t) > 1]
        raise UnfitRow("identical", f"{one!r} and {two!r} are the same text, and there is no prompt")
    # The last `ANSWERS` counts, because earlier ones belong to turns that all completions share.
    cut = shared.rfind(ANSWERS)
    cut = cut + len(ANSWERS) if cut >= 0 else _before_a_word(texts, shared)
    prompt, rests = shared[:cut], [t[cut:] for t in texts]
    rule = "a row without a prompt has texts that begin with it"
    if not prompt.strip():
        raise UnfitRow("drift", f"{rule}, and {names[0]!r} and {names[1]!r} share no beginning")
    if without_rest := [n for n, r in zip(names, rests, strict=True) if not r.strip()]:
        raise UnfitRow("drift", f"{rule}, and {without_rest[0]!r} has nothing after the beginning that it shares")
    return prompt, rests


def _before_a_word(texts: Sequence[str], shared: str) -> int:
    """The position at which the prompt ends so that no word is cut; 0 where there is none. Spaces before the next word
    belong to the rest."""
    cut = len(shared)
    # Back to where a word ends: behind a space, or in front of one that every text has there.
    while cut and not (shared[cut - 1].isspace() or all(len(t) > cut and t[cut].isspace() for t in texts)):
        cut -= 1
    while cut and shared[cut - 1] == " ":
        cut -= 1
    if cut:
        return cut
    # Texts without a shared space, such as Chinese ones, share the whole beginning, less one character if a text would
    # be left empty. But letters of the first word alone (`Sure`, `Sorry`) are no prompt.
    cut = len(shared) - any(len(t) == len(shared) for t in texts)
    inside_a_word = cut > 0 and _is_spaced(shared[cut - 1]) and any(_is_spaced(t[cut]) for t in texts)
    return 0 if inside_a_word else cut


def _is_spaced(character: str) -> bool:
    """Returns whether a character is part of a word (letter, mark or digit) in a script with spaces between words."""
    word_part = unicodedata.category(character)[0] in "LMN"
    return word_part and not unicodedata.name(character, "").startswith(UNSPACED)


def _from_messages(
    prompt: str | tuple[Message, ...] | None, completions: Sequence[tuple[str, Any]], column: str
) -> SharedPrompt:
    """Completions that are messages or whole conversations."""
    parts = [(name, *_split_last(name, value)) for name, value in completions]
    texts = tuple(_not_empty(name, text) for name, _, text in parts)
    conversations = [(name, before) for name, before, _ in parts if before]
    if not conversations:
        if prompt is None:
            raise DataError(
                f"no column {column!r} (env.args.prompt_column), and {parts[0][0]!r} is one message: give the prompt,"
                " or whole conversations"
            )
        return SharedPrompt(prompt, texts)
    if len(conversations) < len(parts):
        single = next(name for name, before, _ in parts if not before)
        raise DataError(f"{single!r} is one message, and another completion is a whole conversation")
    first_name, first = conversations[0]
    for name, before in conversations[1:]:
        if before != first:
            at = _parting(first, before)
            raise UnfitRow(
                "drift",
                f"before their last messages, {first_name!r} and {name!r} differ at message {at}, and a judged"
                " completion is one message after a conversation that is the same on all sides. If the messages"
                f" {at} were judged, end the conversations with them",
            )
    # Messages that begin with such a role continue the row's prompt. Other conversations have to begin with the prompt.
    if first[0]["role"] in CONTINUES:
        return SharedPrompt(_continued(prompt, first, column, first_name), texts)
    if prompt is not None:
        _same_prompt(prompt, first, column, first_name)
    return SharedPrompt(first, texts)


def _continued(
    prompt: str | tuple[Message, ...] | None, first: tuple[Message, ...], column: str, name: str
) -> tuple[Message, ...]:
    """The prompt and then the turns that all completions share, `first`."""
    if prompt is None:
        raise DataError(
            f"{name!r} begins with a message of the {first[0]['role']}, and there is no column {column!r}"
            " (env.args.prompt_column): give the prompt, or whole conversations"
        )
    prompt_messages = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
    return (*prompt_messages, *first)


def _split_last(name: str, value: Any) -> tuple[tuple[Message, ...], str]:
    """(the messages before the last one, which has to be the assistant's; the text of the last one)."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{name!r} is {kind_words(value)}, wanted text or a list of messages")
    messages = [message_of(name, i, m) for i, m in enumerate(value)]
    last = messages.pop()
    if last["role"] != "assistant":
        raise DataError(f"the last message of {name!r} has role {last['role']!r}, and a completion is the assistant's")
    text = said_of(f"the last message of {name!r}", last)
    if messages and messages[-1]["role"] == "assistant":
        raise DataError(f"{name!r} ends with two messages of the assistant; a completion is one message")
    return tuple(messages), text


def _parting(one: Sequence[Message], other: Sequence[Message]) -> int:
    """The number of the first message in which two conversations differ, from 1."""
    pairs = enumerate(zip(one, other, strict=False), 1)
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)) + 1)


def _same_prompt(prompt: str | tuple[Message, ...], turns: tuple[Message, ...], column: str, name: str) -> None:
    """UnfitRow where the shared turns do not begin with the row's prompt. A prompt that is text must be one of the
    user's messages in them."""
    if not isinstance(prompt, str):
        if prompt != turns[: len(prompt)]:
            raise UnfitRow("drift", f"{name!r} and {column!r} differ at message {_parting(prompt, turns)}")
    elif prompt.strip() not in (shown(m["content"]).strip() for m in turns if m["role"] == "user"):
        raise UnfitRow("drift", f"no message of the user in {name!r} is the text of {column!r}")
