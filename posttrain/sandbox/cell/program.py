"""One job inside its own process: run the program, or call one of its functions, and leave.

Nothing said here is trusted outside: the program shares this process and can forge all of it. It is given arguments and
never expected values, so what it can forge is its own answer.
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
DEPTH, NODES = 100, 200_000


class NotPlain(Exception):
    """A result that is not made of exact built-in types, or is too deep or too large."""


def encode(value: Any, depth: int = 0, count: list[int] | None = None) -> Any:
    """A value as JSON that keeps its type: lists, tuples, sets, dicts and bytes are tagged.

    Exact types only. A subclass of int could lie about what it equals, so it is not an int here. An array of numpy is
    the list, and a scalar of numpy the number, truth or text that it holds.
    """
    # A list, so that all levels count in one place: the bound is on the whole value.
    seen = [0] if count is None else count
    seen[0] += 1
    if depth > DEPTH or seen[0] > NODES:
        raise NotPlain(f"the result is deeper than {DEPTH} or has more than {NODES} parts")
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        # Hexadecimal: Python refuses to turn more than 4300 decimal digits into a number and back.
        return {"int": hex(value)}
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return {kind.__name__: [encode(v, depth + 1, seen) for v in value]}
    if kind is dict:
        return {"dict": [[encode(k, depth + 1, seen), encode(v, depth + 1, seen)] for k, v in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if (plain := _of_numpy(value)) is not value:
        return encode(plain, depth, seen)
    raise NotPlain(f"the result has type {kind.__name__!s:.80}, which is not a plain built-in type")


def _of_numpy(value: Any) -> Any:
    """An array or a scalar of numpy as built-in values; anything else, an array of other things or one too large, as it
    is."""
    # Never imported here: without numpy in the sandbox no value can be of it. By exact type again, because a
    # subclass of ndarray may answer `tolist` with anything.
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
    """Run the program as `__main__`; with a `call`, import it and write the value of that call to `result`. The exit
    status."""
    # A function is called in a module of another name, so what stands under `if __name__ == "__main__"` does not run.
    module = ModuleType("solution" if call else "__main__")
    begin(module)
    try:
        status = _guarded(source, call, result, module)
        # The process leaves by os._exit, which does nothing of what an interpreter does at its end: wait for
        # threads, run exit functions, close files. An honest program relies on all three.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        # what only the program's names held is closed, and so written, as at the end of any Python
        module.__dict__.clear()
    except SystemExit as leave:
        status = _status(leave)
    except MemoryError:
        status = MEMORY_ERROR
    except BaseException:
        status = 1
    return flushed(status)


def begin(module: ModuleType) -> None:
    """Make `module` the main one, and every program start from the same random state (numpy's is inherited so)."""
    # Under both names: pickle, dataclasses and typing look a class's module up by its name.
    module.__dict__["__builtins__"] = builtins
    sys.modules[module.__name__] = sys.modules["__main__"] = module
    sys.argv = ["program"]
    module.__dict__["__file__"] = "program"
    streams()
    random.seed(0)


def streams() -> None:
    """The standard streams anew: those of the zygote were made for other files, of which Python remembers whether they
    can seek."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115 (open as long as the program)
        raw.raw.name = f"<{name}>"  # type: ignore[attr-defined]
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=name == "stderr")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _guarded(source: bytes, call: bytes, result: int, module: ModuleType) -> int:
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
    # A class on the way is instantiated, so `Solution.f` is bound.
    for part in call["function"].split("."):
        target = getattr(target() if isinstance(target, type) else target, part)
    value = target(*decode(call["args"]), **decode(call["kwargs"]))
    try:
        text = json.dumps({"value": encode(value)})
    except (NotPlain, RecursionError) as error:
        text = json.dumps({"type": str(error)})
    # A pipe takes what there is room for.
    rest = text.encode()
    while rest:
        rest = rest[os.write(result, rest) :]


def _status(leave: SystemExit) -> int:
    code = leave.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF
    say(f"{code}\n")
    return 1


def trace(error: BaseException, name: str = NAME) -> str:
    """The traceback from the program's own first line on (in a file named `name...`): our frames are nobody's
    business."""
    # A syntax error has no frame of the program; then no frame is shown at all.
    at = error.__traceback__
    while at is not None and not at.tb_frame.f_code.co_filename.startswith(name):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error.with_traceback(at), at, limit=20, chain=False))


def say(text: str) -> None:
    try:
        sys.stderr.write(text)
    except BaseException:
        return  # the program closed or replaced its stderr


def flushed(status: int) -> int:
    """Push out what the streams hold, those too that the program put others in the place of; 1 instead of 0 where that
    fails. One that it closed has nothing to say."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException:
            status = status or 1
    return status
