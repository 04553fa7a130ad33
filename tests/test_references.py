"""What a page names exists: files, modules, classes, tests, `make` targets and the pages it links to.

docs/research/LOG.md is left out, because it tells what was true on its dates.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import public
from tests.test_architecture import FLOOR

ROOT = public.ROOT
PAGES = sorted(
    p
    for p in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tour").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    if p.name not in ("LOG.md",)
)
TOP = ("posttrain", "tests", "docs", "tour", "scripts", "benchmarks", "examples", ".ci")
THEIRS = {"TrainingArguments", "SingleTurnEnv", "MultiTurnEnv", "ToolEnv", "StatefulToolEnv", "None", "True", "False"}
THEIRS |= {"RewardConfig", "RewardTrainer"}
"""Words written as classes of ours are, and of others: transformers, TRL, PrimeIntellect's verifiers, Python."""

FILE = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, (*TOP, *FLOOR)))})/[\w/*{{}},.\[\]!-]*\w(?:/(?!\w)|\*)?")
DOTTED = re.compile(r"(?<![\w./-])posttrain(?:\.\w+)+")
IN_ROOM = re.compile(rf"(?<![\w./-])(?:{'|'.join(FLOOR)})\.\w+\.[A-Z]\w+")
MEMBER = re.compile(r"`([A-Z][a-z]\w*)\.(\w+)")
CLASS = re.compile(r"`([A-Z][a-z]+[A-Z]\w*)[`(.]")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
TARGET = re.compile(r"(?:^|`)\s*make ([a-z-]+)(?= |`|$)", re.M)
ENDINGS = (".py", ".md", ".toml", ".sh", ".txt", ".json", ".jsonl")


@cache
def classes() -> dict[str, set[str]]:
    """Classes of the package, the tests and the tour, each with all names in it."""
    out = dict[str, set[str]]()
    for folder in ("posttrain", "tests", "tour", "scripts", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    words = {x.name for x in ast.walk(node) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)}
                    words |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
                    words |= {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}
                    out.setdefault(node.name, set()).update(words)
                    for base in node.bases:
                        out[node.name].add(f"<{ast.unparse(base).split('[')[0].split('.')[-1]}>")
    return out


def has(name: str, member: str) -> bool:
    """Whether a class or one of its bases has a member."""
    found = classes().get(name, set[str]())
    return member in found or any(has(x[1:-1], member) for x in found if x.startswith("<") and x[1:-1] != name)


def expanded(text: str) -> Iterator[str]:
    """`a_{b,c}.py` as `a_b.py` and `a_c.py`."""
    if found := re.search(r"\{([^{}]*)\}", text):
        for part in found[1].split(","):
            yield from expanded(text[: found.start()] + part + text[found.end() :])
    else:
        yield text


def exists(text: str, page: Path) -> bool:
    """Whether a path or a pattern lies in the repository, in the package or beside the page."""
    return all(any(any(base.glob(one)) for base in (ROOT, ROOT / "posttrain", page.parent)) for one in expanded(text))


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or something that a module defines, and a member of that."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        module = ".".join(parts[:n])
        tree = public.tree(module)
        if tree is None and not ROOT.joinpath(*parts[:n]).is_dir():
            continue
        if n == len(parts):
            return True
        words = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)} if tree else set[str]()
        words |= {x.name for x in ast.walk(tree) if isinstance(x, ast.ClassDef | ast.FunctionDef)} if tree else set()
        words |= {x.name for x in ast.walk(tree) if isinstance(x, ast.AsyncFunctionDef | ast.alias)} if tree else set()
        return parts[n] in words and (n + 1 == len(parts) or parts[n] not in classes() or has(parts[n], parts[n + 1]))
    return False


def wrong(text: str, page: Path) -> Iterator[str]:
    """What a page names and nobody has."""
    for path in FILE.findall(text):
        if path.endswith((*ENDINGS, "/")) and not exists(path, page):
            yield f"{path}: there is no such file"
    for dotted in [*DOTTED.findall(text), *(f"posttrain.{x}" for x in IN_ROOM.findall(text))]:
        if not resolves(dotted):
            yield f"{dotted}: there is no such module or name"
    for name, member in MEMBER.findall(text):
        if name not in THEIRS and not has(name, member):
            yield f"{name}.{member}: there is no such class or member"
    for name in CLASS.findall(text):
        if name not in classes() and name not in THEIRS and not foreign(name):
            yield f"{name}: there is no such class"
    for path, test in TEST.findall(text):
        if (ROOT / path).exists() and f"def {test}(" not in (ROOT / path).read_text():
            yield f"{path}::{test}: there is no such test"
    for link in LINK.findall(text):
        if not (page.parent / link).exists():
            yield f"({link}): the link leads nowhere"
    makefile = (ROOT / "Makefile").read_text()
    for target in TARGET.findall(text):
        if not re.search(rf"^{target}:", makefile, re.M):
            yield f"make {target}: there is no such target"


def foreign(name: str) -> bool:
    """Whether the package imports or names it: a class of torch, transformers or the standard library."""
    return any(re.search(rf"\b{name}\b", text) for text in _sources())


@cache
def _sources() -> tuple[str, ...]:
    return tuple(p.read_text() for p in (ROOT / "posttrain").rglob("*.py"))


def test_what_pages_name_exists() -> None:
    gone = [f"{page.relative_to(ROOT)}: {name}" for page in PAGES for name in sorted({*wrong(page.read_text(), page)})]
    assert not gone, "\n".join(gone)


def test_the_test_itself_finds_what_is_gone() -> None:
    text = (
        "`core/gone.py`, posttrain.core.gone, `posttrain.core.types.Gone`, role.events.Gone, `Group.gone`, `GoneCheck`,"
        " tests/test_ci.py::test_gone, [x](gone.md), `make gone`, tests/record/test_{branch,gone}.py, and what is"
        " there: `core/types.py`, posttrain.core.types.Group.mixed, `Group.mixed`, [x](recipes.md), `make lint`,"
        " tests/record/test_{branch,lineage}.py, `engine/occupancy`, `GroupMean`, `role/`,"
        " python -m scripts.pages.generated_pages"
    )
    assert {x.split(": ")[0] for x in wrong(text, ROOT / "docs/start/recipes.md")} == {
        "core/gone.py",
        "posttrain.core.gone",
        "posttrain.core.types.Gone",
        "posttrain.role.events.Gone",
        "Group.gone",
        "GoneCheck",
        "tests/test_ci.py::test_gone",
        "(gone.md)",
        "make gone",
        "tests/record/test_{branch,gone}.py",
    }
