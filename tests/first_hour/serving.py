"""Processes that outlive a step: servers, which go on while the next commands of their page are typed in another
terminal, and a `posttrain` that is started once for many commands."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

LISTENS = re.compile(r"(?:http://)?(127\.0\.0\.1:\d+)")
SERVES = re.compile(r"posttrain serve (?!--help)|python -m posttrain\.sandbox\.reference_server")
"""Commands that go on until somebody ends them."""


class Serving:
    """A command in the background, until it says where it listens; ended with Ctrl-C."""

    def __init__(self, command: str, folder: Path, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
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
                    self.url = f"http://{found[1]}"
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


class Started:
    """`posttrain` in a process that has imported already what all its commands import (`started.py`)."""

    def __init__(self, venv: Path, folder: Path, environ: dict[str, str]) -> None:
        self._venv, self._output, self._environ = venv, folder / f"said-{id(self)}.txt", environ
        self._process: subprocess.Popen[str] | None = None

    def run(self, words: list[str], folder: Path, environ: dict[str, str], seconds: float) -> tuple[int, str]:
        """The exit code of a command, 124 where it takes longer than that many seconds, and what it printed."""
        if self._process is None:
            self._process = subprocess.Popen(
                [str(self._venv / "bin/python"), str(Path(__file__).with_name("started.py"))],
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        program = [str(self._venv / "bin" / words[0]), *words[1:]]
        asked = {"words": program, "folder": str(folder), "environ": environ, "output": str(self._output)}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        answer = self._process.stdout.readline().strip() if ready else ""
        if not answer:
            self.end()
        said = self._output.read_text(errors="replace") if self._output.exists() else ""
        return int(answer or "124"), said

    def end(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
