"""The examples of docs/environments.md run, in order, in one namespace."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 9
    module = ModuleType("environments_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), module.__dict__)
