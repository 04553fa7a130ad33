"""What CI runs: every test is in one suite, each suite runs at least at every fourth landing, and the time is kept."""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.ci import ledger, page, play
from scripts.ci.plan import EVERY, Known, Plan, choose, shortage
from scripts.ci.reach import RECORD, Reach, digest
from scripts.ci.suites import TABLE as TABLE_FILE
from scripts.ci.suites import Inputs, Suite, Table, TableError, homeless, kinds
from tests.needed import CI, program

ROOT = Path(__file__).parents[1]
TABLE = Table.read(ROOT)

# --- the table --------------------------------------------------------------------------------------------------------


def test_every_file_of_tests_is_in_exactly_one_suite() -> None:
    """Also the one that was written a minute ago and is not under version control."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert homeless(TABLE, [(str(p.relative_to(ROOT)), p.read_text()) for p in files]) == []


def test_a_file_in_no_suite_or_in_two_is_named() -> None:
    new = homeless(
        TABLE,
        [("tests/rooms/test_nobody_named_me.py", ""), ("tests/prove/test_new.py", "pytestmark = pytest.mark.prove\n")],
    )
    assert [w.split(":")[0] for w in new] == ["tests/rooms/test_nobody_named_me.py", "tests/prove/test_new.py"]
    assert "its prove tests are in no suite" in new[1] and "its quick tests are in no suite" in new[0]
    twice = replace(TABLE, suites=(*TABLE.suites, Suite(name="again", tests=("tests/rooms/test_math.py",), seconds=1)))
    assert "are in math, again" in homeless(twice, [("tests/rooms/test_math.py", "")])[0]


def test_marks_are_read_from_the_text() -> None:
    assert kinds("pytestmark = [pytest.mark.prove, x]\n") == {"prove"}
    assert kinds("@pytest.mark.prove\ndef test_x(): ...\n") == {"quick", "prove"}
    assert kinds("def test_x(): ...\n") == {"quick"}


def found(path: str, cases: bool) -> set[str]:
    """The tests of a file, or, where suites name them, their cases (as pytest says them)."""
    if not cases:
        tree = ast.parse((ROOT / path).read_text())
        return {
            n.name
            for n in tree.body
            if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")
        }
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "prove or not prove", path]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    return {line.partition("::")[2] for line in listed.stdout.splitlines() if "::" in line}


def test_files_in_parts_lose_no_test() -> None:
    """Where suites name the tests of a file one by one, every test of it is in exactly one of them."""
    parts = [t.partition("::")[::2] for s in TABLE.suites for t in s.tests if "::" in t]
    for path in sorted({p for p, _ in parts}):
        named = {t for p, t in parts if p == path}
        tests = found(path, any("[" in t for t in named))
        for test in tests:
            holders = [s.name for s in TABLE.suites if s.has(path, test)]
            assert len(holders) == 1, (
                f"{path}::{test} is in {holders}; each test of this file is named in one suite of {TABLE_FILE}"
            )
        lost = named - tests - {t.partition("[")[0] for t in tests}
        assert not lost, f"{path} has no {', '.join(lost)}; {TABLE_FILE} names it"


def test_every_pattern_names_a_file() -> None:
    for s in TABLE.suites:
        found = s.arguments(TABLE.tests)
        assert s.make or found, f"suite {s.name!r} has no tests"
        for pattern in s.reads:
            one = replace(s, tests=(pattern,), make="", counted=True)
            assert any(one.has(str(p)) for p in TABLE.reach.files), (
                f"suite {s.name!r} reads {pattern}, and there is no such file"
            )


def test_the_page_shows_the_table() -> None:
    text = (ROOT / page.PAGE).read_text()
    assert page.with_table(text, TABLE) == text, "run: python3 -m scripts.ci table"


def test_a_suite_without_tests_is_refused() -> None:
    with pytest.raises(TableError, match="needs either"):
        Suite(name="x", seconds=1)
    with pytest.raises(TableError, match="above 0"):
        Suite(name="x", seconds=0, make="lint")
    with pytest.raises(TableError, match="leave `counted` out"):
        Suite(name="x", seconds=1, tests=("tests/x.py",), counted=False)


def test_a_target_that_is_no_pytest_says_by_its_exit_status_what_came_of_it() -> None:
    compares = Suite(name="x", seconds=1, make="parity", counted=False)
    assert not play.Result(compares).trouble and "exit status 2" in play.Result(compares, code=2).trouble
    assert "no test" in play.Result(replace(compares, counted=True)).trouble


# --- the promises: every fourth landing, and the time -----------------------------------------------------------------


def test_the_table_leaves_room_for_its_promises() -> None:
    over = shortage(TABLE.suites, TABLE.budget)
    assert over <= 0, (
        f"the table is {over:.0f} s too long for {TABLE.minutes:g} minutes: cut the longest suite in parts, or make"
        " tests faster"
    )


def test_what_make_test_runs_keeps_its_own_promise() -> None:
    quick = sum(s.seconds for s in TABLE.suites if s.tests and s.marked == "quick")
    assert quick <= 8 * 60, (
        f"`make test` takes {quick:.0f} s by the table, and promises 8 minutes: mark what is long as prove"
    )


def years(suites: list[Suite], budget: float, rng: random.Random, landings: int = 60) -> list[Plan]:
    """Landings of trees in which anything may have changed; the first follows one that ran everything."""
    contents = {s.name: [0, 0] for s in suites}
    known = {s.name: Known(0, Inputs("0", "0")) for s in suites if not s.always}
    plans = []
    for landing in range(1, landings + 1):
        share = rng.choice([0.0, 0.1, 0.5, 1.0])
        for mine in contents.values():
            mine[0] += rng.random() < share
            mine[1] += rng.random() < 0.7
        inputs = {name: Inputs(str(a), f"{a}.{b}") for name, (a, b) in contents.items()}
        plan = choose(suites, known, inputs, landing, rng.randrange(2**32), budget)
        known |= {c.suite.name: Known(landing, inputs[c.suite.name]) for c in plan.runs if not c.suite.always}
        plans.append(plan)
    return plans


@pytest.mark.parametrize("seed", range(20))
def test_each_suite_runs_at_least_at_every_fourth_landing_and_in_time(seed: int) -> None:
    """On this table, over random histories of changes."""
    plans = years(list(TABLE.suites), TABLE.budget, random.Random(seed))
    for i in range(len(plans) - EVERY + 1):
        ran = set().union(*(p.names for p in plans[i : i + EVERY]))
        assert ran == {s.name for s in TABLE.suites}, f"landings {i + 1} to {i + EVERY}"
    assert max(p.seconds for p in plans) <= TABLE.budget
    assert all({s.name for s in TABLE.suites if s.always} <= p.names for p in plans)
    assert all(any(c.suite.one == "ladder" for c in p.runs) for p in plans)


@pytest.mark.parametrize("seed", range(40))
def test_any_table_with_room_keeps_both_promises_and_one_without_keeps_the_first(seed: int) -> None:
    rng = random.Random(seed)
    suites = [
        Suite(name=f"s{i}", tests=(f"t{i}",), seconds=rng.choice([5, 30, 60, 300]), always=rng.random() < 0.1)
        for i in range(rng.randint(2, 40))
    ]
    enough = shortage(suites, 0) + 1
    for budget in (enough, enough / 3):
        plans = years(suites, budget, rng)
        for i in range(len(plans) - EVERY + 1):
            assert set().union(*(p.names for p in plans[i : i + EVERY])) == {s.name for s in suites}
        assert budget < enough or max(p.seconds for p in plans) <= budget


def test_a_plan_is_a_function_of_the_tree_and_seeds_draw_others() -> None:
    suites = [Suite(name=f"s{i}", tests=(f"t{i}",), seconds=60) for i in range(20)]
    known = {s.name: Known(4, Inputs("0", "0")) for s in suites}
    inputs = {s.name: Inputs("0", "0") for s in suites}
    plans = [choose(suites, known, inputs, 5, seed, 420) for seed in range(50)]
    assert choose(suites, known, inputs, 5, 3, 420) == plans[3]
    assert len({frozenset(p.names) for p in plans}) > 40
    assert set().union(*(p.names for p in plans)) == {s.name for s in suites} and all(p.seconds == 420 for p in plans)


def test_what_changed_goes_before_what_only_common_files_changed_for_and_that_before_the_rest() -> None:
    suites = [Suite(name=f"s{i}", tests=(f"t{i}",), seconds=60) for i in range(20)]
    known = {s.name: Known(4, Inputs("0", "0")) for s in suites} | {"s9": Known(1, Inputs("0", "0"))}
    inputs = {s.name: Inputs("0", "0") for s in suites} | {
        "s3": Inputs("1", "1"),
        "s4": Inputs("1", "1"),
        "s5": Inputs("0", "1"),
    }
    del known["s7"]
    for seed in range(20):
        plan = choose(suites, known, inputs, 5, seed, 60 * 9)
        why = {c.suite.name: c.why for c in plan.runs}
        assert why["s7"] == "due: new" and why["s9"] == "due: last ran 4 landings ago"
        assert why["s3"] in ("changed", "its turn: ran at the last landing, changed since") and why["s4"] == why["s3"]
        assert why["s5"].startswith(("common files changed", "its turn")) and len(why) == 9
    tight = choose(suites, known, inputs, 5, 0, 60)
    assert tight.seconds == 60 * 5, "what is due and the quarter in turn run whatever the time"
    assert {c.suite.name: c.why for c in tight.left}.get("s5") == "ran at the last landing, common files changed since"


# --- what a suite depends on ------------------------------------------------------------------------------------------


def users(path: str) -> set[str]:
    return {s.name for s in TABLE.suites if not s.always and Path(path) in TABLE.files(s)}


def near(path: str) -> set[str]:
    return {name for name, files in TABLE.near.items() if Path(path) in files}


def test_a_change_touches_the_suites_whose_tests_import_it() -> None:
    sampled = {s.name for s in TABLE.suites if not s.always}
    assert len(users("posttrain/core/types.py")) > 0.7 * len(sampled)
    assert users("pyproject.toml") == sampled
    assert not {"learner", "engine", "effects", "sandbox, long"} & users("posttrain/verifier/math/grade.py")
    assert {"sandbox", "code", "runs"} <= users("posttrain/sandbox/cell/zygote.py"), (
        "run by its path, imported by nobody"
    )
    assert {"engine", "conformance"} <= users("posttrain/engine/native_code/attention.h"), "compiled, not imported"


def test_what_is_near_is_what_the_tests_name_themselves() -> None:
    assert "math" in near("posttrain/verifier/math/grade.py") and not {"serve", "engine", "faults"} & near(
        "posttrain/verifier/math/grade.py"
    )
    assert {"serve", "serve as a user", "conformance"} <= near("posttrain/serve/app.py") and "math" not in near(
        "posttrain/serve/app.py"
    )
    assert near("constraints-vllm.txt") == {"vllm", "vllm, servers"}
    assert {"vllm", "conformance"} <= near("posttrain/engine/vllm/server.py") and "vllm" in near(
        "posttrain/core/sampling.py"
    ), "the contract"
    assert "vllm" not in near("posttrain/engine/embedded/engine.py")
    assert {"sandbox", "sandbox, long", "sandbox as a user"} <= near("posttrain/sandbox/cell/zygote.py")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A repository with two suites, a record of landing 0, and one commit."""
    files = {
        "pyproject.toml": "",
        "README.md": "",
        "posttrain/__init__.py": "def run():\n    from posttrain.far import x\n",
        "posttrain/far.py": "x = 1\n",
        "posttrain/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from posttrain.far import x\n",
        "posttrain/lazy.py": "def f():\n    from . import b\n",
        "posttrain/b.py": "",
        "posttrain/named.py": "",
        "tests/helper.py": "NAME, FOLDER = 'posttrain.named:Thing', 'rows'\n",
        "tests/rows/one.txt": "",
        "tests/test_a.py": "from posttrain.a import TYPE_CHECKING\ndef test_a():\n    pass\n",
        "tests/test_b.py": "import helper\nfrom posttrain import lazy\ndef test_b():\n    pass\n",
        ".ci/suites.toml": (
            "minutes = 1\nkept = 0\n"
            + "".join(f'[[suite]]\nname = "{x}"\ntests = ["tests/test_{x}.py"]\nseconds = 20 # why\n' for x in "ab")
        ),
        ".ci/ledger.json": '[{"landing": 0, "seed": 0, "ran": {}}]',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *words: str) -> str:
    own = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *own, *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x")
    return git(root, "rev-parse", "HEAD")


