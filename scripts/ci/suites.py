"""The table of suites (`.ci/suites.toml`): which tests there are, how long they take, and what they depend on."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.ci.reach import Reach, digest

TABLE = Path(".ci/suites.toml")
QUICK, PROVE = "quick", "prove"
NEAR = 1 / 2
"""A file that is near to more than this share of all suites is common to them, and near to none: it tells nothing
apart."""


class TableError(Exception):
    """The table, or what it says of the tests, is not right; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One line of the table; the fields are explained at its head."""

    name: str
    seconds: float
    tests: tuple[str, ...] = ()
    make: str = ""
    marked: str = QUICK
    always: bool = False
    alone: bool = False
    one: str = ""
    reads: tuple[str, ...] = ()
    counted: bool = True
    may_skip: bool = False
    settings: dict[str, str] = field(default_factory=dict[str, str], hash=False)
    everything: dict[str, str] = field(default_factory=dict[str, str], hash=False)

    def __post_init__(self) -> None:
        if bool(self.tests) == bool(self.make):
            raise TableError(f"{TABLE}: suite {self.name!r} needs either `tests` or `make`")
        if not self.counted and not self.make:
            raise TableError(f"{TABLE}: suite {self.name!r} has tests, which pytest counts: leave `counted` out")
        if self.marked not in (QUICK, PROVE) or self.seconds <= 0:
            raise TableError(f'{TABLE}: suite {self.name!r}: marked is "{QUICK}" or "{PROVE}", seconds are above 0')

    def has(self, path: str, test: str = "") -> bool:
        """Whether a file is named here, or one test of it (`name[case]`)."""
        for pattern in self.tests:
            file, _, one = pattern.partition("::")
            if _fits(Path(path), file) and (not one or not test or one in (test, test.partition("[")[0])):
                return True
        return False

    def arguments(self, files: Iterable[Path]) -> list[str]:
        """What pytest is told to run."""
        single = [t for t in self.tests if "::" in t]
        whole = [t for t in self.tests if "::" not in t]
        return single + [str(p) for p in sorted(files) if any(_fits(p, t) for t in whole)]


@dataclass(frozen=True)
class Inputs:
    """Digests of what a suite depends on: of the files near to it, and of all."""

    near: str
    all: str

    def __str__(self) -> str:
        return f"{self.near}-{self.all}"

    @classmethod
    def read(cls, text: str) -> Inputs:
        near, _, everything = text.partition("-")
        return cls(near, everything)


@dataclass(frozen=True)
class Table:
    suites: tuple[Suite, ...]
    minutes: float
    kept: float
    root: Path

    @classmethod
    def read(cls, root: Path) -> Table:
        raw: dict[str, Any] = tomllib.loads((root / TABLE).read_text())
        lists = ("tests", "reads")
        rows: list[dict[str, Any]] = [
            {k: tuple(v) if k in lists else v for k, v in row.items()} for row in raw["suite"]
        ]
        suites = tuple(Suite(**row) for row in rows)
        if len({s.name for s in suites}) != len(suites):
            raise TableError(f"{TABLE}: two suites have one name")
        return cls(suites, raw["minutes"], raw["kept"], root)

    @property
    def budget(self) -> float:
        """Seconds a plan may use."""
        return 60 * (self.minutes - self.kept)

    @cached_property
    def reach(self) -> Reach:
        return Reach(self.root)

    @cached_property
    def tests(self) -> list[Path]:
        """All files of tests."""
        return [
            p for p in self.reach.files if p.parts[0] == "tests" and p.name.startswith("test_") and p.suffix == ".py"
        ]

    def _named(self, s: Suite) -> tuple[set[Path], set[Path]]:
        """The code a suite starts from, and all else that its line names."""
        named = {p for p in self.reach.files if any(_fits(p, q) for q in s.reads)}
        code = {p for p in named if p.suffix == ".py"}
        return code | {p for p in self.tests if s.has(str(p))}, named - code

    def files(self, s: Suite) -> set[Path]:
        """All files that a suite depends on."""
        code, other = self._named(s)
        return self.reach.closure(code) | other

    @cached_property
    def near(self) -> dict[str, set[Path]]:
        """Of each suite that is chosen, the files that are near to it. What its line names is, however many others are
        too."""
        chosen = [s for s in self.suites if not s.always]
        said = {s.name: {p for p in self.reach.files if any(_fits(p, q) for q in s.reads)} for s in chosen}
        found = {s.name: said[s.name] if s.make else self.reach.near(self._named(s)[0]) for s in chosen}
        users: dict[Path, int] = {}
        for p in (p for near in found.values() for p in near):
            users[p] = users.get(p, 0) + 1
        return {name: said[name] | {p for p in near if users[p] <= NEAR * len(found)} for name, near in found.items()}

    @cached_property
    def inputs(self) -> dict[str, Inputs]:
        """Of the suites that are chosen, not of those that always run."""
        chosen = [s for s in self.suites if not s.always]
        return {
            s.name: Inputs(digest(self.root, self.near[s.name], 8), digest(self.root, self.files(s), 8)) for s in chosen
        }


def _fits(path: Path, pattern: str) -> bool:
    return any(fnmatchcase(str(path), p) for p in braces(pattern))


def braces(pattern: str) -> list[str]:
    """`a{b,c}` is `ab` and `ac`; at most one pair."""
    found = re.fullmatch(r"([^{]*)\{([^}]*)\}(.*)", pattern)
    return [f"{found[1]}{one}{found[3]}" for one in found[2].split(",")] if found else [pattern]


def kinds(text: str) -> set[str]:
    """Which tests a file has, read from its text: those marked prove, those that are not, or both."""
    tree = ast.parse(text)
    whole = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    if any(_marks(n) for n in whole):
        return {PROVE}
    return {QUICK, PROVE} if _marks(tree) else {QUICK}


def _marks(tree: ast.AST) -> bool:
    found = [n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "prove"]
    return any(ast.unparse(x).split(".")[-1] == "mark" for x in found)


def homeless(table: Table, files: Sequence[tuple[str, str]]) -> list[str]:
    """What is wrong with who holds which file of tests: (path, text) of each."""
    wrong: list[str] = []
    for path, text in files:
        for kind in sorted(kinds(text)):
            holders = [s for s in table.suites if s.marked == kind and s.has(path)]
            parts = [s for s in holders if all("::" in t for t in s.tests)]
            if not holders:
                wrong.append(
                    f"{path}: its {kind} tests are in no suite; name it in {TABLE}, in a suite marked {kind!r}"
                )
            elif len(holders) > 1 and len(parts) < len(holders):
                wrong.append(
                    f"{path}: its {kind} tests are in {', '.join(s.name for s in holders)}; leave it in one of them"
                )
    return wrong
