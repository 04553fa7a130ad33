"""Which files of the repository are pages of the site, and where each lies there.

A page keeps its Markdown: its links lead to files of the repository, so it reads the same in a checkout. For the site a
link to another page is turned to that page's place, and a link to source code to a page that shows the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

FENCE = re.compile(r"^ *(`{3,}|~{3,})")
KEPT = re.compile(r"(`+[^`]*`+|!?\[(?:`[^`]*`|[^\]\[])*\]\([^)]*\)|<[^>]*>|https?://\S+)")
"""Parts of a line in which nothing is cited: code, links, tags, addresses."""
LINK = re.compile(r"(!?)\[((?:`[^`]*`|!\[[^\]]*\]\([^)]*\)|[^\]\[])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^`((?:posttrain|tests)/[\w/.-]+\.py)(?:::\w+)?`$")
SHOWN = re.compile(
    r"docs/(?:design/(?:architecture|laws|pains|papers)|guides/your-algorithm)\.md|README\.md|posttrain/.*"
)
"""Pages in which the name of a source file leads to a page that shows it."""
MARK = re.compile(r"(?<![\w-])([A-E]\d{2}|F(?:\.\d+)+)\b|\b((?:[Ll]aw|[Pp]ain) \d+)\b(?![.,]\d)")
UNCUT = re.compile(r"^\| (\d{4}-\d\d-\d\d|[A-Z]-\d\d) \|")
"""A row of a table that begins with a date, or with a number such as H-07, which the site does not cut at a hyphen."""
HEADING = re.compile(r"^(#{1,6}) (.*)$")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".json": "json", ".jsonl": "json", ".txt": "text"}


APART = "docs/research/"
"""The shelf of logs and evidence: the site shows its pages, and its search does not find them."""
MADE = ("search", "genindex", "py-modindex")
"""Pages that the generator makes."""


class SiteError(Exception):
    """A page cannot become part of the site; the message says which and what to change."""


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")


def place(path: str) -> str:
    """Where a page of the repository lies in the site, without its ending: `docs/guides/check.md` is `guides/check`."""
    p = PurePosixPath(path)
    if path == "docs/README.md":
        return "index"
    if path == "README.md":
        return "readme"
    if p.parts[0] == "docs":
        p = PurePosixPath(*p.parts[1:])
    if p.name == "README.md":
        return str(p.parent / "index") if len(p.parts) == 2 else str(p.parent)
    return str(p.with_suffix("")).lower()


def source_place(path: str) -> str:
    """Where the page of a source file lies in the site."""
    return f"source/{path.replace('.', '_')}"


def read_pages(root: Path) -> dict[str, str]:
    """Path in the repository -> text, of every page that the site holds as it is.

    Raises:
        SiteError: two pages would lie in one place.
    """
    patterns = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "tour/*.md", "notebooks/*.md")
    found = sorted({p for pattern in patterns for p in root.glob(pattern)})
    pages = {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in found}
    taken = list(MADE)
    for path in pages:
        if place(path) in taken:
            raise SiteError(f"{path}: the site has another page {place(path)}.html; call the file something else")
        taken.append(place(path))
    return pages


def marks(pages: dict[str, str]) -> dict[str, str]:
    """Citation -> `page#anchor`, of entries of the survey, laws and pains (docs/design)."""
    out: dict[str, str] = {}
    for name in ("papers", "laws", "pains"):
        for line in pages.get(f"docs/design/{name}.md", "").splitlines():
            heading = HEADING.match(line)
            if heading and (found := re.match(r"([A-E]\d{2}|F(?:\.\d+)+|Law \d+|Pain \d+)\. ", heading[2])):
                out[found[1].lower()] = f"docs/design/{name}.md#{slug(heading[2])}"
    return out


@dataclass
class Stage:
    """Turns pages of the repository into pages of the site; what they link to of the repository's files is kept in
    `sources`."""

    root: Path
    pages: dict[str, str]
    sources: set[str] = field(default_factory=set[str])
    """Source files that got a page of their own, because something links to them."""
    pictures: set[str] = field(default_factory=set[str])
    """Pictures that pages show, as paths in the repository."""

    @cached_property
    def marks(self) -> dict[str, str]:
        return marks(self.pages)

    def page(self, path: str) -> str:
        """The text of a page for the site."""
        head = "---\nnosearch: true\n---\n\n" if path.startswith(APART) else ""
        return head + self.text(self.pages[path], path, place(path))

    def text(self, text: str, path: str, here: str) -> str:
        """A text that stands in `path` of the repository, for the page `here` of the site.

        Raises:
            SiteError: a link leads nowhere.
        """
        out = list[str]()
        for line, code in _lines(text):
            if not code and not line.startswith("    "):
                line = self._linked(line, path, here)
            out.append(line)
        return "\n".join(out) + "\n"

    def _linked(self, line: str, path: str, here: str) -> str:
        heading, shown = HEADING.match(line), SHOWN.fullmatch(path)
        line = UNCUT.sub(r'| <span class="uncut">\1</span> |', line)
        parts = KEPT.split(LINK.sub(lambda m: self._link(m, path, here), line))
        for i, part in enumerate(parts):
            if i % 2 and shown and not heading and (code := CODE.match(part)) and (self.root / code[1]).is_file():
                parts[i] = f"[{part}]({self._to_source(code[1], here)})"
            elif i % 2 == 0 and not heading:
                parts[i] = MARK.sub(lambda m: self._cited(m, path, here), part)
        return "".join(parts)

    def _cited(self, found: re.Match[str], path: str, here: str) -> str:
        target = self.marks.get(found[0].lower(), "")
        page, _, anchor = target.partition("#")
        return f"[{found[0]}]({relative(place(page), here)}.md#{anchor})" if target and page != path else found[0]

    def _link(self, found: re.Match[str], path: str, here: str) -> str:
        picture, words, target = found[1], found[2], found[3]
        words = LINK.sub(lambda m: self._link(m, path, here), words)
        if re.match(r"https?:|mailto:|#", target):
            return f"{picture}[{words}]({target})"
        file, _, anchor = target.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(path), file))
        if picture:
            if not (self.root / there).is_file():
                raise SiteError(f"{path}: the picture {target} is not there")
            self.pictures.add(there)
            return f"![{words}](/{there})"
        return f"[{words}]({self._to(there, anchor, path, here)})"

    def _to(self, there: str, anchor: str, path: str, here: str) -> str:
        if f"{there}/README.md" in self.pages:
            there = f"{there}/README.md"
        shown = re.sub(r"^notebooks/(.*)\.ipynb$", r"notebooks/\1.md", there)
        if shown in self.pages:
            return f"{relative(place(shown), here)}.md" + (f"#{anchor}" if anchor else "")
        if (self.root / there).is_file():
            return self._to_source(there, here)
        raise SiteError(f"{path}: {there} is neither a page nor a file; link to one that is")

    def _to_source(self, file: str, here: str) -> str:
        self.sources.add(file)
        return f"{relative(source_place(file), here)}.md"


def relative(there: str, here: str) -> str:
    """The link from one page of the site to another, both without their ending."""
    return os.path.relpath(there, os.path.dirname(here) or ".")


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Lines, and whether each is part of a fenced block; a picture in mermaid's language is left out."""
    mark, dropped = "", False
    for line in text.splitlines():
        fence = FENCE.match(line)
        if not mark and fence:
            mark, dropped = fence[1], line.strip().endswith("mermaid")
        elif mark and line.strip() == mark:
            if not dropped:
                yield line, True
            mark, dropped = "", False
            continue
        if not dropped:
            yield line, bool(mark)


def outline(text: str) -> Iterator[tuple[str, list[str]]]:
    """(heading, targets of links) of the sections of the index, which are the site's navigation."""
    title, links = "", list[str]()
    for line, code in _lines(text):
        heading = HEADING.match(line)
        if heading and not code:
            yield title, links
            title, links = heading[2], []
        elif re.match(r" *[-*|] ", line):
            links += [m[3] for m in LINK.finditer(line) if not m[3].startswith(("http", "#"))]
    yield title, links


def source_page(root: Path, file: str) -> str:
    """The page that shows a source file; it is not searched."""
    path = root / file
    text = path.read_text(encoding="utf-8").rstrip("\n")
    fence = "`" * (max([3, *(len(x) for x in re.findall(r"`+", text))]) + 1)
    return (
        f"---\norphan: true\nnosearch: true\n---\n\n# {path.name}\n\n`{file}`\n\n"
        f"{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"
    )


Written = Callable[[str, str], None]
"""Writes a page: where it lies, and its text."""
