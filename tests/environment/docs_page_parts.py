"""What the tests of pages share: the cells of tables, the commands as printed, and whether a name can be set."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from posttrain.config import overrides
from posttrain.config.run import Run
from posttrain.environment.rows.own_prompts import PromptsEnv

SPAN = re.compile(r"`([^`]+)`")
SETTING = re.compile(r"[a-z_]+(\.\w+)*(=\S*)?")


def cells(line: str) -> list[str]:
    """The cells of a row of a table; none where the line is no row."""
    return [c.strip() for c in line.strip().strip("|").split("|")] if line.startswith("|") else []


def commands(text: str) -> Iterator[list[str]]:
    """The words of every `posttrain ...` of a page: lines of their own, in blocks or indented, without the comment."""
    joined = re.sub(r"\\\\\n\s*", "", text)
    for line in joined.splitlines():
        line = line.strip().removeprefix("$ ")
        if line.startswith("posttrain ") and not line.endswith("..."):
            yield shlex.split(line, comments=True)


def settable(run: Run, words: str) -> None:
    """Raises where a code span of the second column is no setting, or no value of it."""
    paths = {path for path, _ in overrides.surface(run)} | {f"env.args.{name}" for name in PromptsEnv.settings()}
    given = words.split()
    for word in given:
        assert SETTING.fullmatch(word), f"{word!r} is no setting"
        path = ".".join(overrides.address(run, word.partition("=")[0]))
        assert path in paths, f"{path} is no setting of {run.recipe}"
    if all("=" in word for word in given):
        overrides.apply(run, [w.replace("...", "127.0.0.1:8000") for w in _with_engine(given)])
    else:
        assert len(given) == 1, f"{words!r}: give each a value"


def _with_engine(given: list[str]) -> list[str]:
    return [*(["engine=vllm"] if any(w.startswith("engine.") for w in given) else []), *given]
