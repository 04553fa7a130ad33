"""The live table of roles: what it reads, what it draws, and that it goes on while the learner computes."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.gauge import Gauge, Step
from posttrain.core.types import Task
from posttrain.engine.pool import pool_turns
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.engine.pool.environment_pool import (
    EnvironmentPlayer,
    EnvironmentPool,
    EnvironmentProcess,
    PlayedElsewhere,
)
from posttrain.engine.pool.pool_turns import BusyMeter
from posttrain.record.run_reader import steps
from posttrain.report.console import PlainConsole
from posttrain.report.live.live_terminal import Terminal
from posttrain.report.live.role_table import RoleWatch, drawn
from posttrain.role.group_queue import AskedGroup, GroupQueue
from posttrain.role.roles import RoleCosts
from posttrain.stages.run_parts import RunParts
from tests.engine.pool_parts import PLAIN, Script, prompt, scripted_pool
from tests.tiny import play, tiny_parts, tiny_run

CHANGES = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 4), st.integers(0, 100), st.booleans()), max_size=20)


@given(CHANGES)
@settings(max_examples=100)
def test_a_meter_is_the_sum_over_what_happened(changes: list[tuple[float, int, int, bool]]) -> None:
    """Seconds, seconds without a turn, and tokens times seconds, against the plain sum; parts add up to the whole."""
    clock = [100.0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool_turns.time, "monotonic", lambda: clock[0])
        meter, now = BusyMeter(), (0, 0)
        seconds = idle = flight = 0.0
        odd = False
        parts = list[tuple[float, float, float]]()
        for spent, turns, tokens, taken in changes:
            clock[0] += spent
            seconds, idle, flight = seconds + spent, idle + spent * (not now[0]), flight + spent * now[1]
            if taken:
                part = meter.take()
                parts.append((part.seconds, part.idle, part.flight))
            now = (turns, tokens if turns else 0)
            meter.clear() if odd else [meter.end(n) for n in range(5)]
            odd = not odd
            for n in range(turns):
                meter.begin(n, tokens // turns + (tokens % turns if n == 0 else 0))
                meter.begin(n, tokens // turns + (tokens % turns if n == 0 else 0))
        found, last = meter.read(), meter.take()
    whole = pytest.approx((seconds, idle, flight), abs=1e-6)
    assert (found.seconds, found.idle, found.flight) == whole
    parts.append((last.seconds, last.idle, last.flight))
    assert tuple(map(sum, zip(*parts, strict=True))) == whole, "nothing is counted twice or left out"
    assert 0 <= found.idle_share <= 1


def parts_of(queue: GroupQueue | None = None, plays: EnvironmentPlayer | None = None) -> RunParts:
    return cast("RunParts", SimpleNamespace(queue=queue, version=7, rollout=SimpleNamespace(plays=plays)))


def test_processes_that_play_episodes_are_rows() -> None:
    """One that plays, with how long its oldest episode is there, and one that waits; they have no idle share."""
    place = [EnvironmentProcess(f"environment {i}", cast("Any", SimpleNamespace(died=""))) for i in range(2)]
    place[0].held = {PlayedElsewhere(Task("t", ""), cast("Any", None), 0, False, None): None}
    pool: EnvironmentPool = object.__new__(EnvironmentPool)
    pool.processes = place
    watch = RoleWatch(scripted_pool(Script(), 1), parts_of(plays=EnvironmentPlayer(pool, 0)), RoleCosts())
    rows = {r.name: r for r in watch.rows()}
    assert list(rows) == ["engine 0", "router", "environment 0", "environment 1", "learner"]
    assert rows["environment 0"].doing == "plays" and rows["environment 0"].depth == "1 episodes"
    assert rows["environment 0"].age is not None and rows["environment 1"].age is None
    assert rows["environment 1"].doing == "ready" and "0 restarts" in rows["environment 1"].line()
    assert "learner idle" in watch.line()
    watch.pool.close()


def queue_of(ended: int, open_: int) -> GroupQueue:
    """A queue that holds so many groups; only what its row reads."""
    groups = list[AskedGroup]()
    for i in range(ended + open_):
        group: Any = asyncio.get_running_loop().create_future()
        if i < ended:
            group.set_result(None)
        groups.append(AskedGroup(cast("Any", None), 0, i, i, 3, cast("Any", None), group))
    queue: GroupQueue = object.__new__(GroupQueue)
    queue._waiting, queue.index, queue._full = deque(groups), 5, {}
    return queue


def test_every_role_tells_what_it_does() -> None:
    """An engine with turns, one without, turns held back while weights come, groups asked ahead, the learner."""
    pool, clock = scripted_pool(Script(deaf={"generate"}), 2), RoleCosts()

    async def play() -> None:
        watch = RoleWatch(pool, parts_of(queue_of(2, 3)), clock)
        one = asyncio.ensure_future(pool.generate(prompt(1, 2), PLAIN, 1))
        await asyncio.sleep(0.05)
        pool._loads += 1  # as while new weights come
        held = asyncio.ensure_future(pool.generate(prompt(3), PLAIN, 2))
        await asyncio.sleep(0.05)
        with clock.of("learn"):
            time.sleep(0.02)
            rows = {r.name: r for r in watch.rows()}
        assert list(rows) == ["engine 0", "engine 1", "router", "queue", "learner"]
        first, second, router, queue, learner = rows.values()
        assert (first.doing, first.depth, first.tokens) == ("ready", "1 turns", 2 + PLAIN.max_tokens)
        assert first.age is not None and 0.1 <= first.age < 5 and first.idle is not None and first.idle < 0.5
        assert (second.depth, second.tokens, second.age) == ("0 turns", 0, None) and second.idle == pytest.approx(
            1, abs=0.01
        )
        assert (router.doing, router.depth, router.tokens) == ("holds turns back", "1 turns", 1 + PLAIN.max_tokens)
        assert queue.depth == "5 groups, 2 ended" and "version 3" in queue.more
        assert learner.doing == "learn" and learner.age is not None and learner.age >= 0.02 and learner.idle == 0
        assert learner.more == "version 7"
        with clock.of("rollout"):
            time.sleep(0.05)
            learner = watch.rows()[-1]
        assert learner.doing == "waits (rollout)" and learner.idle is not None and learner.idle > 0.1
        assert watch.rows()[-1].doing == "between steps"
        line = watch.line()
        assert line.startswith("2 of 2 engines ready, 1 turns and 10 tokens in flight, idle ")
        assert "; queue: 5 groups, 2 ended; learner idle " in line
        for turn in (one, held):
            turn.cancel()
        await asyncio.gather(one, held, return_exceptions=True)

    asyncio.run(play())


@pytest.mark.prove
def test_the_clock_of_a_step_tells_how_full_the_queue_was(tmp_path: Path) -> None:
    run = tiny_run(staleness=1, steps=4)
    asyncio.run(play(tiny_parts(tmp_path / "ahead", run)))
    clocks = [s.clock for s in steps(tmp_path / "ahead") if s.stage == "rl"]
    assert [c["queue/groups"] for c in clocks] == [8, 8, 8, 4], "two steps of 4 prompts, and at the end the last one"
    assert all(0 <= c["queue/ended"] <= c["queue/groups"] for c in clocks)
    asyncio.run(play(tiny_parts(tmp_path / "in turn", tiny_run(steps=1))))
    assert not any("queue/groups" in s.clock for s in steps(tmp_path / "in turn"))


def logged(terminal: Terminal, *indices: int) -> None:
    for i in indices:
        terminal.log(Step("rl", i, i, {"rollout/reward": Gauge(1, 2), "engine/tokens": Gauge(40, 4)}))


@pytest.mark.prove
def test_a_note_does_not_end_the_table() -> None:
    out = io.StringIO()
    terminal = Terminal(tiny_run(), PlainConsole(file=out, force_terminal=True, width=110), notebook=False)
    terminal.roles = watched(scripted_pool(Script(), 1), RoleCosts())
    terminal.log(Step("rl", 1, 1, {}, notes=("look at this",)))
    assert "note: step 1: look at this" in out.getvalue()
    out.truncate(0)
    time.sleep(0.6)
    assert "engine 0" in out.getvalue(), "the next step may take long"
    terminal.log(Step("rl", 3, 3, {}, notes=("and at that",)))
    out.truncate(0)
    time.sleep(0.4)
    assert not out.getvalue(), "after the last step there is none"
    terminal.close({})


def watched(pool: EnginePool, clock: RoleCosts) -> RoleWatch:
    return RoleWatch(pool, parts_of(), clock)


@pytest.mark.prove
def test_a_terminal_draws_the_table_also_while_the_learner_computes() -> None:
    out, clock = io.StringIO(), RoleCosts()
    terminal = Terminal(tiny_run(), PlainConsole(file=out, force_terminal=True, width=110), notebook=False)
    terminal.roles = watched(scripted_pool(Script(), 2), clock)
    with clock.of("learn"):
        logged(terminal, 1, 2)
        before = out.getvalue().count("engine 1")
        time.sleep(1.2)  # the learner computes in the thread of the event loop
        frames = out.getvalue()
    terminal.close({})
    assert frames.count("engine 1") >= before + 2, "it is drawn again and again meanwhile"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frames)
    assert re.search(r"role +does +holds +tokens in flight +for +idle", text)
    assert re.search(r"engine 0 +ready +0 turns +0 +\d+% +version 0, 0 restarts", text)
    assert re.search(r"learner +learn +\d\.\d s +\d+% +version 7", text)
    assert "rl" in text and "2/3" in text, "the line of the stage stands above it"


def test_without_a_terminal_it_is_one_plain_line() -> None:
    out = io.StringIO()
    terminal = Terminal(tiny_run(), PlainConsole(file=out, soft_wrap=True), notebook=False)
    terminal.roles = watched(scripted_pool(Script(), 2), RoleCosts())
    logged(terminal, 1, 2, 3)
    terminal.close({})
    lines = out.getvalue().splitlines()
    assert len(lines) == 2, "the first of a stage, and the last"
    assert all("2 of 2 engines ready, 0 turns and 0 tokens in flight, idle 100%; learner idle 0%" in x for x in lines)


def test_a_narrow_terminal_still_gets_every_role() -> None:
    out = io.StringIO()
    PlainConsole(file=out, width=60).print(drawn(watched(scripted_pool(Script(), 3), RoleCosts()).rows()))
    rows = [line.split()[0] for line in out.getvalue().splitlines()[1:]]
    assert len(rows) == 5 and all(row[:3] in ("eng", "rou", "lea") for row in rows), (
        "one line each, cut and not wrapped"
    )
