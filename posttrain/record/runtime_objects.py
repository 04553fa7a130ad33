"""Objects that a program hands to a run beside its tree: reward functions, environments, pieces, rows of data.

The tree stays plain data. It names an object as `inline:NAME`, and the object itself is in `RuntimeObjects`. run.json
records the object's source text and a digest under `objects`, only to be read: to resume the run, the program hands the
object again. Rows are data, so the run folder keeps them in `data/DIGEST.jsonl`.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from posttrain.core.redact_secrets import scrubbed
from posttrain.ladder.both_ladders import AnyAlgorithm
from posttrain.system import read_untrusted
from posttrain.system.errors import ConfigError, DataError, RunFolderError, nearest

INLINE = "inline:"
"""Begins a name in the tree that stands for an object handed by a program."""
DATA = "data"
"""The folder inside a run folder that holds rows handed by a program."""
LARGEST_ROWS = 64 * read_untrusted.MiB
"""Most bytes of rows that are kept with a run."""
LARGEST_SOURCE = 4 * read_untrusted.MiB
"""Most bytes of a Python file of the user's."""
MOST_PIECES = 100
"""Most pieces of the user's own in one run."""
_DIGEST = re.compile(r"[0-9a-f]{32}")
OBJECTS = "objects"
"""The entry of run.json about the objects that the run was handed."""


def is_inline(name: str | None) -> bool:
    """Returns whether a name of the tree stands for an object that a program handed."""
    return name is not None and name.startswith(INLINE)


def source_text(thing: object) -> str:
    """The source text of a function or class, without its indentation; '' where Python cannot find it."""
    try:
        # An object with a `__call__` is known by its class, of which Python has the source.
        target: Any = thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)
        return textwrap.dedent(inspect.getsource(inspect.unwrap(target)))
    except (OSError, TypeError):
        return ""


def source_file(thing: type) -> Path | None:
    """The Python file that defines a class; None for one of a notebook, of a prompt, or of the program itself."""
    try:
        path = Path(inspect.getsourcefile(thing) or "")
    except (OSError, TypeError):
        return None
    # `__main__` is the program itself, and importing its file would run the program again.
    return path.resolve() if thing.__module__ != "__main__" and path.is_file() else None


def file_digest(path: Path) -> str:
    """32 hex digits of a file of source text."""
    return hashlib.blake2b(read_untrusted.read_bytes(path, LARGEST_SOURCE, ConfigError), digest_size=16).hexdigest()


@dataclass(frozen=True)
class OwnPiece:
    """What run.json records of a piece's class that is not posttrain's own."""

    name: str
    file: str = ""
    """The Python file that is imported for it; '' where there is none."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """The digests of that file and of the one that has the class."""


def own_pieces(facts: Mapping[str, Any]) -> tuple[OwnPiece, ...]:
    """The pieces of the user's own that run.json records. DataError where there are more than a run can have."""
    rows: Any = facts.get(OBJECTS)
    out: list[OwnPiece] = []
    # The file may be a stranger's, so the type of each entry is checked.
    for row in cast("list[Any]", rows) if isinstance(rows, list) else []:
        entry = object_of(row)
        # Only identifiers: the name is looked up among classes.
        if entry.get("kind") == "piece" and str(entry.get("name")).isidentifier():
            digests = {k: str(v) for k, v in object_of(entry.get("files")).items()}
            out.append(OwnPiece(str(entry["name"]), str(entry.get("file") or ""), digests))
    if len(out) > MOST_PIECES:
        raise DataError(f"{OBJECTS!r} lists {len(out)} pieces; at most {MOST_PIECES} are read")
    return tuple(out)


def object_of(data: Any) -> dict[str, Any]:
    """Parsed JSON as an object; an empty one where it is none."""
    return cast("dict[str, Any]", data) if isinstance(data, dict) else {}


