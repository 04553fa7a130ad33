"""Ends a run early. On a signal the step that is running is finished, a checkpoint is written, and the run ends; a step
that waits, and does not end, is cancelled. Where the program's own `on_step` asks, the stage is finished after its
step, and the run ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from posttrain.core.gauge import Step
from posttrain.system.errors import ConfigError, PosttrainError
from posttrain.system.terminal_output import leave_lost_terminal

GRACE = 20.0
"""Seconds that a step has at least to end after SIGTERM or SIGHUP: who sends them often kills after 30."""
LOOK_SECONDS = 0.5


class Interrupted(PosttrainError):
    """The run got a signal, wrote a checkpoint, and can be resumed. The exit code is 128 + the signal's number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@dataclass
class Stopper:
    """Remembers a first SIGINT, SIGTERM or SIGHUP; a second one ends the process at once."""

    number: int = 0
    """Number of the signal that came; 0 while none has."""
    on_step: Callable[[Step], object] | None = None
    """The program's own function, called after each step."""
    asked: bool = False
    """Whether it has ended the run: its stage is finished here, and none follows."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block. Python allows it in the main thread only; in others nothing is changed."""
        kept = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    kept[number] = signal.signal(number, self._on_signal)
        except ValueError:
            # Not the main thread, and only there may handlers be set. A program in another thread uses `stop`.
            kept = {}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def stop(self, number: int) -> None:
        """End the run after its step, as this signal does. For a program that waits in another thread."""
        self.number = number

    def after(self, step: Step) -> str:
        """Calls `on_step` with a step that is in the record. Returns why its stage ends here, or ''.

        Raises:
            ConfigError: it returned neither a bool nor None.
        """
        said = None if self.on_step is None else self.on_step(step)
        if said is not None and not isinstance(said, bool | np.bool_):
            raise ConfigError(
                f"on_step returned a {type(said).__name__}: return True to end the run after this step, else nothing"
            )
        self.asked = bool(said)
        return f"on_step ended the run at step {step.index}" if said else ""

    async def ended(self, work: Coroutine[Any, Any, None], step: Callable[[], int]) -> bool:
        """Do the work of a stage. False where SIGTERM or SIGHUP came and the step of then did not end: within `GRACE`
        seconds, or twice the time of the longest step before it. Then the work was cancelled. A first Ctrl-C lets a
        step take its time: whoever is there can press it again.

        Args:
            step: how many steps have ended.
        """
        # The work is one task, looked at twice a second. `last` is when its running step must have ended. It moves on
        # at every look until SIGTERM or SIGHUP has come; then it stands still, so that the time of grace begins with
        # the signal.
        task = asyncio.ensure_future(work)
        at, longest, since = step(), 0.0, time.monotonic()
        last = since + GRACE
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                now = time.monotonic()
                # A step has ended. What follows it, a border or a step of a stage that is not at rest, has time of its
                # own.
                if step() != at:
                    at, longest, since = step(), max(longest, now - since), now
                elif self.number in (signal.SIGTERM, signal.SIGHUP):
                    if now > last:
                        return False
                    continue
                last = now + max(GRACE, 2 * longest)
            task.result()
            return True
        finally:
            # Also where this method itself is cancelled or raises. What the work closes when it is cancelled takes
            # time, which is bounded here.
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_lost_terminal()
        if self.number:
            raise KeyboardInterrupt
        self.number = number
