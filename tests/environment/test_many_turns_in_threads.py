"""Work of many episodes in threads: nobody runs out of time because of another, and what was stopped has no effect."""

from __future__ import annotations

import _thread
import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.stop import EpisodeLimits
from posttrain.environment.tools import database
from posttrain.environment.tools.database import Database
from posttrain.environment.tools.fair_queue import AT_ONCE, SLICE, FairQueue, QueuedWork
from posttrain.environment.tools.tool import Observation, Toolbox, tool
from posttrain.verifier.calling import ToolCall

LIMITS = EpisodeLimits()
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT count(*) FROM c"
COUNT = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x < {n}) SELECT count(*) FROM c"
TABLE = "CREATE TABLE t(a); INSERT INTO t VALUES (1)"


async def query(box: Toolbox, sql: str, seconds: float = 10.0) -> Observation:
    return await box.call(ToolCall("query", {"sql": sql}), replace(LIMITS, tool_seconds=seconds))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread outlives its work, and every turn is given back."""
    before = _thread._count()
    yield
    until = time.monotonic() + 10
    while _thread._count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert _thread._count() <= before and database.QUEUE._free == AT_ONCE and not database.QUEUE.crowded


@pytest.mark.prove
async def test_endless_queries_of_others_stop_nobody_else() -> None:
    """Eight episodes ask what has no end; six change one row, and one computes for longer than its share of the clock
    allows."""
    slow, quick, long = [Database() for _ in range(8)], [Database(TABLE) for _ in range(6)], Database()
    hogs = [asyncio.create_task(query(b, ENDLESS, 0.5)) for b in slow]
    await asyncio.sleep(0.1)
    seen = await asyncio.gather(
        *(query(b, "UPDATE t SET a=2", 0.5) for b in quick), query(long, COUNT.format(n=200_000), 0.5)
    )
    assert [o.kind for o in seen] == ["ok"] * 7 and [b.state() for b in quick] == [{"t": [[2]]}] * 6
    for o in await asyncio.gather(*hogs):
        assert (o.kind, o.text) == ("timeout", "error: query took longer than 0.5 s and was stopped")
    for b in (*slow, *quick, long):
        await b.close()


async def test_a_short_query_does_not_wait_for_the_end_of_long_ones() -> None:
    hogs = [Database() for _ in range(2 * AT_ONCE)]
    running = [asyncio.create_task(query(b, ENDLESS)) for b in hogs]
    await asyncio.sleep(0.2)
    async with Database(TABLE) as box:
        assert (await query(box, "SELECT a FROM t")).seconds < 1.0 and not any(r.done() for r in running)
    for r in running:
        r.cancel()
    for b in hogs:
        await b.close()


async def test_what_was_stopped_has_no_effect_for_good() -> None:
    async with Database("CREATE TABLE t(a); INSERT INTO t VALUES (1), (2), (3)") as box:
        before = box.state()
        change = f"UPDATE t SET a = a + ({ENDLESS} WHERE x > t.a)"
        assert (await query(box, change, 0.2)).kind == "timeout" and box.state() == before
        await asyncio.sleep(0.3)
        assert box.state() == before and (await query(box, "SELECT sum(a) FROM t")).text == "sum(a)\n6"
        assert (await query(box, "UPDATE t SET a = 5")).text == "3 rows changed" and box.state() == {"t": [[5]] * 3}


async def test_a_transaction_that_is_lost_with_a_statement_is_told() -> None:
    """SQLite undoes the open transaction when a change inside it is interrupted: then that is said, and the state says
    the same."""
    async with Database(TABLE) as box:
        for sql in ("BEGIN", "UPDATE t SET a = 2"):
            assert (await query(box, sql)).kind == "ok"
        assert box.state() == {"t": [[2]]}
        seen = await query(box, ENDLESS, 0.1)
        assert (seen.kind, "undone" in seen.text, box.state()) == ("timeout", False, {"t": [[2]]}), (
            "a look loses nothing"
        )
        seen = await query(box, f"UPDATE t SET a = ({ENDLESS} WHERE x > t.a)", 0.1)
        assert (
            seen.text == "error: query took longer than 0.1 s and was stopped; the transaction that was open was undone"
        )
        assert box.state() == {"t": [[1]]}


async def test_a_call_that_was_stopped_before_its_turn_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    line = FairQueue(1)
    monkeypatch.setattr(database, "QUEUE", line)
    turn = line.ask(0.0)
    async with Database(TABLE) as box:
        waiting = asyncio.create_task(query(box, "UPDATE t SET a = 2", 0.05))
        await asyncio.sleep(0.3)
        assert not waiting.done(), "waiting costs no time"
        waiting.cancel()
        await asyncio.wait([waiting])
        assert turn.done()
        line.leave()
        await asyncio.sleep(0.1)
        assert box.state() == {"t": [[1]]} and (await query(box, "SELECT a FROM t")).text == "a\n1"
    assert line._free == 1


async def test_a_cancelled_call_ends_soon_and_gives_its_turn_back_at_once() -> None:
    async with Database(TABLE) as box:
        running = asyncio.create_task(query(box, ENDLESS))
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.wait([running])
        assert database.QUEUE._free == AT_ONCE
        assert (await query(box, "SELECT a FROM t")).text == "a\n1"


@pytest.mark.prove
async def test_what_a_policy_makes_of_its_tables_holds_up_nobody() -> None:
    """The state is read in the same thread, in a bounded time, and not by whoever looks at it."""
    box = Database(TABLE, tables=["t", "u"])
    async with box:
        assert (await query(box, "DROP TABLE t")).kind == "ok"
        ticks: list[float] = []
        made = asyncio.create_task(query(box, f"CREATE VIEW t AS {ENDLESS}"))
        while not made.done():
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            ticks.append(time.monotonic() - begun)
        assert (await made).kind == "ok" and max(ticks) < 1.0
        begun = time.monotonic()
        assert box.state() == {"t": [], "u": []} and time.monotonic() - begun < 0.1
        await query(box, "CREATE TABLE u AS SELECT 7 AS x")
        assert box.state() == {"t": [], "u": [[7]]}, "what is slow costs the others nothing"


async def test_a_tool_without_a_clock_of_its_own_is_stopped_on_the_wall() -> None:
    class Sleepy(Toolbox):
        @tool
        async def wait(self) -> str:
            """Waits."""
            await asyncio.sleep(30)
            return ""

    seen = await Sleepy().call(ToolCall("wait", {}), replace(LIMITS, tool_seconds=0.02))
    assert (seen.kind, seen.text) == ("timeout", "error: wait took longer than 0.02 s and was stopped")


# --- the line ---------------------------------------------------------------------------------------------------------


def test_who_used_least_goes_first() -> None:
    line = FairQueue(1)
    running = line.ask(0.0)
    turns = {used: line.ask(used) for used in (0.3, 0.1, 0.2)}
    assert running.done() and not any(t.done() for t in turns.values())
    for used in (0.1, 0.2, 0.3):
        line.leave()
        assert [u for u, t in sorted(turns.items()) if t.done()] == [u for u in (0.1, 0.2, 0.3) if u <= used]
    line.leave()
    assert line._free == 1


@given(
    at_once=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(["ask", "leave", "cancel"]), st.integers(0, 9)), max_size=40),
)
@settings(max_examples=100)
def test_turns_are_neither_lost_nor_given_twice(at_once: int, moves: list[tuple[str, int]]) -> None:
    line, asked, held = FairQueue(at_once), list[Future[None]](), 0
    for move, i in moves:
        if move == "ask":
            asked.append(line.ask(i / 10))
        elif move == "cancel" and asked:
            asked[i % len(asked)].cancel()
        elif move == "leave" and any(t.done() and not t.cancelled() for t in asked):
            asked.remove(next(t for t in asked if t.done() and not t.cancelled()))
            line.leave()
        held = sum(t.done() and not t.cancelled() for t in asked)
        waits = sum(not t.done() for t in asked)
        assert held <= at_once and (held == at_once or not waits)
    assert line._free == at_once - held


@pytest.mark.prove
async def test_jobs_take_turns_and_many_at_once_all_end() -> None:
    """Hundreds more than run at once, each asking to be let go first now and then; some are stopped, some cancelled on
    their way."""
    line = FairQueue(2)

    def spin(job: list[QueuedWork], seconds: float) -> Any:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            if job[0].tick():
                raise InterruptedError
        return seconds

    async def one(i: int) -> Any:
        job: list[QueuedWork] = []
        job.append(QueuedWork(line, lambda: spin(job, (3 if i % 10 == 0 else 0.1) * SLICE), lambda: None))
        return await job[0].run(SLICE if i % 20 == 0 else 10.0)

    tasks = [asyncio.create_task(one(i)) for i in range(300)]
    await asyncio.sleep(0.05)
    for t in tasks[5::7]:
        t.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for i, x in enumerate(ended):
        allowed = (InterruptedError, asyncio.CancelledError) if i % 20 == 0 else (asyncio.CancelledError,)
        assert isinstance(x, float) or (isinstance(x, allowed) and (i % 7 == 5 or i % 20 == 0)), (i, x)
    assert line._free == 2 and not line.crowded
