"""Rows of the user's files, each with its place; formats that need a package import it here and say so where it is missing."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.core.errors import ConfigError, DataError, nearest

Rows = Iterator[tuple[str, Mapping[str, Any]]]


def json_rows(path: Path) -> Rows:
    """JSON lines (or one JSON array), UTF-8 with or without a byte-order mark, any line ends; blank lines are skipped."""
    raw = path.read_bytes()
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: this is UTF-16; save it as UTF-8")
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    if raw.lstrip()[:1] == b"[":
        yield from _array(path, raw)
        return
    for number, line in enumerate(raw.split(b"\n"), 1):
        place = f"{path}:{number}"
        if line.strip():
            yield place, _object(place, _parse(place, line))


def _array(path: Path, raw: bytes) -> Rows:
    for number, value in enumerate(_parse(str(path), raw), 1):
        place = f"{path} row {number}"
        yield place, _object(place, value)


def _parse(place: str, raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: _once(place, pairs))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise DataError(f"{place}: not JSON: {error.msg} at {line}column {error.colno}; each line must be one complete object") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{place}: cannot be read as JSON: {error}") from None


def _once(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; JSON allows a key twice, and all but the last value would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [k for k, _ in pairs]
        raise DataError(f"{place}: key {next(k for k in keys if keys.count(k) > 1)!r} is given twice; keep one of the two")
    return made


def _object(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{place}: a row is an object such as {{"prompt": "..."}}, but this is {type(value).__name__}')
    return value


def parquet(path: Path) -> Rows:
    """A parquet file."""
    reader = _package("pyarrow.parquet", "pyarrow", f"reading {path}")
    try:
        table = reader.read_table(path)
    except Exception as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error
    yield from _numbered(str(path), table.to_pylist())


def saved(path: str, split: str) -> Rows:
    """A folder written by `save_to_disk`, of one data set or of splits."""
    datasets = _package("datasets", "datasets", f"reading the data set in {path}")
    try:
        data = datasets.load_from_disk(path)
    except Exception as error:
        raise DataError(f"{path}: is a folder, but no data set saved with save_to_disk: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise ConfigError(f"{path} has no split {split!r} (env.args.split): {nearest(split, list(data))}")
        data = data[split]
    yield from _numbered(path, data)


def hub(name: str, split: str) -> Rows:
    """A data set of the hub by its id; anything the hub says against it is passed on."""
    datasets = _package("datasets", "datasets", f"loading {name!r} from the hub")
    try:
        data = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise DataError(f"{name!r} is no file here, and the hub gave no data set for it: {type(error).__name__}: {error}") from error
    yield from _numbered(name, data)


def _numbered(name: str, rows: Any) -> Rows:
    for number, row in enumerate(rows, 1):
        yield f"{name} row {number}", row


def _package(module: str, package: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{purpose} needs the package {package}: pip install {package} (or give the prompts as JSONL)") from error
