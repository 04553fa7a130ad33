"""The code reward on two tables: right programs as models write them earn 1, and what only looks like one earns 0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from posttrain.core.types import Task
from posttrain.core.verdict import State
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits
from posttrain.verifier.code.code_reward import Code
from posttrain.verifier.code.fences import blocks_of
from tests.sandbox.sandbox_parts import backend
from tests.verifier.layout_parts import TASKS, table


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(backend("namespaces"), workers=1, limits=ProgramLimits(wall=2.0)) as pool:
        yield pool


SLOWEST = 3.0
"""Seconds of one verdict beyond those that its program may run."""


def score(sandbox: Sandbox, task: str, response: str) -> float | None:
    began = time.monotonic()
    verdict = asyncio.run(Code(sandbox).verdict(Task("t", "write it", info={"tests": TASKS[task]}), response))
    assert time.monotonic() - began < sandbox.limits.wall + SLOWEST and verdict.state is State.VALUE, verdict
    return verdict.score


@pytest.mark.parametrize(("task", "response"), table("code_honest", "code_second_honest"))
def test_a_right_program_earns_one(sandbox: Sandbox, task: str, response: str) -> None:
    assert score(sandbox, task, response) == 1.0


def quick_first(rows: list[Any]) -> list[Any]:
    """The rows; the long suite plays those that end at their time limit, but for one."""
    long = ("reads files", "huge power", "endless on loading", "sleeps", "2 thread that outlives")
    return [pytest.param(*r.values, id=r.id, marks=[pytest.mark.prove] * str(r.id).startswith(long)) for r in rows]


@pytest.mark.parametrize(("task", "response"), quick_first(table("code_tricky", "code_second_tricky")))
def test_what_is_no_right_program_earns_nothing(sandbox: Sandbox, task: str, response: str) -> None:
    assert score(sandbox, task, response) == 0.0


@pytest.mark.parametrize(
    "piece",
    [
        "`",
        "~",
        "~~~",
        "```",
        "```a\n",
        "a ```x\nb```\n",
        "<pre>",
        "<pre>\n",
        "<answer>",
        "<!--",
        "> ",
        "> ```\n",
        "- ",
        "a b\n",
        "(",
        "-",
        "[PYTHON]\n",
        "      ```\n",
    ],
)
def test_repeated_pieces_are_quick(piece: str) -> None:
    """No pattern reads the same text in two ways: the blocks of a long response are found at once in the run's own
    process."""
    began = time.process_time()
    for many in (200_000 // len(piece), 1_000_000 // len(piece)):
        assert blocks_of(piece * many) and blocks_of("```py\n" + piece * many) and blocks_of(piece * many + "x\n```\n")
    assert time.process_time() - began < SLOWEST
