"""Runs what must pass before a change goes in: `python3 -m scripts.ci`, with nothing but Python's own library.

First `make lint` and `make test`. Then the long suites of `.ci/suites.toml` until 30 minutes from the start are used:
those whose folders or tests the change touches, then the others in an order drawn from the commit's digest, so that the
same tree runs the same suites. What did not run is named. `python3 -m scripts.ci everything` runs all of them.

The change is what was committed within the last day before HEAD; a fresh clone knows no more.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as xml
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "runs/ci"
PASSED = REPORTS / "passed.txt"
MINUTES = 30.0
HANGS = 6
"""A suite that takes so many times its seconds (at least twenty minutes) is ended; in `everything` six times later."""
LINT = {"name": "lint", "make": "lint", "seconds": 170, "counted": False}
ALWAYS = (LINT, {"name": "make test", "make": "test", "seconds": 400})
Suite = dict[str, Any]


def table() -> list[Suite]:
    return tomllib.loads((ROOT / ".ci/suites.toml").read_text())["suite"]


def ways(pattern: str) -> list[str]:
    """`a{b,c}` is `ab` and `ac`; at most one pair."""
    part = re.fullmatch(r"([^{]*)\{([^}]*)\}(.*)", pattern)
    return [f"{part[1]}{one}{part[3]}" for one in part[2].split(",")] if part else [pattern]


def files(patterns: list[str]) -> list[str]:
    """The files that patterns name; `file.py::test` is one test of a file."""
    found = list[str]()
    for pattern in patterns:
        path, _, test = pattern.partition("::")
        named = [str(p.relative_to(ROOT)) for way in ways(path) for p in sorted(ROOT.glob(way))]
        found += [f"{p}::{test}" if test else p for p in named]
    return found


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def changed() -> set[str]:
    """Files of the change."""
    day = int(git("log", "-1", "--format=%ct") or 0) - 86_400
    base = (
        git("rev-list", "-1", f"--before={day}", "HEAD") or git("rev-list", "--max-parents=0", "HEAD").split("\n")[-1]
    )
    return set(git("diff", "--name-only", base, "HEAD").splitlines())


def touched(s: Suite, change: set[str]) -> bool:
    """Whether a change touches a suite's tests, or a folder that it is about (`of`)."""
    about = [f"posttrain/{room}/*" for room in s.get("of", [])] + [w for p in s.get("reads", []) for w in ways(p)]
    own = {f.partition("::")[0] for f in files(s.get("tests", []))}
    return bool(own & change) or any(fnmatchcase(path, pattern) for path in change for pattern in about)


def ordered(suites: list[Suite], change: set[str], seed: int) -> list[Suite]:
    """Those that the change touches first; each part in an order drawn from the seed."""
    drawn = {s["name"]: hashlib.sha256(f"{seed} {s['name']}".encode()).hexdigest() for s in suites}
    return sorted(suites, key=lambda s: (not touched(s, change), drawn[s["name"]]))


def command(s: Suite, report: Path) -> list[str]:
    if "make" in s:
        return ["make", "--no-print-directory", s["make"]]
    python, jobs = f"{os.environ.get('VENV', '.venv')}/bin/python", os.environ.get("JOBS", "2")
    beside = ["-s"] if s.get("alone") else ["--numprocesses", jobs, "--dist", "worksteal"]
    return [python, "-m", "pytest", "-q", *beside, "-m", "prove", f"--junitxml={report}", *files(s["tests"])]


def play(s: Suite, seed: int, everything: bool) -> tuple[float, int, str]:
    """(seconds, tests that passed, why it is no success or '') of one suite."""
    report = REPORTS / f"{re.sub(r'[^a-z0-9]+', '-', s['name'].lower())}.xml"
    own = {"OMP_NUM_THREADS": "1", "POSTTRAIN_CI": "1", "POSTTRAIN_SEED": str(seed)}
    own["POSTTRAIN_SWEEP_SEED"] = str(seed % 2**31)
    own |= s.get("settings", {}) | (s.get("everything", {}) if everything else {})
    if "make" in s:
        own["PYTEST_ADDOPTS"] = shlex.quote(f"--junitxml={report}")
    print(f"== {s['name']}", flush=True)
    begun, limit = time.monotonic(), max(HANGS * s["seconds"], 1200) * (6 if everything else 1)
    child = subprocess.Popen(
        command(s, report), cwd=ROOT, env=os.environ | own, stdin=subprocess.DEVNULL, process_group=0
    )
    try:
        status = child.wait(limit)
    except subprocess.TimeoutExpired:
        status = 124
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    cases = list(xml.parse(report).iter("testcase")) if report.exists() else []
    bad = [f"{c.get('classname')}::{c.get('name')}" for c in cases if {"failure", "error"} & {x.tag for x in c}]
    skipped = sum(c.find("skipped") is not None for c in cases)
    passed = len(cases) - len(bad) - skipped
    for name in bad:
        print(f"failed: {name} ({s['name']})", flush=True)
    none = s.get("counted", True) and not passed and not (s.get("may_skip") and skipped)
    why = f"{len(bad)} failed" if bad else f"exit status {status}" if status else "no test ran" if none else ""
    return time.monotonic() - begun, passed, why


def run(everything: bool) -> int:
    """Runs the suites; the exit status."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    PASSED.unlink(missing_ok=True)
    seed = int(hashlib.sha256(git("rev-parse", "HEAD^{tree}").encode()).hexdigest()[:8], 16)
    suites = [*ALWAYS, *ordered(table(), changed(), seed)]
    begun, left, bad, tests, rows = time.monotonic(), list[str](), list[str](), 0, list[str]()
    for i, s in enumerate(suites):
        used = (time.monotonic() - begun) / 60
        if not everything and i >= len(ALWAYS) and used + s["seconds"] / 60 > MINUTES:
            left.append(s["name"])
            continue
        took, passed, why = play(s, seed, everything)
        tests += passed
        bad += [f"{s['name']}: {why}"] * bool(why)
        rows.append(f"  {s['name']:<28} {took:6.0f} s (table {s['seconds']}) {passed:6} passed  {why}")
    print("\n".join(rows))
    print(f"did not run: {', '.join(left)}" if left else "all suites ran")
    if bad or not tests:
        print(f"CI FAILED: {'; '.join(bad) or 'no test ran'}. Seed {seed}.", flush=True)
        return 1
    PASSED.write_text(f"{len(rows)} suites, {tests} tests passed, {time.monotonic() - begun:.0f} s\n")
    print(f"CI passed: {PASSED.read_text().strip()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:] == ["everything"]))
