"""What a page starts and leaves running while its next commands are typed in another terminal."""

from __future__ import annotations

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
