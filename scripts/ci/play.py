"""Runs the suites of a plan, measures each, and says at the end what passed. A suite of which no test ran is a
failure."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.ci.plan import Plan
from scripts.ci.suites import PROVE, QUICK, Suite, Table, TableError

REPORTS = Path("runs/ci")
PASSED = REPORTS / "passed.txt"
"""Written at the very end, and only where everything passed: how many suites and tests."""
MEASURED = REPORTS / "seconds.json"
LONGEST = 6
"""A part that takes so many times its seconds in the table (and ten minutes at least) hangs, and is ended."""
SLOW = 2.0
"""From this multiple of the table's seconds on, a suite's line says so."""


@dataclass
class Result:
    """What came of one suite."""

    suite: Suite
    seconds: float = 0.0
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list[str])
    code: int = 0

    @property
    def trouble(self) -> str:
        """Why this suite is no success; '' where it is one."""
        if self.failed:
            return f"{len(self.failed)} failed"
        if self.code:
            return f"ended with exit status {self.code}"
        if not self.suite.counted or self.passed or (self.suite.may_skip and self.skipped):
            return ""
        return "no test of it ran"


@dataclass(frozen=True)
class Part:
    """One process: suites whose tests run side by side, or one that stands alone."""

    name: str
    suites: tuple[Suite, ...]


def parts(plan: Plan) -> list[Part]:
    """Lint (which makes the environment), the quick suites, those that stand alone, the long ones, other
    environments."""
    chosen = [c.suite for c in plan.runs]
    shared = {kind: tuple(s for s in chosen if s.tests and not s.alone and s.marked == kind) for kind in (QUICK, PROVE)}
    found = [
        *(Part(s.name, (s,)) for s in chosen if s.make == "lint"),
        Part("quick suites", shared[QUICK]),
        *(Part(s.name, (s,)) for s in chosen if s.tests and s.alone),
        Part("long suites", shared[PROVE]),
        *(Part(s.name, (s,)) for s in chosen if s.make and s.make != "lint"),
    ]
    return [p for p in found if p.suites]


def settings(suites: Sequence[Suite], everything: bool) -> dict[str, str]:
    """Environment variables of the suites of one process; two may not want different values."""
    found: dict[str, str] = {}
    for s in suites:
        for name, value in (s.settings | (s.everything if everything else {})).items():
            if found.setdefault(name, value) != value:
                raise TableError(
                    f"{s.name}: {name}={value}, but a suite beside it wants {found[name]}; run one of them alone"
                )
    return found


def jobs() -> str:
    """Processes that share a part's tests."""
    return os.environ.get("JOBS", "2")


def command(part: Part, table: Table, report: Path) -> list[str]:
    first = part.suites[0]
    if first.make:
        return ["make", "--no-print-directory", first.make]
    spread = (
        []
        if first.alone
        else ["--numprocesses", jobs(), "--dist", "loadfile" if first.marked == QUICK else "worksteal"]
    )
    chosen = [a for s in part.suites for a in s.arguments(table.tests)]
    mark = "prove" if first.marked == PROVE else "not prove"
    python = f"{os.environ.get('VENV', '.venv')}/bin/python"
    return [
        python,
        "-m",
        "pytest",
        "-q",
        *spread,
        *(["-s"] if first.alone else []),
        "-m",
        mark,
        f"--junitxml={report}",
        *chosen,
    ]


def play(part: Part, table: Table, seed: int, everything: bool) -> list[Result]:
    """One part from start to end; its output goes where ours goes. Its wall time is shared out by the seconds of the
    suites' tests."""
    report = (table.root / REPORTS / f"{part.name.replace(' ', '-').replace(',', '')}.xml").absolute()
    own = {
        "OMP_NUM_THREADS": "1",
        "POSTTRAIN_SEED": str(seed),
        "POSTTRAIN_SWEEP_SEED": str(seed % 2**31),
        "POSTTRAIN_CI": "1",
    } | settings(part.suites, everything)
    if part.suites[0].make:
        own = {"PYTEST_ADDOPTS": shlex.quote(f"--junitxml={report}")} | own
    print(f"== {part.name}: {', '.join(s.name for s in part.suites)}", flush=True)
    begun = time.monotonic()
    status = process(
        command(part, table, report), table.root, own, max(LONGEST * sum(s.seconds for s in part.suites), 600)
    )
    wall = time.monotonic() - begun
    print(f"== {part.name}: {wall:.0f} s", flush=True)
    results = [Result(s) for s in part.suites]
    lost = count(report, results) if report.exists() else []
    shared = not any(s.alone or s.make for s in part.suites)
    total = sum(r.seconds for r in results)
    for r in results:
        r.seconds = wall * (r.seconds / total if total else 1 / len(results)) if shared else wall
        r.failed += lost
        r.code = 0 if status == 1 and any(x.failed for x in results) else status
    return results


