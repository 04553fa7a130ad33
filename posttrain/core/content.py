"""The content of a message: text, or several parts, each text or a reference to an image, a sound, a video or a file.

`content_of` is the only function that reads parts, from an environment, a row of data, a request or a record. Media are
references by path or digest. No model here reads media, so `environment.chat` refuses them before a run starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from posttrain.core.errors import DataError, nearest

MEDIA = ("image", "audio", "video", "file")
TYPES = ("text", *MEDIA)


@dataclass(frozen=True)
class ContentPart:
    """One part. Text has `text` and nothing else; media have `media_type` and where their bytes are."""

    type: str
    text: str = ""
    media_type: str = ""
    """Such as image/png."""
    path: str = ""
    sha256: str = ""
    """Of the bytes, 64 hex digits."""

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
            raise DataError(
                f"a content part of type {self.type!r} needs a media_type such as image/png, and has no text"
            )
        if not (self.path or self.sha256) or (self.sha256 and not re.fullmatch(r"[0-9a-f]{64}", self.sha256)):
            raise DataError(f"a content part of type {self.type!r} needs a path or a sha256 of 64 hex digits")

    def plain(self) -> dict[str, str]:
        """As chat templates and JSON take it: without the fields that are empty; text always has its text."""
        return {name: value for name, value in asdict(self).items() if value or name == self.type}


Content = str | tuple[ContentPart, ...]


def content_of(value: Any) -> Content:
    """Text as it is; a list of parts, as `ContentPart` or as objects with their fields, checked.

    Raises:
        DataError: it is neither, or a part is malformed or of a type that is not known.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        kind = "an empty list" if isinstance(value, list | tuple) else type(value).__name__
        raise DataError(f"content is {kind}, wanted text or a list of parts with at least one")
    return tuple(_part(i, part) for i, part in enumerate(cast("Sequence[Any]", value), 1))


def _part(number: int, value: Any) -> ContentPart:
    if isinstance(value, ContentPart):
        return value
    if not isinstance(value, Mapping):
        wanted = "{'type': 'text', 'text': '...'}"
        raise DataError(f"content part {number} is {type(value).__name__}, wanted an object such as {wanted}")
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
    """The text; of several parts their texts joined, nothing between them. DataError where a part is no text."""
    if isinstance(value, str):
        return value
    if media := unread(value):
        raise DataError(media)
    return "".join(part.text for part in value)


def unread(value: Content) -> str:
    """Why a text model cannot read it; '' where it can."""
    media = [] if isinstance(value, str) else [part for part in value if part.type != "text"]
    if not media:
        return ""
    first = media[0]
    return (
        f"content has a part of type {first.type!r} ({first.media_type}, {first.path or first.sha256[:12]}), and this"
        " model reads text alone: say it in words and take the part out, or leave the task out"
    )


def shown(value: Content) -> str:
    """The content for people: the text, with media in brackets."""
    if isinstance(value, str):
        return value
    return "".join(p.text if p.type == "text" else f"[{p.type} {p.path or p.sha256}]" for p in value)


def plain(value: Content) -> str | list[dict[str, str]]:
    """The content in the form that chat templates, reward functions and JSON accept."""
    return value if isinstance(value, str) else [part.plain() for part in value]


def mapped(value: Content, change: Callable[[str], str]) -> Content:
    """The content with every text of it changed."""
    if isinstance(value, str):
        return change(value)
    return tuple(ContentPart("text", change(p.text)) if p.type == "text" else p for p in value)
