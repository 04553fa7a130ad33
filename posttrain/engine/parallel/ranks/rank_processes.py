"""The other ranks of a run as processes of this machine, which the run itself starts, watches and ends.

They meet in a folder that nobody else can read: there lie their key, their notes for each other, and what they print.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from posttrain.engine.parallel.ranks.signed_messages import fresh_key
from posttrain.engine.pool.engine_process import last_words, signal_name
from posttrain.system.child_lifetime import begun

COMMAND = "from {module} import serve; serve({rank}, {world}, {path!r}, **{told})"
"""The Python program of a rank's process."""
KEY = "key"
"""The name of the ranks' key in their store."""
END_SECONDS = 20.0
"""Seconds that a process has to end by itself."""


class RankProcesses:
    """Ranks 1 to `world` - 1, each running `module.serve(rank, world, path, **told)`.

    All ranks meet in `store`, a file at `path`. `told` is passed on, with `seconds` added to it.
    """

    def __init__(self, world: int, module: str, threads: int, seconds: float, told: Mapping[str, Any]) -> None:
        self.key = fresh_key()
        self._temporary = tempfile.TemporaryDirectory(prefix="posttrain-ranks-")
        self.folder = Path(self._temporary.name)
        """Nobody else can read it (mode 0700)."""
        # It has the ranks' key, which the folder's mode protects. -1: any number of processes.
        self.store = FileStore(path := str(self.folder / "store"), -1)
        self.store.set(KEY, self.key.decode())
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # A run that ends without `close` leaves no process behind.
        atexit.register(self.close, kill=True)
        for rank in range(1, world):
            arguments = {"rank": rank, "world": world, "path": path, "told": {"seconds": seconds, **told}}
            with self._log(rank).open("wb") as log:
                # `begun` also ends them where this process is killed and can run nothing.
                self._processes[rank] = begun(
                    COMMAND.format(module=module, **arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                )

    @property
    def pids(self) -> dict[int, int]:
        """The number of each rank's process."""
        return {rank: p.pid for rank, p in self._processes.items()}

    def gone(self) -> str:
        """The first rank whose process has ended, and how; '' where all live."""
        ends = ((rank, self.ended(rank)) for rank in self._processes)
        return next((f"rank {rank} is gone: {end}" for rank, end in ends if end), "")

    def ended(self, rank: int) -> str:
        """Returns how the process of a rank ended, in words; '' where it lives."""
        code = self._processes[rank].poll()
        if code is None:
            return ""
        # Popen gives a process that was ended by a signal the negative number of the signal.
        end = f"it was killed by {signal_name(-code)}" if code < 0 else f"it ended with exit code {code}"
        return f"{end}{last_words(self._log(rank))}"

    def stopped(self, rank: int) -> bool:
        """Returns whether the process lives and is stopped (SIGSTOP), as far as this system says."""
        with contextlib.suppress(OSError, IndexError):
            about = Path(f"/proc/{self._processes[rank].pid}/stat").read_text()
            # The state follows the name in parentheses, and a name may hold spaces and parentheses itself.
            return about.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def close(self, kill: bool = False) -> None:
        """End the processes: wait until they have ended by themselves, or `kill` them at once."""
        atexit.unregister(self.close)
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            # One deadline for all. Without any time left a process gets a tenth of a second, so that its end is seen.
            with contextlib.suppress(subprocess.TimeoutExpired):
                if not kill:
                    process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        self._temporary.cleanup()

    def _log(self, rank: int) -> Path:
        """The file with what a rank prints."""
        return self.folder / f"rank-{rank}"
