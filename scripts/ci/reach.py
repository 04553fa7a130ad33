"""Which files a test reads: what it imports, directly or not, and what lies beside that. A digest of them tells whether
a suite changed.

Read from the source alone: imports wherever they stand (except for type checkers), names of modules and of files in
strings (`"posttrain.cli"`, `"papers.md"`), folders that lie beside a module and that it names, files of a package that
nothing imports (programs and data that are opened by their path). A package that is only passed on the way to a module
(`posttrain` in `posttrain.core.run`) counts for what it imports at once.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

CODE = ("posttrain", "tests", "benchmarks", "scripts")
"""Folders whose Python files may import each other."""
FOR_ALL = ("pyproject.toml", "constraints.txt", "tests/conftest.py")
"""What every test depends on."""
SKIPPED = {".git", "__pycache__", "runs", "build", "dist", ".hypothesis", ".pytest_cache", ".ruff_cache"}
RECORD = Path(".ci", "ledger.json")
"""The record of landings. It counts for no test: the plan of a landing is written into it after the plan was made."""
MODULE = re.compile(r"\b(?:posttrain|tests|benchmarks)(?:\.\w+)+")


def tracked(root: Path) -> list[Path]:
    """All files of the repository, relative to it: as git has them, or, without git, all that a fresh copy holds."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return sorted(Path(n) for n in listed.stdout.split("\0") if n and (root / n).is_file())
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            f for f in folders if f not in SKIPPED and not f.startswith(".venv") and not f.endswith(".egg-info")
        ]
        found += [Path(folder, n).relative_to(root) for n in names]
    return sorted(p for p in found if (root / p).is_file())


def digest(root: Path, files: Iterable[Path], length: int = 12) -> str:
    """Of names and contents; the order given does not matter."""
    h = hashlib.sha256()
    for path in sorted(files):
        h.update(f"{path}\0".encode() + hashlib.sha256((root / path).read_bytes()).digest())
    return h.hexdigest()[:length]


def seed(root: Path) -> int:
    """Of a tree: all its files but prose and the record of landings, so that neither draws other suites."""
    counted = (p for p in tracked(root) if p.suffix != ".md" and p != RECORD)
    return int(digest(root, counted, 8), 16)


