"""What is installed by pip: everything a command needs and nothing of the workshop, and only imports that are declared.

That it works from there, in a fresh environment, is the first hour's (`tests/first_hour`).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.first_hour.fresh import source, wheel

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {
    "huggingface_hub": "huggingface-hub",
    "math_verify": "math-verify",
    "reasoning_gym": "reasoning-gym",
    "yaml": "pyyaml",
    "markdown_it": "markdown-it-py",
}
"""Import names that are not the names of their packages."""
OWN_ENVIRONMENT = {
    "vllm": "has an environment of its own (constraints-vllm.txt)",
    "triton": "comes with torch for CUDA; engine/head/triton_tiles.py is imported only where it is",
    "mpi4py": "",
    "pandas": "the user's",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(ROOT, tmp_path_factory.mktemp("wheel") / "made")


@pytest.mark.prove
def test_it_holds_the_package_whole_and_nothing_else(made: Path) -> None:
    """Every file of `posttrain/`: kernels in C, prompts, skeletons, rewards; no tests, benchmarks or run folders. Its
    size counts code and data, as they are packed: comments and docstrings may grow."""
    with zipfile.ZipFile(made) as packed:
        files = {n: packed.read(n) for n in packed.namelist() if ".dist-info/" not in n}
    want = {str(p) for p in source(ROOT) if p.parts[0] == "posttrain"}
    assert files.keys() == want
    assert sum(len(zlib.compress(code(x) if n.endswith(".py") else x)) for n, x in files.items()) < 11 << 17


def code(text: bytes) -> bytes:
    """A module without comments and bare strings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [b for b in node.body if not (isinstance(b, ast.Expr) and isinstance(b.value, ast.Constant))]
    return ast.unparse(tree).encode()


@pytest.mark.prove
def test_its_metadata_says_what_a_package_index_shows(made: Path) -> None:
    with zipfile.ZipFile(made) as packed:
        name = next(n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
        told = message_from_bytes(packed.read(name))
        assert any(n.endswith("/licenses/LICENSE") for n in packed.namelist())
    assert told["Name"] == "posttrain" and told["License-Expression"] == "Apache-2.0"
    assert told["Description-Content-Type"] == "text/markdown" and "## Quickstart" in str(told.get_payload())
    assert set(told.get_all("Provides-Extra") or ()) == set(PROJECT["optional-dependencies"])


@pytest.mark.prove
def test_a_wheel_can_be_built_from_the_source_distribution(tmp_path: Path, made: Path) -> None:
    """And that wheel holds the same files."""
    tree = made.parent / "source"
    code = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=tree, capture_output=True, text=True)
    if "No module named 'setuptools'" in done.stderr:
        pytest.skip("setuptools is not installed here; pip builds wheels in an environment of its own")
    assert done.returncode == 0, done.stderr
    packed = tmp_path / done.stdout.split()[-1]
    with tarfile.open(packed) as tar:
        names = {n.partition("/")[2] for n in tar.getnames()}
    assert {"README.md", "LICENSE", "constraints.txt", "pyproject.toml"} <= names
    assert {str(p) for p in source(ROOT) if p.parts[0] == "posttrain"} <= names
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "runs/", "tour/"))]


# --- what is imported is declared -------------------------------------------------------------------------------------


def packages(words: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ;]", w)[0].lower() for w in words}


BASE = packages(PROJECT["dependencies"])
EXTRAS = {
    package: extra
    for extra, words in PROJECT["optional-dependencies"].items()
    if extra not in ("dev", "bench", "all")
    for package in packages(words)
}


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """(package, whether the import stands in a function) of each import from outside, also by `import_module`."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for_types = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    inside = {id(x) for n in functions for x in ast.walk(n)}
    typed = {id(x) for n in for_types for x in ast.walk(n)}
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        for name in names:
            top = str(name).partition(".")[0]
            if id(node) not in typed and top != "posttrain" and top not in sys.stdlib_module_names:
                yield NAMES.get(top, top).lower(), id(node) in inside


def test_what_is_imported_is_declared() -> None:
    """At the top of a file only what is always installed; in a function also what an extra brings."""
    wrong = list[str]()
    for path in sorted((ROOT / "posttrain").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        in_extra = name.startswith(("posttrain/serve/", "posttrain/engine/vllm/"))
        for package, inside in imported(path):
            if package in BASE or package in OWN_ENVIRONMENT:
                continue
            if package not in EXTRAS:
                wrong.append(f"{name} imports {package}, which pyproject.toml does not declare")
            elif not (inside or in_extra):
                wrong.append(f"{name} imports {package} of the extra {EXTRAS[package]!r} at its top")
    assert not wrong, "\n".join(wrong)


def test_all_is_every_extra_for_users() -> None:
    extras = PROJECT["optional-dependencies"]
    (line,) = extras["all"]
    named = set(re.findall(r"[\w-]+", line.partition("[")[2]))
    assert named == set(extras) - {"all", "dev", "bench"}


def test_the_readme_says_what_each_extra_brings() -> None:
    text = (ROOT / "README.md").read_text()
    assert [e for e in PROJECT["optional-dependencies"] if e not in ("dev", "bench") and f"`{e}`" not in text] == []