def test_imports_are_followed_and_packages_on_the_way_count_for_what_they_do_at_once(tiny: Path) -> None:
    r = Reach(tiny)
    seen = {t: {str(p) for p in r.closure([Path(f"tests/test_{t}.py")])} for t in "ab"}
    assert seen["a"] == {"pyproject.toml", "tests/test_a.py", "posttrain/__init__.py", "posttrain/a.py"}
    assert seen["b"] >= {
        "posttrain/lazy.py",
        "posttrain/b.py",
        "posttrain/named.py",
        "tests/helper.py",
        "tests/rows/one.txt",
    }
    assert digest(tiny, [Path("README.md"), Path("pyproject.toml")]) == digest(
        tiny, [Path("pyproject.toml"), Path("README.md")]
    )


# --- the record -------------------------------------------------------------------------------------------------------


def land(root: Path, since: str) -> Plan:
    """`make landing` and the last commit."""
    landings, plan = ledger.next_landing(Table.read(root), since)
    (root / ledger.LEDGER).write_text(ledger.written(landings))
    commit(root)
    return plan


def why(plan: Plan) -> dict[str, str]:
    return {c.suite.name: c.why for c in plan.runs}


def test_ci_finds_the_plan_that_was_written_and_a_later_change_voids_it(tiny: Path) -> None:
    first = land(tiny, git(tiny, "rev-parse", "HEAD"))
    assert why(first) == {"a": "due: new", "b": "due: new"} and first.landing == 1
    assert ledger.current(Table.read(tiny)) == (first, "")
    landed = git(tiny, "rev-parse", "HEAD")

    (tiny / "posttrain/b.py").write_text("y = 2\n")
    commit(tiny)
    forgotten, trouble = ledger.current(Table.read(tiny))
    assert "is not of this tree" in trouble and "make landing" in trouble
    assert forgotten.landing == 2 and set(why(forgotten).values()) == {"due: new"}, "nothing is known but landing 0"

    second = land(tiny, landed)
    assert second.landing == 2 and why(second)["b"].startswith(("changed", "its turn"))
    assert ledger.current(Table.read(tiny)) == (second, "")
    (tiny / "posttrain/b.py").write_text("y = 3\n")
    commit(tiny)
    again = land(tiny, landed)
    assert again.landing == 2 and again.seed != second.seed, "a draft that did not land is replaced"
    assert [x.landing for x in ledger.parse((tiny / ledger.LEDGER).read_text())] == [0, 1, 2]

    (tiny / "README.md").write_text("words\n")
    commit(tiny)
    assert ledger.current(Table.read(tiny)) == (again, ""), "prose voids no plan"