class Reach:
    """The files of one tree and who reads whom."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = [p for p in tracked(root) if p != RECORD]
        code = [p for p in self.files if p.suffix == ".py" and p.parts[0] in CODE]
        self.modules = {_dotted(p): p for p in code}
        self.code = set(code)
        self.named: dict[str, list[Path]] = {}
        self.inside: dict[Path, list[Path]] = {}
        for p in self.files:
            self.named.setdefault(p.name, []).append(p)
            self.inside.setdefault(p.parent, []).append(p)
        self.direct = cache(self._direct)
        self.of = cache(self._of)
        self.beside_of = cache(lambda path: [p for p in self.beside if self._lies_beside(p, path)])
        imported = {q for p in code for q, _ in self.direct(p, True) if q.suffix == ".py" or p.parts[0] != "tests"}
        self.beside = [
            p for p in self.files if p.parts[0] in CODE and p not in imported and not p.name.startswith("test_")
        ]

    def closure(self, tests: Iterable[Path]) -> set[Path]:
        """The tests and all that they read."""
        common = [p for p in self.files if str(p) in FOR_ALL]
        return set().union(common, *(self.of(p) for p in tests))

    def near(self, tests: Iterable[Path]) -> set[Path]:
        """The tests with their helpers, the modules that these name themselves, and what those read of their own
        folder."""
        found: set[Path] = set()
        todo = list(tests)
        while todo:
            path = todo.pop()
            if path in found:
                continue
            found.add(path)
            mine = path.parts[0] == "tests"
            todo += [q for q, whole in self.direct(path, True) if whole and (mine or _of_its_folder(q, path))]
            todo += [] if mine else self.beside_of(path)
        return found

    def _of(self, test: Path) -> frozenset[Path]:
        conftest = test.parent / "conftest.py"
        todo = [(test, True)] + ([(conftest, True)] if (self.root / conftest).is_file() else [])
        seen: dict[Path, bool] = {}
        while todo:
            path, whole = todo.pop()
            if seen.get(path, False) or (path in seen and not whole):
                continue
            seen[path] = whole
            if path.suffix == ".py":
                todo += self.direct(path, whole)
            if path.parts[0] in CODE and path.parts[0] != "tests":
                todo += [(p, True) for p in self.beside_of(path) if p not in seen]
        return frozenset(seen)

    def _lies_beside(self, path: Path, module: Path) -> bool:
        """Whether a file that nothing imports lies in the folder of a module, or below it in folders that are no
        packages."""
        if path.suffix == ".py" and path.parent == module.parent:
            return path.name not in ("__main__.py", "__init__.py")
        folder = path.parent
        while (
            folder != module.parent
            and module.parent in folder.parents
            and not (self.root / folder / "__init__.py").exists()
        ):
            folder = folder.parent
        return folder == module.parent

    def _direct(self, path: Path, whole: bool) -> tuple[tuple[Path, bool], ...]:
        """(file, whether all of it counts or only what it does when it is imported) of everything that a module
        names."""
        if path.suffix != ".py":
            return ()
        found: list[tuple[Path, bool]] = []
        body = ast.parse((self.root / path).read_text()).body
        for node in _nodes(body, whole):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found += self._module(path, alias.name)
            elif isinstance(node, ast.ImportFrom):
                base = list(path.parent.parts[: len(path.parent.parts) - node.level + 1]) if node.level else []
                for alias in node.names:
                    found += self._module(path, ".".join([*base, *filter(None, [node.module]), alias.name]))
            elif whole and isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += self._string(path, node.value)
        return tuple(dict.fromkeys(found))

    def _module(self, user: Path, name: str) -> Iterator[tuple[Path, bool]]:
        """A module by its name (or the name of something in it), with the packages it lies in."""
        parts = name.split(".")
        if user.parts[0] == "tests" and (own := user.parent / f"{parts[0]}.py") in self.code:
            yield own, True
            return
        here = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self.modules), 0)
        for n in range(1, here + 1):
            if (package := self.modules.get(".".join(parts[:n]))) is not None:
                yield package, n == here

    def _string(self, user: Path, text: str) -> Iterator[tuple[Path, bool]]:
        if text == "posttrain" and user.parts[0] == "tests":
            yield from (
                (self.modules[n], True)
                for n in ("posttrain", "posttrain.cli", "posttrain.__main__")
                if n in self.modules
            )
        for name in MODULE.findall(text):
            yield from (x for x in self._module(user, name) if x[0] != self.modules.get("posttrain"))
        if text.strip("./") and "\0" not in text:
            yield from ((p, True) for p in self.inside.get(user.parent / text, ()))
        name = text.rsplit("/", 1)[-1]
        if "." in name and len(self.named.get(name, ())) == 1 and self.named[name][0].suffix != ".py":
            yield self.named[name][0], True


def _of_its_folder(path: Path, module: Path) -> bool:
    """In the folder of a module, or below it where the module lies in a part of a room (`room/part/...`) or in the room
    that is one part (`sandbox`)."""
    deep = len(module.parts) > 3 or module.parts[:2] == ("posttrain", "sandbox")
    return path.parent == module.parent or (deep and module.parent in path.parents)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _nodes(body: list[ast.stmt], whole: bool) -> Iterator[ast.AST]:
    """All nodes but docstrings and what only a type checker reads; without what stands in functions unless `whole`."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from _nodes(statement.orelse, whole)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if whole or isinstance(statement, ast.ClassDef):
                yield from _nodes(statement.body, whole)
                yield from (n for d in statement.decorator_list for n in ast.walk(d))
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            inner = [s for name in ("body", "orelse", "finalbody") for s in getattr(statement, name, [])]
            inner += [s for h in getattr(statement, "handlers", []) for s in h.body]
            yield from _nodes(inner, whole)
            yield from (
                n for f in ("test", "iter", "items") for x in _list(getattr(statement, f, [])) for n in ast.walk(x)
            )
        else:
            yield from ast.walk(statement)


def _list(x: object) -> list[ast.AST]:
    return x if isinstance(x, list) else [x]  # type: ignore[return-value]