def process(words: Sequence[str], folder: Path, settings: Mapping[str, str], limit: float) -> int:
    """The exit status; what cannot be started or takes too long is ended with all it started, and is no success."""
    try:
        child = subprocess.Popen(
            words, cwd=folder, env=os.environ | settings, stdin=subprocess.DEVNULL, process_group=0
        )
    except OSError as error:
        print(f"cannot start {words[0]}: {error}", flush=True)
        return 127
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"ended after {limit:.0f} s, {LONGEST} times its seconds in the table", flush=True)
        return 124
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def count(report: Path, results: Sequence[Result]) -> list[str]:
    """Adds the tests of a report to their suites; what failed outside of any of them is returned."""
    lost: list[str] = []
    for case in xml.parse(report).iter("testcase"):
        name, where = case.get("name", ""), case.get("classname", "")
        path = next((f"{p}.py" for p in _paths(where) if any(r.suite.has(f"{p}.py", name) for r in results)), "")
        owner = next(
            (r for r in results if path and r.suite.has(path, name)), results[0] if results[0].suite.make else None
        )
        bad = case.find("failure") is not None or case.find("error") is not None
        if owner is None:
            lost += [f"{where}::{name}"] if bad else []
            continue
        owner.seconds += float(case.get("time", 0))
        if bad:
            owner.failed.append(f"{path or where}::{name}")
        elif case.find("skipped") is not None:
            owner.skipped += 1
        else:
            owner.passed += 1
    return lost


def _paths(classname: str) -> list[str]:
    """`tests.rooms.test_x.TestY`, from the longest name on, as paths."""
    names = classname.split(".")
    return ["/".join(names[:n]) for n in range(len(names), 0, -1)]


def run(plan: Plan, table: Table, everything: bool = False) -> int:
    """Every part, whatever became of the others; the exit status."""
    shutil.rmtree(table.root / REPORTS, ignore_errors=True)
    (table.root / REPORTS).mkdir(parents=True)
    begun = time.monotonic()
    results = [r for part in parts(plan) for r in play(part, table, plan.seed, everything)]
    print(measured(results))
    kept = [
        r
        for r in results
        if not r.trouble and r.passed + (r.suite.make != "") and not (everything and r.suite.everything)
    ]
    (table.root / MEASURED).write_text(json.dumps({r.suite.name: round(r.seconds, 1) for r in kept}))
    for r in results:
        for name in r.failed:
            print(f"failed: {name} ({r.suite.name})")
    bad = [f"{r.suite.name}: {r.trouble}" for r in results if r.trouble]
    tests = sum(r.passed for r in results)
    took = f"{time.monotonic() - begun:.0f} s"
    if bad or not tests:
        print(f"CI FAILED after {took}: {'; '.join(bad) or 'no test ran'}. Seed {plan.seed}.", flush=True)
        return 1
    said = f"{len(results)} suites, {tests} tests passed, {sum(r.skipped for r in results)} skipped, {took}"
    (table.root / PASSED).write_text(said + "\n")
    print(f"CI passed: {said}", flush=True)
    return 0


def measured(results: Sequence[Result]) -> str:
    """The seconds of each suite beside those of the table."""
    width = max(len(r.suite.name) for r in results)
    lines = ["", f"  {'suite':<{width}}  seconds  table  passed  skipped"]
    for r in results:
        slow = (
            f"  {r.seconds / r.suite.seconds:.1f} times the table's seconds"
            if r.seconds > SLOW * r.suite.seconds
            else ""
        )
        note = r.trouble or (slow if r.passed or not r.skipped else "  all skipped")
        lines.append(
            f"  {r.suite.name:<{width}}  {r.seconds:7.0f}  {r.suite.seconds:5.0f}  {r.passed:6}  {r.skipped:7}  {note}"
        )
    return "\n".join([*lines, ""])


def keep(table: Table, seconds: Mapping[str, float]) -> str:
    """The table's text with measured seconds; its comments stay."""
    lines, name = [], ""
    for line in (table.root / ".ci/suites.toml").read_text().splitlines():
        if line.startswith("name = "):
            name = line.split('"')[1]
        if line.startswith("seconds = ") and name in seconds:
            rest = line.partition("#")[2]
            line = f"seconds = {max(1, round(seconds[name]))}" + (f" #{rest}" if rest else "")
        lines.append(line)
    return "\n".join(lines) + "\n"


def stop(message: str) -> int:
    print(f"CI FAILED: {message}", file=sys.stderr, flush=True)
    return 1
