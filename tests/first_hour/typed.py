"""What is typed from a page: the commands of its blocks and those that its running text mentions whole; what of a page
nobody would play; and which pages a seed draws."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrain.cli.parser import read_words
from tests.first_hour.pages import Step, mentions, overlooked, steps
from tests.first_hour.words import NOT_PAGES, pages, put_in


def whole(text: str) -> bool:
    """Whether a text is a command that can be typed: not the name of one (`posttrain check`, `posttrain run grpo`), and
    not a form (`algorithm=NAME`, `...`)."""
    words = shlex.split(put_in(text, Path("nowhere")))
    if words[0] != "posttrain":
        return True
    named = words[:2] == ["posttrain", "run"] and len(words) < 4
    if named or "..." in text or re.search(r"\b(NAME|A|B|OWNER|CLASS)\b", " ".join(words)):
        return False
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            read_words(words[1:])
    except SystemExit as end:
        return not end.code
    return True


def steps_of(path: Path, root: Path) -> list[Step]:
    """Everything that a page says to type: its blocks in order, then what its running text mentions as a whole command
    and the blocks have not."""
    found = steps(path, root)
    typed = {s.text.partition("  #")[0].strip() for s in found}
    return [*found, *(m for m in mentions(path, root) if m.text not in typed and whole(m.text))]


def unplayed(root: Path, site: Sequence[str]) -> Iterator[str]:
    """What pages of the site print and nobody plays, with what to change. A page that is made from a notebook is played
    as the notebook."""
    played = {p.relative_to(root).as_posix() for p in pages(root)}
    for page in site:
        path = root / page
        if page in NOT_PAGES or (page.startswith("notebooks/") and f"{page.removesuffix('.md')}.ipynb" in played):
            continue
        if page not in played:
            yield from (
                f"{s}: name the page in PAGES or NOT_PAGES of tests/first_hour/words.py" for s in steps(path, root)
            )
        for line in overlooked(path, root):
            yield f"{line}: name the program in PROGRAMS of tests/first_hour/pages.py, so that it is played"


def sizes_of(found: Sequence[Path], root: Path) -> dict[Path, int]:
    """How many steps each page has; notebooks have a suite of their own, and are left out."""
    return {p: len(steps_of(p, root)) for p in found if p.suffix != ".ipynb"}


def drawn(sizes: dict[Path, int], seed: int, share: float) -> list[Path]:
    """The first page and others that a seed draws, until they hold this share of all steps, in their usual order."""
    first, *left = list(sizes)
    kept = {first}
    random.Random(seed).shuffle(left)
    for path in left:
        if sum(sizes[p] for p in kept) < share * sum(sizes.values()):
            kept.add(path)
    return [p for p in sizes if p in kept]
