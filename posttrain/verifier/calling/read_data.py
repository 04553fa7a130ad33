"""Reads model output as data: JSON and Python literals, strictly, for any text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

LONGEST = 100_000
"""The most characters of a call. A longer one is malformed."""
LONGEST_TURN = 10 * LONGEST
"""The most characters of a turn in which calls are looked for."""
DIGITS = 5000
"""The fewest characters that a parser sees of a value: more than the 4300 digits of an integer that Python reads."""
DEEPEST = 50
"""The deepest nesting of brackets."""
_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,127}")


def _marks(quotes: str) -> re.Pattern[str]:
    """A pattern of the marks of a text: a string in one of these quotes, a bracket, or a piece of other text."""
    # Possessive repetitions never give a character back, so each is looked at once. A string that is not closed is one
    # mark up to the end. Other text comes in pieces of up to 64 characters.
    strings = "|".join(rf"{q}[^{q}\\]*+(?:\\.[^{q}\\]*+)*+{q}?" for q in quotes)
    return re.compile(rf"{strings}|[][{{}}()]|[^][{{}}(){quotes}\s]{{1,64}}+", re.DOTALL)


_JSON_MARKS, _PYTHON_MARKS = _marks('"'), _marks("\"'")


class Unreadable(ValueError):
    """A text is not a call. The message is shown to the model."""


def json_value(text: str) -> Any:
    """One JSON value and nothing else."""
    value, end = json_prefix(text)
    if rest := text[end:].strip():
        raise Unreadable(f"after the JSON value there is {rest[:40]!r}")
    return value


def json_prefix(text: str, begin: int = 0) -> tuple[Any, int]:
    """(the JSON value in `text` at `begin`, the position of its end). Keys must be unique. NaN and infinity are errors.
    Unreadable says what is wrong, and where."""
    while begin < len(text) and text[begin] in " \t\r\n":
        begin += 1
    # The parser sees no more than the value. It would otherwise read to the end of the turn for each opening tag.
    window = text[begin : _end(text, begin, _JSON_MARKS)]
    try:
        value, end = _JSON.raw_decode(window)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not valid JSON: {error}") from None
    return value, begin + end


def _end(text: str, begin: int, marks: re.Pattern[str]) -> int:
    """The end of the value that begins at `begin`, or a position behind it. Unreadable if its brackets outside strings
    are nested too deeply: parsers recurse, so this is checked before."""
    depth = 0
    for mark in marks.finditer(text, begin, begin + LONGEST):
        if mark[0] in "[{(":
            depth += 1
            if depth > DEEPEST:
                raise Unreadable(f"brackets nest deeper than {DEEPEST}")
        elif mark[0] in "]})":
            depth -= 1
        # Here the outermost bracket is closed, or the value has no brackets and its first mark is all of it. A number
        # may be longer than one mark, so the end is at least `DIGITS` characters behind `begin`.
        if depth <= 0:
            return max(mark.end(), begin + DIGITS)
    return begin + LONGEST


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its keys and values; ValueError for a key that is given twice: JSON readers disagree about
    which value counts, so a tool could get another than the one that is checked here."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {key!r} is given twice")
        values[key] = value
    return values


def _constant(name: str) -> NoReturn:
    """Refuses `NaN` and `Infinity`, which Python's JSON reader accepts."""
    raise ValueError(f"{name} is no JSON number")


def _number(text: str) -> float:
    """A JSON number with a decimal point or an exponent; ValueError if it is too large for a float."""
    if (x := float(text)) in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large a number")
    return x


_JSON = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_number)


def name_of(x: Any) -> str:
    """A checked tool name."""
    if not isinstance(x, str) or not _NAME.fullmatch(x):
        raise Unreadable(f"{str(x)[:60]!r} is no tool's name" if x is not None else "the call names no tool")
    return x


def arguments_of(x: Any) -> dict[str, Any]:
    """Checked arguments by name."""
    if not isinstance(x, Mapping):
        raise Unreadable(
            f"arguments must be a JSON object, not {type(x).__name__}" if x is not None else "the call has no arguments"
        )
    return dict(x)


def object_call(x: Any, name: str, arguments: str) -> tuple[str, dict[str, Any]]:
    """(tool, arguments) of a JSON object that has them under these keys."""
    if not isinstance(x, Mapping):
        raise Unreadable(f"a call is a JSON object, not {type(x).__name__}")
    if extra := sorted(set(x) - {name, arguments, "id", "type", "tool_call_id"}):
        raise Unreadable(f"a call has {name!r} and {arguments!r}, not {extra[0]!r}")
    return name_of(x.get(name)), arguments_of(x.get(arguments))


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a Python list such as `[f(a=1), g(b="x")]`: names and literals only, nothing is evaluated."""
    if len(text) > LONGEST:
        raise Unreadable(f"longer than {LONGEST} characters")
    # Only for its check of the nesting, because `ast.parse` recurses.
    _end(text, 0, _PYTHON_MARKS)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise Unreadable(f"not a Python list of calls: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"not a Python list of calls: {type(error).__name__}") from None
    if not isinstance(tree, ast.List) or not all(isinstance(item, ast.Call) for item in tree.elts):
        raise Unreadable("not a Python list of calls")
    return [_python_call(item) for item in tree.elts if isinstance(item, ast.Call)]


def _python_call(call: ast.Call) -> tuple[str, dict[str, Any]]:
    """One call of a Python list: its name, and its arguments by name."""
    if call.args:
        raise Unreadable("arguments are given by name: f(a=1)")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise Unreadable("arguments are written out one by one, without **")
        try:
            arguments[keyword.arg] = _plain(ast.literal_eval(keyword.value))
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise Unreadable(f"argument {keyword.arg} is no literal value") from None
    return name_of(_dotted(call.func)), arguments


def _dotted(node: ast.expr) -> str | None:
    """The name `a.b.c` of an expression that only reads attributes; None for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def _plain(x: Any) -> Any:
    """The value of a Python literal that JSON also has; ValueError for others."""
    if x is None or isinstance(x, bool | int | str) or (isinstance(x, float) and x == x and abs(x) != float("inf")):
        return x
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if isinstance(x, dict) and all(isinstance(k, str) for k in x):
        return {k: _plain(v) for k, v in x.items()}
    raise ValueError("no JSON value")


def loose_value(text: str) -> Any:
    """A value in a format without quotes: its JSON value, or the text itself if it is not JSON."""
    try:
        return json_value(text)
    except Unreadable:
        return text
