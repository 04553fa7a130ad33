"""Rows of the user's files, each with its place. A package that a format needs is imported only for that format."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.system import read_untrusted
from posttrain.system.errors import ConfigError, DataError, nearest

PACKED = {
    b"\x1f\x8b": "gzip: unpack it (gunzip)",
    b"\x28\xb5\x2f\xfd": "zstd: unpack it (unzstd)",
    b"PK\x03\x04": "a zip archive, as Excel files are: unpack it, or save the table as JSON lines",
    b"PAR1": "parquet: let its name end in .parquet",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
}
"""First bytes of files that are no JSON -> the kind of the file, and what to do."""
Rows = Iterator[tuple[str, Mapping[str, Any]]]
MARK = b"\xef\xbb\xbf"
"""UTF-8's byte-order mark."""
LONGEST_ROW = 16 * read_untrusted.MiB
"""The most bytes of a line and characters of a row: more than fit any context."""
LARGEST_ARRAY = 256 * read_untrusted.MiB
"""The most bytes of a file that is one JSON array, because it has to be read whole."""
DEEPEST = 100
"""The deepest nesting of lists and objects."""
ROWS_AT_ONCE = 16
"""Rows of a parquet file that are read at once."""


def json_rows(path: Path) -> Rows:
    """The rows of JSON lines or of one JSON array, in UTF-8 with or without a byte-order mark, with any line ends.
    Blank lines are skipped, and a line longer than `LONGEST_ROW` is refused before it is read."""
    with read_untrusted.opened(path, DataError) as file:
        start = file.read(1 << 16)
    if packing := next((words for bytes_, words in PACKED.items() if start.startswith(bytes_)), ""):
        raise DataError(f"{path}: this is {packing}")
    if path.suffix in (".csv", ".tsv"):
        raise DataError(
            f"{path}: this is {path.suffix[1:].upper()}, which has no types: write JSON lines, such as with pandas:"
            " read_csv(FILE).to_json('rows.jsonl', orient='records', lines=True)"
        )
    if start.removeprefix(MARK).lstrip()[:1] == b"[":
        raw = read_untrusted.read_bytes(path, LARGEST_ARRAY, DataError).removeprefix(MARK)
        for number, value in enumerate(_parse(str(path), raw), 1):
            place = f"{path} row {number}"
            yield place, _bounded(place, _object(place, value))
        return
    for number, line in read_untrusted.read_lines(path, LONGEST_ROW, DataError):
        place = f"{path}:{number}"
        # These bytes are a byte-order mark only at the beginning of a file. Elsewhere they are text.
        line = line.removeprefix(MARK) if number == 1 else line
        if line.strip():
            yield place, _bounded(place, _object(place, _parse(place, line.rstrip(b"\r\n"))))


def _parse(place: str, raw: bytes) -> Any:
    """The JSON value of these bytes. DataError with the place, if they are none."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: _with_unique_keys(place, pairs))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise DataError(
            f"{place}: not JSON: {error.msg} at {line}column {error.colno}; each line must be one complete object"
        ) from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{place}: cannot be read as JSON: {error}") from None


def _with_unique_keys(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. DataError if a key occurs twice: JSON allows it, but would lose a value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [k for k, _ in pairs]
        twice = next(k for k in keys if keys.count(k) > 1)
        raise DataError(f"{place}: key {twice!r} is given twice; keep one of the two")
    return values


def _object(place: str, value: Any) -> Mapping[str, Any]:
    """The row itself, checked to be an object."""
    if not isinstance(value, dict):
        raise DataError(f'{place}: a row is an object such as {{"prompt": "..."}}, but this is {type(value).__name__}')
    return value


def _bounded(place: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row. DataError if it is larger or more deeply nested than allowed."""
    size = 0
    # A stack instead of recursion, because a deeply nested row would overflow the recursion.
    waiting: list[tuple[Any, int]] = [(row, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise DataError(
                f"{place}: lists and objects in lists and objects, more than {DEEPEST} deep; make the row flatter"
            )
        # What is no text counts too, as 8 characters: else a list of millions of numbers would have no size.
        size += len(value) if isinstance(value, str | bytes) else 8
        if isinstance(value, Mapping):
            size += sum(len(str(name)) for name in value)
            waiting += [(v, depth + 1) for v in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(v, depth + 1) for v in value]
        if size > LONGEST_ROW:
            raise DataError(f"{place}: the row has more than {LONGEST_ROW:,} characters; shorten it or leave it out")
    return row


def parquet(path: Path) -> Rows:
    """A parquet file, a few rows at a time."""
    reader = _package("pyarrow.parquet", "pyarrow", f"reading {path}")
    # Opened here only for our own error message where the file cannot be read. pyarrow opens it again.
    with read_untrusted.opened(path, DataError):
        pass
    try:
        batches = reader.ParquetFile(path).iter_batches(batch_size=ROWS_AT_ONCE)
        yield from _numbered(str(path), (row for batch in batches for row in batch.to_pylist()))
    except DataError:  # of `_bounded`, which already says what is wrong and where
        raise
    except Exception as error:  # whatever the package raises for a file that it cannot read
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error


def saved(path: str, split: str) -> Rows:
    """A folder written by `save_to_disk`: one data set, or several splits."""
    datasets = _package("datasets", "datasets", f"reading the data set in {path}")
    try:
        data = datasets.load_from_disk(path)
    except Exception as error:  # whatever the package raises for a folder that it cannot read
        raise DataError(f"{path}: is a folder, but no data set saved with save_to_disk: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise ConfigError(f"{path} has no split {split!r} (env.args.split): {nearest(split, list(data))}")
        data = data[split]
    yield from _numbered(path, data)


def hub(name: str, split: str) -> Rows:
    """A data set of the hub by its id. An error of the hub is passed on in a DataError."""
    datasets = _package("datasets", "datasets", f"loading {name!r} from the hub")
    try:
        data = datasets.load_dataset(name, split=split)
    except Exception as error:  # whatever the package, the network or the hub gives as an error
        raise DataError(
            f"{name!r} is no file here, and the hub gave no data set for it: {type(error).__name__}: {error}"
        ) from error
    yield from _numbered(name, data)


def _numbered(name: str, rows: Any) -> Rows:
    """The rows of a data set, each with its place."""
    for number, row in enumerate(rows, 1):
        place = f"{name} row {number}"
        yield place, _bounded(place, row)


def _package(module: str, package: str, purpose: str) -> ModuleType:
    """A module. ConfigError, which says what needs it, if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the package {package}: pip install {package} (or give the prompts as JSONL)"
        ) from error
