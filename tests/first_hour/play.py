"""Plays the pages in a fresh environment, each in a folder of its own, and tells what did not go as the page says."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.recipe.recipes import RECIPES
from tests.first_hour import fresh
from tests.first_hour.pages import Step, steps
from tests.first_hour.words import exempt, pages, put_in, smaller, toy

HERE = Path(__file__).parent
TRACE = "Traceback (most recent call last)"
ENDS_WITH = (
    (r"posttrain check ", (0, 1)),  # 1: a probe failed, which the page shows
)
"""Exit codes other than 0 that a page documents."""
WRITES = re.compile(r"(?:^posttrain export \S+|--out) ([\w./-]+)")
"""A folder that a command writes, where there is one already (given, or the same run in another form), makes room. A
model that is given is given again after it was exported to."""
LISTENS = re.compile(r"http://127\.0\.0\.1:\d+")


@dataclass(frozen=True)
class Played:
    """One step: what was typed (with what stands for what), the exit code, seconds, and what it printed. `wrong` says
    what did not go as the page says; `skipped` why it was not played."""

    step: Step
    typed: str = ""
    code: int = 0
    seconds: float = 0.0
    output: str = ""
    wrong: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Hour:
    """The fresh environment, the folder of things that are given, the address of a served model, and the sizes."""

    root: Path
    folder: Path
    venv: Path
    whole: bool
    limit: float
    served: str = ""
    environ: dict[str, str] = field(default_factory=dict)


def flushed(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def prepare(root: Path, folder: Path, whole: bool, say: Callable[[str], None] = flushed) -> Hour:
    """Make the environment and what the pages take for granted."""
    made = fresh.wheel(root, folder / "wheel")
    say(f"{made.name}: {made.stat().st_size / 1024:.0f} KiB")
    venv = fresh.environment(made, folder / "venv", root / "constraints.txt", say)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "LANG", "LC_", "SSL_", "TMP"))}
    environ = {
        **kept,
        "HOME": str(home),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "80",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MY_KEY": "none",
        "MY_TOKEN": "a token of eighteen characters",
    }
    given = folder / "given"
    shutil.rmtree(given, ignore_errors=True)
    shutil.rmtree(folder / "pages", ignore_errors=True)
    given.mkdir()
    begun = time.monotonic()
    code = [str(venv / "bin/python"), str(HERE / "given.py")]
    subprocess.run(code, cwd=given, env=environ, check=True, stdout=subprocess.DEVNULL)
    say(f"my-model, mine.jsonl, mine.py, runs/mine: {time.monotonic() - begun:.0f} s")
    return Hour(root, folder, venv, whole, 1200.0 if whole else 300.0, environ=environ)


class Serving:
    """`posttrain serve` in the background, until it says where it listens; ended with Ctrl-C."""

    def __init__(self, command: str, folder: Path, environ: dict[str, str], before: str = "") -> None:
        self.process = subprocess.Popen(
            ["bash", "-c", f"{before}exec {command}"],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.said, self.url = "", ""

    def listens(self, seconds: float) -> bool:
        """Wait for the address."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.process.stdout], [], [], 0.5)[0]:
                read = os.read(self.process.stdout.fileno(), 65536).decode(errors="replace")
                self.said += read
                if found := LISTENS.search(self.said):
                    self.url = found[0]
                    return True
                if not read:
                    return False
        return False

    def end(self) -> int:
        """Ctrl-C; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            rest, _ = self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            rest, _ = self.process.communicate()
        self.said += rest.decode(errors="replace")
        return self.process.returncode


class Page:
    """One page in its folder: a copy of what is given; of an example, its own folder too."""

    def __init__(self, hour: Hour, path: Path) -> None:
        self.hour, self.path = hour, path
        self.folder = hour.folder / "pages" / str(path.relative_to(hour.root)).replace("/", "-")
        shutil.copytree(hour.folder / "given", self.folder)
        if path.parent != hour.root and path.parent.name != "docs":
            shutil.copytree(path.parent, self.folder, dirs_exist_ok=True)
        (self.folder / ".venv").symlink_to(hour.venv)
        self._exported = ""
        self._python: subprocess.Popen[str] | None = None

    def play(self) -> Iterator[Played]:
        """Each step, when it ended."""
        try:
            for step in steps(self.path, self.hour.root):
                yield self._play(step)
        finally:
            if self._python is not None:
                self._python.kill()
                self._python.wait()

    def _play(self, step: Step) -> Played:
        if why := exempt(step.page, step.text):
            return Played(step, skipped=why)
        if step.kind == "file":
            (self.folder / step.name).write_text(step.text)
            return Played(step)
        begun = time.monotonic()
        typed, code, output = self._block(step.text) if step.kind == "python" else self._command(step.text)
        seconds = time.monotonic() - begun
        allowed = next((c for pattern, c in ENDS_WITH if re.match(pattern, typed)), (0,))
        wrong = f"ended with {code}" if code not in allowed else "shows a traceback" if TRACE in output else ""
        return Played(step, typed, code, seconds, output, wrong)

    def _command(self, text: str) -> tuple[str, int, str]:
        typed = put_in(text, self.folder / "runs")
        typed = typed if self.hour.whole else smaller(typed)
        if re.match(r"(export \w+=|cd )", typed):
            self._exported += typed + "\n"
        if re.match(r"posttrain serve\b", typed) and "--help" not in typed:
            return self._serve(typed)
        if re.search(r"reference_server", typed):
            return self._serve(typed)
        environ = {**self.hour.environ, "SERVED": self.hour.served}
        target = WRITES.search(typed)
        if target and (self.folder / target[1]).is_dir():
            shutil.rmtree(self.folder / target[1])
        try:
            return self._ran(typed, environ)
        finally:
            if (
                target
                and typed.startswith("posttrain export")
                and (given := self.hour.folder / "given" / target[1]).is_dir()
            ):
                shutil.rmtree(self.folder / target[1], ignore_errors=True)
                shutil.copytree(given, self.folder / target[1])

    def _ran(self, typed: str, environ: dict[str, str]) -> tuple[str, int, str]:
        try:
            done = subprocess.run(
                ["bash", "-c", f"{self._exported}{typed}"],
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self.hour.limit,
            )
        except subprocess.TimeoutExpired as late:
            return typed, 124, (late.stdout or b"").decode(errors="replace")
        return typed, done.returncode, done.stdout.decode(errors="replace")

    def _serve(self, typed: str) -> tuple[str, int, str]:
        server = Serving(typed, self.folder, self.hour.environ, self._exported)
        heard = server.listens(self.hour.limit)
        code = server.end()
        return typed, 0 if heard and code in (0, 130) else code or 1, server.said

    def _block(self, text: str) -> tuple[str, int, str]:
        if self._python is None:
            table = json.dumps({} if self.hour.whole else {name: toy(name, []) for name in RECIPES})
            self._python = subprocess.Popen(
                [str(self.hour.venv / "bin/python"), str(HERE / "driver.py"), table],
                cwd=self.folder,
                env=self.hour.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin is not None and self._python.stdout is not None
        block, output = self.folder / ".block.py", self.folder / ".block.txt"
        block.write_text(text)
        output.write_text("")
        print(f"{block}\t{output}", file=self._python.stdin, flush=True)
        ready, _, _ = select.select([self._python.stdout], [], [], self.hour.limit)
        answer = self._python.stdout.readline().strip() if ready else "124"
        return "python block", int(answer or "1"), output.read_text(errors="replace")


def play(hour: Hour, chosen: Sequence[Path], jobs: int, say: Callable[[str], None] = flushed) -> list[Played]:
    """Play pages, `jobs` of them at once; returns every step."""
    server = Serving("posttrain serve my-model --port 0 --no-token", hour.folder / "given", hour.environ)
    if not server.listens(120.0):
        raise RuntimeError(f"posttrain serve my-model says no address:\n{server.said}")
    hour = Hour(**{**hour.__dict__, "served": server.url})
    out: list[Played] = []
    lock = threading.Lock()

    def one(path: Path) -> None:
        for p in Page(hour, path).play():
            with lock:
                out.append(p)
                say(told(p))

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, chosen))
    finally:
        server.end()
    return out


def told(p: Played) -> str:
    """A line about a step; where it went wrong also the end of what it printed."""
    if p.skipped:
        return f"  not played  {p.step}  ({p.skipped})"
    line = f"  {p.seconds:6.1f} s    {p.step}"
    if p.typed not in (p.step.text, "python block"):
        line += f"\n              as: {p.typed}"
    if p.wrong:
        line += f"\n  WRONG       {p.wrong}\n" + "\n".join(f"    | {x}" for x in p.output.splitlines()[-25:])
    return line


def main(words: Sequence[str]) -> int:
    """`python -m tests.first_hour [--whole] [--into FOLDER] [PAGE ...]`."""
    root = HERE.parents[1]
    words = list(words)
    whole = "--whole" in words and not words.remove("--whole")
    folder = Path(words.pop(words.index("--into") + 1)) if "--into" in words else None
    words = [w for w in words if w != "--into"]
    begun = time.monotonic()
    folder = folder or Path(tempfile.mkdtemp(prefix="first-hour-"))
    folder.mkdir(parents=True, exist_ok=True)
    hour = prepare(root, folder, bool(whole))
    chosen = [p for p in pages(root) if not words or str(p.relative_to(root)) in words]
    played = play(hour, chosen, 2)
    wrong = [p for p in played if p.wrong]
    skipped = sum(bool(p.skipped) for p in played)
    print(f"{len(played)} steps of {len(chosen)} pages, {skipped} not played, {len(wrong)} wrong")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{time.monotonic() - begun:.0f} s; processor time {spent.ru_utime + spent.ru_stime:.0f} s")
    for p in wrong:
        print(told(p))
    return 1 if wrong else 0
