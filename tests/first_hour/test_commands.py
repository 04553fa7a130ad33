"""What the pages print, without playing it: every step is found, every command is one that the program has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from posttrain.cli.parser import parser, split_overrides
from tests.first_hour.pages import Step, steps
from tests.first_hour.play import PLAIN
from tests.first_hour.serving import SERVES
from tests.first_hour.words import EXEMPT, NOT_PAGES, exempt, pages, put_in, smaller

ROOT = Path(__file__).parents[2]
STEPS = [s for p in pages(ROOT) for s in steps(p, ROOT)]
COMMANDS = [s for s in STEPS if s.kind == "command"]


def test_steps_of_a_page_are_found_in_order(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n    posttrain run ladder \\\n        rl.steps=2   # why\n    what it prints\n\n"
        "```sh\n$ posttrain show runs/mine\nls\n```\n\n```python\nprint(1)\n```\n\n```python\n# mine.py\nx = 1\n```\n"
        "```json\nposttrain run nothing\n```\n- a list:\n    posttrain run not_a_block\n"
    )
    assert [(s.kind, s.text, s.name) for s in steps(page, tmp_path)] == [
        ("command", "posttrain run ladder rl.steps=2   # why", ""),
        ("command", "posttrain show runs/mine", ""),
        ("python", "print(1)\n", ""),
        ("file", "# mine.py\nx = 1\n", "mine.py"),
    ]
    notebook = tmp_path / "one.ipynb"
    cell = '{"cell_type": "code", "source": ["!posttrain show runs/mine\\n", "x = 1\\n", "x"]}'
    notebook.write_text('{"cells": [{"cell_type": "markdown", "source": []}, ' + cell + "]}")
    assert [(s.kind, s.line, s.text) for s in steps(notebook, tmp_path)] == [
        ("command", 2, "posttrain show runs/mine"),
        ("python", 2, "\nx = 1\nx\n"),
    ]


def test_the_pages_of_a_new_user_are_there_and_have_steps() -> None:
    played = {s.page for s in STEPS}
    wanted = {"README.md", "docs/recipes.md", "docs/environments.md", "docs/tools.md"}
    assert wanted <= played and len(COMMANDS) > 60
    assert [p for p in NOT_PAGES if not (ROOT / p).is_file()] == []


@pytest.mark.parametrize("step", COMMANDS, ids=str)
def test_a_printed_command_is_one_that_the_program_has(step: Step) -> None:
    """Its words are understood by the parser, as printed and at toy size."""
    typed = put_in(step.text, Path("nowhere"))
    for command in (typed, smaller(typed)):
        words = shlex.split(command, comments=True)
        if (
            words[:1] == ["posttrain"]
            and not any(w in ("--help", "--version", "-h") for w in words)
            and "|" not in words
        ):
            rest, _ = split_overrides(words[1:])
            assert parser().parse_args(rest).command


def test_every_exemption_is_used() -> None:
    texts = [(s.page, s.text) for s in COMMANDS]
    unused = [e for e in EXEMPT if not any(re.match(e.text, t) for _, t in texts)]
    assert len(unused) <= len(EXEMPT) // 2, unused
    assert exempt("README.md", "make run") and not exempt("README.md", "posttrain run ladder")


def test_toy_sizes_stand_where_a_setting_has_another_value() -> None:
    small = smaller("posttrain run sft model=m sft.steps=500 --out runs/x  # why")
    assert small.startswith("posttrain run sft model=m sft.steps=4 --out runs/x env.heldout=8 ")
    assert small.endswith("sft.batch=8  # why") and small.count("sft.steps") == 1
    assert "sft.steps" not in smaller("posttrain run verifiable sft=none")
    assert smaller("posttrain run --resume runs/x rl.steps=200") == "posttrain run --resume runs/x rl.steps=14"
    assert smaller("posttrain show runs/x") == "posttrain show runs/x"
    assert "rl.eval_every=1 " in smaller("posttrain run grpo rl.eval_every=10 model=m")
    assert "rl.eval_every=0 " in smaller("posttrain run grpo model=m")
    assert smaller("posttrain eval m env=arithmetic") == "posttrain eval m env=arithmetic env.heldout=8 --max-tokens 8"
    assert smaller("python train.py A", "driver.py --toy") == "python driver.py --toy train.py A"


def test_what_a_server_is_and_what_needs_the_shell() -> None:
    assert SERVES.match("posttrain serve my-model --port 0") and not SERVES.match("posttrain serve --help")
    assert PLAIN.match("posttrain run sft 'a=b c'") and not PLAIN.match("posttrain ladder | head")


def test_the_index_has_every_example() -> None:
    examples = ROOT / "examples"
    listed = set(re.findall(r"\]\((\w+)/README\.md\)", (examples / "README.md").read_text(encoding="utf-8")))
    assert listed == {p.parent.name for p in examples.glob("*/README.md")}
