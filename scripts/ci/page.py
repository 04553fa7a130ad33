"""The table of suites as CONTRIBUTING.md shows it."""

from __future__ import annotations

from pathlib import Path

from scripts.ci.plan import EVERY
from scripts.ci.suites import Suite, Table

PAGE = Path("CONTRIBUTING.md")
BEGIN, END = "<!-- suites: written by `python3 -m scripts.ci table` -->", "<!-- end of suites -->"


def when(s: Suite) -> str:
    if s.always:
        return "each landing"
    return f"every {EVERY}th at least" + (f"; one {s.one} each" if s.one else "")


def rows(table: Table) -> str:
    lines = ["| suite | what runs | seconds | when |", "|---|---|---:|---|"]
    for s in table.suites:
        what = (
            f"`make {s.make}`"
            if s.make
            else ", ".join(f"`{t}`" for t in s.tests) + (", marked prove" if s.marked == "prove" else "")
        )
        lines.append(f"| {s.name} | {what} | {s.seconds:.0f} | {when(s)} |")
    always = sum(s.seconds for s in table.suites if s.always)
    total = sum(s.seconds for s in table.suites)
    lines.append(f"| **all** | `make everything` | {total:.0f} | {always:.0f} s of it at each landing |")
    return "\n".join(lines)


def with_table(text: str, table: Table) -> str:
    """The page with the table between its two marks; ValueError where a mark is missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has lost one of its two marks: {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{rows(table)}\n{END}{tail}"
