"""An algorithm's choices as they are typed in an override, in full and short, and where the algorithm comes from."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, cast

from posttrain.ladder.algorithm import Algorithm, choices
from posttrain.ladder.both_ladders import AnyAlgorithm


def word(value: Any) -> str:
    """A choice as it is typed in an override: `none`, `kl(coef=0.04, estimator=k3)`, `signed,overlong(cache=0.2)`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    # An algorithm is a dataclass as well, so it is asked for before pieces are.
    if isinstance(value, AnyAlgorithm):
        return value.name
    if isinstance(value, tuple):
        return ",".join(word(v) for v in cast("tuple[Any, ...]", value)) or "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{f.name}={word(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return type(value).__name__.lower() + (f"({inside})" if inside else "")
    return str(value)


def compact(value: Any) -> str:
    """`word` without the fields that are off (at a default of none, 0 or false), and without those that serve only an
    off one, as `horizon` serves `target`."""
    if isinstance(value, tuple):
        return ",".join(compact(v) for v in cast("tuple[Any, ...]", value)) or "none"
    if not dataclasses.is_dataclass(value) or isinstance(value, type | AnyAlgorithm):
        return f"{value:g}" if isinstance(value, float) else word(value)
    inside = ", ".join(f"{name}={compact(x)}" for name, x in _set_fields(value).items())
    return type(value).__name__.lower() + (f"({inside})" if inside else "")


def _set_fields(piece: Any) -> dict[str, Any]:
    """The fields of a piece that are not off."""
    values = {f.name: getattr(piece, f.name) for f in dataclasses.fields(piece)}
    # Off: the default is none, 0 or false, and the field still has it. `horizon` and `delta` say how
    # an adaptive coefficient moves; without a `target` it does not move.
    off = {f.name for f in dataclasses.fields(piece) if not f.default and values[f.name] == f.default}
    idle = {"horizon", "delta"} if "target" in off else set[str]()
    return {name: x for name, x in values.items() if name not in off | idle}


def patches(a: AnyAlgorithm) -> list[str]:
    """Returns the changes of an algorithm on its parent, as overrides; of the root, its choices that are not none."""
    if a.parent is None:
        return [f"{f}={compact(getattr(a, f))}" for f in choices(type(a)) if getattr(a, f) not in (None, ())]
    out: list[str] = []
    for f in choices(type(a)):
        old, new = getattr(a.parent, f), getattr(a, f)
        if old == new:
            continue
        # Same kind of piece, other numbers: only the changed numbers (`clip.high=0.28`). Another kind: the whole piece.
        numbers = list(dataclasses.fields(new)) if dataclasses.is_dataclass(new) and type(old) is type(new) else []
        changed = [x.name for x in numbers if getattr(old, x.name) != getattr(new, x.name)]
        if changed:
            out += [f"{f}.{name}={compact(getattr(new, name))}" for name in changed]
        else:
            out.append(f"{f}={compact(new)}")
    return out


def credit_words(a: Algorithm) -> str:
    """Baseline, scale and whitening in one word: `groupmean/group_std, sample`."""
    scaled = "" if a.scale == "one" else f"/{a.scale}"
    return type(a.baseline).__name__.lower() + scaled + (f", {a.whiten}" if a.whiten else "")


def source(a: AnyAlgorithm) -> str:
    """The publication of an algorithm in words, such as `arXiv 2402.14740` or `Williams 1992`."""
    return f"arXiv {a.paper}" if _arxiv(a) else a.paper


def year(a: AnyAlgorithm) -> str:
    """Returns the year of the source, from its arXiv id or the year it names; '' where it names none."""
    if _arxiv(a):
        return f"20{a.paper[:2]}"
    named = re.search(r"\b(19|20)\d\d\b", a.paper)
    return named.group() if named else ""


def _arxiv(a: AnyAlgorithm) -> bool:
    # Such as 2402.14740, or 1312.5602.
    return re.fullmatch(r"\d{4}\.\d{4,5}", a.paper) is not None
