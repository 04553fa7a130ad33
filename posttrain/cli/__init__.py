"""The command line, `posttrain COMMAND`. Each command imports what it needs only when it is called.

`parser.COMMANDS` lists the commands. Errors of `system.errors` end with one message and their own exit code. Any other
exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from posttrain.cli.screen_text import screen_width
from posttrain.system.errors import PosttrainError, RunFolderError
from posttrain.system.files import full
from posttrain.system.shell import wrapped
from posttrain.system.terminal_output import guard_errors, guard_logs, leave_lost_terminal, quiet_libraries, tell


class Terminated(BaseException):
    """Raised by SIGTERM and SIGHUP outside a run, which handles them itself. Its argument is the signal's number."""


def _terminate(number: int, frame: FrameType | None) -> None:
    # After SIGHUP the terminal may be gone, and printing the message of `main` would fail.
    if number == signal.SIGHUP:
        leave_lost_terminal()
    raise Terminated(number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise `Terminated`. An ignored signal (`nohup`) stays ignored."""
    not_ignored = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    old_handlers = {number: signal.signal(number, _terminate) for number in not_ignored}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _full(error: OSError, why: str, advice: str) -> int:
    """Report a full disk outside a run folder: of a file, or of redirected standard output."""
    if not error.filename:
        # Python flushes standard output once more at its end, and would fail in the same way with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(OSError):
        tell(f"posttrain: {why}: {error.filename or 'the output'} was not written. {advice}", file=sys.stderr)
    return RunFolderError.exit_code


def _shown(message: str) -> str:
    """A message in the columns of a terminal. Elsewhere its lines stay whole, so that a program finds words in them."""
    return "\n".join(wrapped(message, screen_width())) if sys.stderr.isatty() else message


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        # Around the imports too: a signal at any time ends with a message and the exit code of shells for it.
        with _signals_raise():
            return _main(list(sys.argv[1:] if argv is None else argv))
    except Terminated as error:
        tell("posttrain: terminated", file=sys.stderr)
        return 128 + error.args[0]


def _main(words: list[str]) -> int:
    # Before a command imports anything: from here on no message or traceback can control the terminal.
    guard_logs()
    guard_errors()
    quiet_libraries()
    try:
        # This imports all commands, so it stands here, where signals and errors are handled already.
        from posttrain.cli.parser import read_words

        options = read_words(words)
        code = options.command(options)
        # A full disk or a closed pipe is only known when the buffer is written; here it is caught below.
        sys.stdout.flush()
        return code
    except PosttrainError as error:
        tell(_shown(f"posttrain: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        tell("posttrain: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # As in `_full`: the flush at Python's end would fail too, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if (why_and_advice := full(error)) is None:
            raise
        return _full(error, *why_and_advice)
