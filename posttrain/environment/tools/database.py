"""An SQLite database of one episode, in memory. What SQL may do here is read and change that database, for a bounded time."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from typing import Annotated, Any

from posttrain.environment.tools.tool import Toolbox, ToolError, tool

MOST_ROWS = 50
"""Of one answer."""
MOST_KEPT = 1000
"""Rows of a table that a verifier sees."""
MOST_BYTES = 16 << 20
"""Of one database."""
HEAP = 512 << 20
"""Bytes that SQLite may hold in this process, over all databases: what one query builds while it runs is in no other limit."""
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
        *(sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT, sqlite3.SQLITE_ANALYZE, sqlite3.SQLITE_REINDEX, sqlite3.SQLITE_ALTER_TABLE),
        *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_VIEW, sqlite3.SQLITE_CREATE_TRIGGER),
        *(sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_DROP_VIEW, sqlite3.SQLITE_DROP_TRIGGER),
    )
)
_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"})
"""Refused by name."""


class Database(Toolbox):
    """One in-memory database, closed with the episode.

    Args:
        script: SQL that fills it first; trusted.
        tables: what `state` shows, all of them where None.
    """

    def __init__(self, script: str = "", tables: Sequence[str] | None = None) -> None:
        self._tables = tables
        self._stop = threading.Event()
        self._running: asyncio.Future[Any] | None = None
        self._connection = c = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        c.executescript(script)
        c.execute(f"PRAGMA max_page_count = {max(1, MOST_BYTES // 4096)}")
        c.execute(f"PRAGMA hard_heap_limit = {HEAP}")
        for limit, value in _LIMITS.items():
            c.setlimit(limit, value)
        c.set_authorizer(_authorize)
        c.set_progress_handler(lambda: self._stop.is_set(), 10_000)

    @tool
    async def query(self, sql: Annotated[str, "one statement of SQLite's SQL"]) -> str:
        """Runs one SQL statement. A query shows its columns and rows, a change the number of rows it changed."""
        await self._idle()
        self._running = asyncio.ensure_future(asyncio.to_thread(self._execute, sql))
        self._running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            return await asyncio.shield(self._running)
        except asyncio.CancelledError:
            self._stop.set()
            raise

    def _execute(self, sql: str) -> str:
        try:
            cursor = self._connection.execute(sql)
            if cursor.description is None:
                return f"{max(cursor.rowcount, 0)} rows changed"
            rows = cursor.fetchmany(MOST_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
            raise ToolError(str(error) or type(error).__name__) from None
        lines = [" | ".join(column[0] for column in cursor.description), *(" | ".join(map(_shown, row)) for row in rows[:MOST_ROWS])]
        return "\n".join(lines) + (f"\n(more than {MOST_ROWS} rows; the rest is not shown)" if len(rows) > MOST_ROWS else "")

    async def _idle(self) -> None:
        """A statement that was stopped has really ended."""
        if self._running is not None:
            await asyncio.wait([self._running])
            self._running = None
        self._stop.clear()

    def state(self) -> dict[str, list[list[Any]]]:
        """Rows of the tables in their order; {} while a statement that was stopped still runs."""
        if self._running is not None and not self._running.done():
            return {}
        self._stop.clear()
        c = self._connection
        names = self._tables or [n for (n,) in c.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
        return {name: self._rows(name) for name in names}

    def _rows(self, table: str) -> list[list[Any]]:
        """[] where the policy left a table that cannot be read: one it dropped, or made of columns that fail."""
        quoted = table.replace('"', '""')
        try:
            return [list(row) for row in self._connection.execute(f'SELECT * FROM "{quoted}"').fetchmany(MOST_KEPT)]
        except (sqlite3.Error, MemoryError):
            return []

    async def close(self) -> None:
        self._stop.set()
        if self._running is not None:
            await asyncio.wait([self._running])
        self._connection.close()


def _authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
    if action not in _ALLOWED or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _shown(value: Any) -> str:
    return "NULL" if value is None else f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
