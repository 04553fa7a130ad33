"""What the pages print, without playing it: every step is found, every command is one that the program has."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from posttrain.cli.parser import parser, split_overrides
from posttrain.recipe.recipes import recipe
from scripts.site.pages import read_pages
from tests.first_hour.pages import Step, mentions, steps
from tests.first_hour.play import PLAIN
from tests.first_hour.serving import SERVES
from tests.first_hour.typed import drawn, sizes_of, steps_of, unplayed, whole
from tests.first_hour.words import EXEMPT, NOT_PAGES, exempt, pages, put_in, smaller

ROOT = Path(__file__).parents[2]
STEPS = [s for p in pages(ROOT) for s in steps_of(p, ROOT)]
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
    wanted = {"README.md", "docs/start/recipes.md", "docs/guides/environments.md", "docs/guides/tools.md"}
    assert wanted <= played and len(COMMANDS) > 60
    assert [p for p in NOT_PAGES if not (ROOT / p).is_file()] == []


def test_every_page_of_the_site_is_played_and_no_command_is_overlooked() -> None:
    wrong = list(unplayed(ROOT, list(read_pages(ROOT))))
    assert not wrong, "\n".join(wrong)
    assert NOT_PAGES.keys() == {"docs/research/LOG.md", "docs/research/defects.md"}


def test_a_new_page_is_played_or_named(tmp_path: Path) -> None:
    """A page in a folder that is played, one elsewhere, and commands that are found by nobody."""
    text = "# New\n\nSee `ray start --head`.\n\n    posttrain run ladder\n    srun train.py\n\n"
    text += "```sh\nls -l\nN=1 make run\n```\n"
    for page in ("docs/new.md", "guides/new.md"):
        (tmp_path / page).parent.mkdir()
        (tmp_path / page).write_text(text)
    overlooked = [":3: ray start --head", ":6: srun train.py", ":9: ls -l"]
    assert [x.partition(": name the")[0] for x in unplayed(tmp_path, ["docs/new.md", "guides/new.md"])] == [
        *(f"docs/new.md{x}" for x in overlooked),
        "guides/new.md:5: posttrain run ladder",
        "guides/new.md:10: N=1 make run",
        *(f"guides/new.md{x}" for x in overlooked),
    ]


def test_running_text_is_played_where_it_mentions_a_whole_command(tmp_path: Path) -> None:
    page = tmp_path / "docs/page.md"
    page.parent.mkdir()
    page.write_text(
        "# `posttrain ladder`\n\nSay `posttrain run --resume\nRUN`, not `posttrain check`, `posttrain run grpo` or"
        " `posttrain faults NAME`.\n\n    posttrain ladder grpo   # why\n\n| `posttrain ladder grpo` |"
        " `posttrain plot RUN` |\n"
    )
    assert [(s.line, s.text) for s in steps_of(page, tmp_path)] == [
        (6, "posttrain ladder grpo   # why"),
        (3, "posttrain run --resume RUN"),
        (8, "posttrain plot RUN"),
    ]
    assert whole("make run") and not whole("posttrain rum") and not whole("posttrain compare A B ...")


def test_what_running_text_only_names_is_there() -> None:
    """`posttrain check` is a command of the program, `posttrain run grpo` a recipe."""
    commands = {p.stem for p in (ROOT / "posttrain/cli/commands").glob("*_command.py")}
    for said in (m for p in pages(ROOT) for m in mentions(p, ROOT) if not whole(m.text)):
        _, command, *rest = put_in(said.text, Path("nowhere")).split()
        assert command.startswith("-") or f"{command.replace('eval', 'evaluate')}_command" in commands, said
        if command == "run" and rest and re.fullmatch(r"\w+", rest[0]):
            assert recipe(rest[0]), said


def test_pages_are_drawn_by_a_seed() -> None:
    sizes = sizes_of(pages(ROOT), ROOT)
    draws = [drawn(sizes, seed, 0.3) for seed in range(60)]
    assert draws[0] == drawn(sizes, 0, 0.3) != draws[1] and all(d[0] == ROOT / "README.md" for d in draws)
    assert sizes.keys() == {p for d in draws for p in d}
    count = [sum(sizes[p] for p in d) / sum(sizes.values()) for d in draws]
    assert min(count) >= 0.3 and max(count) < 0.4


def test_everything_plays_every_page_as_printed() -> None:
    """`make everything`: all pages, as printed, and all pages of the site in the browser; CI draws of both."""
    suites = {s["name"]: s for s in tomllib.loads((ROOT / ".ci/suites.toml").read_text(encoding="utf-8"))["suite"]}
    assert suites["first hour"]["everything"] == {"POSTTRAIN_FIRST_HOUR": "whole"}
    assert suites["documentation"]["everything"] == {"POSTTRAIN_DOCS": "all"}
    assert "settings" not in suites["first hour"] and "settings" not in suites["documentation"]


def test_a_target_that_a_page_names_is_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    typed = [s for s in COMMANDS if s.text.startswith("make ")]
    words = {(str(s), w) for s in typed for w in shlex.split(s.text, comments=True)[1:] if "=" not in w}
    assert words and not [w for w in sorted(words) if w[1] not in targets]


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
    unused = {e.why for e in EXEMPT if not any(re.match(e.text, s.text) for s in STEPS)}
    assert unused <= {"needs a GPU"}, unused
    assert exempt("README.md", "make run") and not exempt("README.md", "posttrain run ladder")


def test_toy_sizes_stand_where_a_setting_has_another_value() -> None:
    small = smaller("posttrain run sft model=m sft.steps=500 --out runs/x  # why")
    assert small.startswith("posttrain run sft model=m sft.steps=4 --out runs/x env.heldout=8 ")
    assert small.endswith("sft.batch=8  # why") and small.count("sft.steps") == 1
    assert "sft.steps" not in smaller("posttrain run verifiable sft=none")
    assert "sft.steps" not in smaller("posttrain run sft model=m sft.epochs=2")
    assert smaller("posttrain run --resume runs/x rl.steps=200") == "posttrain run --resume runs/x rl.steps=14"
    assert smaller("posttrain show runs/x") == "posttrain show runs/x"
    assert "rl.eval_every=1 " in smaller("posttrain run grpo rl.eval_every=10 model=m")
    assert "rl.eval_every=0 " in smaller("posttrain run grpo model=m")
    assert smaller("posttrain eval m env=arithmetic") == "posttrain eval m env=arithmetic env.heldout=8 --max-tokens 8"
    assert smaller("posttrain ladder --on runs/x --step 6") == "posttrain ladder --on runs/x --step 2"
    assert smaller("python train.py A", "driver.py --toy") == "python driver.py --toy train.py A"


def test_what_a_server_is_and_what_needs_the_shell() -> None:
    assert SERVES.match("posttrain serve my-model --port 0") and not SERVES.match("posttrain serve --help")
    assert PLAIN.match("posttrain run sft 'a=b c'") and not PLAIN.match("posttrain ladder | head")


def test_the_index_has_every_example() -> None:
    examples = ROOT / "examples"
    listed = set(re.findall(r"\]\((\w+)/README\.md\)", (examples / "README.md").read_text(encoding="utf-8")))
    assert listed == {p.parent.name for p in examples.glob("*/README.md")}
