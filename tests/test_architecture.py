"""The table of rooms as a test: a room looks only down, rooms of one floor do not know each other, and all stay
small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent / "posttrain"

FLOORS = (
    ("core", "system"),
    ("ladder",),
    ("config",),
    ("record",),
    ("algorithm", "sandbox", "verifier", "environment", "diagnose", "plan"),
    ("engine", "toy"),
    ("role",),
    ("checks", "search"),
    ("stages",),
    ("recipe", "faults"),
    ("build",),
    ("report",),
    ("evaluation",),
    ("api",),
    ("web",),
    ("serve", "lab"),
    ("cli",),
)
"""Rooms from the bottom up."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OVER = {"core": ("system",), "verifier": ("sandbox",), "environment": ("verifier", "sandbox")}
"""The exceptions within a floor: a room, and those of its floor that it may import."""
NO_TORCH = (
    *("core", "system", "ladder", "config", "record", "sandbox", "verifier", "environment", "diagnose", "plan"),
    *("recipe", "faults", "web", "cli"),
)
GROUND = ("core", "system", "ladder", "config", "record")
"""Rooms of numpy and the standard library alone."""
PLAYED = ("toy", "lab")
"""Rooms that no run reaches; only these import `toy`."""
HEAVY = {"torch", "transformers", "accelerate", "vllm", "ray", "peft", "datasets"}
LIGHT = {"environment": {"datasets"}, "verifier": {"ray"}}
"""What an otherwise light room may import, inside a function."""
FILE_LINES, FUNCTION_LINES, FOLDER_MODULES = 500, 60, 16

FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    """The room a file lies in; '' for the package's own `__init__` and `__main__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if len(parts) > 1 or parts[0] not in ("__init__", "__main__") else ""


def imports(path: Path, text: str | None = None, only_run: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands; `from posttrain import x` counts as `posttrain.x`.

    With `only_run` without those that stand under `if TYPE_CHECKING`.
    """
    package = ("posttrain", *path.relative_to(ROOT).parent.parts)
    tree = parsed(path) if text is None else ast.parse(text)
    typed = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    left_out = {id(x) for n in typed for part in n.body for x in ast.walk(part)} if only_run else set[int]()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(x for x in (base, node.module) if x)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def named(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def module(path: Path) -> str:
    """The dotted name of a file; of a package it is that of its `__init__`."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The circles of a graph: groups of nodes that all reach one another."""
    reach = {node: reached(graph, node) for node in graph}
    met = {
        frozenset([node, *(other for other in reach[node] if node in reach[other])])
        for node in graph
        if node in reach[node]
    }
    return sorted(sorted(group) for group in met)


def reached(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    """Nodes that a path of one edge or more leads to."""
    found, waiting = set[str](), [*graph[start]]
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += graph[node]
    return found


def test_a_room_looks_only_down() -> None:
    wrong = [f"{named(p)} is in no room: add it to FLOORS" for p in FILES if room(p) and room(p) not in FLOOR]
    for path in [p for p in FILES if room(p) in FLOOR]:
        here = room(path)
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] != "posttrain" or len(parts) < 2 or parts[1] not in FLOOR or parts[1] == here:
                continue
            if FLOOR[parts[1]] >= FLOOR[here] and parts[1] not in OVER.get(here, ()):
                where = "a room of its own floor" if FLOOR[parts[1]] == FLOOR[here] else "a room above it"
                wrong.append(f"{named(path)}:{line} {here} imports {parts[1]}, {where}; meet through core/ports.py")
    assert not wrong, "\n".join(wrong)


def test_light_rooms_import_nothing_heavy() -> None:
    light = [p for p in FILES if room(p) in ("", *NO_TORCH)]
    assert not (wrong := imported(light, lambda p, top: top in HEAVY - LIGHT.get(room(p), set()))), "\n".join(wrong)


def imported(paths: Sequence[Path], wrong: Callable[[Path, str], bool]) -> list[str]:
    """The imports of packages that are wrong in these files, each with its place."""
    found = ((path, line, m) for path in paths for line, m in imports(path))
    return [f"{named(path)}:{line} imports {m}" for path, line, m in found if wrong(path, m.split(".")[0])]


def test_light_rooms_reach_nothing_heavy() -> None:
    """Nor does what they import when they are imported: a wrong command is answered without the second that torch
    takes."""
    paths = [p.relative_to(ROOT).with_suffix("") for p in FILES if room(p) in NO_TORCH and p.stem != "__main__"]
    modules = [".".join(("posttrain", *p.parts)).removesuffix(".__init__") for p in paths]
    program = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        f"    if found := {HEAVY} & sys.modules.keys(): sys.exit(f'{{name}} reaches {{found}}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_ground_is_numpy_and_the_standard_library() -> None:
    known, ground = {*sys.stdlib_module_names, "numpy", "posttrain"}, [p for p in FILES if room(p) in GROUND]
    assert not (wrong := imported(ground, lambda _, top: top not in known)), "\n".join(wrong)


def test_no_run_reaches_the_small_worlds() -> None:
    paths = [p for p in FILES if room(p) not in PLAYED]
    wrong = [f"{named(p)}:{line} imports {m}" for p in paths for line, m in imports(p) if m.startswith("posttrain.toy")]
    assert not wrong, "\n".join(wrong) + "\nsmall worlds are for laws, miniatures and lessons"


def test_no_module_reaches_itself() -> None:
    """No circle of modules: each can be read, and moved, knowing only what it imports. Imports inside functions count;
    those for type checkers alone do not, because they never run."""
    known = {module(p) for p in FILES}

    def used(path: Path) -> set[str]:
        names = [m for _, m in imports(path, only_run=True)]
        return {
            next(x for x in (m, m.rpartition(".")[0]) if x in known) for m in names if {m, m.rpartition(".")[0]} & known
        }

    found = circles({module(p): used(p) for p in FILES})
    assert not found, "modules import each other; move what both need into a third: " + "; ".join(
        ", ".join(c) for c in found
    )


def test_the_table_for_people_says_the_same() -> None:
    """architecture.md has a line for each room that exists, with its floor and whether it may import torch."""
    page = (ROOT.parent / "docs/design/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| .* \| (yes|no) \|$", page, re.M)
    there = {room(p) for p in FILES} - {""}
    assert {name: (int(floor), torch) for floor, name, torch in rows} == {
        name: (FLOOR[name], "no" if name in NO_TORCH else "yes") for name in there
    }


def test_no_folder_is_a_heap() -> None:
    """At most 16 modules beside each other, so that a folder is read at a glance; lessons are a list by number."""
    there = Counter(p.parent for p in FILES if p.name != "__init__.py" and "lessons" not in p.relative_to(ROOT).parts)
    wide = {named(folder): n for folder, n in there.items() if n > FOLDER_MODULES}
    assert not wide, f"{wide}: make rooms by subject inside"


def test_the_search_finds_circles() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}, "e": {"a"}}) == [["b", "c"], ["d"]]


def test_files_and_functions_stay_small() -> None:
    """Length is a smell: a file may have 400 lines, up to 500 where one idea needs them, and a function 60.
    Comments do not count, nor does a function's docstring."""
    wrong = list[str]()
    for path in FILES:
        text = path.read_text().splitlines()
        comments = [bool(re.match(r"\s*#", line)) for line in text]
        lines = len(text) - sum(comments)
        wrong += [f"{named(path)} has {lines} lines; at most {FILE_LINES}"] if lines > FILE_LINES else []
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                end, words = node.end_lineno or node.lineno, ast.get_docstring(node, clean=False) or ""
                long = end - node.lineno - words.count("\n") - sum(comments[node.lineno - 1 : end]) + (not words)
                told = f"{named(path)}:{node.lineno} {node.name} has {long} lines; at most {FUNCTION_LINES}"
                wrong += [told] if long > FUNCTION_LINES else []
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    assert not (silent := [named(p) for p in FILES if not ast.get_docstring(parsed(p))]), f"{silent}: no docstring"


def test_the_test_itself_sees_every_way_to_import() -> None:
    text = (
        "import torch.nn as nn\nfrom posttrain import recipe\nfrom ..engine.gone import x\ndef f():\n    import cli\n"
    )
    found = [m for _, m in imports(ROOT / "stages" / "x.py", text)]
    assert found == ["torch.nn", "posttrain.recipe", "posttrain.engine.gone.x", "cli"]
