"""A vLLM server that posttrain can train against: `python -m posttrain.engine.vllm.launch --model MODEL --port 8000`.

Everything after the module's name goes to vLLM's own server. What the log-prob contract and the weight updates need is
added, and refused where it is given. It listens on this machine alone unless told otherwise: its control routes
(weights, remote calls) ask for no key, so do not open it to a network that you do not trust.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from posttrain.engine.vllm import installed
from posttrain.engine.vllm.start_vllm import BACKEND, EXTENSION, whole_prompts
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell

PARENT = "POSTTRAIN_PARENT"
"""Environment variable: process id of the run that started this server. The server ends with it."""
FOLDER = "POSTTRAIN_FOLDER"
"""Environment variable: the folder that the run made for this server. The server removes the folder where the run has
ended without doing so."""
NEEDED: dict[str, str | None] = {
    "--generation-config": "vllm",
    "--logprobs-mode": "processed_logprobs",
    "--max-logprobs": "-1",
    "--worker-extension-cls": EXTENSION,
    "--weight-transfer-config": json.dumps({"backend": BACKEND}),
    "--enable-scale-out": None,
    "--enable-prompt-tokens-details": None,
}
"""Arguments of vLLM's server without which posttrain refuses it."""
GRACE = 10.0
"""Seconds that a server has to end by itself after the run that started it."""
_PR_SET_PDEATHSIG = 1
"""Linux: prctl's option by which the kernel sends this process a signal when its parent ends."""


def arguments(given: Sequence[str]) -> list[str]:
    """The given arguments and those that posttrain needs; ConfigError where a needed one was given as well."""
    out = list(given)
    # vLLM's parser takes --max_loras for --max-loras, so both spellings are looked for.
    names = {a.partition("=")[0].replace("_", "-") for a in given if a.startswith("--")}
    needed = NEEDED | ({"--no-enable-chunked-prefill": None} if whole_prompts() else {})
    for name, value in needed.items():
        if name in names:
            raise ConfigError(f"{name} is what posttrain decides ({value or 'on'}): leave it out")
        out += [name] if value is None else [name, value]
    # 1 is vLLM's own number, so nothing is added: `vllm_worker` reads an adapter back from the only place there is.
    if "--max-loras" in names:
        raise ConfigError("--max-loras is what posttrain decides (1): leave it out")
    return out if "--host" in names else [*out, "--host", "127.0.0.1"]


@contextlib.contextmanager
def ending_with_parent() -> Iterator[None]:
    """Inside, the kernel ends this process when the run that started it ends, in whatever way.

    The server's folder is removed too, also where vLLM has not yet begun to handle the signal. The processes that the
    server has begun are ended too, also where the server itself was killed. This is needed with Ray: it kills the
    children of an actor, and leaves the processes that these have begun.
    """
    parent, folder = os.environ.pop(PARENT, None), os.environ.pop(FOLDER, None)
    if parent is None or not sys.platform.startswith("linux"):
        yield
        return
    # Until vLLM handles the signal itself, it raises SystemExit here, so that `finally` below runs.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Only where this process leads a group of its own: the group is what will be killed.
    if os.getpgrp() == (server := os.getpid()) and not os.fork():
        try:
            _end_after_server(server, int(parent), folder)
        finally:
            os._exit(0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_end_after, args=(int(parent), folder), daemon=True).start()
    try:
        # The run may have ended before the kernel was asked, and then no signal comes.
        if os.getppid() != int(parent):
            raise SystemExit("the run that started this server has ended")
        yield
    finally:
        if folder is not None and os.getppid() != int(parent):
            shutil.rmtree(folder, ignore_errors=True)


def _end_after_server(server: int, parent: int, folder: str | None) -> None:
    """Runs in a process of its own: when the server has ended, in whatever way, end what is left of its group.

    The folder holds the server's log, which the run may still read. So it is removed only when the run has ended too.
    """
    os.setsid()  # it leaves the group that it will end
    # SIGUSR1 is blocked before the kernel is asked for it, so that a signal which comes at once waits for `sigwait`.
    # The other signals are meant for the server, and must not end the process that cleans up after it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() == server:
        signal.sigwait({signal.SIGUSR1})
    # killpg raises ProcessLookupError as soon as the group has no process any more, which ends the wait.
    for sign in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GRACE
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server, sign)
            while time.monotonic() < until:
                time.sleep(0.05)
                os.killpg(server, 0)
    with contextlib.suppress(ProcessLookupError):
        while folder is not None and os.path.exists(folder):
            os.kill(parent, 0)  # only asks whether the process is there
            time.sleep(0.2)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _end_after(parent: int, folder: str | None) -> None:
    """Runs in a thread: end this process and those that it began, where the signal was not enough. vLLM 0.32 can wait
    for its engine for ever where it gets a signal while it starts."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(GRACE)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    # A group that this process does not lead may hold the processes of others.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        tell(f"{__doc__}\nAdded to vLLM's arguments: {' '.join(arguments([]))}\nvLLM's own arguments:\n")
    else:
        sys.argv[1:] = arguments(sys.argv[1:])
    installed()
    # vLLM has its control routes in this mode only: remote calls, updates of weights, the emptying of the cache.
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "3600")  # connections stay open while the learner computes
    given = {a.replace("_", "-") for a in sys.argv}  # vLLM's parser takes both spellings
    if "--enable-lora" in given:
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    # vLLM's own setting lets it compile small functions of its sampler: 51 s at the first request with log-probs.
    if "--enforce-eager" in given:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with ending_with_parent():
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        serve()


if __name__ == "__main__":
    main()
