"""The content of a message: text, or several parts, each text or a reference to an image, a sound, a video or a file.

Parts from an environment, a row of data, a request or a record are all read by `content_of`. Media are references. No
model here reads them yet, so `environment.templates.chat_template` refuses them before a run starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from posttrain.system.errors import DataError, nearest

MEDIA = ("image", "audio", "video", "file")
TYPES = ("text", *MEDIA)


@dataclass(frozen=True)
class ContentPart:
    """One part. A text part has `text` only. A media part has `media_type`, and `path` or `sha256` of its bytes."""

    type: str
    text: str = ""
    media_type: str = ""
    """A MIME type, such as image/png."""
    path: str = ""
    sha256: str = ""
    """SHA-256 of the bytes, 64 hex digits."""

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise DataError(f"content parts of type {self.type!r} are not supported: {nearest(self.type, TYPES)}")
        if strange := [name for name, value in asdict(self).items() if not isinstance(value, str)]:
            raise DataError(f"{strange[0]!r} of a content part of type {self.type!r} is no text: write it as text")
        if self.type == "text":
            if self.media_type or self.path or self.sha256:
                raise DataError("a content part of type 'text' has text only: leave media_type, path and sha256 out")
            return
        if self.text or not re.fullmatch(r"[\w.+-]+/[\w.+-]+", self.media_type):
            raise DataError(f"a content part of type {self.type!r} needs a media_type such as image/png, and no text")
        if not (self.path or self.sha256) or (self.sha256 and not re.fullmatch(r"[0-9a-f]{64}", self.sha256)):
            raise DataError(f"a content part of type {self.type!r} needs a path or a sha256 of 64 hex digits")

    def plain(self) -> dict[str, str]:
        """As a dict for chat templates and JSON. Empty fields are left out, but a text part always has `text`."""
        # Only the field `text` can be called like a part's type.
        return {name: value for name, value in asdict(self).items() if value or name == self.type}


Content = str | tuple[ContentPart, ...]


def content_of(value: Any) -> Content:
    """Checked content. Text is returned as it is. Parts may be `ContentPart`s or mappings with the same fields.

    Raises:
        DataError: it is neither text nor parts, or a part is malformed or of an unknown type.
    """
    if isinstance(value, str):
        return value
    # An empty list is an error and not an empty text: it does not say what was meant.
    if not isinstance(value, list | tuple) or not value:
        kind = "an empty list" if isinstance(value, list | tuple) else type(value).__name__
        raise DataError(f"content is {kind}, wanted text or a list of parts with at least one")
    return tuple(_part(i, part) for i, part in enumerate(cast("Sequence[Any]", value), 1))


def _part(number: int, value: Any) -> ContentPart:
    """One checked part. `number` is its place, counted from 1, for messages."""
    if isinstance(value, ContentPart):
        return value
    if not isinstance(value, Mapping):
        wanted = "{'type': 'text', 'text': '...'}"
        raise DataError(f"content part {number} is {type(value).__name__}, wanted an object such as {wanted}")
    # A column of structs (parquet, arrow) writes None into fields that a part does not have: they count as not given.
    given: dict[str, Any] = {str(name): x for name, x in cast("Mapping[Any, Any]", value).items() if x is not None}
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise DataError(f"content parts of type {kind!r} are not supported: {nearest(str(kind), TYPES)}")
    fields = ["text"] if kind == "text" else ["media_type", "path", "sha256"]
    if unknown := sorted(given.keys() - {"type", *fields}):
        raise DataError(f"content part {number} of type {kind!r} has {unknown[0]!r}: {nearest(unknown[0], fields)}")
    if kind == "text" and "text" not in given:
        raise DataError(f"content part {number} of type 'text' has no text")
    return ContentPart(**given)


def text_of(value: Content) -> str:
    """The text. Texts of several parts are joined without a separator. DataError if a part is not text."""
    if isinstance(value, str):
        return value
    if media := unread(value):
        raise DataError(media)
    return "".join(part.text for part in value)


def unread(value: Content) -> str:
    """The reason why a text model cannot read this content; '' if it can."""
    media = [] if isinstance(value, str) else [part for part in value if part.type != "text"]
    if not media:
        return ""
    first = media[0]
    return (
        f"content has a part of type {first.type!r} ({first.media_type}, {first.path or first.sha256[:12]}), and this"
        " model reads text alone: say it in words and take the part out, or leave the task out"
    )


def shown(value: Content) -> str:
    """The text for people to read, with media in brackets."""
    if isinstance(value, str):
        return value
    return "".join(p.text if p.type == "text" else f"[{p.type} {p.path or p.sha256}]" for p in value)


def plain(value: Content) -> str | list[dict[str, str]]:
    """In the form that chat templates, reward functions and JSON use: text, or a list of dicts."""
    return value if isinstance(value, str) else [part.plain() for part in value]


def mapped(value: Content, change: Callable[[str], str]) -> Content:
    """The content with `change` applied to each of its texts."""
    if isinstance(value, str):
        return change(value)
    return tuple(ContentPart("text", change(p.text)) if p.type == "text" else p for p in value)


def conversation(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt for people to read. Text, and a single message of the user, are shown as they are. With other messages,
    each message begins with its role.

    >>> conversation([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}])
    'system: Be brief.\\nuser: 2+2'
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0].get("role") == "user":
        return shown(prompt[0]["content"])
    return "\n".join(_message(m) for m in prompt)


def prompt_words(prompt: str | Sequence[Mapping[str, Any]], most: int = 80) -> str:
    """A prompt in quotes, for an error message. A long one is cut to its beginning and its end.

    >>> prompt_words([{"role": "user", "content": "2+2"}])
    "'2+2'"
    """
    text = conversation(prompt)
    return repr(text if len(text) <= most else f"{text[: most // 3]}...{text[-(most // 2) :]}")


def _message(message: Mapping[str, Any]) -> str:
    """One message as a line: its role, its text, and its tool calls."""
    # A call stands inside `function`, as OpenAI writes it, or alone.
    calls = [c.get("function", c) for c in message.get("tool_calls") or ()]
    called = [f"[calls {c.get('name')} {c.get('arguments')}]" for c in calls]
    return f"{message.get('role')}: {' '.join(x for x in (shown(message.get('content') or ''), *called) if x)}"
