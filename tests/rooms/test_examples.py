"""Every command of every example runs as printed, with fewer steps and a smaller model.

Commands run from inside a copy of the folder, in the order of the page. Those of `posttrain` run in this process, but
the server, which runs beside.
"""

from __future__ import annotations

import os
import re
import runpy
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

import posttrain
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

SIZES = {"model.hidden": "32", "model.ffn": "64", "model.heads": "2", "model.kv_heads": "1", "slots": "16"}
SHORT = {"env.heldout": "4", "evaluation.samples": "1", "threads": "1"}
SFT = {"sft.steps": "3", "sft.batch": "8"}
RL = {"rl.steps": "2", "rl.prompts": "4", "rl.siblings": "4", "rl.eval_every": "0", "rl.checkpoint_every": "1"}


def toy(words: list[str]) -> list[str]:
    """The words of `posttrain ...` at toy size: only what the command can be told, and only of stages that it has."""
    if words[0] != "run":
        return words
    if "--resume" in words:
        return [re.sub(r"^rl\.steps=\d+$", "rl.steps=3", w) for w in words]
    built = not any(w.startswith("model=") for w in words)
    stages = {**({} if "sft=none" in words or words[1] == "grpo" else SFT), **({} if words[1] == "sft" else RL)}
    small = {**(SIZES if built else {}), **SHORT, **stages}
    kept = [w for w in words if w.partition("=")[0] not in small]
    return [*kept, *(f"{k}={v}" for k, v in small.items())]


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
    real = posttrain.run

    def small(named: str, *words: str, **more: object) -> object:
        return real(named, *toy(["run", named, *words])[2:], **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(posttrain, "run", small)
    yield name


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One command, in this process."""
    if words[0] == "python":
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
        return
    assert words[0] == "posttrain", f"{words[0]}: an example has commands of posttrain and python only"
    assert main(toy(words[1:])) == 0, " ".join(words)


@pytest.mark.parametrize("there", NAMES, indirect=True)
def test_an_example_runs_as_printed(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in lines(there):
        run(words, monkeypatch)
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
    run(lines(there)[0], monkeypatch)
    (server,) = lines(there, "serve")
    with serving(server):
        for words in lines(there, "client"):
            run(words, monkeypatch)


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
