"""Writes the two tables of docs/research/lab-tables.md: what speaks when a page is broken, and the
numbers that pages compare with.

python -m scripts.site.lessons        # --check only compares
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from posttrain.lab.catalog import entries, load
from posttrain.lab.server import claim_rows
from posttrain.web.picture import number

PAGE = Path(__file__).parents[2] / "docs/research/lab-tables.md"
BREAKS, CLAIMS = "what speaks", "numbers"


def broken_rows() -> list[str]:
    """A row for each setting that breaks a page: the page, the setting, who speaks."""
    rows = ["| page | setting | what is seen | what speaks in a real run |", "|---|---|---|---|"]
    for entry in entries():
        lesson = load(entry.name)
        for b in lesson.breaks:
            setting = ", ".join(f"{k}={v}" for k, v in b.values.items())
            kind = next((s.kind for s in lesson.last(lesson.read(b.values)).says if s.name == b.speaks), "")
            speaks = "no run would notice this" if b.speaks is None else f"{kind} `{b.speaks}`"
            rows.append(f"| {lesson.number} {lesson.title} | `{setting}` | {b.what} | {speaks} |")
    return rows


def number_rows() -> list[str]:
    """A row for each claim: claimed, ours, and whether it holds."""
    rows = ["| page | claim | source | claimed | ours | |", "|---|---|---|---:|---:|---|"]
    for entry in entries():
        lesson = load(entry.name)
        for words, source, claimed, ours, holds, why in claim_rows(lesson):
            verdict = "holds" if holds else f"does not hold: {why}"
            rows.append(f"| {lesson.number} | {words} | {source} | {number(claimed)} | {number(ours)} | {verdict} |")
    return rows


def with_tables(text: str) -> str:
    """The page with both tables written anew between their marks, and the count of pages that no run would notice."""
    broken = broken_rows()
    quiet = sum(row.endswith("no run would notice this |") for row in broken)
    broken += ["", f"Of {len(broken) - 2} settings, {quiet} would be noticed by no run."]
    for name, rows in ((BREAKS, broken), (CLAIMS, number_rows())):
        begin, end = f"<!-- {name}: written by `python -m scripts.site.lessons` -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        text = "\n".join([f"{head}{begin}", "", *rows, "", f"{end}{rest.partition(end)[2]}"])
    return text


def main(words: Sequence[str]) -> int:
    import torch

    torch.set_num_threads(1)
    before = PAGE.read_text(encoding="utf-8")
    after = with_tables(before)
    if "--check" in words:
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
