"""An SQLite database of one episode, in memory. SQL can only read and change this database, within a time limit."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any

from posttrain.environment.tools.fair_queue import FairQueue, QueuedWork
from posttrain.environment.tools.tool import OutOfTime, Toolbox, ToolError, own_clock, tool

SECONDS = 2.0
"""Most processor time of one statement, and of reading the tables after it: far more than a sensible one needs."""
QUEUE = FairQueue()
"""The queue for the statements of all databases of this process."""
MOST_ROWS = 50
"""The most rows of one answer."""
MOST_KEPT = 1000
"""The most rows of a table that a verifier sees."""
MOST_BYTES = 16 << 20
"""The most bytes of one database."""
HEAP = 512 << 20
"""The most bytes that SQLite may hold in this process, over all databases. No other limit covers the memory that a
query needs while it runs."""
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 20,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 10,
}
_ACTIONS = (
    "SELECT READ RECURSIVE FUNCTION INSERT UPDATE DELETE TRANSACTION SAVEPOINT ANALYZE REINDEX ALTER_TABLE "
    "CREATE_TABLE CREATE_INDEX CREATE_VIEW CREATE_TRIGGER DROP_TABLE DROP_INDEX DROP_VIEW DROP_TRIGGER"
)
_ALLOWED = frozenset(getattr(sqlite3, f"SQLITE_{name}") for name in _ACTIONS.split())
_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"})
"""Functions that are refused by name: they load code, or reach files, memory or other programs."""


class Database(Toolbox):
    """One in-memory database, closed with the episode.

    A statement runs in its own thread when its turn comes. Its limit is in its own processor time: SQL in memory waits
    for nothing, so other delays are caused by other jobs. A statement that is stopped has no effect.

    Args:
        script: trusted SQL that fills the database first.
        tables: the tables that `state` returns. None: all of them.
        seconds: most processor time of one statement, if a call may take longer.
    """

    def __init__(self, script: str = "", tables: Sequence[str] | None = None, seconds: float = SECONDS) -> None:
        self._tables, self._seconds = tables, seconds
        self._job: QueuedWork | None = None
        self._reading = 0.0
        """While the tables are read: the processor time of the thread at which reading is stopped. Else 0."""
        self._guard = threading.Lock()
        # Statements run one after the other, each in its own thread, so the check of the thread is off. With autocommit
        # the policy itself begins and ends transactions.
        self._connection = c = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        c.executescript(script)
        # The order matters. The script is trusted and may do more than the policy, so it runs first. The pragmas come
        # before the authorizer, which refuses them.
        c.execute(f"PRAGMA max_page_count = {max(1, MOST_BYTES // 4096)}")  # a page has 4096 bytes
        c.execute(f"PRAGMA hard_heap_limit = {HEAP}")
        self._state = self._read()
        for limit, value in _LIMITS.items():
            c.setlimit(limit, value)
        c.set_authorizer(_authorize)
        # Called every 10,000 steps of SQLite's virtual machine: often enough to stop in time, too seldom to cost much.
        c.set_progress_handler(self._over, 10_000)

    @tool
    async def query(self, sql: Annotated[str, "one statement of SQLite's SQL"]) -> str:
        """Runs one SQL statement. A query shows its columns and rows, a change the number of rows it changed."""
        seconds = min(own_clock(), self._seconds)
        await self._idle()
        # Stopping a statement may roll back the transaction in which it runs. The policy is told so.
        in_transaction = self._connection.in_transaction
        self._job = job = QueuedWork(QUEUE, lambda: self._execute(sql), self._interrupt)
        try:
            return await job.run(seconds)
        except (ToolError, InterruptedError):
            # The error is the statement's own and not of being stopped.
            if not job.stopped:
                raise
            undone = in_transaction and not self._connection.in_transaction
            raise OutOfTime(seconds, "the transaction that was open was undone" if undone else "") from None

    def _execute(self, sql: str) -> str:
        """Runs in the job's thread: executes the statement, updates the state, returns the answer."""
        c, changes_before = self._connection, self._connection.total_changes
        try:
            cursor = c.execute(sql)
            # One row more than is shown tells whether there are more.
            has_rows = cursor.description is not None
            rows = _fetched(cursor, MOST_ROWS + 1) if has_rows else []
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
            # The tables are read after an error too: it may have rolled back a transaction, or kept changes (OR FAIL).
            self._state = self._read()
            raise ToolError(str(error) or type(error).__name__) from None
        # The tables are read unless nothing changed. A query with rows may change some (RETURNING), and a change of the
        # schema is no query and changes no row.
        changed = c.total_changes - changes_before
        if not has_rows or changed:
            self._state = self._read()
        if not has_rows:
            # Python counts no rows of a statement that begins with WITH.
            return f"{changed if cursor.rowcount < 0 else cursor.rowcount} rows changed"
        lines = [" | ".join(column[0] for column in cursor.description)]
        lines += [" | ".join(map(_shown, row)) for row in rows[:MOST_ROWS]]
        if len(rows) > MOST_ROWS:
            lines.append(f"(more than {MOST_ROWS} rows; the rest is not shown)")
        return "\n".join(lines)

    def _over(self) -> bool:
        """Returns whether the running statement has to end. SQLite calls this regularly."""
        # Asked while the tables are read too, because `tick` lets other jobs go first.
        stopped = self._job is not None and self._job.tick()
        return time.thread_time() > self._reading if self._reading else stopped

    def _interrupt(self) -> None:
        """Stop the policy's statement, from another thread. Reading the tables after it is not stopped."""
        with self._guard:
            # `_reading` is set under the same lock, so no interrupt of a statement stops the reading of the tables.
            if not self._reading:
                self._connection.interrupt()

    async def _idle(self) -> None:
        """Wait until a statement that was stopped has ended."""
        if self._job is not None:
            await asyncio.wait([self._job.done])
            self._job = None

    def state(self) -> dict[str, list[list[Any]]]:
        """Rows of the tables, in order, after the last statement that ended."""
        return self._state

    def _read(self) -> dict[str, list[list[Any]]]:
        """The state. It is read in the statement's thread and within `SECONDS`, because the policy may have made tables
        that are slow to read."""
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
        """The rows of a table; [] if the policy dropped it, or gave it columns that fail or take too long."""
        # The policy chooses the names of tables, so a name may contain a quote.
        quoted = table.replace('"', '""')
        try:
            cursor = self._connection.execute(f'SELECT * FROM "{quoted}"')
            return [list(row) for row in _fetched(cursor, MOST_KEPT)]
        except (sqlite3.Error, MemoryError):
            return []

    async def close(self) -> None:
        if self._job is not None:
            self._job.stop()
            await asyncio.wait([self._job.done])
        self._connection.close()


def _fetched(cursor: sqlite3.Cursor, most: int) -> list[Sequence[Any]]:
    """The first rows of a query, at most `most`. MemoryError where they are larger than a whole database: a column may
    be computed, of any size."""
    rows: list[Sequence[Any]] = []
    size = 0
    for row in itertools.islice(cursor, most):
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > MOST_BYTES:
            cursor.close()
            raise MemoryError(f"the rows have more than {MOST_BYTES} bytes")
        rows.append(row)
    return rows


def _authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
    """SQLite asks this for each action of a statement: whether it is allowed. `second` is the name of a function."""
    if action not in _ALLOWED or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _shown(value: Any) -> str:
    """A value of a row as the policy is shown it."""
    return "NULL" if value is None else f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
