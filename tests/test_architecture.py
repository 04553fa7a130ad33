"""The table of rooms as a test: a room looks only down, rooms of one floor do not know each other, and all stay
small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "posttrain"

FLOORS = (
    ("core",),
    ("algorithm", "sandbox", "verifier", "environment", "data", "diagnose", "toy"),
    ("role", "engine"),
    ("checks", "controller", "search"),
    ("recipe", "faults"),
    ("api",),
    ("serve", "replay", "view", "lab"),
    ("cli",),
)
"""Rooms from the bottom up. A room that does not exist yet may be listed."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OVER = {"verifier": ("sandbox",), "environment": ("verifier", "sandbox")}
"""The one exception within a floor: a room, and those of its floor that it may import."""
NO_TORCH = ("core", "sandbox", "verifier", "environment", "data", "diagnose", "recipe", "faults", "cli")
PLAYED = ("toy", "lab")
"""Rooms that no run reaches; only these import `toy`."""
HEAVY = {"torch", "transformers", "accelerate", "vllm", "ray", "peft", "datasets"}
LIGHT = {"environment": {"datasets"}, "data": {"datasets"}}
"""What an otherwise light room may import, inside a function."""
FILE_LINES, FUNCTION_LINES = 400, 60

FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    """The room a file lies in; '' for the package's own `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] != "__init__" else ""


def imports(path: Path, text: str | None = None) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands; `from posttrain import x` counts as `posttrain.x`."""
    package = ("posttrain", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text() if text is None else text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(x for x in (base, node.module) if x)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_room_looks_only_down(path: Path) -> None:
    here = room(path)
    assert here == "" or here in FLOOR, (
        f"{named(path)}: room {here!r} is not in the table; add it to FLOORS and to the design page"
    )
    wrong: list[str] = []
    for line, module in imports(path):
        parts = module.split(".")
        if here == "" or parts[0] != "posttrain" or len(parts) < 2 or parts[1] not in FLOOR or parts[1] == here:
            continue
        if parts[1] in OVER.get(here, ()):
            continue
        if FLOOR[parts[1]] >= FLOOR[here]:
            where = "a room of its own floor" if FLOOR[parts[1]] == FLOOR[here] else "a room above it"
            wrong.append(f"{named(path)}:{line} {here} imports {parts[1]}, {where}; meet through core/ports.py")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in ("", *NO_TORCH)], ids=named)
def test_light_rooms_import_nothing_heavy(path: Path) -> None:
    forbidden = HEAVY - LIGHT.get(room(path), set())
    wrong = [f"{named(path)}:{line} imports {m}" for line, m in imports(path) if m.split(".")[0] in forbidden]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "core"], ids=named)
def test_core_is_numpy_and_the_standard_library(path: Path) -> None:
    known = {*sys.stdlib_module_names, "numpy", "posttrain"}
    wrong = [f"{named(path)}:{line} imports {m}" for line, m in imports(path) if m.split(".")[0] not in known]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in FILES if room(p) not in PLAYED], ids=named)
def test_no_run_reaches_the_small_worlds(path: Path) -> None:
    wrong = [f"{named(path)}:{line} imports {m}" for line, m in imports(path) if m.startswith("posttrain.toy")]
    assert not wrong, "\n".join(wrong) + "\nsmall worlds are for laws, miniatures and lessons"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= FILE_LINES, f"{named(path)} has {lines} lines; cut it into rooms of at most {FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            long = (node.end_lineno or node.lineno) - node.lineno + 1
            assert long <= FUNCTION_LINES, (
                f"{named(path)}:{node.lineno} {node.name} has {long} lines; at most {FUNCTION_LINES}"
            )


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{named(path)} has no docstring"


def test_the_test_itself_sees_every_way_to_import() -> None:
    text = (
        "import torch.nn as nn\nfrom posttrain import recipe\nfrom ..engine.models import x\ndef f():\n    import cli\n"
    )
    found = [m for _, m in imports(ROOT / "controller" / "x.py", text)]
    assert found == ["torch.nn", "posttrain.recipe", "posttrain.engine.models.x", "cli"]
