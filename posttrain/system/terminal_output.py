"""All output to a terminal goes through here, so that nothing in foreign text can control the screen.

Names of tasks and stages, answers, reasons, exceptions and templates may have escape sequences, line breaks or marks
that change the direction of writing. `visible` writes such characters out. `tell` prints a line, and `overwrite`
replaces the last one; no other function of the package may print.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import termios
import threading
import traceback
import warnings
from types import TracebackType
from typing import Any, TextIO

COLOURS = re.compile("\x1b\\[(?:0|1|2|31|32|33|36)m")
"""The escape sequences that posttrain itself writes into a line."""


def visible(text: str, keep: str = "") -> str:
    r"""The text with everything that is not a printable character or a space written out; characters in `keep` stay.

    Not printable are control characters of both ranges, marks of writing direction, invisible formatting, private and
    unassigned characters, halves of surrogate pairs, and all white space but the space.

    >>> visible("a\x1b[2Jb\n\u202e")
    'a\\x1b[2Jb\\n\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def visible_lines(text: str) -> str:
    """Like `visible`, but line breaks stay: for posttrain's own text with foreign text in it."""
    return visible(text, "\n")


def coloured_lines(text: str) -> str:
    """Like `visible_lines`, but posttrain's own colours stay. Foreign text in it has gone through `visible` before."""
    # The text between the known sequences is written out. Then the sequences are put back in their places.
    plain, colours = COLOURS.split(text), COLOURS.findall(text)
    return "".join(visible_lines(part) + code for part, code in zip(plain, [*colours, ""], strict=True))


def tell(text: str = "", *, file: TextIO | None = None, coloured: bool = False) -> None:
    """Print a line (or several) at once, to standard output where no other file is named."""
    shown = coloured_lines(text) if coloured else visible_lines(text)
    print(shown, file=sys.stdout if file is None else file, flush=True)


def overwrite(line: str, file: TextIO) -> None:
    """Put a line in the place of the last one in a terminal; '' only removes it."""
    print(f"\r\x1b[K{visible(line)}", end="", file=file, flush=True)


def leave_lost_terminal() -> None:
    """Called after SIGHUP: if the terminal is gone, output goes to the null device. Else printing would fail."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            # EIO: a terminal that is gone. Files and pipes give ENOTTY, and stay.
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


# --- what others print ------------------------------------------------------------------------------------------------


def guard_logs() -> None:
    """From here on, messages and tracebacks of every logger of this process are visible text, for any handler."""
    before = logging.getLogRecordFactory()
    # Already guarded: a second layer would only cost time.
    if getattr(before, "visible", False):
        return

    def make(*args: Any, **named: Any) -> logging.LogRecord:
        record = before(*args, **named)
        try:
            message = record.getMessage()
        except Exception:  # a call that does not fit its own form is reported by logging itself
            return record
        if not message.isprintable():
            # The message is formatted here and its arguments are dropped. Else they would bring foreign text in later.
            record.msg, record.args = visible_lines(message), ()
        if record.exc_info and record.exc_info[0] is not None:
            # Formatters take this text where it is set and make none of their own.
            record.exc_text = visible_lines("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return record

    make.visible = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make)


def quiet_libraries() -> None:
    """From here on, messages of libraries for programmers are not printed.

    Such messages say that a name is deprecated, or that a part of a package is missing which posttrain does not use.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(peft|torch|torchao|transformers)\b")


def guard_errors() -> None:
    """From here on, warnings and the tracebacks of uncaught exceptions are visible text."""
    standard_format = warnings.formatwarning
    if getattr(standard_format, "visible", False):
        return

    def formatted(*args: Any, **named: Any) -> str:
        return visible_lines(standard_format(*args, **named))

    def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), file=sys.stderr)

    def print_uncaught_in_thread(hook_args: threading.ExceptHookArgs) -> None:
        # Python's own hook says nothing of a thread that ends by SystemExit either.
        if hook_args.exc_type is not SystemExit and hook_args.exc_value is not None:
            print_uncaught(hook_args.exc_type, hook_args.exc_value, hook_args.exc_traceback)

    formatted.visible = True  # type: ignore[attr-defined]
    warnings.formatwarning, sys.excepthook, threading.excepthook = formatted, print_uncaught, print_uncaught_in_thread
