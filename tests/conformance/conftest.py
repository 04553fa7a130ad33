"""The `subject` fixture: every test of this folder that asks for it runs once on each engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from tests.conformance import subjects


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        more = [b for name in subjects.ENGINES for b in subjects.BESIDE.get(name, ())]
        beside = more if metafunc.definition.get_closest_marker("beside") else []
        metafunc.parametrize(
            "subject", [*subjects.ENGINES, *(b for b in beside if b not in subjects.ENGINES)], indirect=True
        )


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Iterator[subjects.Subject]:
    """An engine that serves the weights of seed 1 and has nothing to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    s = subjects.subject(request.param)
    asyncio.run(s.publish(1))
    s.sampler.gauges()
    yield s
    until = time.monotonic() + 10
    while not s.idle() and time.monotonic() < until:
        time.sleep(0.05)
    assert s.idle(), f"{s.name}: the test has ended and the engine still holds requests"
    torch.set_num_threads(before)


def pytest_sessionfinish() -> None:
    """Engines with processes of their own end with the tests."""
    if subjects.subject.cache_info().currsize:
        for name in subjects.ENGINES:
            subjects.subject(name).close()
