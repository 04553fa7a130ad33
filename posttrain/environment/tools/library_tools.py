"""The tools of the library but Python (`tools.python`). Their state is in memory and belongs to one episode."""

from __future__ import annotations

from typing import Annotated

from posttrain.environment.expression import ExpressionError, evaluate
from posttrain.environment.tools.tool import Toolbox, ToolError, tool

MOST_KEYS, MOST_BYTES = 1000, 1 << 20
"""The most keys, and characters in all, of one episode's store or files."""
LONGEST_NAME = 200


class Calculator(Toolbox):
    """Exact arithmetic."""

    @tool
    def calculate(self, expression: Annotated[str, "numbers, + - * / and brackets"]) -> str:
        """Evaluates an arithmetic expression exactly."""
        try:
            return str(evaluate(expression).value)
        except ExpressionError as error:
            raise ToolError(str(error)) from None


class KeyValue(Toolbox):
    """A store of texts by key."""

    def __init__(self, entries: dict[str, str] | None = None) -> None:
        self._entries = dict(entries or {})

    @tool
    def put(self, key: str, value: str) -> str:
        """Stores a text under a key, in place of what was there."""
        _check_room(self._entries, key, value)
        self._entries[key] = value
        return "ok"

    @tool
    def get(self, key: str) -> str:
        """Reads the text stored under a key."""
        return self._text(key)

    @tool
    def remove(self, key: str) -> str:
        """Removes a key and its text."""
        self._text(key)
        del self._entries[key]
        return "ok"

    @tool
    def keys(self) -> list[str]:
        """Lists all keys in alphabetical order."""
        return sorted(self._entries)

    def _text(self, key: str) -> str:
        """The text under a key. ToolError if there is none."""
        if key not in self._entries:
            raise ToolError(f"no key {key[:LONGEST_NAME]!r}")
        return self._entries[key]

    def state(self) -> dict[str, str]:
        return dict(self._entries)


class Files(Toolbox):
    """An episode's own folder of text files, in memory, so no path can reach the machine's files."""

    def __init__(self, files: dict[str, str] | None = None) -> None:
        self._files = {_path(p): text for p, text in (files or {}).items()}

    @tool
    def read_file(self, path: str) -> str:
        """Reads a file."""
        return self._files[self._known_path(path)]

    @tool
    def write_file(self, path: str, text: str) -> str:
        """Writes a file, in place of what was there."""
        self._put(_path(path), text)
        return "ok"

    @tool
    def append_file(self, path: str, text: str) -> str:
        """Adds to the end of a file, which is made where there is none."""
        path = _path(path)
        self._put(path, self._files.get(path, "") + text)
        return "ok"

    @tool
    def list_files(self) -> list[str]:
        """Lists the paths of all files in alphabetical order."""
        return sorted(self._files)

    @tool
    def delete_file(self, path: str) -> str:
        """Deletes a file."""
        del self._files[self._known_path(path)]
        return "ok"

    def _known_path(self, path: str) -> str:
        """The normalised path of a file. ToolError if there is no such file."""
        path = _path(path)
        if path not in self._files:
            raise ToolError(f"no file {path!r}")
        return path

    def _put(self, path: str, text: str) -> None:
        """Writes a file. ToolError if its path is a folder, or if there is no room."""
        # A folder exists only as the start of paths of files. So one name could be a file and a folder, which no file
        # system allows.
        if any(other.startswith(f"{path}/") or path.startswith(f"{other}/") for other in self._files if other != path):
            raise ToolError(f"{path!r} cannot be a file and a folder")
        _check_room(self._files, path, text)
        self._files[path] = text

    def state(self) -> dict[str, str]:
        return dict(self._files)


def _path(path: str) -> str:
    """The normalised path. ToolError if it is not the path of a file inside the folder."""
    parts = path.split("/")
    # Models often write `/notes.txt` or `./notes.txt`. Both mean a file of the episode's folder.
    while parts and parts[0] in ("", "."):
        parts.pop(0)
    if not parts or not all(parts) or any(p in (".", "..") for p in parts) or "\0" in path or len(path) > LONGEST_NAME:
        raise ToolError(
            f"{path[:LONGEST_NAME]!r} is no path of a file: write notes.txt or data/notes.txt, without . or .."
        )
    return "/".join(parts)


def _check_room(entries: dict[str, str], name: str, text: str) -> None:
    """ToolError if the new text would exceed the limits of an episode."""
    if len(name) > LONGEST_NAME:
        raise ToolError(f"a name has at most {LONGEST_NAME} characters")
    if name not in entries and len(entries) >= MOST_KEYS:
        raise ToolError(f"there are {MOST_KEYS} entries already: remove one first")
    size = sum(len(k) + len(v) for k, v in entries.items() if k != name) + len(name) + len(text)
    if size > MOST_BYTES:
        raise ToolError(
            f"that would be {size} characters in all, and {MOST_BYTES} are the most: remove something first"
        )
