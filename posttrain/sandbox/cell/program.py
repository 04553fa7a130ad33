"""One job inside its own process: runs the program, or calls one of its functions, and ends.

Nothing that this process reports is trusted outside, because the program runs in it and can forge all of it. The
process gets arguments and never expected values, so the program can only forge its own answer.
"""

from __future__ import annotations

import atexit
import builtins
import io
import json
import os
import random
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

MEMORY_ERROR = 121
"""Exit status of a program that ended with MemoryError."""
NAME = "<program>"
"""Name of the program's file in tracebacks."""
DEPTH, NODES = 100, 200_000
"""The deepest nesting and the most parts of a result."""


class NotPlain(Exception):
    """A result that is not made of exact built-in types, or is too deep or too large."""


def encode(value: Any, depth: int = 0, count: list[int] | None = None) -> Any:
    """A value as JSON that keeps its type: lists, tuples, sets, dicts and bytes are tagged.

    Only exact types are accepted: a subclass of int could compare equal to anything. An array of numpy is written as a
    list, and a scalar of numpy as the number, truth value or text that it holds.
    """
    # The count is in a list, so that all levels of the recursion share it. The bound is on the whole value.
    parts = [0] if count is None else count
    parts[0] += 1
    if depth > DEPTH or parts[0] > NODES:
        raise NotPlain(f"the result is deeper than {DEPTH} or has more than {NODES} parts")
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        # Hexadecimal, because Python refuses to convert more than 4300 decimal digits.
        return {"int": hex(value)}
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return {kind.__name__: [encode(v, depth + 1, parts) for v in value]}
    if kind is dict:
        return {"dict": [[encode(k, depth + 1, parts), encode(v, depth + 1, parts)] for k, v in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if (plain := _of_numpy(value)) is not value:
        return encode(plain, depth, parts)
    raise NotPlain(f"the result has type {kind.__name__!s:.80}, which is not a plain built-in type")


def _of_numpy(value: Any) -> Any:
    """An array or a scalar of numpy as built-in values. Anything else is returned as it is, and so are arrays that are
    too large or have elements of other kinds."""
    # numpy is not imported here: if the program has not imported it, no value is of it. Exact types again, because
    # `tolist` of a subclass of ndarray may return anything.
    numpy = sys.modules.get("numpy")
    kind = type(value)
    if numpy is None or not (kind is numpy.ndarray or kind in numpy.sctypeDict.values()):
        return value
    # A longdouble has more digits than a float, so it is not one. Arrays of objects are read element by element.
    known = value.dtype.kind in "biufUO" and not (value.dtype.kind == "f" and value.dtype.itemsize > 8)
    return value.tolist() if known and value.size <= NODES else value


def decode(said: Any) -> Any:
    """Returns the value that `encode` wrote. Raises ValueError or TypeError where `said` is no such thing."""
    if said is None or isinstance(said, bool | str | float):
        return said
    if not isinstance(said, dict) or len(said) != 1:
        raise ValueError("not an encoded value")
    ((kind, body),) = said.items()
    if kind == "int":
        return int(body, 16)
    if kind == "bytes":
        return bytes.fromhex(body)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in body}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(decode(v) for v in body)
    raise ValueError(f"unknown tag {kind!r}")


def run(source: bytes, call: bytes, result: int) -> int:
    """Run the program as `__main__`, or call a function of it and write the value to `result`. Returns the status."""
    # For a call the module has another name, so that code under `if __name__ == "__main__"` does not run.
    module = ModuleType("solution" if call else "__main__")
    begin(module)
    try:
        status = _guarded(source, call, result, module)
        # The process ends by os._exit. So the steps of an interpreter's end have to be made here: wait for threads, run
        # exit functions, close files. An honest program relies on all three.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        # This closes files that only the program's names refer to, and so writes their buffers.
        module.__dict__.clear()
    # Raised by a signal handler of the program, or while its error is printed. `_guarded` caught everything else.
    except SystemExit as leave:
        status = _status(leave)
    except MemoryError:
        status = MEMORY_ERROR
    except BaseException:
        status = 1
    return flushed(status)


def begin(module: ModuleType) -> None:
    """Make `module` the main module, and set the random state of every program; numpy's comes from the zygote."""
    # Under both names, because pickle, dataclasses and typing look up a class's module by its name.
    module.__dict__["__builtins__"] = builtins
    sys.modules[module.__name__] = sys.modules["__main__"] = module
    sys.argv = ["program"]
    module.__dict__["__file__"] = "program"
    streams()
    random.seed(0)


def streams() -> None:
    """Makes the standard streams anew: those of the zygote remember whether the files that they had can seek."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115 (open as long as the program)
        file.raw.name = f"<{name}>"  # type: ignore[attr-defined]
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = io.TextIOWrapper(file, encoding="utf-8", errors=errors, line_buffering=name == "stderr")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _guarded(source: bytes, call: bytes, result: int, module: ModuleType) -> int:
    """Runs the program, and the call if there is one. Returns the exit status."""
    try:
        exec(compile(source, NAME, "exec", dont_inherit=True), module.__dict__)
        if call:
            _answer(json.loads(call), result, module)
    except SystemExit as leave:
        return _status(leave)
    except MemoryError:
        say("MemoryError\n")
        return MEMORY_ERROR
    except BaseException as error:
        say(trace(error))
        return 1
    return 0


def _answer(call: dict[str, Any], result: int, module: ModuleType) -> None:
    """Call the function that was asked for, by its dotted name; `Solution.f` is a method of a fresh `Solution()`."""
    target: Any = module
    # A class in the dotted name is instantiated, so that `Solution.f` is a bound method.
    for name in call["function"].split("."):
        target = getattr(target() if isinstance(target, type) else target, name)
    value = target(*decode(call["args"]), **decode(call["kwargs"]))
    try:
        text = json.dumps({"value": encode(value)})
    except (NotPlain, RecursionError) as error:
        text = json.dumps({"type": str(error)})
    # One write may take only a part, as much as the pipe has room for.
    unwritten = text.encode()
    while unwritten:
        unwritten = unwritten[os.write(result, unwritten) :]


def _status(leave: SystemExit) -> int:
    """The exit status of a SystemExit, as Python's own: text is printed and gives 1."""
    code = leave.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF
    say(f"{code}\n")
    return 1


def trace(error: BaseException, name: str = NAME) -> str:
    """The traceback from the first frame of the program on, whose file is named `name...`. Our frames are left out."""
    # A syntax error has no frame of the program. Then no frame is shown.
    at = error.__traceback__
    while at is not None and not at.tb_frame.f_code.co_filename.startswith(name):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error.with_traceback(at), at, limit=20, chain=False))


def say(text: str) -> None:
    """Writes to standard error, if the program left it open."""
    try:
        sys.stderr.write(text)
    except BaseException:
        return  # the program closed or replaced its stderr


def flushed(status: int) -> int:
    """Flushes the standard streams, also those that the program replaced. Returns the status, or 1 instead of 0 if that
    fails. Streams that the program closed are left out."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException:
            status = status or 1
    return status
