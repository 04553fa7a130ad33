"""What CI runs: lint and `make test`, then long suites while there is time. Every long test is in one suite."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from scripts import ci

ROOT = Path(__file__).parents[1]
SUITES = ci.table()


def has_long_tests(text: str) -> bool:
    """Whether a file has tests that are marked prove, read from its text."""
    named = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute) and n.attr == "prove"]
    return any(ast.unparse(x).split(".")[-1] == "mark" for x in named)


def test_every_long_test_is_in_exactly_one_suite() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if has_long_tests(path.read_text()):
            name = str(path.relative_to(ROOT))
            whole = [s["name"] for s in SUITES if name in ci.files(s.get("tests", []))]
            parts = [s["name"] for s in SUITES if any(f.startswith(f"{name}::") for f in ci.files(s.get("tests", [])))]
            assert len(whole) == 1 or (parts and not whole), (
                f"{name}: name it in one suite of .ci/suites.toml, not {whole}"
            )


def test_every_pattern_names_a_file_and_every_room_exists() -> None:
    for s in SUITES:
        assert ("tests" in s) != ("make" in s) and s["seconds"] > 0, s["name"]
        for pattern in [*s.get("tests", []), *s.get("reads", [])]:
            assert all(ci.files([w]) for w in ci.ways(pattern)), f"{s['name']}: {pattern} names no file"
        assert all((ROOT / "posttrain" / room).is_dir() for room in s.get("of", [])), s["name"]
    assert len({s["name"] for s in SUITES}) == len(SUITES)


def test_what_a_change_touches_comes_first_and_the_order_repeats() -> None:
    change = {"posttrain/sandbox/sandbox_pool.py"}
    names = [s["name"] for s in ci.ordered(SUITES, change, 7)]
    about = sum(ci.touched(s, change) for s in SUITES)
    assert 0 < about < len(SUITES) and all(ci.touched(s, change) for s in ci.ordered(SUITES, change, 7)[:about])
    assert names == [s["name"] for s in ci.ordered(list(reversed(SUITES)), change, 7)]
    assert names != [s["name"] for s in ci.ordered(SUITES, change, 8)] and sorted(names) == sorted(
        s["name"] for s in SUITES
    )


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one test of each end, which `play` runs with this Python."""
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    monkeypatch.setattr(ci, "REPORTS", tmp_path)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    monkeypatch.setenv("VENV", str(tmp_path / "venv"))
    long = "import pytest\n@pytest.mark.prove\n"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = prove\n")
    (tmp_path / "test_good.py").write_text(f"{long}def test_it(): pass\n")
    (tmp_path / "test_bad.py").write_text(f"{long}def test_it(): assert 0\n")
    (tmp_path / "test_short.py").write_text("def test_it(): pass\n")
    (tmp_path / "test_skip.py").write_text(f"{long}def test_it(): pytest.skip('no')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "more", "passed", "why"),
    [
        ("test_good.py", {}, 1, ""),
        ("test_bad.py", {}, 0, "1 failed"),
        ("test_short.py", {}, 0, "exit status 5"),
        ("test_skip.py", {}, 0, "no test ran"),
        ("test_skip.py", {"may_skip": True}, 0, ""),
    ],
)
def test_a_suite_is_a_success_only_where_a_test_of_it_passed(
    small: Path, file: str, more: dict[str, bool], passed: int, why: str
) -> None:
    made = {"name": file, "tests": [file], "seconds": 1, "alone": True, **more}
    assert ci.play(made, 1, False)[1:] == (passed, why)


def test_what_fails_is_red_and_what_did_not_run_is_named(
    small: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = ({"name": n, "tests": [f"test_{n}.py"], "seconds": 1, "alone": True} for n in ("good", "bad"))
    monkeypatch.setattr(ci, "PASSED", small / "passed.txt")
    monkeypatch.setattr(ci, "ALWAYS", (good,))
    monkeypatch.setattr(ci, "table", lambda: [bad | {"seconds": 99_999}])
    assert ci.run(False) == 0 and "1 tests passed" in (small / "passed.txt").read_text()
    assert "did not run: bad" in capfd.readouterr().out
    assert ci.run(True) == 1 and not (small / "passed.txt").exists()
    assert "CI FAILED: bad: 1 failed" in capfd.readouterr().out
