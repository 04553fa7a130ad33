"""An SQLite database of one episode, in memory. What SQL may do here is read and change that database, for a bounded
time."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any

from posttrain.environment.tools.fair_queue import FairQueue, QueuedWork
from posttrain.environment.tools.tool import OutOfTime, Toolbox, ToolError, own_clock, tool

SECONDS = 2.0
"""Processor time of one statement, and of reading the tables after it: far more than any sensible one takes in so small
a database."""
LINE = FairQueue()
"""Statements of all databases of this process take turns."""
MOST_ROWS = 50
"""Of one answer."""
MOST_KEPT = 1000
"""Rows of a table that a verifier sees."""
MOST_BYTES = 16 << 20
"""Of one database."""
HEAP = 512 << 20
"""Bytes that SQLite may hold in this process, over all databases: what one query builds while it runs is in no other
limit."""
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 20,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 10,
}
_ALLOWED = frozenset(
    (
        *(sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION),
        *(sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE),
        *(
            sqlite3.SQLITE_TRANSACTION,
            sqlite3.SQLITE_SAVEPOINT,
            sqlite3.SQLITE_ANALYZE,
            sqlite3.SQLITE_REINDEX,
            sqlite3.SQLITE_ALTER_TABLE,
        ),
        *(
            sqlite3.SQLITE_CREATE_TABLE,
            sqlite3.SQLITE_CREATE_INDEX,
            sqlite3.SQLITE_CREATE_VIEW,
            sqlite3.SQLITE_CREATE_TRIGGER,
        ),
        *(sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_DROP_VIEW, sqlite3.SQLITE_DROP_TRIGGER),
    )
)
_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"})
"""Refused by name."""


class Database(Toolbox):
    """One in-memory database, closed with the episode.

    A statement runs in a thread while it lasts, at its turn, and takes as long as its own processor time says: SQL in
    memory waits for nothing, so what is lost on the clock is others' doing. One that is stopped has no effect.

    Args:
        script: SQL that fills it first; trusted.
        tables: what `state` shows, all of them where None.
        seconds: processor time of one statement, where a call may take longer.
    """

    def __init__(self, script: str = "", tables: Sequence[str] | None = None, seconds: float = SECONDS) -> None:
        self._tables, self._seconds = tables, seconds
        self._job: QueuedWork | None = None
        self._reading = 0.0
        """While the tables are read: the processor time of the thread at which that ends."""
        self._guard = threading.Lock()
        self._connection = c = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        c.executescript(script)
        c.execute(f"PRAGMA max_page_count = {max(1, MOST_BYTES // 4096)}")
        c.execute(f"PRAGMA hard_heap_limit = {HEAP}")
        self._state = self._read()
        for limit, value in _LIMITS.items():
            c.setlimit(limit, value)
        c.set_authorizer(_authorize)
        c.set_progress_handler(self._over, 10_000)

    @tool
    async def query(self, sql: Annotated[str, "one statement of SQLite's SQL"]) -> str:
        """Runs one SQL statement. A query shows its columns and rows, a change the number of rows it changed."""
        seconds = min(own_clock(), self._seconds)
        await self._idle()
        within = self._connection.in_transaction
        self._job = job = QueuedWork(LINE, lambda: self._execute(sql), self._interrupt)
        try:
            return await job.run(seconds)
        except (ToolError, InterruptedError):
            if not job.stopped:
                raise
            undone = within and not self._connection.in_transaction
            raise OutOfTime(seconds, "the transaction that was open was undone" if undone else "") from None

    def _execute(self, sql: str) -> str:
        """In the job's thread: the answer, and the state that the statement leaves."""
        c, changes = self._connection, self._connection.total_changes
        try:
            cursor = c.execute(sql)
            looked = cursor.description is not None
            rows = cursor.fetchmany(MOST_ROWS + 1) if looked else []
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
            self._state = self._read()
            raise ToolError(str(error) or type(error).__name__) from None
        if not looked or c.total_changes != changes:
            self._state = self._read()
        if not looked:
            return f"{max(cursor.rowcount, 0)} rows changed"
        lines = [
            " | ".join(column[0] for column in cursor.description),
            *(" | ".join(map(_shown, row)) for row in rows[:MOST_ROWS]),
        ]
        return "\n".join(lines) + (
            f"\n(more than {MOST_ROWS} rows; the rest is not shown)" if len(rows) > MOST_ROWS else ""
        )

    def _over(self) -> bool:
        """Whether what runs has to end; SQLite asks this every so often."""
        stopped = self._job is not None and self._job.tick()
        return time.thread_time() > self._reading if self._reading else stopped

    def _interrupt(self) -> None:
        """End the statement of the policy, from another thread; reading what it left goes on."""
        with self._guard:
            if not self._reading:
                self._connection.interrupt()

    async def _idle(self) -> None:
        """A statement that was stopped has really ended."""
        if self._job is not None:
            await asyncio.wait([self._job.done])
            self._job = None

    def state(self) -> dict[str, list[list[Any]]]:
        """Rows of the tables in their order, after the last statement that ended."""
        return self._state

    def _read(self) -> dict[str, list[list[Any]]]:
        """The state. Where a statement ran: what the policy made of its tables may be slow to read, and must not hold
        up others."""
        with self._guard:
            self._reading = time.thread_time() + SECONDS
        try:
            c = self._connection
            names = self._tables or [
                n for (n,) in c.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
            ]
            return {name: self._rows(name) for name in names}
        finally:
            self._reading = 0.0

    def _rows(self, table: str) -> list[list[Any]]:
        """[] where the policy left a table that cannot be read: one it dropped, or made of columns that fail or take
        too long."""
        quoted = table.replace('"', '""')
        try:
            return [list(row) for row in self._connection.execute(f'SELECT * FROM "{quoted}"').fetchmany(MOST_KEPT)]
        except (sqlite3.Error, MemoryError):
            return []

    async def close(self) -> None:
        if self._job is not None:
            self._job.stop()
            await asyncio.wait([self._job.done])
        self._connection.close()


def _authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
    if action not in _ALLOWED or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _shown(value: Any) -> str:
    return "NULL" if value is None else f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
