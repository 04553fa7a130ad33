"""Runs without their checks, for measurements of what the checks are worth. Nothing of the package can be switched off
like this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from posttrain.api import session
from posttrain.build import build_run
from posttrain.engine.layers.shared_prefixes import Sharing
from posttrain.role.events import Observers


async def _believed(*_: Any) -> None:
    """In place of the proofs before the first step."""


@contextmanager
def unwatched() -> Iterator[None]:
    """Nothing is checked inside the block."""
    with (
        patch.object(build_run, "observers", lambda *_: Observers()),
        patch.object(build_run, "of_run", Observers),
        patch.object(session, "prove_start", _believed),
        patch.object(Sharing, "_prove", lambda *_: None),
    ):
        yield