def test_a_record_that_claims_more_than_was_planned_is_void(tiny: Path) -> None:
    land(tiny, git(tiny, "rev-parse", "HEAD"))
    text = (tiny / ledger.LEDGER).read_text()
    (tiny / ledger.LEDGER).write_text(re.sub(r'"a": "[^"]*"(, )?', "", text))
    plan, trouble = ledger.current(Table.read(tiny))
    assert trouble and why(plan)["a"] == "due: new"
    for broken in (
        "",
        "{",
        "[1]",
        "[]",
        '[{"landing": 2, "seed": 0, "ran": {}}, {"landing": 1, "seed": 0, "ran": {}}]',
    ):
        (tiny / ledger.LEDGER).write_text(broken)
        plan, trouble = ledger.current(Table.read(tiny))
        assert trouble and plan.names == {"a", "b"}, broken


def test_forgotten_landings_make_everything_due(tiny: Path) -> None:
    """Every commit since the record may have been a landing; without a history, all of them."""
    for _ in range(2):
        land(tiny, git(tiny, "rev-parse", "HEAD"))
    for i in range(3):
        (tiny / "posttrain/far.py").write_text(f"x = {i}\n")
        (tiny / "posttrain/a.py").write_text(f"x = {i}\n")
        commit(tiny)
    plan, trouble = ledger.current(Table.read(tiny))
    assert trouble and set(why(plan).values()) == {"due: last ran 4 landings ago"}
    subprocess.run(["rm", "-rf", str(tiny / ".git")], check=True)
    plan, trouble = ledger.current(Table.read(tiny))
    assert trouble and all(w.startswith("due") for w in why(plan).values())


