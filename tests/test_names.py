"""Names: no class name twice, no module name for two things, a public surface that is frozen, and a glossary that
explains each public name.

After an intended change of the surface, correct the table in tests/public.py and write the new one with

    POSTTRAIN_UPDATE=1 python -m pytest tests/test_names.py

and say in the change what users have to do.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import posttrain
from tests import public

ROOT = public.ROOT
GOLDEN = Path(__file__).parent / "golden" / "public.txt"
GLOSSARY, NAMES = ROOT / "docs/reference/glossary.md", ROOT / "docs/design/names.md"
FILES = sorted((ROOT / "posttrain").rglob("*.py"))

SAME_MODULE_NAME = {"judge.py": ("the recipe of a judge, and the environment it trains in: users name both", 2)}
"""Module files whose name stands twice: what they are, and how many there are."""

PEERS = (
    "DeepSpeed", "gymnasium", "math-verify", "MLflow", "ms-swift", "NeMo RL", "OpenAI API", "OpenRLHF", "PEFT",
    "prime-rl", "Python", "PyTorch", "reasoning-gym", "statistics", "TRL", "transformers", "verifiers", "verl", "vLLM",
)  # fmt: skip
PAPER = re.compile(r"\d{4}\.\d{4,5}|[A-Z]\w+ (?:& [A-Z]\w+ |et al\. )?(?:19|20)\d\d")


def classes() -> Iterator[tuple[str, str]]:
    """(class, where) of every class of the package, private and nested ones too."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_class_name_is_used_twice() -> None:
    found = dict[str, list[str]]()
    for name, where in classes():
        found.setdefault(name, []).append(where)
    twice = [f"{name}: {', '.join(places)}" for name, places in sorted(found.items()) if len(places) > 1]
    assert not twice, "one word for two things; give one of them its own name:\n" + "\n".join(twice)


def test_a_module_name_is_one_place() -> None:
    found = dict[str, list[Path]]()
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py") and "lessons" not in path.relative_to(ROOT).parts:
            found.setdefault(path.name, []).append(path.relative_to(ROOT / "posttrain"))
    many = {name: len(places) for name, places in found.items() if len(places) > 1}
    known = {name: count for name, (_, count) in SAME_MODULE_NAME.items()}
    new = [f"{n}: {', '.join(map(str, found[n]))}" for n in many if many[n] > known.get(n, 0)]
    assert not new, "rename a module, or give the reason in SAME_MODULE_NAME:\n" + "\n".join(sorted(new))
    assert not (gone := sorted(n for n in known if many.get(n, 0) < known[n])), (
        f"SAME_MODULE_NAME excuses more than there is: {gone}"
    )


def test_the_public_surface_is_what_it_was() -> None:
    try:
        now = "".join(f"{line}\n" for line in public.lines())
    except public.SurfaceError as e:
        raise AssertionError(str(e)) from None
    if os.environ.get("POSTTRAIN_UPDATE"):
        GOLDEN.write_text(now)
    before, after = GOLDEN.read_text().splitlines(), now.splitlines()
    gone, new = [x for x in before if x not in {*after}], [x for x in after if x not in {*before}]
    assert before == after, "the public surface changed (POSTTRAIN_UPDATE=1 accepts it):\n" + "\n".join(
        [*(f"- {x}" for x in gone), *(f"+ {x}" for x in new)]
    )


def imported(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of what a page, a template or a program imports from the package."""
    for module, several in re.findall(r"^\s*(?:>>> )?from (posttrain[\w.]*) import (\([^)]*\)|[^\n]*)", text, re.M):
        for name in re.sub(r"[()\\]|#.*", "", several).split(","):
            if name.strip():
                yield module, name.split(" as ")[0].strip()


def test_what_pages_and_templates_import_is_public() -> None:
    table, algorithms = {*public.names()}, public.algorithms()
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p.name != "LOG.md"]
    programs = [*(ROOT / "posttrain").glob("**/data/*.txt"), *(ROOT / "posttrain").glob("**/data/*.py")]
    assert programs and pages
    wrong = list[str]()
    for path in [*pages, *programs, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "tour").iterdir()]:
        for module, name in imported(path.read_text()) if path.is_file() else ():
            whole = f"{module}.{name}" in public.PUBLIC or (module == public.LADDER and name in algorithms)
            whole = whole or (module in public.CONSTANTS and name.isupper())
            if not whole and public.home(module, name) not in table:
                wrong.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert not wrong, "imported where users read, and not in tests/public.py:\n" + "\n".join(wrong)


def test_what_the_package_offers_is_public() -> None:
    names = {name for _, name in public.names()}
    assert {n for n in posttrain.__all__ if not n.startswith("_")} <= names


def entries(page: Path) -> list[tuple[str, str, str]]:
    """(entry, sentence, source) of each row of a page's table."""
    table = [x for x in page.read_text().splitlines() if x.startswith("| ")]
    rows = [x.strip("| ").split(" | ") for x in table[1:]]
    assert all(len(row) == 3 for row in rows), [row for row in rows if len(row) != 3]
    return [(row[0], row[1], row[2]) for row in rows]


def test_the_page_of_names_has_every_public_name_and_no_other() -> None:
    public_names = {name for _, name in public.names()}
    found = {entry.strip("`") for entry, _, _ in entries(NAMES)}
    assert not [entry for entry, _, _ in entries(GLOSSARY) if entry.startswith("`")], "the glossary has words alone"
    missing, strange = sorted(public_names - found), sorted(found - public_names)
    assert not missing, f"docs/design/names.md does not explain {missing}"
    assert not strange, f"docs/design/names.md explains what is not public: {strange}"


@pytest.mark.parametrize("page", [GLOSSARY, NAMES], ids=lambda p: p.stem)
def test_entries_are_in_order_and_none_stands_twice(page: Path) -> None:
    order = [(entry.strip("`").casefold(), entry) for entry, _, _ in entries(page)]
    misplaced = [f"{b[1]} after {a[1]}" for a, b in pairwise(order) if a >= b]
    assert not misplaced, misplaced


def test_each_entry_is_a_sentence_with_its_source() -> None:
    for entry, sentence, source in entries(GLOSSARY) + entries(NAMES):
        assert sentence.endswith(".") and len(sentence) <= 300, entry
        known = all(s == "ours" or s in PEERS or PAPER.fullmatch(s) for s in source.split(", "))
        assert source and known, f"{entry}: {source!r} is no paper, no peer's documentation and not `ours`"


def test_algorithms_of_the_ladder_are_explained_with_their_papers() -> None:
    page = (ROOT / "docs/reference/algorithms.md").read_text()
    found = public.algorithms()
    assert len(found) > 50
    for word, paper in found.values():
        assert f"`{word}`" in page or f"# {word}" in page, f"docs/reference/algorithms.md does not explain {word}"
        assert paper in page, f"docs/reference/algorithms.md does not name {paper}, the source of {word}"
