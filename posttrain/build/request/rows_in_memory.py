"""Rows that a Python program has in memory as JSONL text: lists of dicts, `datasets.Dataset`, pandas data frames."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from posttrain.record.runtime_objects import LARGEST_ROWS
from posttrain.system.errors import ConfigError, DataError, nearest

WANTED = "a list of dicts, a datasets.Dataset, a pandas data frame, or the path of a file"

DEEPEST = 100
"""Deepest nesting of a row's value."""


def jsonl(rows: Any, split: str = "train") -> str:
    """The rows as JSONL. Packages such as datasets and pandas are not imported: an object is known by its methods.

    Raises:
        ConfigError: these are no rows, or there are too many to be kept with a run.
        DataError: a row is no dict, or has a value that JSON does not have. The message names the row.
    """
    lines, size = list[str](), 0
    for number, row in enumerate(_rows(rows, split), 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"prompts row {number}: a row is a dict such as {{'prompt': '...', 'answer': '...'}}, but this is"
                f" {type(row).__name__} {row!r:.60}"
            )
        plain = {str(k): _plain(v, f"prompts row {number}: {str(k)[:40]!r}") for k, v in row.items()}
        lines.append(f"{json.dumps(plain)}\n")
        size += len(lines[-1])
        if size > LARGEST_ROWS:
            raise ConfigError(
                f"prompts: more than {LARGEST_ROWS >> 20} MiB of rows, and rows in memory are copied into every run"
                " folder. Write them to a file (JSONL or parquet, or Dataset.save_to_disk) and give its path: then only"
                " the path is kept"
            )
    if not lines:
        raise DataError("prompts: there are no rows")
    return "".join(lines)


def _rows(rows: Any, split: str) -> Iterable[Any]:
    # Objects are known by their attributes. The order matters: a data set and a data frame are iterable too.
    if hasattr(rows, "column_names") and hasattr(rows, "to_list"):  # a data set
        return rows
    if isinstance(rows, Mapping):
        mapping = cast("Mapping[str, Any]", rows)
        if any(hasattr(v, "column_names") for v in mapping.values()):  # its splits
            if split not in mapping:
                raise ConfigError(f"prompts: no split {split!r}: {nearest(split, list(mapping))}")
            return mapping[split]
        raise ConfigError(f"prompts: a dict is one row; give {WANTED}")
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a data frame
        # It has NaN or NA where only other rows have a value.
        return ({k: v for k, v in row.items() if not _missing(v)} for row in rows.to_dict("records"))
    if isinstance(rows, Iterable) and not isinstance(rows, str | bytes):
        return cast("Iterable[Any]", rows)
    raise ConfigError(f"prompts: {type(rows).__name__} holds no rows; give {WANTED}")


def _missing(value: Any) -> bool:
    return (
        value is None
        or type(value).__name__ in ("NAType", "NaTType")
        or (isinstance(value, float) and math.isnan(value))
    )


def _plain(value: Any, place: str, depth: int = 0) -> Any:
    """A value as JSON has it. Arrays and numbers of NumPy, torch and arrow become lists and numbers."""
    # A value that contains itself also ends here.
    if depth > DEEPEST:
        raise DataError(f"{place} is nested more than {DEEPEST} deep, or holds itself: write it flatter")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        inner = cast("Mapping[Any, Any]", value)
        # The place names five keys at most, so that a message stays short in a deep value.
        return {str(k): _plain(v, f"{place}.{k}" if depth < 5 else place, depth + 1) for k, v in inner.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, place, depth + 1) for v in cast("list[Any]", value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), place, depth + 1)
    raise DataError(
        f"{place} holds a {type(value).__name__}, which JSON does not have: write it as text or a number, or leave the"
        " column out"
    )
