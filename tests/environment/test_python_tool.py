"""The Python tool: variables stay, limits are the episode's, and nobody is blamed for waiting or left with another's
interpreter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from posttrain.core.stop import EpisodeLimits
from posttrain.environment.tools.offered import OfferedTools
from posttrain.environment.tools.python import LOST, InterpreterSlots, Python
from posttrain.environment.tools.tool import Toolbox
from posttrain.sandbox.choose_backend import open_sandbox
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.verifier.calling import ToolCall

LIMITS = EpisodeLimits()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox(workers=1, sessions=2) as found:
        yield found


async def call(box: Toolbox, code: str, limits: EpisodeLimits = LIMITS) -> tuple[str, str]:
    seen = await box.call(ToolCall("python", {"code": code}), limits)
    return seen.kind, seen.text


async def test_python_keeps_its_variables_and_ends_with_the_episode(sandbox: Sandbox) -> None:
    async with Python(InterpreterSlots(sandbox, 10.0)) as box:
        assert await call(box, "x = 6") == ("ok", "(nothing was printed)")
        assert await call(box, "print('hi'); x * 7") == ("ok", "hi\n42")
        kind, text = await call(box, "1 / 0")
        assert kind == "refused" and "ZeroDivisionError" in text
        kind, text = await call(box, "import os; os._exit(3)")
        assert kind == "refused" and LOST in text
        assert "NameError" in (await call(box, "x"))[1]


@pytest.mark.prove
async def test_a_piece_that_takes_too_long_is_the_policys_and_the_next_one_runs(sandbox: Sandbox) -> None:
    """A little before the call's own time: the policy is told why. Where the call's time is up first, it is told with
    the next one."""
    async with Python(InterpreterSlots(sandbox, 1.0)) as box:
        kind, text = await call(box, "while True: pass", EpisodeLimits(tool_seconds=5.0))
        assert kind == "refused" and "timeout" in text and LOST in text
        assert await call(box, "y = 1", EpisodeLimits(tool_seconds=5.0)) == ("ok", "(nothing was printed)")
    async with Python(InterpreterSlots(sandbox, 60.0)) as box:
        assert (await call(box, "import time; time.sleep(50)", EpisodeLimits(tool_seconds=0.3)))[0] == "timeout"
        assert await call(box, "1 + 1") == ("ok", f"{LOST}\n2")
        assert await call(box, "2 + 2") == ("ok", "4")


async def test_an_episode_waits_for_its_seat_and_no_call_runs_out_of_time_for_another(sandbox: Sandbox) -> None:
    """Six episodes on two seats: each has an interpreter of its own from its first piece to its last, and no call times
    out."""
    interpreters = InterpreterSlots(sandbox, 5.0, slots=2)
    sitting = most = 0

    async def episode(number: int) -> list[Any]:
        nonlocal sitting, most
        async with Python(interpreters) as box:
            sitting += 1
            most = max(most, sitting)
            out = [
                await call(box, f"mine = {number}"),
                await call(box, "import time; time.sleep(0.1)"),
                await call(box, "mine"),
            ]
            sitting -= 1
            return out

    said = await asyncio.gather(*(episode(i) for i in range(6)))
    assert most == 2
    assert [kind for out in said for kind, _ in out] == ["ok"] * 18 and [out[-1][1] for out in said] == [
        str(i) for i in range(6)
    ]
    waiting = asyncio.create_task(episode(7))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert interpreters.free._value == 2, "whoever leaves gives the slot back"


def test_it_is_offered_within_the_limits_of_the_episode() -> None:
    offered = OfferedTools.of("python", seconds=5.0)
    try:
        assert offered.interpreters.limits.wall == 4.0 and offered.contained
    finally:
        offered.close()
