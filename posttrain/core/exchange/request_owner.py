"""The episode that asks an engine for a turn, which travels with the coroutine: an engine pool can name the episode
that waits, and the one whose turn killed its engines (`UnanswerableTurn`)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestOwner:
    """The place of one episode: its random stream, task, visit and sibling."""

    stream: str
    task: str
    visit: int
    sibling: int

    def __str__(self) -> str:
        return f"task {self.task!r}, visit {self.visit}, sibling {self.sibling} ({self.stream})"


# Between rollout and engine lies the environment's code, which passes no owner on. A
# context variable is inherited by the coroutine, and by the tasks that it starts.
_ASKER: ContextVar[RequestOwner | None] = ContextVar("asker", default=None)


def asker() -> RequestOwner | None:
    """The episode in whose coroutine this is called; None outside of one."""
    return _ASKER.get()


@contextmanager
def asked_for(who: RequestOwner) -> Generator[None]:
    """Inside the block, every request to an engine belongs to this episode."""
    token = _ASKER.set(who)
    try:
        yield
    finally:
        _ASKER.reset(token)


DEADLY = "dead_letter"
"""Source and kind of the verdict on an episode whose turn raised `UnanswerableTurn`."""


class UnanswerableTurn(Exception):
    """A turn that killed every engine it was given to, or an episode that killed every process that played it. It fails
    its episode (`who`, where one asked), and not the run. `deaths` processes died of it; `of` says which."""

    def __init__(
        self, who: RequestOwner | None, deaths: int, cause: str, of: str = "engines died while they sampled its turn"
    ) -> None:
        self.who, self.deaths, self.cause = who, deaths, cause
        super().__init__(
            f"{who or 'a turn outside of an episode'}: {deaths} {of}, the last one with nothing else to do. {cause}"
        )
