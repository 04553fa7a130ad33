"""A session inside its own process: pieces of a program, run one after the other in one namespace.

A piece shows what a notebook cell would: what it printed, then the repr of a last expression. The pieces come over one
socket, and a line for each piece that is done goes back over it. The output goes to the standard streams. As with a
job, nothing that comes from this process is trusted, because the program could have written it.
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
"""Bytes of the number before a piece, which is the length of the piece."""


def converse(wire: int) -> int:
    """Answer pieces until the wire ends. Returns the exit status."""
    module = ModuleType("__main__")
    program.begin(module)
    # Each line is written at once, because a killed process writes nothing from its buffers.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    done = 0
    while (piece := _piece(wire)) is not None:
        done += 1
        status = _cell(piece, f"<cell {done}>", module.__dict__)
        program.flushed(status)
        os.write(wire, b"%d %d\n" % (done, status))
    return 0


def _piece(wire: int) -> bytes | None:
    """The next piece; None at the end of the wire."""
    head = _exactly(wire, LENGTH)
    return None if head is None else _exactly(wire, int.from_bytes(head, "big"))


def _exactly(wire: int, count: int) -> bytes | None:
    """`count` bytes of the wire; None if it ends before."""
    parts = bytearray()
    while len(parts) < count:
        part = os.read(wire, min(65536, count - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _cell(piece: bytes, name: str, namespace: dict[str, Any]) -> int:
    """Run one piece. Returns 0, or 1 for an exception, or MEMORY_ERROR. SystemExit ends only the piece."""
    try:
        # As in a notebook, a last statement that is an expression is evaluated separately, because its value is shown.
        tree = ast.parse(piece, name)
        _remember(piece, name)
        last = tree.body[-1] if tree.body else None
        # `pop` takes the statement out of the tree and returns it. It is true, so `shown` is its expression.
        shown = tree.body.pop() and last.value if isinstance(last, ast.Expr) else None
        # With `dont_inherit` the `from __future__` of this file does not apply to the program.
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if shown is not None:
            value = eval(compile(ast.Expression(shown), name, "eval", dont_inherit=True), namespace)
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
    """Keeps the source of a piece, so that a traceback can show the line that failed."""
    text = piece.decode("utf-8", "replace")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
