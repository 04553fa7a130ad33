"""A vLLM server that is started for a run, watched, and ended with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

from posttrain.engine.model.policy_model import Policy
from posttrain.engine.pool.engine_process import last_words
from posttrain.engine.vllm import installed
from posttrain.engine.vllm.adapter_load import BASE, check_served
from posttrain.engine.vllm.launch import FOLDER, PARENT
from posttrain.engine.vllm.start_vllm import START, arguments, describe, folder_for_weights, workers_environment
from posttrain.system.errors import EngineError

ROLE = "the rollout engine (a vLLM server of this run)"
STOP_SECONDS = 20.0
"""Seconds that the server has to end after a signal."""


class SpawnedServer:
    """The server process, on a free port of this machine. It has a process group of its own, so that all of it is
    ended. ConfigError where vllm is not installed; EngineError, with the end of its log, where the server does not
    start."""

    def __init__(self, policy: Policy, *, slots: int, cache_bytes: int, eager: bool, workers: int = 1) -> None:
        installed()
        check_served(policy)
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-vllm-", dir=folder_for_weights(policy))
        self.folder = Path(self._folder.name)
        """Holds the model's description, the log, and weights during an update."""
        describe(policy, str(self.folder / "model"))
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "posttrain.engine.vllm.launch",
            "--port",
            str(port),
            "--uvicorn-log-level",
            "warning",
        ]
        for name, value in arguments(policy, str(self.folder / "model"), slots, cache_bytes, eager, workers).items():
            flag = f"--{name.replace('_', '-')}"
            # A flag of vLLM has no value: it is there or not.
            command += [flag] if value is True else [] if value is False else [flag, str(value)]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ
                | workers_environment(workers, eager)
                | {PARENT: str(os.getpid()), FOLDER: self._folder.name},
            )
        self._why = ""  # why the server has ended, once `ended` has seen that it has
        atexit.register(self.close)
        try:
            self._wait()
            (self.folder / "model" / BASE).unlink(missing_ok=True)  # the server has read it
        except BaseException:
            self.close()
            raise

    def ended(self) -> str:
        """Returns the reason why the server has ended, with the end of its log; '' while it runs. Removes its files."""
        if not self._why and (code := self._process.poll()) is not None:
            self._why = f"it has ended with exit code {code}{last_words(self.folder / 'log')}"
            self.close()
        return self._why

    def close(self) -> None:
        """End the process group and remove the folder. A second call does nothing."""
        atexit.unregister(self.close)
        for signal_number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal_number)
            if self._gone(seconds):
                break
        self._folder.cleanup()

    def _gone(self, seconds: float) -> bool:
        """Returns whether the whole group has ended within this time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._process.poll()  # a process that has ended and was not waited for counts as one of the group for ever
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False

    def _wait(self) -> None:
        """Wait until the server answers. EngineError where it ends before, or takes more than `START` seconds."""
        # Without the proxies of the environment, which cannot reach this machine's own address.
        direct, until = urllib.request.build_opener(urllib.request.ProxyHandler({})), time.monotonic() + START
        while True:
            # The end of the server is reported at once, with its last words, and not after the whole time.
            if why := self.ended():
                raise EngineError(f"{ROLE} did not start: {why}")
            with contextlib.suppress(OSError, HTTPException), direct.open(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            if time.monotonic() > until:
                raise EngineError(f"{ROLE} did not answer in {START:g} s{last_words(self.folder / 'log')}")
            time.sleep(0.2)


def _free_port() -> int:
    """A port of this machine that nobody uses at this moment."""
    # Somebody else may take the port before the server does. Then the server ends, and `_wait` tells why.
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
