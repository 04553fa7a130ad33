"""Builds the site: pages and reference as Markdown into a folder, then Sphinx with warnings as errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

from scripts.site.pages import Stage, outline, place, read_pages, source_page
from scripts.site.reference import write_reference

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOME = "posttrain"
"""The title of the index, which is no section of the navigation."""
TITLES = {"readme": "Readme <readme>"}
"""Pages that the navigation calls otherwise than their own title does."""


LESSONS = Path("build/lab")
"""The pages of the lab, which `posttrain lab --site` writes: they are files already."""


def stage(root: Path, into: Path) -> Stage:
    """Writes the Markdown of the site; returns what was turned."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    found = Stage(root, read_pages(root))

    def write(where: str, text: str) -> None:
        path = into / f"{where}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    names = write_reference(found, write)
    for path in found.pages:
        write(place(path), found.page(path))
    contents(found, into)
    _add(into / "reference.md", names)
    written: set[str] = set()
    while left := found.sources - written:
        for file in sorted(left):
            write(f"source/{file.replace('.', '_')}", source_page(root, file))
        written |= left
    for picture in found.pictures:
        (into / picture).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / picture, into / picture)
    return found


def contents(found: Stage, into: Path) -> None:
    """The navigation: the sections of the index, and what examples and the tour hold below theirs."""
    lines = list[str]()
    sections = [s for s in outline(found.pages["docs/README.md"]) if s[0] not in ("", HOME)]
    for title, links in sections:
        targets = dict.fromkeys(found._to(_normal(link), "", "docs/README.md", "index") for link in links)
        pages = [TITLES.get(p, p) for t in targets if not t.startswith("source/") and (p := t.removesuffix(".md"))]
        if pages:
            lines += tree(pages, title)
    _add(into / "index.md", lines)
    for folder in ("examples", "tour"):
        below = [
            place(p) for p in found.pages if p.startswith(f"{folder}/") and PurePosixPath(p).parts[1:] != ("README.md",)
        ]
        if below:
            _add(into / folder / "index.md", tree([p.removeprefix(f"{folder}/") for p in below]))


def _normal(link: str) -> str:
    return os.path.normpath(os.path.join("docs", link.partition("#")[0]))


def tree(pages: list[str], title: str = "") -> list[str]:
    caption = [f":caption: {title}"] if title else []
    return ["", "```{toctree}", ":hidden:", *caption, "", *pages, "```"]


def _add(path: Path, lines: list[str]) -> None:
    path.write_text(path.read_text(encoding="utf-8") + "\n".join(lines) + "\n", encoding="utf-8")


def build(root: Path, into: Path) -> int:
    """The site as static files in `into`; the exit status of Sphinx, whose warnings are errors."""
    source = into.parent / f"{into.name}-source"
    stage(root, source)
    shutil.rmtree(into, ignore_errors=True)
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-c", str(HERE), "-b", "html"]
    made = subprocess.run([*words, "-d", f"{source}-cache", str(source), str(into)], cwd=root)
    if (lessons := root / LESSONS).is_dir():
        shutil.copytree(lessons, into / "lab", dirs_exist_ok=True)
    return made.returncode
