"""The ladder drawn as a tree, in text of 100 columns or fewer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.ladder.both_ladders import AnyAlgorithm
from posttrain.ladder.formula.override_words import patches
from posttrain.ladder.policy_rows import LADDER

WIDTH = 100


def wrapped(lead: str, words: Sequence[str], below: str, width: int = WIDTH) -> Iterator[str]:
    """Lines with `words` after `lead`; further lines begin with `below`. A word that is too long is cut at its
    commas."""
    line, empty = lead, True
    for text in words:
        fits = len(below) + len(text) <= width
        # The pattern cuts a long word behind each comma: "Clip(low=0.2, high=0.28)" gives
        # "Clip(low=0.2, " and "high=0.28)". Between parts of one word no space is added.
        for n, part in enumerate([text] if fits else re.findall(r".*?, |.+$", text)):
            between = "  " if n == 0 else ""
            if not empty and len((line + between + part).rstrip()) > width:
                yield line.rstrip()
                line, empty = below, True
            line, empty = line + ("" if empty else between) + part, False
    yield line.rstrip()


def picture(width: int = WIDTH, ladder: Mapping[str, Any] = LADDER) -> list[str]:
    """All algorithms of a ladder as lines, each under the one that it patches, with its changes and, in at least
    `WIDTH` columns, its source."""
    # Columns of a source: 13 of text, as below, and two spaces.
    source = 15 if width >= WIDTH else 0
    children: dict[str, list[AnyAlgorithm]] = {}
    for a in ladder.values():
        children.setdefault(a.parent.name if a.parent else "", []).append(a)
    # Each level is indented by 4. The widest line of indent and name sets the column where sources begin.
    wide = max(4 * len(a.lineage()) - 4 + len(a.name) for a in ladder.values())

    def draw(a: AnyAlgorithm, lead: str, below: str) -> Iterator[str]:
        children_of_a = children.get(a.name, [])
        start = f"{lead + a.name:<{wide}}  " + (f"{a.paper:<13}  " if source else "")
        yield from wrapped(start, patches(a), f"{below + ('│' if children_of_a else ''):<{wide + 2 + source}}", width)
        for i, child in enumerate(children_of_a):
            last = i == len(children_of_a) - 1
            yield from draw(child, below + ("└── " if last else "├── "), below + ("    " if last else "│   "))

    return [line for root in children[""] for line in draw(root, "", "")]
