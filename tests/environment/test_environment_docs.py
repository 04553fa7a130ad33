"""The examples of the pages about environments and tools run, in order, in one namespace a page. What is a file
of its own there is played in the first hour."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs/guides"
PAGES = {"environments.md": 12, "preference_data.md": 1, "tools.md": 3}


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    blocks = re.findall(r"```python\n(?!# \w+\.py\n)(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == PAGES[page]
    module = ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, page, "exec"), module.__dict__)
