"""The ladder in a terminal: the tree of patches, one algorithm in full, the difference of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from posttrain.cli.formula import formula
from posttrain.core.algorithm import CHOICES, Algorithm, differences
from posttrain.core.ladder import LADDER, algorithm
from posttrain.core.pieces.pull import KL

FORM = """\
A    = (reward - baseline) / scale                     credit
push = trust_region(ratio of pi to anchor, A)          how loudly a token may speak; never differentiated
loss = sum over tokens of weight * ( -sg[correction * push] * A * logp + pull )"""


def word(value: Any) -> str:
    """A choice as it is typed in an override: `none`, `kl(coef=0.04, estimator=k3)`, `signed,overlong(cache=0.2)`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Algorithm):
        return value.name
    if isinstance(value, tuple):
        return ",".join(word(v) for v in cast("tuple[Any, ...]", value)) or "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{f.name}={word(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return type(value).__name__.lower() + (f"({inside})" if inside else "")
    return str(value)


def source(a: Algorithm) -> str:
    return f"arXiv {a.paper}" if a.paper[:4].isdigit() and "." in a.paper else a.paper


def _patch(a: Algorithm) -> str:
    """What an algorithm changes on its parent; of the root, its choices that are not `none`."""
    if a.parent is None:
        changed = {f: getattr(a, f) for f in CHOICES if getattr(a, f) not in (None, ())}
    else:
        changed = {f: new for f, (_, new) in differences(a.parent, a).items()}
    return "  ".join(f"{f}={word(v)}" for f, v in changed.items())


def tree() -> str:
    """All algorithms, each under the one it patches."""
    children: dict[str, list[Algorithm]] = {}
    for a in LADDER.values():
        children.setdefault(a.parent.name if a.parent else "", []).append(a)

    def draw(a: Algorithm, lead: str, below: str) -> Iterator[str]:
        yield f"{lead}{a.name}   ({source(a)})"
        yield f"{below}{'│' if a.name in children else ' '}     {_patch(a)}"
        mine = children.get(a.name, [])
        for i, child in enumerate(mine):
            last = i == len(mine) - 1
            yield from draw(child, below + ("└── " if last else "├── "), below + ("    " if last else "│   "))

    lines = [line for root in children[""] for line in draw(root, "", "")]
    return "\n".join([FORM, "", *lines, "", "posttrain ladder NAME shows one in full; posttrain ladder --diff A B compares two."])


def one(name: str) -> str:
    """One algorithm: every choice, what it means as a formula, and how it came about."""
    a = algorithm(name)
    wide = max(len(f"{f}={word(getattr(a, f))}") for f in CHOICES)
    rows = [f"  {f'{f}={word(getattr(a, f))}':<{wide}}   {formula(f, getattr(a, f))}" for f in CHOICES]
    out = [f"{a.name}   ({source(a)})", "", FORM, "", *rows]
    if isinstance(a.pull, KL):
        out += ["", f"  gradient of the KL: {a.pull.truth}"]
    if a.note:
        out += ["", f"  note: {a.note}"]
    steps = [f"  {p.name:<16}{_patch(p)}" for p in a.lineage()]
    reads = ", ".join(sorted(a.reads)) or "nothing beyond the rollout"
    return "\n".join([*out, "", f"reads: {reads}", "", "lineage:", *steps])


def diff(left: str, right: str) -> str:
    """The choices in which two algorithms differ."""
    a, b = algorithm(left), algorithm(right)
    rows = [(f, word(x), word(y)) for f, (x, y) in differences(a, b).items()]
    if not rows:
        return f"{a.name} and {b.name} make the same choices"
    table = [("", a.name, b.name), *rows]
    w0, w1 = (max(len(r[i]) for r in table) for i in (0, 1))
    return "\n".join(f"{f:<{w0}}   {x:<{w1}}   {y}".rstrip() for f, x, y in table)