def test_a_copy_without_git_has_the_same_plan(tiny: Path) -> None:
    plan = land(tiny, git(tiny, "rev-parse", "HEAD"))
    subprocess.run(["rm", "-rf", str(tiny / ".git")], check=True)
    (tiny / ".venv").mkdir()
    (tiny / ".venv/x.py").write_text("")
    assert ledger.current(Table.read(tiny)) == (plan, "")


def test_what_landed_last_is_the_main_branch_of_the_origin_or_what_the_branch_began_with(tiny: Path) -> None:
    begun = git(tiny, "rev-parse", "HEAD")
    (tiny / "new").write_text("")
    commit(tiny)
    assert ledger.landed(tiny) == begun
    copy = tiny.parent / "copy"
    git(tiny.parent, "clone", "--quiet", str(tiny), str(copy))
    assert ledger.landed(copy) == git(tiny, "rev-parse", "HEAD")


# --- running it -------------------------------------------------------------------------------------------------------


def play_tiny(root: Path, monkeypatch: pytest.MonkeyPatch, **tests: str) -> tuple[int, Path]:
    """Two suites with these tests, run for real."""
    for name, text in tests.items():
        (root / f"tests/test_{name}.py").write_text(text)
    monkeypatch.setenv("VENV", sys.prefix)
    monkeypatch.setenv("JOBS", "0")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    table = Table.read(root)
    plan, _ = ledger.current(table)
    return play.run(plan, table), root / play.PASSED