@dataclass(frozen=True)
class ObjectNote:
    """The record in run.json of one object."""

    name: str
    kind: str
    """reward, environment or piece."""
    source: str
    closes_over: tuple[str, ...] = ()
    """Names outside the function that it reads where it was defined. Their values are not recorded."""
    file: str = ""
    """The Python file to import for a piece."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """The digests, for a piece, of that file and of the one that has the class."""

    @staticmethod
    def of(name: str, kind: str, thing: Any) -> ObjectNote:
        # A function may read values from where it was defined. They may be secrets or data, so only their names are
        # kept.
        code = getattr(inspect.unwrap(thing), "__code__", None) if callable(thing) else None
        return ObjectNote(name, kind, source_text(thing), tuple(getattr(code, "co_freevars", ())))

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.source.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "digest": self.digest,
            # The digest is of the whole source. In the text that is written, secrets are removed.
            "source": scrubbed(self.source),
            "closes_over": list(self.closes_over),
            **({"file": self.file, "files": dict(self.files)} if self.kind == "piece" else {}),
        }


def rows_digest(text: str) -> str:
    """32 hex digits of rows written as JSONL."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RuntimeObjects:
    """The objects of one run, by their names in the tree without `inline:`."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    environments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pieces: Mapping[str, type] = field(default_factory=dict[str, type])
    """Classes of an algorithm's pieces that are not part of posttrain."""
    algorithms: Mapping[str, AnyAlgorithm] = field(default_factory=dict[str, AnyAlgorithm])
    """The algorithm of `algorithm=path.py:NAME`, by that word. Its file is imported for its pieces."""
    data: Mapping[str, str] = field(default_factory=dict[str, str])
    """Rows as JSONL, by their digest."""
    folder: Path | None = None
    """The folder of a resumed run, which has its rows."""

    def reward(self, name: str) -> Callable[..., Any]:
        """The reward function of a name in the tree; ConfigError, with the way to hand it, where there is none."""
        short = name.removeprefix(INLINE)
        if short not in self.rewards:
            raise ConfigError(self._missing("reward function", short, f"rewards=[{_word(short)}]", self.rewards))
        return self.rewards[short]

    def environment(self, name: str) -> Any:
        """The environment of a name in the tree; ConfigError, with the way to hand it, where there is none."""
        short = name.removeprefix(INLINE)
        if short not in self.environments:
            raise ConfigError(self._missing("environment", short, f"env={_word(short)}", self.environments))
        return self.environments[short]

    def _missing(self, what: str, name: str, keyword: str, known: Mapping[str, Any]) -> str:
        """The message that an object was not handed. `keyword`: the argument of the call that hands it."""
        hint = f" ({nearest(name, known)})" if known else ""
        folder = "FOLDER" if self.folder is None else repr(str(self.folder))
        return (
            f"{what} {name!r} was handed to this run by a Python program, and a run folder keeps its source text but"
            f" runs no code of it{hint}. Hand it again from Python: posttrain.run(resume={folder}, {keyword}), or"
            f" posttrain.evaluate({folder}, {keyword}). To use it from the command line, put it into a file and name it"
            " path.py:NAME"
        )

    def lacking(self, rewards: Sequence[str], environments: Sequence[str]) -> str:
        """Returns a message that says which of these names of the tree is missing, and how to hand all of them; ''
        where nothing is."""
        ways: list[str] = []
        if environments:
            ways.append(f"env={_word(environments[0].removeprefix(INLINE))}")
        if rewards:
            ways.append(f"rewards=[{', '.join(_word(r.removeprefix(INLINE)) for r in rewards)}]")
        for name in rewards:
            # The first that is missing, with how to hand all of them at once.
            if (short := name.removeprefix(INLINE)) not in self.rewards:
                return self._missing("reward function", short, ", ".join(ways), self.rewards)
        for name in environments:
            if (short := name.removeprefix(INLINE)) not in self.environments:
                return self._missing("environment", short, ", ".join(ways), self.environments)
        return ""

    def rows(self, name: str) -> Iterator[tuple[str, Any]]:
        """The lines of the rows of a name in the tree as (place, parsed JSON).

        Raises:
            ConfigError: they were neither handed nor kept.
            RunFolderError: the kept file was changed.
        """
        digest = name.removeprefix(INLINE)
        # Lines are cut at newlines only. `splitlines` would also cut at other separators inside texts.
        for number, line in enumerate(self._text(digest).removesuffix("\n").split("\n"), 1):
            yield f"prompts row {number}", read_untrusted.parse(line, f"prompts row {number}", DataError)

    def _text(self, digest: str) -> str:
        if digest in self.data:
            return self.data[digest]
        path = None if self.folder is None else self.folder / DATA / f"{digest}.jsonl"
        # The digest becomes a file name, so it must be one: the tree may be a stranger's.
        if not _DIGEST.fullmatch(digest) or path is None or not path.is_file():
            raise ConfigError(
                f"env.prompts={INLINE}{digest}: these rows were handed to the run by a Python program, and"
                f" {'there is no folder that keeps them' if path is None else f'{path} is not there'}. Hand them again:"
                " env=posttrain.prompts(rows)"
            )
        text = read_untrusted.read_bytes(path, LARGEST_ROWS, RunFolderError).decode(errors="replace")
        # With edited rows it would be another run.
        if rows_digest(text) != digest:
            raise RunFolderError(f"{path} is not as it was written, so these are not the rows of the run")
        return text

    def notes(self) -> tuple[ObjectNote, ...]:
        kinds = (("reward", self.rewards), ("environment", self.environments))
        notes = [ObjectNote.of(name, kind, thing) for kind, things in kinds for name, thing in things.items()]
        return (*notes, *(self._piece_note(name, cls) for name, cls in self.pieces.items()))

    def _piece_note(self, name: str, cls: type) -> ObjectNote:
        defined_in = source_file(cls)
        words = [word for word, algorithm in self.algorithms.items() if cls in _piece_types(algorithm)]
        # The file that was named for this piece's algorithm may import the class from another one. Both can change.
        imported = Path(words[0].rpartition(":")[0]).expanduser().resolve() if words else defined_in
        files = {str(p): file_digest(p) for p in (imported, defined_in) if p is not None}
        return replace(ObjectNote.of(name, "piece", cls), file=str(imported or ""), files=files)

    def write_data(self, folder: Path) -> None:
        for digest, text in self.data.items():
            (folder / f"{digest}.jsonl").write_bytes(text.encode())


def _piece_types(algorithm: AnyAlgorithm) -> set[type]:
    return {type(piece) for a in algorithm.lineage() for piece in a.pieces}


def _word(name: str) -> str:
    """A name as a program may write it, in the call that a message advises."""
    return name if name.isidentifier() else "THE_OBJECT"
