"""What tests kill: the processes of a placed run by their kind, a run that is resumed until it ends, an environment
whose verdicts need processes of every kind, and engines that die of one prompt or in a broadcast of weights. And a run
that a signal cuts after a step."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.api import main, session
from posttrain.build.spawn_engines import EngineParts, EnvironmentParts
from posttrain.config.env import Reward
from posttrain.config.run import Run
from posttrain.core.ports import Attempt, Sampler
from posttrain.core.verdict import Verdict
from posttrain.engine.transfer import collective
from posttrain.environment.gallery import GALLERY
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.sandbox.choose_backend import open_sandbox
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import SandboxBroken, SandboxUnavailableError
from posttrain.stages.interrupt import Interrupted
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver
from posttrain.verifier.integers import last_integer
from posttrain.verifier.reward_source import graded

KINDS = ("engine", "verifier", "guardian", "sandbox", "tracker", "environment", "learner")
"""Processes of a run under placement=processes: engines; the processes that answer for a reward function, and their
guardians; sandboxes; the tracker of shared memory; processes that play episodes; the learner, which is the run itself.

A program inside a sandbox is none of them: one that is killed counts as one that crashed, which is its own fault.
"""
POISON = "POSTTRAIN_TEST_POISON"
"""Environment variable with the token ids of the prompt of which `DeadlyParts` die."""
MARKS, DEATHS = "POSTTRAIN_TEST_MARKS", 2
"""Of `MidBroadcastParts`: the environment variable that names the folder, and how many die."""
REWARD = "import time\n\ndef length(task, text):\n    time.sleep(0.002)\n    return float(len(text) % 3) / 8\n"


@dataclass(frozen=True, kw_only=True)
class Checked(Arithmetic):
    """Arithmetic whose right answer is computed by a program in a sandbox."""

    @cached_property
    def _programs(self) -> Sandbox:
        return open_sandbox(self.sandbox.name, workers=2, packages=(), token=self.sandbox.token)

    async def verdict(self, attempt: Attempt) -> Verdict:
        try:
            ran = await self._programs.run(f"print({str(attempt.task.prompt)[1:-1]})")
        except (SandboxBroken, SandboxUnavailableError) as error:
            return Verdict.failed("sandbox", str(error))
        if ran.why != "ok":
            return Verdict.failed("sandbox", f"the program ended with {ran.why}")
        said, right = last_integer(attempt.text), ran.stdout.decode().strip()
        return graded(said == right, said, right)

    def close(self) -> None:
        super().close()
        if (programs := vars(self).pop("_programs", None)) is not None:
            programs.close()


GALLERY["checked"] = f"{__name__}:Checked"


def checked(run: Run, folder: Path) -> Run:
    """The run with verdicts from sandboxes and from a reward function in two workers."""
    folder.mkdir(parents=True, exist_ok=True)
    (file := folder / "length.py").write_text(REWARD)
    rewards = (Reward(function=f"{file}:length", workers=2),)
    return replace(run, env=replace(run.env, name="checked", rewards=rewards))


class CheckedEnvironmentParts(EnvironmentParts):
    """As its base. The process that makes them imports this module, and so knows `Checked`."""


class DeadlyParts(EngineParts):
    """An engine that kills its process when it is asked to go on after the poisonous prompt."""

    def __call__(self) -> Sampler:
        engine: Any = super().__call__()
        deadly, generate = [int(i) for i in os.environ[POISON].split()], engine.generate

        async def dies(ids: np.ndarray, *more: Any, **how: Any) -> Any:
            if ids.tolist() == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return await generate(ids, *more, **how)

        engine.generate = dies
        return engine


class MidBroadcastParts(EngineParts):
    """An engine whose process is killed in the second broadcast of weights that it takes part in, until so many were
    that the folder `MARKS` has `DEATHS` files."""

    def __call__(self) -> Sampler:
        marks, plain, count = Path(os.environ[MARKS]), collective._broadcast, itertools.count(1)

        def dies(*given: Any) -> None:
            if next(count) == 2 and len(os.listdir(marks)) < DEATHS:
                (marks / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            plain(*given)

        collective._broadcast = dies
        return super().__call__()


# --- the processes of a run ------------------------------------------------------------------------------------------


def living() -> tuple[dict[int, int], dict[int, str]]:
    """(parent, command) of the living processes of this machine, by their id."""
    parents, commands = dict[int, int](), dict[int, str]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if state != "Z":
            parents[int(entry.name)], commands[int(entry.name)] = int(parent), command
    return parents, commands


def kinds_of(run: int) -> dict[str, list[int]]:
    """Ids of the living processes of the run with this process id, by their kind."""
    parents, commands = living()
    out: dict[str, list[int]] = {kind: [] for kind in KINDS}
    out["learner"] += [run] if run in parents else []
    for pid, parent in parents.items():
        own, above = commands[pid], commands.get(parent, "")
        if parent == run:
            for kind, word in BEGUN.items():
                out[kind] += [pid] if word in own else []
        elif parents.get(parent) == run and BEGUN["guardian"] in above:
            out["verifier"].append(pid)
    return out


BEGUN = {
    "engine": "# engine ",
    "environment": "# environment ",
    "guardian": "posttrain.verifier.workers.guardian",
    "sandbox": "zygote",
    "tracker": "multiprocessing.resource_tracker",
}
"""What stands in the command of a process that the run has begun, by its kind."""


@dataclass
class RoleKiller:
    """Kills processes of a run with SIGKILL, one kind after the other, at instants that are drawn from a seed."""

    kinds: Sequence[str]
    """The kinds to kill, in order."""
    rng: np.random.Generator
    between: float
    """Mean seconds between two kills."""
    killed: Counter[str] = field(default_factory=Counter[str])
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def left(self) -> int:
        return len(self.kinds) - self.killed.total()

    def alive(self, run: int) -> dict[str, list[int]]:
        return kinds_of(run)

    def attack(self, run: int) -> None:
        """Kill processes of this run until it has ended, or nothing is left to kill. To be called from a thread."""
        while self.left and not self.over.wait(float(self.rng.exponential(self.between))):
            kind = self.kinds[self.killed.total()]
            if (alive := self.alive(run)[kind]) and kill(alive[int(self.rng.integers(len(alive)))]):
                self.killed[kind] += 1
                if kind == "learner":
                    return


def kill(pid: int) -> bool:
    """Kill it; whether it was there still."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def order_of_kinds(rng: np.random.Generator, count: int, kinds: Sequence[str] = KINDS) -> list[str]:
    """Every kind as often as the others, in an order that is drawn."""
    rounds = -(-count // len(kinds))
    return [str(kind) for _ in range(rounds) for kind in rng.permutation(list(kinds))][:count]


# --- a run in a child ------------------------------------------------------------------------------------------------


def ended(folder: Path, run: Run, killer: RoleKiller) -> int:
    """Play the run in a child of this process, resumed wherever its learner was killed, to its end. The killer is at
    work from when the engines are ready. Returns how often it was resumed.

    Raises:
        AssertionError: it ended in another way than well or by the killer.
    """
    lives = 0
    while True:
        sign, before = folder.with_name(f"{folder.name}-ready-{lives}"), killer.killed["learner"]
        begun = (folder / "run.json").exists()
        work: Callable[[], object] = (
            (lambda: main.run(resume=folder, quiet=True, trust=True))
            if begun
            else (lambda: main.run(run, out=folder, quiet=True))
        )
        pid = _child(work, sign)
        killer.over.clear()
        attack = threading.Thread(target=_attack_when_ready, args=(killer, pid, sign), daemon=True)
        attack.start()
        _, status = os.waitpid(pid, 0)
        killer.over.set()
        attack.join()
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return lives
        assert code == -signal.SIGKILL and killer.killed["learner"] == before + 1, (
            f"the run ended with {code} and was not killed; so far {dict(killer.killed)}"
        )
        lives += 1


def _attack_when_ready(killer: RoleKiller, pid: int, sign: Path) -> None:
    while not sign.exists():
        if killer.over.wait(0.02):
            return
    killer.attack(pid)


def _child(work: Callable[[], object], sign: Path) -> int:
    """Fork, do the work in the child and never return there. `sign` is written when its engines are ready."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    inherited: Any = resource_tracker._resource_tracker  # the parent's, if it has one, is no process of this run
    inherited._fd = inherited._pid = None
    try:
        play = session.RunSession.play

        async def ready(self: session.RunSession) -> None:
            sign.touch()
            await play(self)

        session.RunSession.play = ready  # type: ignore[method-assign]
        work()
        code = 0
    except BaseException as error:
        os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def gone(pids: Sequence[int], seconds: float = 15.0) -> bool:
    """Whether all of these processes end within so many seconds."""
    until = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def cut_run(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int = 2, **how: Any) -> None:
    """A run that stops by a signal after its step `at` of reinforcement. `how`: what `main.run` is given besides."""
    remember = ReinforceDriver.remember

    def cut(self: ReinforceDriver, asked: Any, step: Any) -> Any:
        if asked.index == at:
            self.stopper.stop(signal.SIGTERM)
        return remember(self, asked, step)

    with monkeypatch.context() as patched:
        patched.setattr(ReinforceDriver, "remember", cut)
        with pytest.raises(Interrupted):
            main.run(run, out=folder, quiet=True, **how)
