"""However a run ends, nothing of its episodes' tools is left: no interpreter, no sandbox, no process below it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.run_parts import RL, SMALL
from tests.sandbox.sandbox_parts import gone

WORLD = """
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.stop import EpisodeLimits
from posttrain.verifier.calling.parse import ToolCall
from posttrain.environment.gallery.calculator import CalculatorEnv
from posttrain.environment.tools.offered import OfferedTools
from posttrain.role.episode_conversation import Conversation

TOOLS = OfferedTools.of("python", seconds=3.0)


@dataclass(frozen=True, kw_only=True)
class World(CalculatorEnv):
    async def play(self, task, talk):
        if not isinstance(talk, Conversation):  # the answers that are known play the task as it is
            return await super().play(task, talk)
        talk.see(task.prompt)
        async with TOOLS.box(task) as box:
            said = await talk.say()
            first = await box.call(ToolCall("python", {"code": "kept = 6 * 7; print(kept)"}), EpisodeLimits())
            assert first.text == "42", first
            Path(__file__).with_suffix(".at").touch()
            await box.call(ToolCall("python", {"code": "while True: pass"}), EpisodeLimits(tool_seconds=100))
        return said.stop
"""


def below(pid: int) -> set[int]:
    """All processes that descend from this one."""
    found: set[int] = set()
    for task in Path("/proc").glob(f"{pid}/task/*"):
        with contextlib.suppress(OSError):
            found |= {int(c) for c in (task / "children").read_text().split()}
    return found | {p for child in found for p in below(child)}


@pytest.mark.prove
@pytest.mark.parametrize(("how", "times"), [("SIGINT", 1), ("SIGTERM", 2), ("SIGKILL", 1)])
def test_no_interpreter_outlives_its_run(tmp_path: Path, how: str, times: int) -> None:
    """One signal ends a run at its next step, a second one at once, and the last kind asks nobody."""
    file = tmp_path / "world.py"
    file.write_text(WORLD)
    words = [
        "arithmetic",
        "sft=none",
        *SMALL,
        *RL,
        f"env.name={file}:World",
        "env.heldout=2",
        "--out",
        str(tmp_path / "run"),
    ]
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from posttrain.cli import main; raise"
        " SystemExit(main())"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", start, "run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    ) as run:
        until = time.monotonic() + 120
        while not file.with_suffix(".at").exists() and run.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        left = below(run.pid)
        commands = [_command(p) for p in left]
        for _ in range(times):
            run.send_signal(getattr(signal, how))
            time.sleep(0.2)
        said, _ = run.communicate(timeout=60)
    assert any("zygote" in c for c in commands), f"no sandbox was running: {said[-2000:]}"
    assert [p for p in left if not gone(p, within=10)] == []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
