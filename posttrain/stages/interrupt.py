"""Ends a run early, after a signal or because the program's own `on_step` asks for it. After a signal the running step
is finished and a checkpoint is written; a step that does not end in time after SIGTERM or SIGHUP is cancelled. Where
`on_step` returns True, its stage is finished after that step."""

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
"""Least seconds that a step has to end after SIGTERM or SIGHUP. The sender often kills the process after 30."""
LOOK_SECONDS = 0.5
"""Seconds between two looks at the running step."""


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
    """Whether `on_step` has ended the run: the running stage is finished, and no other stage follows."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block. In another thread than the main one nothing is changed."""
        old_handlers = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Under `nohup` SIGHUP is ignored, and stays so.
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    old_handlers[number] = signal.signal(number, self._on_signal)
        except ValueError:
            # Python sets signal handlers in the main thread only. A program in another thread calls `stop`.
            old_handlers = {}
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def stop(self, number: int) -> None:
        """End the run after the running step, as signal `number` would. For a program that waits in another thread."""
        self.number = number

    def after(self, step: Step) -> str:
        """Calls `on_step` with a step that was just recorded. Returns the reason why its stage ends here, or ''.
        ConfigError where `on_step` returned neither a bool nor None."""
        answer = None if self.on_step is None else self.on_step(step)
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise ConfigError(
                f"on_step returned a {type(answer).__name__}: return True to end the run after this step, else nothing"
            )
        self.asked = bool(answer)
        return f"on_step ended the run at step {step.index}" if answer else ""

    async def ended(self, work: Coroutine[Any, Any, None], step: Callable[[], int]) -> bool:
        """Do the work of a stage; returns False where it was cancelled because its step did not end in time.

        After SIGTERM or SIGHUP the running step has `GRACE` seconds, or twice the time of the longest step before it,
        if that is more. After a first Ctrl-C a step has all the time it needs, since the user can press Ctrl-C again.

        Args:
            work: all steps of the stage.
            step: returns how many steps have ended.
        """
        # The work is one task, looked at every `LOOK_SECONDS`. `deadline` is the time by which the running step must
        # end. Without a signal it moves on at every look. After SIGTERM or SIGHUP it stands still, so the time of grace
        # begins with the signal.
        task = asyncio.ensure_future(work)
        steps_ended, longest, step_began = step(), 0.0, time.monotonic()
        deadline = step_began + GRACE
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                now = time.monotonic()
                # A step has ended since the last look. What runs now (a checkpoint, or one more step because the stage
                # is not at rest) gets a new time of grace.
                if step() != steps_ended:
                    steps_ended, longest, step_began = step(), max(longest, now - step_began), now
                elif self.number in (signal.SIGTERM, signal.SIGHUP):
                    if now > deadline:
                        return False
                    continue
                deadline = now + max(GRACE, 2 * longest)
            task.result()
            return True
        finally:
            # Also where this method itself is cancelled or raises. The work may need time to close its parts after it
            # is cancelled; we wait at most `GRACE` seconds for that.
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_lost_terminal()
        if self.number:
            raise KeyboardInterrupt
        self.number = number
