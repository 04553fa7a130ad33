"""Compares two renderings of one conversation, and finds a thought that a chat template opens for the policy.

Such a template ends the prompt with a tag such as `<think>`, and the policy closes the thought.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from posttrain.core.types import Message
from posttrain.system.errors import DataError
from posttrain.verifier.thoughts import THOUGHTS

if TYPE_CHECKING:
    from posttrain.environment.templates.chat_template import Chat

REWRITES = (
    "this chat template rewrites history: with a further message it no longer writes the earlier turns as the policy"
    " saw them, so several turns cannot be one token sequence. Set model.history=rewrite (each turn is then a sequence"
    " of its own), or use a template that only appends"
)

TAIL = 48
"""The tag of an opened thought is searched in this many tokens, or characters of their text, at the end of a prompt."""
SAID = "zq7"
"""A turn for probing templates. No template contains this text."""
_TAGS = "|".join(re.escape(begin) for begin, _ in THOUGHTS)
_OPENED = re.compile(rf"(?:{_TAGS})\s*\Z")


def differs(before: str, whole: str) -> str:
    """The message `REWRITES` with the place at which the two renderings begin to differ."""
    at = len(common(before, whole))
    earlier, later = (text[max(0, at - 20) : at + 40] for text in (before, whole))
    return f"{REWRITES} (it wrote ...{earlier!r}, and then ...{later!r})"


def common(a: str, b: str) -> str:
    """The longest common beginning."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def squeezed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def opening(prompt: str) -> str:
    """The tag at the end of a prompt that opens a thought, with the white space behind it; '' if there is none.

    >>> opening("<|assistant|><think>\\n"), opening("<|assistant|><think></think>")
    ('<think>\\n', '')
    """
    tag = _OPENED.search(prompt[-TAIL:])
    return tag[0] if tag else ""


def continued(chat: Chat, completion: str, opened: str) -> str:
    """A completion as it continues a thought that the prompt has opened: without an opening tag at its start, or behind
    the closing tag, where it has no thought, as the template writes such a turn."""
    begin = opened.strip()
    if completion.lstrip().startswith(begin):
        # The prompt has the line break behind the tag already.
        after_tag = completion.lstrip()[len(begin) :]
        return after_tag.lstrip("\n") if opened.endswith("\n") else after_tag
    return completion if dict(THOUGHTS)[begin] in completion else closing(chat, opened)[0] + completion


@lru_cache(8)
def closing(chat: Chat, opened: str) -> tuple[str, bool]:
    """(the text that closes an opened thought before a turn without thoughts, whether the template writes it)."""
    end = dict(THOUGHTS)[opened.strip()]
    history = [Message(role="user", content="hi")]
    try:
        before = chat.render(history, generate=True)
        whole = chat.render([*history, Message(role="assistant", content=SAID)], generate=False)
    except DataError:
        return f"\n{end}\n\n", False
    # `gap` stands between the opened thought and the turn: with the closing tag, the template's own way to close it.
    gap = whole[len(before) :].partition(SAID)[0] if common(before, whole) == before else ""
    return (gap, True) if end in gap else (f"\n{end}\n\n", False)
