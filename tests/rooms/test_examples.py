"""Every command of every example runs as printed, with fewer steps and a smaller model.

Commands run from inside a copy of the folder, in the order of the page. Those of `posttrain` run in this process, but
the server, which runs beside.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from page_parts import commands
from toy_sizes import toy

from posttrain.api import overrides
from posttrain.cli import main
from posttrain.recipe.recipes import RECIPES, recipe

pytestmark = pytest.mark.prove

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ELSEWHERE = {"gsm8k"}
"""Examples that have a test of their own."""
NAMES = sorted(p.name for p in EXAMPLES.iterdir() if p.is_dir() and p.name not in {"__pycache__", *ELSEWHERE})
BLOCK = re.compile(r"^```sh(?: (\w+))?\n(.*?)^```$", re.M | re.DOTALL)


def page(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text(encoding="utf-8")


def lines(name: str, kind: str = "") -> list[list[str]]:
    """The commands of the page's blocks of a kind, each as words."""
    text = "\n".join(body for mark, body in BLOCK.findall(page(name)) if mark == kind)
    return [shlex.split(line) for line in text.splitlines() if line.strip()]


@pytest.fixture
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A copy of the example's folder, as the current one."""
    name: str = request.param
    shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.chdir(tmp_path / name)
    yield name


def run(words: list[str]) -> None:
    """One command: `posttrain` in this process, a script in one of its own."""
    if words[0] == "python":
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        program = [sys.executable, str(Path(__file__).with_name("toy_sizes.py")), *words[1:]]
        subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=300)
        return
    assert words[0] == "posttrain", f"{words[0]}: an example has commands of posttrain and python only"
    assert main(toy(words[1:])) == 0, " ".join(words)


@pytest.mark.parametrize("there", NAMES, indirect=True)
def test_an_example_runs_as_printed(there: str) -> None:
    for words in lines(there):
        run(words)
    if CHECKS.get(there) is not None:
        CHECKS[there]()


CHECKS: dict[str, Callable[[], None]] = {
    "prompts": lambda: _exists("runs/letters/run.json"),
    "export": lambda: _exists("trained/config.json"),
    "compare_seeds": lambda: _exists("runs/dapo-3/run.json"),
}


def _exists(path: str) -> None:
    assert Path(path).exists(), path


@contextmanager
def serving(words: list[str]) -> Iterator[None]:
    """The server of the page as a process, until it answers, and to its end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([sys.executable, "-m", "posttrain.cli", *words[1:]], env=env)
    port = words[words.index("--port") + 1]
    try:
        for _ in range(600):
            assert server.poll() is None, "the server ended"
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    assert answer.status == 200
                    break
            except URLError:
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("there", ["evaluate_and_serve"], indirect=True)
def test_the_served_run_answers(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_TOKEN", "a-token-of-more-than-16")
    run(lines(there)[0])
    (server,) = lines(there, "serve")
    with serving(server):
        for words in lines(there, "client"):
            run(words)


@pytest.mark.parametrize("name", NAMES)
def test_commands_beside_the_blocks_can_be_given(name: str) -> None:
    """What stands indented needs a model or a hub; its settings are put together all the same."""
    for words in commands(page(name)):
        if words[1] == "run" and "--resume" not in words:
            assert words[2] in RECIPES
            overrides.apply(recipe(words[2]), [w for w in words[3:] if "=" in w and not _ours(w)])


def _ours(word: str) -> bool:
    return word.startswith("--") or (".py:" in word and word.startswith("algorithm="))


def test_the_index_has_every_example() -> None:
    listed = set(re.findall(r"\]\((\w+)/README\.md\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed - ELSEWHERE == set(NAMES)
