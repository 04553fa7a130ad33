"""Plays the pages in a fresh environment, each in a folder of its own, and tells what did not go as the page says."""

from __future__ import annotations

import os
import re
import resource
import select
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from tests.first_hour import fresh
from tests.first_hour.pages import Step
from tests.first_hour.serving import SERVES, Serving, Started
from tests.first_hour.typed import steps_of
from tests.first_hour.words import exempt, pages, put_in, smaller, with_words

HERE = Path(__file__).parent
SCRIPT = f"{HERE / 'driver.py'} --toy"
"""What plays a script of the reader's at toy size."""
BY_THE_SHELL = ("README.md", "examples/prompts/README.md")
PLAIN = re.compile(r"posttrain [^|&;$<>`]*$")
"""At toy size a page's plain commands are run by forks of a program that has imported torch, which is most of what each
would do: those of the first page and of one example by the shell and the installed script, as are all when played
whole."""
DEFAULT_ADDRESS = "http://127.0.0.1:8000"
SERVES_WITHIN = 120.0
TRACE = "Traceback (most recent call last)"
ENDS_WITH = (
    (r"posttrain check ", (0, 1)),  # 1: a probe failed, which the page shows
    (r"posttrain run .*--allow-fault", (0, 3)),  # 3: the fault was caught; at toy size it may have nothing to act on
)
"""Exit codes other than 0 that a page documents."""
WRITES = re.compile(r"(?:^posttrain export \S+|--out) ([\w./-]+)")
"""A folder that a command writes, where there is one already (given, or the same run in another form), makes room. A
model that is given is given again after it was exported to."""


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
    """The fresh environment, the folder of things that are given, and the sizes."""

    root: Path
    folder: Path
    venv: Path
    whole: bool
    limit: float
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
    (home / ".cache").mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "LANG", "LC_", "SSL_", "TMP"))}
    environ = {
        **kept,
        "HOME": str(home),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "80",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    given = folder / "given"
    shutil.rmtree(given, ignore_errors=True)
    shutil.rmtree(folder / "pages", ignore_errors=True)
    given.mkdir()
    begun = time.monotonic()
    code = [str(venv / "bin/python"), str(HERE / "given.py")]
    subprocess.run(code, cwd=given, env=environ, check=True, stdout=subprocess.DEVNULL)
    say(f"my-model, mine.jsonl, mine.py, runs/mine: {time.monotonic() - begun:.0f} s")
    return Hour(root, folder, venv, whole, 3600.0 if whole else 300.0, environ=environ)


class Page:
    """One page in its folder: a copy of what is given; of an example, its own folder too. Its cache is its own, so that
    nothing it needs was made by another page, such as the speed of this machine that a plan reads there."""

    def __init__(self, hour: Hour, path: Path, started: Started, found: Sequence[Step]) -> None:
        self.hour, self.found, self._started = hour, found, started
        self.page = str(path.relative_to(hour.root))
        self.folder = hour.folder / "pages" / self.page.replace("/", "-")
        shutil.copytree(hour.folder / "given", self.folder)
        if path.relative_to(hour.root).parts[0] in ("examples", "tour", "notebooks"):
            shutil.copytree(path.parent, self.folder, dirs_exist_ok=True)
        (self.folder / ".venv").symlink_to(hour.venv)
        cache = self.folder / ".cache"
        shutil.copytree(Path(hour.environ["HOME"]) / ".cache", cache)
        self._environ, self._url = hour.environ | {"XDG_CACHE_HOME": str(cache)}, ""
        self._python: subprocess.Popen[str] | None = None
        self._servers: list[tuple[Step, Serving]] = []

    def play(self) -> Iterator[Played]:
        """Each step, when it ended. A server goes on while the steps after it are played, as in another terminal; that
        it did not end well is told last."""
        try:
            for step in self.found:
                yield self._play(step)
        finally:
            if self._python is not None:
                self._python.kill()
                self._python.wait()
            ended = [(step, server, server.end()) for step, server in self._servers]
        for step, server, code in ended:
            if code not in (0, 130) or TRACE in server.said:
                yield Played(step, step.text, code, output=server.said, wrong=f"after Ctrl-C it ended with {code}")

    def _play(self, step: Step) -> Played:
        if why := exempt(step.page, step.text):
            return Played(step, skipped=why)
        if step.kind == "file":
            (self.folder / step.name).write_text(step.text)
            return Played(step)
        begun = time.monotonic()
        typed, code, output = self._block(step.text) if step.kind == "python" else self._command(step)
        seconds = time.monotonic() - begun
        allowed = next((c for pattern, c in ENDS_WITH if re.match(pattern, typed)), (0,))
        wrong = f"ended with {code}" if code not in allowed else "shows a traceback" if TRACE in output else ""
        return Played(step, typed, code, seconds, output, wrong)

    def _command(self, step: Step) -> tuple[str, int, str]:
        typed = self._addressed(put_in(step.text, self.folder / "runs"))
        if re.match(r"export \w+=", typed):
            return self._export(typed)
        if SERVES.match(typed):
            return self._serve(step, with_words(typed, [] if "--port" in typed else ["--port 0"]))
        if not self.hour.whole:
            typed = smaller(typed, SCRIPT if self._runs(typed) else "")
        target = WRITES.search(typed)
        if target and (self.folder / target[1]).is_dir():
            shutil.rmtree(self.folder / target[1])
        try:
            return self._ran(typed)
        finally:
            if (
                target
                and typed.startswith("posttrain export")
                and (given := self.hour.folder / "given" / target[1]).is_dir()
            ):
                shutil.rmtree(self.folder / target[1], ignore_errors=True)
                shutil.copytree(given, self.folder / target[1])

    def _runs(self, typed: str) -> bool:
        """Whether it is a program of the reader's in which a run begins."""
        program = self.folder / (typed.split()[1:2] or ["."])[0]
        return program.suffix == ".py" and program.is_file() and "posttrain.run(" in program.read_text()

    def _addressed(self, text: str) -> str:
        """The default address is that of the server that the page has started, which listens on any free port."""
        return text.replace(DEFAULT_ADDRESS, self._url) if self._url else text

    def _ran(self, typed: str) -> tuple[str, int, str]:
        if not self.hour.whole and self.page not in BY_THE_SHELL and PLAIN.match(typed):
            words = shlex.split(typed, comments=True)
            return typed, *self._started.run(words, self.folder, self._environ, self.hour.limit)
        try:
            done = subprocess.run(
                ["bash", "-c", typed],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self.hour.limit,
            )
        except subprocess.TimeoutExpired as late:
            return typed, 124, (late.stdout or b"").decode(errors="replace")
        return typed, done.returncode, done.stdout.decode(errors="replace")

    def _export(self, typed: str) -> tuple[str, int, str]:
        """What it sets is there for every later step of the page."""
        _, code, said = self._ran(f"{typed}\nenv -0")
        if not code:
            self._environ = dict(x.split("=", 1) for x in said.split("\0") if "=" in x)
        return typed, code, "" if not code else said

    def _serve(self, step: Step, typed: str) -> tuple[str, int, str]:
        server = Serving(typed, self.folder, self._environ)
        if not server.listens(SERVES_WITHIN):
            return typed, server.end() or 1, server.said
        self._servers.append((step, server))
        self._url = server.url
        return typed, 0, server.said

    def _block(self, text: str) -> tuple[str, int, str]:
        if self._python is None:
            self._python = subprocess.Popen(
                [str(self.hour.venv / "bin/python"), str(HERE / "driver.py"), *([] if self.hour.whole else ["--toy"])],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin is not None and self._python.stdout is not None
        block, output = self.folder / ".block.py", self.folder / ".block.txt"
        block.write_text(self._addressed(text))
        output.write_text("")
        print(f"{block}\t{output}", file=self._python.stdin, flush=True)
        ready, _, _ = select.select([self._python.stdout], [], [], self.hour.limit)
        answer = self._python.stdout.readline().strip() if ready else "124"
        return "python block", int(answer or "1"), output.read_text(errors="replace")


def play(hour: Hour, chosen: Sequence[Path], jobs: int, say: Callable[[str], None] = flushed) -> list[Played]:
    """Play pages, `jobs` of them at once; returns every step."""
    out: list[Played] = []
    lock = threading.Lock()

    idle: SimpleQueue[Started] = SimpleQueue()

    def one(path: Path) -> None:
        started = idle.get()
        try:
            for p in Page(hour, path, started, found[path]).play():
                with lock:
                    out.append(p)
                    say(told(p))
        finally:
            idle.put(started)

    found = {path: steps_of(path, hour.root) for path in chosen}  # here, because it asks the parser, which may print
    programs = [Started(hour.venv, hour.folder, hour.environ) for _ in range(jobs)]
    for program in programs:
        idle.put(program)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, chosen))
    finally:
        for program in programs:
            program.end()
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
    if unknown := set(words) - {str(p.relative_to(root)) for p in pages(root)}:
        print(f"{main.__doc__}\nno page: {', '.join(sorted(unknown))}. Name pages as README.md or docs/guides/ranks.md")
        return 2
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
