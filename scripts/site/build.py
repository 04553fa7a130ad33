"""Builds the site: pages and reference as Markdown into a folder, then Sphinx with warnings as errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.site.pages import Stage, outline, place, read_pages, source_page
from scripts.site.reference import write_reference

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHELVES = ("start", "guides", "help", "reference", "design", "research")
"""Folders of docs/ in the order of the navigation; the first page of each, its README.md, lists its pages."""


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
    _add(into / "reference/api.md", names)
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
    """The navigation: the shelves, what the first page of each leads to in its order, and what lies beside them."""
    for shelf in SHELVES:
        below = listed(found.pages, f"docs/{shelf}/README.md", f"docs/{shelf}/")
        _add(into / shelf / "index.md", tree([place(p).removeprefix(f"{shelf}/") for p in below]))
    for folder in ("examples", "tour"):
        below = [p for p in found.pages if p.startswith(f"{folder}/") and p != f"{folder}/README.md"]
        if below:
            _add(into / folder / "index.md", tree([place(p).removeprefix(f"{folder}/") for p in below]))
    beside = [place(p) for p in found.pages if p.startswith("notebooks/")]
    first = ["Readme <readme>", *(f"{folder}/index" for folder in (*SHELVES, "examples", "tour"))]
    _add(into / "index.md", tree([*first, *beside, "contributing"]))


def listed(pages: dict[str, str], path: str, folder: str) -> list[str]:
    """The pages of a folder to which a page leads, each once, in its order."""
    links = (link.partition("#")[0] for _, links in outline(pages[path]) for link in links)
    targets = (os.path.normpath(os.path.join(os.path.dirname(path), link)) for link in links)
    return [p for p in dict.fromkeys(targets) if p.startswith(folder) and p in pages]


def tree(pages: list[str]) -> list[str]:
    return ["", "```{toctree}", ":hidden:", "", *pages, "```"]


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
