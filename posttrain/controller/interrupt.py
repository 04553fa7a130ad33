"""Ends a run early on a signal: the step that is running is finished, a checkpoint is written, and the run ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from posttrain.core.errors import PosttrainError


class Interrupted(PosttrainError):
    """The run got a signal, wrote a checkpoint, and can be resumed. The exit code is 128 + the signal's number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@dataclass
class Stopper:
    """Remembers a first SIGINT or SIGTERM; a second one ends the process at once."""

    number: int = 0
    """Of the signal that came; 0 while none has."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block. Python allows it in the main thread only; in others nothing is changed."""
        kept = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                kept[number] = signal.signal(number, self._on_signal)
        except ValueError:
            kept = {}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def stop(self, number: int) -> None:
        """End the run after its step, as this signal does. For a program that waits in another thread."""
        self.number = number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