GOOD = "import time\ndef test_good():\n    time.sleep(.2)\n"


def test_a_run_tells_seconds_and_passes(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, passed = play_tiny(
        tiny, monkeypatch, a=GOOD, b="import os\ndef test_b():\n    assert os.environ['POSTTRAIN_SEED'].isdigit()\n"
    )
    said = capfd.readouterr().out
    assert code == 0 and passed.read_text().startswith("2 suites, 2 tests passed"), said
    assert said.strip().splitlines()[-1].startswith("CI passed: 2 suites")
    seconds = play.keep(Table.read(tiny), {"a": 7.4})
    assert "seconds = 7 # why" in seconds and "seconds = 20 # why" in seconds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def test_b():\n    assert 0\n", "failed: tests/test_b.py::test_b (b)"),
        ("import pytest\n@pytest.mark.skip\ndef test_b():\n    pass\n", "b: no test of it ran"),
        ("", "b: no test of it ran"),
        ("import nothing_of_this_name\n", "CI FAILED"),
        ("import os\ndef test_b():\n    os._exit(0)\n", "CI FAILED"),
    ],
)
def test_what_did_not_run_or_failed_is_red(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    code, passed = play_tiny(tiny, monkeypatch, a=GOOD, b=text)
    said = capfd.readouterr().out
    assert code == 1 and not passed.exists() and says in said, said
    assert "CI FAILED" in said.strip().splitlines()[-1]


MISSING = """
from tests.needed import program
def test_b():
    program(("no-such-browser", "nor-this-one"), "no-such-package")
"""


def test_a_missing_program_is_a_skip_and_under_ci_a_failure(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(CI, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-package is not installed: apt-get install"):
        program(("no-such-browser",), "no-such-package")
    assert Path(program(("no-such-browser", "sh"), "dash")).name == "sh"
    shutil.copy(ROOT / "tests/needed.py", tiny / "tests/needed.py")
    code, _ = play_tiny(tiny, monkeypatch, a=GOOD, b=MISSING)
    said = capfd.readouterr().out
    assert code == 1 and "failed: tests/test_b.py::test_b (b)" in said and "CI does not skip what needs it" in said, (
        said
    )


def test_what_hangs_or_cannot_start_is_ended_and_red(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert play.process(["sh", "-c", "sleep 60 & sleep 60"], tmp_path, {}, 0.2) == 124 and time.monotonic() - begun < 30
    assert play.process([str(tmp_path / "no-python")], tmp_path, {}, 1) == 127
    assert "ended after" in capfd.readouterr().out


def test_the_entry_prints_the_plan_and_runs_it_without_anything_installed_for_it(tiny: Path) -> None:
    shutil.copytree(ROOT / "scripts/ci", tiny / "scripts/ci", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".ci/run", tiny / ".ci/run")
    (tiny / "tests/test_a.py").write_text(GOOD)
    commit(tiny)
    land(tiny, git(tiny, "rev-parse", "HEAD~1"))
    own = {"PATH": os.environ["PATH"], "VENV": sys.prefix, "JOBS": "0", "CI": "true"}
    isolated = f"{sys.base_prefix}/bin/python3"
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tiny,
        env=own | {"PYTHON": isolated},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert said.startswith("landing 1\n") and "due: new" in said and "; seed " in said and "note:" not in said
    assert said.strip().splitlines()[-1].startswith("CI passed: 2 suites, 2 tests passed")
    (tiny / "tests/test_a.py").write_text("def test_good():\n    assert 0\n")
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tiny,
        env=own | {"PYTHON": isolated},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "call `make landing`" in done.stdout and "CI FAILED" in done.stdout


def test_the_entry_is_red_when_its_program_ends_early_without_a_word(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    entry = tmp_path / ".ci/run"
    entry.write_text((ROOT / ".ci/run").read_text())
    (tmp_path / "runs/ci").mkdir(parents=True)
    (tmp_path / play.PASSED).write_text("3 suites, 30 tests passed\n")
    done = subprocess.run(
        ["bash", str(entry)], env={"PYTHON": "true", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "no test ran" in done.stdout


def test_the_record_of_landings_counts_for_no_suite() -> None:
    """Else writing a plan into it would change the plan."""
    assert RECORD not in TABLE.reach.files and (ROOT / RECORD).is_file()
