"""Why a run ends early: somebody asked, and the run answers at the next step border with a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from posttrain.core.errors import PosttrainError


class Interrupted(PosttrainError):
    """The run was asked to end, wrote a checkpoint, and can be resumed. Exit code 128 + signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@dataclass
class Stopper:
    """Remembers a first SIGINT or SIGTERM; a second one ends the process at once."""

    number: int = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block (only possible in the main thread; elsewhere nothing is changed)."""
        kept = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                kept[number] = signal.signal(number, self._heard)
        except ValueError:
            kept = {}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
