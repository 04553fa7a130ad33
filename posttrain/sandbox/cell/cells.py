"""A session inside its own process: pieces of a program one after the other, in one namespace that is kept between
them.

Each piece is answered as a notebook cell would be: what it printed, then the repr of a last expression. One socket
brings the pieces and takes a line for each that is done; the streams are those of any program. Like a job's, every word
said here is the program's own.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import os
import sys
from types import ModuleType
from typing import Any

from . import program

LENGTH = 8
"""Bytes of the number before a piece: how long it is."""


def converse(wire: int) -> int:
    """Answer pieces until the wire ends; the exit status."""
    module = ModuleType("__main__")
    program.begin(module)
    # So that lines printed before a piece is killed have arrived: a killed process flushes nothing.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    done = 0
    while (piece := _piece(wire)) is not None:
        done += 1
        status = _cell(piece, f"<cell {done}>", module.__dict__)
        program.flushed(status)
        os.write(wire, b"%d %d\n" % (done, status))
    return 0


def _piece(wire: int) -> bytes | None:
    head = _exactly(wire, LENGTH)
    return None if head is None else _exactly(wire, int.from_bytes(head, "big"))


def _exactly(wire: int, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(wire, min(65536, count - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _cell(piece: bytes, name: str, space: dict[str, Any]) -> int:
    """Run one piece; 0, 1 for an exception (SystemExit too: it ends the piece, not the session), or MEMORY_ERROR."""
    try:
        # As in a notebook: the last statement, if it is an expression, is taken off and evaluated apart for its value.
        tree = ast.parse(piece, name)
        _remember(piece, name)
        last = tree.body[-1] if tree.body else None
        shown = tree.body.pop() and last.value if isinstance(last, ast.Expr) else None
        # dont_inherit: else the `from __future__` of this file would hold for the program.
        exec(compile(tree, name, "exec", dont_inherit=True), space)
        if shown is not None:
            value = eval(compile(ast.Expression(shown), name, "eval", dont_inherit=True), space)
            if value is not None:
                builtins._ = value  # type: ignore[attr-defined]
                print(repr(value))
    except SystemExit as leave:
        program.say(f"SystemExit: {leave.code}\n")
        return 1
    except MemoryError:
        program.say("MemoryError\n")
        return program.MEMORY_ERROR
    except BaseException as error:
        program.say(program.trace(error, "<cell "))
        return 1
    return 0


def _remember(piece: bytes, name: str) -> None:
    """So that a traceback shows the line that failed."""
    text = piece.decode("utf-8", "replace")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
