"""Coroutine tests run to their end on a fresh event loop; no plugin is needed for that."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

with suppress(ImportError):  # the environment of vLLM has no hypothesis
    from hypothesis import settings

    # No test fails because the machine is busy.
    settings.register_profile("without a clock", deadline=None)
    settings.load_profile("without a clock")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{n: pyfuncitem.funcargs[n] for n in names}))
    return True


@pytest.fixture(scope="session", autouse=True)
def notes_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The notes that runs leave for their user lie in a folder of the tests' own."""
    before, folder = os.environ.get("XDG_STATE_HOME"), tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(folder)
    yield folder
    os.environ.pop("XDG_STATE_HOME")
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before
