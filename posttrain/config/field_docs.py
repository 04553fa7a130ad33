"""The meaning of each setting: the text below a field in the source of its class, and below a choice where it is
declared. `posttrain run RECIPE --help` and the comments of a written run read it here."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from posttrain.system import dataclass_json

_SENTENCE = re.compile(r"(?<=[^.][.?!])(?<!Eq\.)(?<! al\.)\s+(?=[A-Z`0-9('\"]|[\w.]+: )")
"""Where a sentence ends and the next begins. The point of `...`, `Eq.` and `et al.` ends none. The next one begins with
a capital, a quotation, a bracket or a digit, or with the name of a choice and a colon (`drain: they end first`)."""
_CODE = re.compile(r"[A-E]\d{2}\b")
"""A code of the survey of algorithms, such as A09."""
_BRACKETS = re.compile(r"\s*\(([^()]*\b[A-E]\d{2}\b[^()]*)\)")


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """Class name -> field -> text, of one module; names of the module itself are under ''."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_file():
        return {}
    # Python keeps no text below a field, so it is read from the source.
    source = ast.parse(Path(file).read_text(encoding="utf-8"))
    classes = {node.name: _below(node.body) for node in ast.walk(source) if isinstance(node, ast.ClassDef)}
    return {**classes, "": _below(source.body)}


def _below(body: list[ast.stmt]) -> dict[str, str]:
    """Each name that is assigned, with the text that stands below the assignment."""
    out: dict[str, str] = {}
    for statement, after in pairwise(body):
        if not isinstance(statement, ast.AnnAssign | ast.Assign):
            continue
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
        text_node = after.value if isinstance(after, ast.Expr) else None
        if isinstance(text_node, ast.Constant) and isinstance(text_node.value, str):
            out |= {t.id: " ".join(text_node.value.split()) for t in targets if isinstance(t, ast.Name)}
    return out


def without_codes(text: str) -> str:
    """The text without the codes by which the source refers to the survey of algorithms; a reader of help has no key
    to them.

    >>> without_codes("Leave-one-out (RLOO, A09). Mean (A07). Learned (A05; Schulman 1506.02438)")
    'Leave-one-out (RLOO). Mean. Learned (Schulman 1506.02438)'
    """

    def plain(bracket: re.Match[str]) -> str:
        parts = [_CODE.sub("", part).strip() for part in re.split("[,;]", bracket[1])]
        return f" ({', '.join(p for p in parts if p)})" if any(parts) else ""

    return _BRACKETS.sub(plain, text)


def meaning(cls: type, field: str) -> str:
    """The whole text of a field: its own, else that of the named type it is declared with, else that of the class it is
    inherited from, else what its group of settings is; '' where there is none."""
    for base in (c for c in cls.__mro__ if field in inspect.get_annotations(c)):
        texts = _texts(base.__module__)
        if text := texts.get(base.__name__, {}).get(field):
            return without_codes(text)
        type_name = str(inspect.get_annotations(base)[field]).partition(" |")[0]
        if text := texts.get("", {}).get(type_name):
            return without_codes(text)
    members = dataclass_json.members(dataclass_json.hints(cls)[field])
    declared = [cast("type", m) for m in members if dataclasses.is_dataclass(m)]
    return about(declared[0]) if declared else ""


def sentence(text: str) -> str:
    """The first sentence of a text.

    >>> sentence("Most tokens. None: all.")
    'Most tokens.'
    """
    return _SENTENCE.split(text.strip(), maxsplit=1)[0]


def about(cls: type[Any]) -> str:
    """The first sentence about a class, such as a piece of an algorithm."""
    text = without_codes(" ".join((inspect.getdoc(cls) or "").split()))
    # A dataclass without a docstring gets its signature as one.
    return "" if text.startswith(f"{cls.__name__}(") else sentence(text)
