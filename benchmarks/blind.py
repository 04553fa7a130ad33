"""Runs without their checks, for measurements of what the checks are worth. Nothing of the package can be switched off like this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from posttrain.controller import stages
from posttrain.core.types import Gauges, Step
from posttrain.recipe import main
from posttrain.role.draws import Bets


class Blind:
    """In place of the controller's guard: it looks at nothing."""

    def __init__(self, history: Any = (), bets: Bets | None = None) -> None:
        self.bets = bets or Bets()

    def take(self) -> Gauges:
        return {}

    async def begin(self, h: Any) -> None:
        pass

    async def after(self, h: Any, step: Step) -> Step:
        return step

    def rolled_out(self, h: Any, asked: Any) -> None:
        h.sync.sampler.gauges()

    def scored(self, h: Any, groups: Any) -> None:
        pass

    def unjudged(self, asked: Any) -> tuple[str, ...]:
        return ()

    def observer(self, h: Any, minibatch: Any) -> None:
        return None

    @contextmanager
    def first_move(self, h: Any, batch: Any) -> Iterator[None]:
        yield


class Deaf:
    """In place of the checks of a supervised stage."""

    def __init__(self, **_: Any) -> None:
        pass

    @contextmanager
    def watch(self, *_: Any) -> Iterator[None]:
        yield


async def _believed(*_: Any) -> None:
    """In place of the proofs before the first step."""


@contextmanager
def unwatched() -> Iterator[None]:
    """Nothing is checked inside the block."""
    with (
        patch.object(stages, "Guard", Blind),
        patch.object(stages, "Lessons", Deaf),
        patch.object(main, "prove_start", _believed),
    ):
        yield
