"""The pages of guidance: their commands can be given as printed, and the settings they name exist."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.parser import parser, split_overrides
from posttrain.config import overrides
from posttrain.config.run import Run
from posttrain.core.types import Task
from posttrain.diagnose.gauges.registry import REGISTRY
from posttrain.diagnose.rules.all_rules import RULES
from posttrain.recipe.recipes import RECIPES, recipe
from tests.environment.docs_page_parts import SETTING, SPAN, cells, commands, settable

ROOT = Path(__file__).parents[2]
NAMES = (
    "which-algorithm",
    "batch-sizes",
    "reward-is-flat",
    "reward-rises-quality-does-not",
    "out-of-memory",
    "slow",
    "coming-from-trl",
    "coming-from-verl",
    "troubleshooting",
)
PAGES = [next((ROOT / "docs").rglob(f"{name}.md")) for name in NAMES]
HEADS = ("rl.", "sft.", "env.", "model.", "engine.", "evaluation.", "pull.", "clip.", "correction.", "sampling.")
"""How a setting begins where it stands in a sentence; longer names of other frameworks begin otherwise."""


@cache
def runs() -> list[Run]:
    return [recipe(name) for name in RECIPES]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_are_accepted(page: Path) -> None:
    """Each is parsed, and the settings of a run are put together, without starting it."""
    for words in commands(page.read_text(encoding="utf-8")):
        rest, settings = split_overrides(words[1:])
        parser().parse_args(rest)
        if words[1] == "run" and "--resume" not in words:
            assert words[2] in RECIPES, f"{words[2]}: no recipe of that name"
            overrides.apply(recipe(words[2]), settings)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_settings_that_sentences_name_exist(page: Path) -> None:
    """In a table of another framework the first column is theirs."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for line in lines:
        row = cells(line)
        text = " ".join(row[1:]) if len(row) > 2 and page.stem.startswith("coming-from") else line
        for span in SPAN.findall(text):
            for word in span.split():
                name = word.partition("=")[0]
                if not SETTING.fullmatch(word) or not (name.startswith(HEADS) or "=" in word):
                    continue
                if not _known(name) and word not in THEIRS:
                    raise AssertionError(f"{page.name}: {span!r}: {name} is no setting")


THEIRS = {"beta=0", "use_kl_loss=false", 'loss_type="dapo"'}
"""Spans that look like settings of ours and are told of another framework."""


@cache
def _known(name: str) -> bool:
    return any(_has(run, name) for run in runs())


def _has(run: Run, name: str) -> bool:
    if name in (s.name for s in run.stages):
        return True
    try:
        settable(run, name)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_gauges_that_a_page_names_exist(page: Path) -> None:
    families = {x.partition("/")[0] for x in REGISTRY}
    for span in SPAN.findall(page.read_text(encoding="utf-8")):
        if re.fullmatch(r"[a-z]+/[a-zA-Z_]+", span) and span.partition("/")[0] in families:
            assert span in REGISTRY, f"{page.name}: no gauge is called {span}"


def verl() -> list[tuple[str, str]]:
    text = (ROOT / "docs/start/coming-from-verl.md").read_text(encoding="utf-8")
    rows = [cells(line) for line in text.splitlines() if len(cells(line)) == 3]
    return [(r[0], r[1]) for r in rows if r[1] != "here" and not r[0].startswith("---")]


@pytest.mark.parametrize("row", verl(), ids=lambda r: r[0])
def test_the_settings_beside_verls_can_be_set(row: tuple[str, str]) -> None:
    for words in SPAN.findall(row[1]):
        settable(recipe("grpo"), words)


def test_every_page_of_guidance_is_read_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\((docs/[\w/-]+\.md)\)", readme))
    assert {p.relative_to(ROOT).as_posix() for p in PAGES} - named == set()


# --- the sentences of a run -------------------------------------------------------------------------------------------


@cache
def sentences() -> list[str]:
    """Every text of the package: the constant parts of each string, with `{}` where a value stands."""
    out = list[str]()
    for path in (ROOT / "posttrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                out.append("".join(x.value if isinstance(x, ast.Constant) else "{}" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                out.append(node.value)
    return out


def phrases() -> list[str]:
    page = PAGES[NAMES.index("troubleshooting")].read_text(encoding="utf-8")
    rows = [cells(line) for line in page.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", r[0])[0] for r in rows]


@pytest.mark.parametrize("phrase", phrases())
def test_a_sentence_of_the_index_is_one_that_a_run_can_say(phrase: str) -> None:
    assert any(phrase in text for text in sentences()), f"no text of the package contains {phrase!r}"


def said_by(name: str) -> str:
    """The texts of a rule and of the functions of its module that it calls by name."""
    module = inspect.getmodule(RULES[name])
    assert module is not None
    functions = {n.name: n for n in ast.parse(inspect.getsource(module)).body if isinstance(n, ast.FunctionDef)}
    reached, left = set[str](), {name}
    while left:
        reached |= left
        named = {x.id for f in left for x in ast.walk(functions[f]) if isinstance(x, ast.Name)}
        left = (named & set(functions)) - reached
    return "\n".join(
        x.value
        for f in reached
        for x in ast.walk(functions[f])
        if isinstance(x, ast.Constant) and isinstance(x.value, str)
    )


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_in_the_index(name: str) -> None:
    text = said_by(name)
    assert any(phrase in text for phrase in phrases()), f"troubleshooting.md has no sentence of the rule {name}"


# --- links to sections ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The sections of a page, as links name them: lower case, no punctuation, spaces as hyphens."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "README.md", ROOT / "README.md"], ids=lambda p: p.stem)
def test_links_lead_to_sections(page: Path) -> None:
    for path, section in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        there = (page.parent / path).resolve() if path else page
        assert section in anchors(there), f"{page.name}: {path}#{section}: there is no such section"


def test_a_reward_of_verl_works_as_the_page_wraps_it() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/start/coming-from-verl.md").read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile(block, "coming-from-verl.md", "exec"), space)
    task = Task(id="t", prompt="3+4=", answer="7", info={"data_source": "sums"})
    assert [space["reward"](task, text) for text in (" 7 ", "8")] == [1.0, 0.0]
